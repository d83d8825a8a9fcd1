"""The plan of a sampler, which grows with the decisions of a controller, and where loaders wait for these."""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, final

from variable_batch_size._validation import MAX_INT, check_int
from variable_batch_size.adaptive.adaptive_trace import AdaptiveTrace, largest_size
from variable_batch_size.adaptive.decided_trace import ADOPTED_AFTER, DecidedTrace
from variable_batch_size.data.clock import Clock
from variable_batch_size.data.plan import Epoch, Plan
from variable_batch_size.data.state import VERSION
from variable_batch_size.trace.batch_trace import BatchTrace

WAIT_SECONDS = 0.5  # after which a waiting loader looks whether anybody still reads what it would read
WARN_SECONDS = 30.0  # of waiting


class AbandonedError(Exception):
    """Nobody reads what a waiting loader would read."""


@final
class Resumed(NamedTuple):
    """What a saved state brings: a clock at its position, and what a controller has decided."""

    clock: Clock
    decided: DecidedTrace | None


@final
class PlanState:
    """The plan of a sampler, as far as it is known.

    A loader may read in a thread of its own, ahead of the training: where the batch size is not decided yet, it waits
    in `known_plan`. The thread of the training cannot wait for itself and gets an error. Before the first update nobody
    knows which one it is: only a daemon, as the thread of a loader is, waits then.

    Args:
        plan: the plan.
        decided: what a controller has decided, whose batch sizes the plan has; None for a fixed trace.

    Attributes:
        plan: the plan.
        decided_at: number of updates after which the controller was last checked; several optimizers may share a
            sampler.
    """

    def __init__(self, plan: Plan, decided: DecidedTrace | None) -> None:
        self.plan, self._decided = plan, decided
        self.decided_at = 0
        self._skipped: DecidedTrace | None = None  # where an epoch was chosen that is not trained yet
        self._clocks: weakref.WeakSet[Clock] = weakref.WeakSet()
        self._changed = threading.Condition()
        self._trainer: int | None = None  # the thread of the last update

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, which no loader waits for."""
        own = {"plan": self.plan, "decided_at": self.decided_at, "clocks": list(self._clocks)}
        return own | {name: one and one.copy() for name, one in vars(self).items() if name in ("_decided", "_skipped")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the state of another one; its clocks are copies, too."""
        clocks = state.pop("clocks")
        vars(self).update(state, _clocks=weakref.WeakSet(clocks))
        self._changed, self._trainer = threading.Condition(), None

    @property
    def decided(self) -> DecidedTrace | None:
        """What a controller has decided, from where the training is; None for a fixed trace."""
        return self._skipped or self._decided

    def clock(self) -> Clock:
        """Return a clock, whose plan grows with this one."""
        clock = Clock(self.plan)
        self._clocks.add(clock)
        return clock

    def fix_shape(self, devices: int) -> None:
        """Cut all steps into microbatches of one shape, before any is read."""
        self.plan = replace(self.plan, fixed_shape=True)
        if self._decided is not None:
            self._decided = self._first_decided(self._decided.adaptive, devices)
            self.plan = replace(self.plan, trace=self._decided.trace)
        self._replan()

    def decide_first(self, devices: int) -> None:
        """Decide again, before the first step, for another number of devices."""
        if self._decided is not None:
            self.grow(self._first_decided(self._decided.adaptive, devices))

    def _first_decided(self, adaptive: AdaptiveTrace, devices: int) -> DecidedTrace:
        return DecidedTrace.begin(adaptive, devices, self.plan.minibatch_size, fixed_shape=self.plan.fixed_shape)

    def trace(self, updates: int) -> BatchTrace:
        """Return the batch trace; of a controller, the first `updates` steps."""
        return self.plan.trace if self._decided is None else self._decided.so_far(updates)

    @property
    def max_batch_size(self) -> int:
        """The largest batch size that an update may have, in samples."""
        return self.plan.trace.max_batch_size if self._decided is None else largest_size(self._decided.adaptive)

    @property
    def needs_noise(self) -> bool:
        """Whether a controller needs the gradient noise."""
        return self._decided is not None and self._decided.adaptive.needs_noise

    def grow(self, decided: DecidedTrace) -> None:
        """Plan with what was decided since; what lies before the position of any clock is the same."""
        assert self._decided is not None
        if decided.trace is not self._decided.trace:
            behind = min(self._clocks, key=lambda clock: clock.position)
            state = {**behind.state_dict(), "fixed_shape": self.plan.fixed_shape}
            self.plan = replace(self.plan, trace=decided.trace).resume(state)
            self._replan()
        self._publish(decided)  # after the plan, which a thread that sees it reads

    def mark_trainer(self) -> None:
        """Note that this thread trains."""
        self._trainer = threading.get_ident()

    def _is_of_training(self, thread: threading.Thread) -> bool:
        return not thread.daemon if self._trainer is None else thread.ident == self._trainer

    def skip_to(self, updates: int | None) -> None:
        """Note that the training will skip to this number of updates; None: it will not."""
        self._skipped = None if self._decided is None or updates is None else self._decided.skip_to(updates)

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
            RuntimeError: if the thread of the training would have to wait.
            AbandonedError: if nobody reads what the caller would read.
        """
        begun: float | None = None
        while True:
            decided, plan = self.decided, self.plan  # in this order, because the training may replace the plan
            end = None if decided is None else decided.known_until
            epoch, end_step = plan.epoch(number), MAX_INT if end is None else end
            if step < end_step or (step == epoch.end_step and plan.ends_whatever_follows(epoch)):
                return plan, epoch, end_step
            assert decided is not None
            if self._is_of_training(threading.current_thread()):
                raise _reads_too_far(decided.adaptive.delay, step, end_step, ahead)
            if abandoned() or not threading.main_thread().is_alive():
                raise AbandonedError
            with self._changed:
                if self.decided is decided:
                    self._changed.wait(WAIT_SECONDS)
            begun = _warn_if_long(begun)

    def clock_at(self, state: dict[str, Any], devices: int | None) -> Resumed:
        """Return a clock at a saved position, with the plan from there on, for this number of devices.

        None: nothing is decided again, but at the next question.

        Raises:
            ValueError: if there is no such position.
        """
        plan, decided = self.plan, self._decided
        if decided is not None:
            decided = _resume(decided, state, devices, plan.dataset_size)
            plan = replace(plan, trace=decided.trace)
        clock = Clock(plan.resume(state))
        clock.load_state_dict(state)
        return Resumed(clock, decided)

    def counted(self, state: dict[str, Any]) -> Resumed:
        """Return a clock that counts on from a saved position, where batches arrive."""
        clock = Clock(replace(self.plan, fixed_shape=bool(state["fixed_shape"])))
        clock.load_state_dict(state)
        return Resumed(clock, None)

    def past(self, state: dict[str, Any]) -> str:
        """Return the fingerprint of the batch sizes that this training has before a saved position."""
        step = check_int(state["step"], "step")
        if self._decided is None:
            return self.plan.past(step)
        if "growth" in state:  # which brings its own
            return str(state["past"])
        return replace(self.plan, trace=DecidedTrace.after_constant(self._decided.adaptive, step).trace).past(step)

    def restore(self, resumed: Resumed) -> None:
        """Take the plan of a saved state, and what is decided."""
        self.plan, self.decided_at = resumed.clock.plan, resumed.clock.step
        self._publish(resumed.decided)

    def state(self) -> dict[str, Any]:
        """Return what a controller has decided, as plain numbers; of a fixed trace, nothing."""
        return {} if self.decided is None else {"growth": self.decided.state_dict()}

    def _publish(self, decided: DecidedTrace | None) -> None:
        with self._changed:
            self._decided, self._skipped = decided, None
            self._changed.notify_all()

    def _replan(self) -> None:
        for clock in self._clocks:
            clock.replan(self.plan)


def _reads_too_far(delay: int, step: int, end_step: int, ahead: int) -> RuntimeError:
    return RuntimeError(
        f"a loader must not read updates whose batch size is not decided yet, but it reads update {step}, {ahead} "
        f"reads ahead of step(), and the batch sizes are known up to update {end_step - 1}; pass "
        f"delay=num_workers * prefetch_factor + 4 to the AdaptiveTrace, which is always enough, here at least "
        f"{max(delay + 1, ahead + ADOPTED_AFTER)}, or let the loader prefetch less"
    )


def _warn_if_long(begun: float | None) -> float:
    """Warn once after `WARN_SECONDS`; return when the wait began, or infinity after the warning."""
    if begun is not None and time.monotonic() - begun > WARN_SECONDS:
        warnings.warn(
            f"A loader has waited {WARN_SECONDS:.0f} seconds in {threading.current_thread().name} for a batch size "
            f"that the training decides; if the training waits for this thread, pass a larger delay to the "
            f"AdaptiveTrace (num_workers * prefetch_factor + 4 is always enough)",
            UserWarning,
            stacklevel=3,
        )
        return float("inf")
    return time.monotonic() if begun is None else begun


def _resume(decided: DecidedTrace, state: dict[str, Any], devices: int | None, dataset_size: int) -> DecidedTrace:
    updates = check_int(state["step"], "step")
    if "growth" not in state:  # that of a fixed trace
        return DecidedTrace.after_constant(decided.adaptive, updates)
    # With drop_last, the size of the next step has ended an epoch of which a rest is left: it stays.
    by_size = bool(state["ended"]) and check_int(state["epoch_samples"], "epoch_samples") < dataset_size
    try:
        return DecidedTrace.resume(decided.adaptive, state["growth"], devices, updates, updates + by_size)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(
            f"a state of version {VERSION} must hold growth as it was saved, but its decisions cannot be read "
            f"({error!r:.80}); restore another state"
        ) from error
