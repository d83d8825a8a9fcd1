"""Read a number of a device some updates later, when the device has computed it and the host does not wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

READ_EVERY = 16  # updates between two reads, each of a value that is as many updates old


def copy_later(tensor: Tensor) -> Callable[[], Tensor]:
    """Return a function that returns a tensor on the CPU; called later, it does not wait for the device.

    Nothing may change the tensor in place in the meantime. On a GPU, the copy begins now. A copy that begins later
    waits for all that the host has queued in the meantime.
    """
    if not tensor.is_cuda:
        return tensor.cpu  # without a step marker, which would cut the graph
    copy = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor.detach(), non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # occurs when the copy is complete
    copied.record(torch.cuda.current_stream(tensor.device))  # type: ignore[no-untyped-call]

    def read() -> Tensor:
        copied.synchronize()
        return copy

    return read


@final
class LateReader:
    """Reads what each update leaves on a device; ranks that make the same updates read after the same ones."""

    def __init__(self) -> None:
        self._updates = 0  # since the last read
        self._read_due: Callable[[], Tensor] | None = None  # returns the value then, which is read next

    def read(self, value: Tensor) -> Tensor | None:
        """Count an update, and return None, or every `READ_EVERY` updates the value of as many updates before.

        The device has computed that value by then, so that the host does not wait. `value`: what this update leaves.
        """
        self._updates += 1
        if self._updates < READ_EVERY:
            return None
        read_due, self._read_due, self._updates = self._read_due, copy_later(value), 0
        return None if read_due is None else read_due()
