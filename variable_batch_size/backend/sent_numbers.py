"""Python numbers as tensors on a device that compiles graphs, where a number in a graph would be another graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor

_KEPT = 64  # numbers that stay on the device, because a later update may use them again

Send = Callable[[Sequence[Any], torch.dtype, torch.device], "list[Tensor]"]


def copy_to_device(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Return each number, or tuple of numbers, as a tensor on a device, without a wait for the device.

    Args:
        values: the numbers, or tuples.
        dtype: of the tensors.
        device: the device.
    """
    return [torch.tensor(value, dtype=dtype).to(device, non_blocking=True) for value in values]


@final
class SentNumbers:
    """Numbers that are data of the graphs of a device.

    Args:
        device_type: of the device, such as "tpu".
        send: copies numbers to it.
    """

    def __init__(self, device_type: str, send: Send = copy_to_device) -> None:
        self.device_type, self._send = device_type, send
        self._sent: dict[tuple[str, int, torch.dtype, Any], Tensor] = {}  # by place, index in it, dtype and number

    def tensors(self, values: Sequence[Any], dtype: torch.dtype, device: torch.device, place: str) -> Sequence[Tensor]:
        """Return numbers, or tuples of them, as tensors; those that were sent to the same place are not sent again.

        Args:
            values: the numbers, or tuples.
            dtype: of the tensors.
            device: where they are sent.
            place: name of the place in the graphs that uses them; "" to send them in any case.
        """
        if not place:
            return self._send(values, dtype, device)
        # One tensor for equal numbers at two places would be another graph than two tensors.
        keys = [(place, index, dtype, value) for index, value in enumerate(values)]
        missing = [key for key in keys if key not in self._sent]
        newly_sent = dict(zip(missing, self._send([key[-1] for key in missing], dtype, device), strict=True))
        sent = {key: newly_sent[key] if key in newly_sent else self._sent.pop(key) for key in keys}
        self._sent |= sent  # popped and added again, so that those used last are at the end
        while len(self._sent) > _KEPT:
            del self._sent[next(iter(self._sent))]  # the first one: it was not used for the longest time
        return list(sent.values())
