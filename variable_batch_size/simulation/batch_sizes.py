"""Which batch size an update has: a controller's answers, or a batch trace."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias, final

from variable_batch_size.adaptive.adaptive_trace import AdaptiveTrace
from variable_batch_size.adaptive.base import ControlInput
from variable_batch_size.adaptive.decisions import (
    Decision,
    Decisions,
    decide,
    decide_again,
    first_decisions,
    in_effect,
    is_due,
)
from variable_batch_size.trace.batch_trace import BatchTrace

InputOf: TypeAlias = Callable[[int | None], ControlInput]  # of the batch size that was chosen last


class BatchSizes(Protocol):
    """Chooses the batch size of the next updates."""

    @property
    def end(self) -> float:
        """The number of updates after which the training ends."""
        ...

    def decisions(self, decisions: Decisions, input_of: InputOf, restarted: bool) -> Decisions:
        """Return what is decided before an update: the decision that counts, and later ones.

        Args:
            decisions: what was decided before; a checkpoint has it.
            input_of: function that returns what a controller may use, from the batch size that was chosen last.
            restarted: whether it is the first update after a start of the training.
        """
        ...

    def changes(self, decisions: Decisions, updates: int) -> float:
        """Return the first update after number `updates` before which `decisions` has to be called again."""
        ...


@final
@dataclass(frozen=True, slots=True)
class OfController:
    """The decisions of a controller."""

    trace: AdaptiveTrace

    @property
    def end(self) -> float:
        """No end."""
        return math.inf

    def decisions(self, decisions: Decisions, input_of: InputOf, restarted: bool) -> Decisions:
        """Ask the controller if it is time, and drop the decisions that no longer count."""
        if not decisions:
            return first_decisions(self.trace, input_of(self.trace.start))
        now = input_of(decisions[-1].batch_size)
        if restarted:
            decisions = decide_again(self.trace, decisions, now.devices, now.updates)
        if is_due(self.trace, now.updates):
            decisions = (*decisions, decide(self.trace, decisions, input_of(decisions[-1].batch_size)))
        return in_effect(decisions, now.updates)

    def changes(self, decisions: Decisions, updates: int) -> float:
        """Return the update of the next question, or of the next answer."""
        every = self.trace.every
        asked = math.inf if every is None else (updates // every + 1) * every
        return min([asked, *(decision.begins for decision in decisions[1:2])])


@final
@dataclass(frozen=True, slots=True)
class OfTrace:
    """The batch sizes of a trace, in which a step is an update that is kept."""

    trace: BatchTrace

    @property
    def end(self) -> float:
        """The end of a trace with `on_end="stop"`."""
        ends = self.trace.on_end == "stop" and self.trace.steps is not None
        return float(len(self.trace)) if ends else math.inf

    def decisions(self, decisions: Decisions, input_of: InputOf, restarted: bool) -> Decisions:
        """Return the batch size of the step."""
        input = input_of(None)
        return (Decision(input.updates, self.trace.batch_size(input.updates)),)

    def changes(self, decisions: Decisions, updates: int) -> float:
        """Return the step at which the next run of equal sizes begins."""
        step = self.trace.constant_until(updates)
        return math.inf if step is None else step
