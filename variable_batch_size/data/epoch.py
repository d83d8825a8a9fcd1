"""An epoch of a plan: a pass through the dataset, or the part of it before the training ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, slots=True)
class Epoch:
    """Steps `first_step .. end_step - 1` of the trace, which use `samples` samples of the dataset.

    Attributes:
        number: number of the epoch, from 0.
        first_step: its first step in the trace.
        end_step: the step after its last one.
        samples: samples of all its steps.
        trace_offset: samples of the trace before `first_step`.
        samples_before: samples of all earlier epochs.
        complete: whether it ends with the dataset, and not where the training ends.
        known_from: the first step whose samples are known: after an update that an earlier end had shortened.
    """

    number: int
    first_step: int
    end_step: int
    samples: int
    trace_offset: int
    samples_before: int
    complete: bool = True
    known_from: int = 0

    @property
    def updates(self) -> int:
        """The number of its steps."""
        return self.end_step - self.first_step
