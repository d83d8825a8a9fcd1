"""How far a training is."""

from __future__ import annotations

from typing import NamedTuple, final

from variable_batch_size.adaptive.decisions import Decisions
from variable_batch_size.simulation.course import Course


@final
class Position(NamedTuple):
    """How far a training is, as a checkpoint has it."""

    updates: int
    samples: int
    progress: float
    used: int  # samples of the epoch under way
    decisions: Decisions

    def after(self, course: Course, updates: int, decisions: Decisions) -> Position:
        """Return the position after the first `updates` updates of a course."""
        return Position(
            self.updates + updates,
            self.samples + course.samples(updates),
            self.progress + course.progress(updates),
            course.used(updates),
            decisions,
        )
