"""Read a number of a device some updates later, when the device has computed it and the host does not wait."""

from __future__ import annotations

from typing import final

from torch import Tensor

READ_EVERY = 16  # updates between two reads, each of a value that is as many updates old


@final
class LateReader:
    """Reads what each update leaves on a device; ranks that make the same updates read after the same ones."""

    def __init__(self) -> None:
        self._updates = 0  # since the last read
        self._due: Tensor | None = None  # the value then, which is read next

    def read(self, value: Tensor) -> Tensor | None:
        """Count an update that leaves this value; return, on the CPU, that of `READ_EVERY` updates ago if it is due."""
        self._updates += 1
        if self._updates < READ_EVERY:
            return None
        due, self._due, self._updates = self._due, value, 0
        return None if due is None else due.cpu()  # without a step marker, which would cut the graph
