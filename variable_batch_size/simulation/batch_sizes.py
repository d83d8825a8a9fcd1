"""Which batch size an update has: a controller's answers, or a batch trace."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, TypeAlias, final

from variable_batch_size._validation import MAX_INT, check_int
from variable_batch_size.adaptive.base import ControlInput, Controller
from variable_batch_size.trace.batch_trace import BatchTrace

Answers: TypeAlias = tuple[tuple[int, int], ...]  # (first update, batch size): the one that counts, then later ones


class BatchSizes(Protocol):
    """Chooses the batch size of the next updates."""

    @property
    def initial(self) -> Answers:
        """What is chosen before the first update."""
        ...

    @property
    def end(self) -> float:
        """The number of updates after which the training ends."""
        ...

    def answers(self, answers: Answers, input: ControlInput, restarted: bool) -> Answers:
        """Return what is chosen before an update.

        Args:
            answers: what was chosen before; a checkpoint has it.
            input: what a controller may use.
            restarted: whether it is the first update after a start of the training.
        """
        ...

    def changes(self, answers: Answers, updates: int) -> float:
        """Return the first update after number `updates` before which `answers` has to be asked again."""
        ...


@final
@dataclass(frozen=True, slots=True)
class OfController:
    """The answers of a controller, which is asked before the first update after each start, and every so often.

    Args:
        controller: the controller.
        low: least batch size.
        high: largest batch size.
        every: number of updates after which it is asked; None: only at a start.
        delay: number of updates from the question to the first update with the answer.
        initial: the batch size before the first answer; without it, the first answer counts at once.
    """

    controller: Controller
    low: int
    high: int
    every: int | None
    delay: int
    initial: Answers

    @property
    def end(self) -> float:
        """No end."""
        return math.inf

    def answers(self, answers: Answers, input: ControlInput, restarted: bool) -> Answers:
        """Ask the controller if it is time, and drop the answers that no longer count."""
        updates = input.updates
        if restarted or (self.every and updates % self.every == 0):
            size = check_int(self.controller(input), "the batch size of the controller", 1, MAX_INT)
            begins = updates + self.delay if answers else updates
            answers = (*answers, (begins, min(max(size, self.low), self.high)))
        counts = max(row for row, (begins, _) in enumerate(answers) if begins <= updates)
        return answers[counts:]

    def changes(self, answers: Answers, updates: int) -> float:
        """Return the update of the next question, or of the next answer."""
        asked = math.inf if self.every is None else (updates // self.every + 1) * self.every
        return min([asked, *(begins for begins, _ in answers[1:2])])


@final
@dataclass(frozen=True, slots=True)
class OfTrace:
    """The batch sizes of a trace, in which a step is an update that is kept."""

    trace: BatchTrace

    @property
    def initial(self) -> Answers:
        """Nothing is chosen before."""
        return ()

    @property
    def end(self) -> float:
        """The end of a trace with `on_end="stop"`."""
        ends = self.trace.on_end == "stop" and self.trace.steps is not None
        return float(len(self.trace)) if ends else math.inf

    def answers(self, answers: Answers, input: ControlInput, restarted: bool) -> Answers:
        """Return the batch size of the step."""
        return ((input.updates, self.trace.batch_size(input.updates)),)

    def changes(self, answers: Answers, updates: int) -> float:
        """Return the step at which the next run of equal sizes begins."""
        step = self.trace.constant_until(updates)
        return math.inf if step is None else step
