"""The plan of a sampler, which grows if its trace does."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, final

from variable_batch_size._validation import MAX_INT, check_int, value_error
from variable_batch_size.data.clock import Clock
from variable_batch_size.data.epoch import Epoch
from variable_batch_size.data.known_steps import KnownSteps
from variable_batch_size.data.plan import Plan
from variable_batch_size.data.state import VERSION
from variable_batch_size.trace.batch_trace import BatchTrace
from variable_batch_size.trace.growing import ADOPTED_AFTER, GrowingTrace, Growth, Question, so_far


@final
class Growing(NamedTuple):
    """A trace that grows, and what is decided of it."""

    trace: GrowingTrace
    growth: Growth


@final
class Resumed(NamedTuple):
    """What a saved state brings: a clock at its position, and what is decided of a growing trace."""

    clock: Clock
    growing: Growing | None


@final
class Planning:
    """The plan of a sampler and, if its trace is growing, what it grows by.

    Args:
        plan: the plan.
        growing: the growing trace, whose growth the plan has.

    Attributes:
        plan: the plan, as far as it is known.
        growing: the growing trace, and what is decided of it; None if the whole trace is known.
        decided_at: number of updates at which it was last looked after; several optimizers may share a sampler.
    """

    def __init__(self, plan: Plan, growing: Growing | None) -> None:
        self.plan, self.growing = plan, growing
        self.decided_at = 0
        self._moved: Growth | None = None  # where an epoch was chosen that is not trained yet
        self._clocks: weakref.WeakSet[Clock] = weakref.WeakSet()
        self._known_steps = KnownSteps()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, in which the questions hold what is known."""
        growing = self.growing
        if growing is not None:
            questions = tuple(Question.of(question.read()) for question in growing.growth.questions)
            growing = growing._replace(growth=replace(growing.growth, questions=questions))
        return {**vars(self), "growing": growing, "_clocks": list(self._clocks)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the state of another one; its clocks are copies, too."""
        vars(self).update(state, _clocks=weakref.WeakSet(state["_clocks"]))

    def clock(self) -> Clock:
        """Return a clock, whose plan grows with this one."""
        clock = Clock(self.plan)
        self._clocks.add(clock)
        return clock

    def fix_shape(self, devices: int) -> None:
        """Cut all steps into microbatches of one shape, on so many devices, before any is read."""
        self.plan = replace(self.plan, fixed_shape=True)
        if self.growing is not None:
            trace = self.growing.trace
            growth = trace.begin(devices, self.plan.minibatch_size, fixed_shape=True)
            self.growing, self.plan = Growing(trace, growth), replace(self.plan, trace=growth.trace)
        for clock in self._clocks:
            clock.replan(self.plan)

    def trace(self, updates: int) -> BatchTrace:
        """Return the batch trace; of a growing one, the first `updates` steps."""
        return self.plan.trace if self.growing is None else so_far(self.plan.trace, updates)

    @property
    def max_batch_size(self) -> int:
        """The largest batch size that an update may have, in samples."""
        return self.plan.trace.max_batch_size if self.growing is None else self.growing.trace.largest

    @property
    def needs_noise(self) -> bool:
        """Whether the decisions need the gradient noise."""
        return self.growing is not None and self.growing.trace.needs_noise

    @property
    def known_until(self) -> int | None:
        """The first step whose batch size is not known yet; None if all are."""
        growing, growth = self.growing, self.growth
        return None if growing is None or growth is None else growing.trace.known_until(growth)

    @property
    def growth(self) -> Growth | None:
        """What is decided, where the training is."""
        return self._moved or (None if self.growing is None else self.growing.growth)

    def grow(self, growth: Growth) -> None:
        """Plan with what was asked or decided since; what lies before the position of any clock is the same."""
        assert self.growing is not None
        if growth.trace is not self.growing.growth.trace:
            behind = min(self._clocks, key=lambda clock: clock.position)
            state = {**behind.state_dict(), "fixed_shape": self.plan.fixed_shape}
            self.plan = replace(self.plan, trace=growth.trace).resumed(state)
            for clock in self._clocks:
                clock.replan(self.plan)
        self.growing = self.growing._replace(growth=growth)  # after the plan, which a thread that sees it reads
        self._moved = None
        self._known_steps.notify()

    def skip_to(self, updates: int | None) -> None:
        """Note that the training will leave out what lies before so many updates; None: it will not."""
        growing = self.growing
        self._moved = None if growing is None or updates is None else growing.growth.moved_to(updates)

    def is_trained_here(self) -> None:
        """Note that this thread trains."""
        self._known_steps.is_trained_here()

    def known_plan(
        self, number: int, step: int, ahead: int, *, abandoned: Callable[[], bool] = lambda: False
    ) -> tuple[Plan, Epoch, int]:
        """Return a plan in which the batch size of a step is known, or the epoch is known to have ended before it.

        Args:
            number: number of the epoch.
            step: the step.
            ahead: number of microbatches, or of updates, that were read and not trained on, with this one.
            abandoned: function that returns whether nobody reads what the caller would read.

        Returns:
            The plan, the epoch in it, and the first step whose batch size it does not know.

        Raises:
            RuntimeError: if the batch size can become known only after this call.
            AbandonedError: if nobody reads what the caller would read.
        """
        while True:
            end = self.known_until  # before the plan, which the training may replace in between
            plan = self.plan
            epoch, end_step = plan.epoch(number), MAX_INT if end is None else end
            if step < end_step or (step == epoch.end_step and plan.ends_whatever_follows(epoch)):
                return plan, epoch, end_step
            if not self._known_steps.wait_for(partial(self._knows_more, end), abandoned):
                raise self._reads_too_far(step, end_step, ahead)

    def resumed(self, state: dict[str, Any], devices: int) -> Resumed:
        """Return a clock at a saved position, with the plan that leads on from there on so many devices.

        Raises:
            ValueError: if there is no such position.
        """
        plan, growing = self.plan, self.growing
        if growing is not None:
            growing = growing._replace(growth=_resumed_growth(growing.trace, state, devices, plan.dataset_size))
            plan = replace(plan, trace=growing.growth.trace)
        clock = Clock(plan.resumed(state))
        clock.load_state_dict(state)
        return Resumed(clock, growing)

    def past(self, state: dict[str, Any]) -> str:
        """Return the fingerprint of the batch sizes that this training has before a saved position."""
        step = check_int(state["step"], "step")
        if self.growing is None:
            return self.plan.past(step)
        if "growth" in state:  # which brings its own
            return str(state["past"])
        return replace(self.plan, trace=self.growing.trace.constant_until(step).trace).past(step)

    def adopt(self, resumed: Resumed) -> None:
        """Take the plan of a saved state, and what is decided."""
        self.plan, self.growing, self._moved = resumed.clock.plan, resumed.growing, None
        self.decided_at = resumed.clock.step
        self._known_steps.notify()

    def state(self) -> dict[str, Any]:
        """Return what is decided of a growing trace, as plain numbers; of another one, nothing."""
        growing, growth = self.growing, self.growth
        return {} if growing is None or growth is None else {"growth": growing.trace.state_of(growth)}

    def _knows_more(self, known_until: int | None) -> bool:
        return self.known_until != known_until

    def _reads_too_far(self, step: int, known_until: int, ahead: int) -> RuntimeError:
        delay = 0 if self.growing is None else self.growing.trace.delay
        return RuntimeError(
            f"a loader must not read updates whose batch size is not chosen yet, but it reads update {step}, {ahead} "
            f"reads ahead of step(), and the batch sizes are known up to update {known_until - 1}; pass "
            f"delay=num_workers * prefetch_factor + 4 to the AdaptiveTrace, which is always enough, here at least "
            f"{max(delay + 1, ahead + ADOPTED_AFTER)}, or let the loader prefetch less"
        )


def _resumed_growth(trace: GrowingTrace, state: dict[str, Any], devices: int, dataset_size: int) -> Growth:
    updates = check_int(state["step"], "step")
    if "growth" not in state:  # that of a fixed trace
        return trace.constant_until(updates)
    # With drop_last, the size of the next step has ended an epoch of which a rest is left: it stays.
    by_size = bool(state["ended"]) and check_int(state["epoch_samples"], "epoch_samples") < dataset_size
    try:
        return trace.restored(state["growth"], devices, updates, updates + by_size)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(
            f"a state of version {VERSION} must hold growth as it was saved, but its decisions cannot be read "
            f"({error!r:.80}); restore another state"
        ) from error


def growing_at_start(
    trace: GrowingTrace, devices: int, minibatch_size: int, dataset_size: int, on_end: object, *, fixed_shape: bool
) -> Growing:
    """Return a growing trace at the beginning of a training.

    Raises:
        ValueError: if it cannot train with this dataset, or an `on_end` is given.
    """
    if on_end is not None:
        raise value_error("on_end must be left out with a trace that never ends", repr(on_end), "omit it")
    own = trace.for_training(check_int(dataset_size, "dataset_size", 1))
    rows = check_int(minibatch_size, "minibatch_size", 1)
    return Growing(own, own.begin(devices, rows, fixed_shape=fixed_shape))
