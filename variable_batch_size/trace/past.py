"""The past of a trace: what must be the same for a position in it to mean the same samples."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, final

import numpy as np

if TYPE_CHECKING:
    from variable_batch_size.trace.batch_trace import BatchTrace

_CHUNK = 65536  # steps that are hashed at once


@final
class Past:
    """Hashes the batch sizes before a step; a later step costs only the sizes in between.

    It depends on the sizes alone: not on what follows, nor on how the trace was created.
    """

    def __init__(self, trace: BatchTrace) -> None:
        self._trace = trace
        self._step, self._hash = 0, hashlib.sha256()

    def fingerprint(self, step: int) -> str:
        """Return the SHA-256, in hexadecimal, of the batch sizes of the steps 0 to `step` - 1."""
        if step < self._step:
            self._step, self._hash = 0, hashlib.sha256()
        for begin in range(self._step, step, _CHUNK):
            sizes = self._trace.batch_sizes(np.arange(begin, min(step, begin + _CHUNK)))
            self._hash.update(sizes.astype("<i8").tobytes())
        self._step = step
        return self._hash.hexdigest()

    def __reduce__(self) -> tuple[Any, ...]:
        return Past, (self._trace,)
