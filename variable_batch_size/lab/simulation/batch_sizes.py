"""The batch size of each update: from a controller, or from a batch trace."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, final

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

InputOf: TypeAlias = Callable[[int | None], ControlInput]  # the batch size that was chosen last -> input


@final
@dataclass(frozen=True, slots=True)
class ControllerSizes:
    """The decisions of a controller; `advance` returns the one in effect before an update, then the pending ones."""

    trace: AdaptiveTrace

    @property
    def end(self) -> float:
        """No end."""
        return math.inf

    def advance(self, pending: Decisions, input_of: InputOf, restarted: bool) -> Decisions:
        """Call the controller if a decision is due, and drop the decisions that are over.

        Args:
            pending: those before the update before; a checkpoint has them.
            input_of: returns the input of the controller, from the batch size that was chosen last.
            restarted: whether it is the first update after a start of the training.
        """
        if not pending:
            return first_decisions(self.trace, input_of(self.trace.start))
        now = input_of(pending[-1].batch_size)
        if restarted:
            pending = decide_again(self.trace, pending, now.devices, now.updates)
        if is_due(self.trace, now.updates):
            pending = (*pending, decide(self.trace, pending, input_of(pending[-1].batch_size)))
        return in_effect(pending, now.updates)

    def next_change(self, pending: Decisions, updates: int) -> float:
        """Return the first update after number `updates` before which `advance` has to be called again."""
        every = self.trace.every
        asked = math.inf if every is None else (updates // every + 1) * every
        return min([asked, *(decision.begins for decision in pending[1:2])])


@final
@dataclass(frozen=True, slots=True)
class TraceSizes:
    """The batch sizes of a trace, in which a step is an update that is kept."""

    trace: BatchTrace

    @property
    def end(self) -> float:
        """The end of a trace with `on_end="stop"`."""
        ends = self.trace.on_end == "stop" and self.trace.steps is not None
        return float(len(self.trace)) if ends else math.inf

    def advance(self, pending: Decisions, input_of: InputOf, restarted: bool) -> Decisions:
        """Return the batch size of the step."""
        input = input_of(None)
        return (Decision(input.updates, self.trace.batch_size(input.updates)),)

    def next_change(self, pending: Decisions, updates: int) -> float:
        """Return the step at which the next run of equal sizes begins."""
        step = self.trace.constant_until(updates)
        return math.inf if step is None else step


BatchSizes: TypeAlias = ControllerSizes | TraceSizes
