"""A batch trace that grows while the training goes on: its decisions, and what a sampler and an optimizer see of it.

The course of a question, which any number of updates may separate from the next one:

    update t              every rank notes what is known (`Question`), without reading a device
    update t + 2          rank 0 reads it, and has it answered
    update t + 3          every rank knows the answer, and plans with it
    update t + delay      the first update that has the batch size
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias, final, runtime_checkable

import numpy as np

from variable_batch_size.trace.batch_trace import BatchTrace

READ_AFTER, ADOPTED_AFTER = 2, 3  # updates after a question; by then any device has computed what is read


@final
@dataclass(frozen=True, slots=True)
class Decision:
    """A batch size that was chosen.

    Attributes:
        begins: the first update that has it.
        batch_size: samples of an update.
        input: from what it was chosen; None for the batch size that a training starts with.
    """

    begins: int
    batch_size: int
    input: Any = None


Decisions: TypeAlias = tuple[Decision, ...]  # the one that counts, then those that begin later


def counting(decisions: Decisions, updates: int) -> Decisions:
    """Return the decision that counts after so many updates, and those that begin later."""
    return decisions[max(row for row, decision in enumerate(decisions) if decision.begins <= updates) :]


@final
class Facts(NamedTuple):
    """What an optimizer knows after an update, as plain numbers.

    Attributes:
        devices: number of ranks.
        updates: number of updates so far.
        samples: number of samples of these updates.
        progress: how far the training is, in updates at the reference batch size.
        noise: sigma^2, mu^2, and the number of updates that gave an estimate; None if it is not measured.
        ref_batchsize: the reference batch size, in samples; None if there is none.
    """

    devices: int
    updates: int
    samples: int
    progress: float
    noise: Sequence[float] | None
    ref_batchsize: int | None


@final
class Question(NamedTuple):
    """A question that is not yet answered: asked after so many updates; `read` may wait for a device."""

    updates: int
    read: Callable[[], Facts]

    @classmethod
    def of(cls, facts: Facts) -> Question:
        """Return the question whose facts are known."""
        return cls(facts.updates, partial(_same, facts))


def _same(facts: Facts) -> Facts:
    return facts


@final
@dataclass(frozen=True, slots=True)
class Growth:
    """What a training has of its growing trace.

    Attributes:
        trace: all batch sizes that were chosen; the last one continues.
        decisions: the decision that counts, and those that begin later.
        questions: those that are not yet answered, in their order.
        asked: number of updates at the last question, or at the beginning of what was trained since.
    """

    trace: BatchTrace
    decisions: Decisions
    questions: tuple[Question, ...] = ()
    asked: int = 0

    @classmethod
    def of(cls, runs: Sequence[tuple[int, int]], decisions: Decisions, updates: int) -> Growth:
        """Return the growth in which `runs`, (first step, batch size), come before the decisions.

        Args:
            runs: what was chosen before, in ascending order.
            decisions: the decision that counts after `updates`, and later ones.
            updates: number of updates so far, which stay as they are.
        """
        later = {max(decision.begins, updates): decision.batch_size for decision in decisions}  # the last one counts
        rows = [*(run for run in runs if run[0] < min(later)), *sorted(later.items())]
        first_step, size = np.array(rows, np.int64).T  # (runs,), (runs,)
        return cls(BatchTrace(first_step, size, None), decisions, asked=updates)

    @property
    def runs(self) -> list[tuple[int, int]]:
        """The first step and the batch size of each run of equal sizes."""
        first_step, size = self.trace.runs
        return list(zip(first_step.tolist(), size.tolist(), strict=True))

    def with_question(self, question: Question) -> Growth:
        """Return the growth with a further question."""
        return replace(self, questions=(*self.questions, question), asked=question.updates)

    def answered(self, decision: Decision, updates: int) -> Growth:
        """Return the growth after so many updates, when the answer to the oldest question is known."""
        last, trace = self.decisions[-1], self.trace
        earlier = [known for known in self.decisions if known.begins < decision.begins]  # the newest one counts
        decisions = counting((*earlier, decision), updates)
        if decision.batch_size != last.batch_size or decision.begins <= last.begins:
            trace = Growth.of(self.runs, decisions, updates).trace
        return replace(self, trace=trace, decisions=decisions, questions=self.questions[1:])

    def moved_to(self, updates: int) -> Growth:
        """Return the growth of a training that has left out what lies before so many updates."""
        return replace(self, decisions=counting(self.decisions, updates), questions=(), asked=updates)


def so_far(trace: BatchTrace, updates: int) -> BatchTrace:
    """Return the first steps of a trace, as many as there were updates.

    Raises:
        ValueError: if there was none.
    """
    if updates == 0:
        raise ValueError("the trace of what has happened needs at least one update, but there was none; train first")
    first_step, size = trace.runs
    made = first_step < updates  # (runs,)
    return BatchTrace(first_step[made], size[made], updates)


class Stopwatch(Protocol):
    """Measures the seconds of updates, on the host."""

    def after_update(self, devices: int, rows: int, rounds: int) -> None:
        """Note an update: its devices, the rows of a microbatch, and the microbatches of the slowest device."""

    def state_dict(self) -> dict[str, Any]:
        """Return what was measured, as plain numbers."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what an earlier run has measured."""


@runtime_checkable
class GrowingTrace(Protocol):
    """What a sampler and an optimizer need of a trace that grows."""

    @property
    def description(self) -> str:
        """What decides, and within which limits, in words that are the same on all ranks."""
        ...

    @property
    def every(self) -> int | None:
        """The number of updates between two questions; None: there is only that at the beginning."""
        ...

    @property
    def delay(self) -> int:
        """The number of updates from a question to the first one with its answer."""
        ...

    @property
    def needs_noise(self) -> bool:
        """Whether the gradient noise has to be measured."""
        ...

    def check_rules(self, rules: Sequence[Any]) -> None:
        """Raise ValueError if the batch sizes are not for these learning-rate rules, as far as that is known."""

    @property
    def largest(self) -> int:
        """The largest batch size that may be chosen."""
        ...

    def for_training(self, dataset_size: int) -> GrowingTrace:
        """Return the trace with batch sizes that the dataset has; raise ValueError if it cannot train."""
        ...

    def begin(self, devices: int, minibatch_size: int, *, fixed_shape: bool) -> Growth:
        """Return the growth at the beginning of a training."""
        ...

    def restored(self, state: dict[str, Any], devices: int, updates: int, step: int) -> Growth:
        """Return the growth of a training that goes on from the `state_of` another one, on so many devices.

        Args:
            state: the `state_of` the other one.
            devices: number of devices.
            updates: number of updates so far.
            step: the first step whose batch size may change.
        """
        ...

    def warn_if_changed(self, state: dict[str, Any]) -> None:
        """Warn if another controller decides than in the training whose `state_of` this is."""

    def constant_until(self, step: int) -> Growth:
        """Return the growth of a training that had the batch size to start with until a step.

        Raises:
            ValueError: if there is none.
        """
        ...

    def state_of(self, growth: Growth) -> dict[str, Any]:
        """Return what `restored` needs, as plain numbers, strings, lists and dictionaries."""
        ...

    def is_due(self, updates: int) -> bool:
        """Return whether a question is asked after so many updates."""
        ...

    def known_until(self, growth: Growth) -> int | None:
        """Return the first step whose batch size is not known; None if all are."""
        ...

    def stopwatch(self) -> Stopwatch | None:
        """Return what measures the seconds of updates; None if nobody needs them."""
        ...

    def answer(self, growth: Growth, minibatch_size: int, stopwatch: Stopwatch | None, *, fixed_shape: bool) -> str:
        """Return the answer to the oldest question, as rank 0 tells it; it may be that it failed."""
        ...

    def told(self, growth: Growth, answer: str, updates: int) -> Growth:
        """Return the growth after so many updates, when an answer is known.

        Raises:
            RuntimeError: if the answer is that it failed.
        """
        ...

    def scalars(self, decision: Decision) -> dict[str, float]:
        """Return a decision and its input as scalars by name."""
        ...
