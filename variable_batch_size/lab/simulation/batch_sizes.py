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
    """Batch sizes that a controller decides while the training runs. A decision may take effect some updates later."""

    trace: AdaptiveTrace

    @property
    def end(self) -> float:
        """Number of updates after which the batch sizes end: infinity, as a controller always returns another one."""
        return math.inf

    def advance(self, pending: Decisions, input_of: InputOf, restarted: bool) -> Decisions:
        """Return the batch-size decision in effect now, then the pending ones; ask the controller if a decision is due.

        Args:
            pending: what this method returned before the last update, or before the one that a checkpoint has; () at
                the beginning.
            input_of: returns the input of the controller, from the batch size that was chosen last.
            restarted: whether it is the first update after a start or a restart of the training.
        """
        if not pending:
            return first_decisions(self.trace, input_of(self.trace.start))
        present_input = input_of(pending[-1].batch_size)
        if restarted:
            pending = decide_again(self.trace, pending, present_input.devices, present_input.updates)
        if is_due(self.trace, present_input.updates):
            pending = (*pending, decide(self.trace, pending, input_of(pending[-1].batch_size)))
        return in_effect(pending, present_input.updates)

    def next_change(self, pending: Decisions, updates: int) -> float:
        """Return the number of updates after which the batch size may change, so that `advance` has to be called again.

        `pending` is what it returned last, before update number `updates`.
        """
        every = self.trace.every
        next_question = math.inf if every is None else (updates // every + 1) * every
        next_begin = pending[1].begins if len(pending) > 1 else math.inf
        return min(next_question, next_begin)


@final
@dataclass(frozen=True, slots=True)
class TraceSizes:
    """Batch sizes that a batch trace has fixed in advance: a step of it is an update that is kept."""

    trace: BatchTrace

    @property
    def end(self) -> float:
        """Number of steps of a trace with `on_end="stop"`; infinity for others."""
        stops = self.trace.on_end == "stop" and self.trace.steps is not None
        return float(len(self.trace)) if stops else math.inf

    def advance(self, pending: Decisions, input_of: InputOf, restarted: bool) -> Decisions:
        """Return the batch size of the next step as the only decision, in the form of `ControllerSizes.advance`.

        Args:
            pending: not used.
            input_of: called for the number of updates so far.
            restarted: not used.
        """
        input = input_of(None)
        return (Decision(input.updates, self.trace.batch_size(input.updates)),)

    def next_change(self, pending: Decisions, updates: int) -> float:
        """Return the number of the update at which the batch size may change next, or infinity if it never does."""
        step = self.trace.constant_until(updates)
        return math.inf if step is None else step


BatchSizes: TypeAlias = ControllerSizes | TraceSizes
