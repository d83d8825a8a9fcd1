"""Which microbatch comes next, and whether the user's loop passes the one that its sampler dealt.

Errors of a user's loop are raised here (`Loop.receive`), when the sampler is read again
(`CustomSampler.check_readable`), and when gradients are not those of a `backward()` (`optim/backward_check.py`).
`data/read_ahead.py` tells skipped microbatches from prefetched ones.
"""

from __future__ import annotations

import warnings
from enum import Enum, auto
from typing import NamedTuple, Protocol, final
from weakref import WeakSet

from variable_batch_size.backend import Backend
from variable_batch_size.data.clock import Clock
from variable_batch_size.data.iteration import Iteration, Use
from variable_batch_size.data.microbatching import Microbatch
from variable_batch_size.data.plan import Step
from variable_batch_size.data.sampler import CustomSampler


class Watcher(Protocol):
    """An object that also counts microbatches, and must know which of them are committed."""

    def commit(self, *, updated: bool) -> None:
        """Handle the commit of the accumulated step; not `updated`: its update was skipped as non-finite."""

    def discard(self) -> None:
        """Handle the discarding of the accumulated step, if any."""


class Upcoming(NamedTuple):
    """The microbatch that the next `step()` counts, and the update that it belongs to."""

    microbatch: Microbatch
    step: Step
    updates: int  # before this one
    samples: int  # of those updates


@final
class Phase(Enum):
    """Where in a step an optimizer is."""

    BETWEEN_STEPS = auto()
    INSIDE_STEP = auto()  # some microbatches are accumulated, others are to come
    INTERRUPTED = auto()  # an exception has left step(): what is accumulated is unknown, the weights have not changed
    HALF_UPDATED = auto()  # an exception has left the inner optimizer's step: the weights are unknown, too


_WAY_OUT = {
    Phase.INSIDE_STEP: "call it when optimizer.step() has returned True, or call discard_step() first",
    Phase.INTERRUPTED: "call optimizer.discard_step() and iterate the loader again, or load a state",
    Phase.HALF_UPDATED: "restore the states of model and optimizer, such as those of the last checkpoint",
}


@final
class Loop:
    """Counts the microbatches of a sampler that reach `step()`, along the sampler's plan.

    It reads the plan and counts by itself, because microbatches that the sampler yielded may only be prefetched.
    """

    def __init__(self, sampler: CustomSampler, backend: Backend, *, spread: bool = True) -> None:
        self.sampler = _check_world(sampler, backend)
        self.clock: Clock = sampler.attach(spread=spread)
        self.watchers: WeakSet[Watcher] = WeakSet()
        self.phase = Phase.BETWEEN_STEPS
        self._world = backend.world
        self._round = 0  # microbatches of the current step received on this rank
        self._step: Step | None = None
        self._min_microbatches = sampler.min_microbatches  # with which it was split
        self._microbatches: dict[int, Microbatch] = {}  # of the current step, by round: each is needed several times
        self._iteration: Iteration | None = None
        self._received = 0  # microbatches of the iteration received

    @property
    def epoch(self) -> int:
        """The epoch of the next update, see `Clock.due_epoch`; the sampler knows whether an end is still pending."""
        return self.clock.epoch.number + (self.clock.finished and not self._end_pending)

    @property
    def done(self) -> bool:
        """Whether the training has ended, and the loop has read the end of its last epoch."""
        return self.clock.done and not self._end_pending

    @property
    def _end_pending(self) -> bool:
        return self.clock.end_pending and self.sampler.clock.end_pending

    @property
    def begun(self) -> bool:
        """Whether a microbatch of the current step was accumulated."""
        return self._round > 0

    @property
    def step(self) -> Step:
        """The current step: the next update."""
        at_least = self.sampler.min_microbatches  # an optimizer that attaches later may change it
        if self._step is None or at_least != self._min_microbatches:
            self._step = self.clock.plan.step(self.clock.epoch, self.clock.step, at_least)
            self._min_microbatches, self._microbatches = at_least, {}
        return self._step

    @property
    def several_rounds(self) -> bool:
        """Whether this rank has several microbatches in the current step; True if the step is not known yet."""
        return self.clock.finished or self.step.rounds(self._world) > 1

    def check_phase(self, what: str, *allowed: Phase) -> None:
        """Check that a method may be called now.

        Raises:
            RuntimeError: in another phase.
        """
        if self.phase in allowed:
            return
        state = {
            Phase.INSIDE_STEP: "has accumulated only some of its microbatches",
            Phase.INTERRUPTED: "was interrupted by an exception",
            Phase.HALF_UPDATED: "was interrupted by an exception in the inner optimizer's step, or in a hook of it, "
            "so that the weights may be half updated",
        }[self.phase]
        when = "between steps" if Phase.INSIDE_STEP not in allowed else "in an intact step"
        raise RuntimeError(f"{what} must be called {when}, but step {self.clock.step} {state}; {_WAY_OUT[self.phase]}")

    def check_receiving(self) -> None:
        """Check that `step()` may be called now; otherwise a microbatch that was read for it is lost.

        Raises:
            RuntimeError: after an exception.
        """
        if self.phase in (Phase.INTERRUPTED, Phase.HALF_UPDATED) and self.sampler.iteration is not None:
            self.sampler.iteration.use = Use.STALE
        self.check_phase("step()", Phase.BETWEEN_STEPS, Phase.INSIDE_STEP)

    def microbatch(self, ahead: int = 0) -> Microbatch:
        """Return the next microbatch of this rank, or one that is `ahead` rounds later in the same step.

        Raises:
            RuntimeError: if all updates of the epoch are committed, and the next one was not read yet.
        """
        if self.clock.finished:
            self._enter_next_epoch()
        step, round_index = self.step, self._round + ahead
        if round_index not in self._microbatches:
            self._microbatches[round_index] = step.microbatch(round_index, self._world)
        return self._microbatches[round_index]

    def upcoming(self) -> Upcoming | None:
        """Return what the next `step()` counts; None if it must not be called now, or the next epoch was not set."""
        if self.clock.finished or self.phase not in (Phase.BETWEEN_STEPS, Phase.INSIDE_STEP):
            return None
        return Upcoming(self.microbatch(), self.step, self.clock.step, self.clock.samples)

    def receive(self) -> Microbatch:
        """Count the next microbatch as received, and return it.

        Raises:
            RuntimeError: if it cannot be the one that the sampler dealt.
        """
        microbatch = self.microbatch()
        iteration = self.sampler.iteration
        if iteration is not None and iteration is not self._iteration:
            self._received = self._begin(iteration)
            self._iteration = iteration
        if iteration is not None and iteration.min_microbatches != self._min_microbatches:
            iteration.use = Use.STALE
            raise RuntimeError(
                f"the loader must be iterated again after an optimizer is created whose result depends on how steps "
                f"are split, but this iteration was begun before, and splits them into at least "
                f"{iteration.min_microbatches} microbatches; call optimizer.discard_step() and start a new loop over "
                f"the loader"
            )
        if iteration is None or self._received >= iteration.counts.yielded:
            raise RuntimeError(
                f"step() must be called once per microbatch of the optimizer's own sampler, but that sampler has "
                f"yielded {0 if iteration is None else iteration.counts.yielded} and this is number "
                f"{self._received + 1}; pass the same CustomSampler to the optimizer and, as batch_sampler, to the "
                f"loader (in a trainer: use the loader or the engine that the integration returns), and call step() "
                f"once per microbatch"
            )
        ends_at = self._received - self._round + self.step.rounds(self._world)
        if skipped := iteration.counts.count_step(self._received, ends_at):
            raise RuntimeError(
                f"step() must follow the backward() of every microbatch, but {skipped} of those that were read did not "
                f"reach step() before step {microbatch.step} continued; call it once per microbatch, skip none (after "
                f"an exception call discard_step() and iterate the loader again), pass the sampler to the loader as "
                f"batch_sampler, and give an optimizer that steps more rarely a sampler of its own"
            )
        self._received += 1
        return microbatch

    def next_round(self) -> None:
        """Advance to the next microbatch of the same step."""
        self._microbatches.pop(self._round, None)
        self._round += 1
        self.phase = Phase.INSIDE_STEP

    def commit(self, *, updated: bool) -> None:
        """Advance to the next step; the sampler's clock follows. Not `updated`: it was skipped as non-finite."""
        self.clock.advance(self.step.batch_size)
        self.sampler.follow(self.clock)
        self._begin_step()
        for watcher in self.watchers:
            watcher.commit(updated=updated)

    def set_epoch(self, epoch: int) -> None:
        """Move the clock, see `Clock.set_epoch`, and return to the first microbatch of its step."""
        before = self.clock.position
        skipped = self.clock.set_epoch(epoch)
        self.restart()
        if skipped.updates and self.clock.position != before:
            warnings.warn(
                f"set_epoch({epoch}) skips {skipped.updates} updates and {skipped.samples} samples, which are not "
                f"trained on; call it with optimizer.epoch to go on",
                UserWarning,
                stacklevel=3,
            )

    def restart(self) -> None:
        """Return to the first microbatch of the step at which the clock stands; it must come from a new iteration."""
        for iteration in (self._iteration, self.sampler.iteration):
            if iteration is not None:
                iteration.use = Use.STALE
        self._begin_step()
        self._iteration = None
        for watcher in self.watchers:
            watcher.discard()

    def _begin_step(self) -> None:
        self._round, self._step, self._microbatches, self.phase = 0, None, {}, Phase.BETWEEN_STEPS

    def _enter_next_epoch(self) -> None:
        """Move to the next epoch if the sampler was read there: `set_epoch` of the sampler is then enough."""
        due, iteration = self.epoch, self.sampler.iteration
        if iteration is None or iteration.use is Use.STALE or iteration.start != (due, self.clock.step):
            ended = self.clock.epoch.number
            raise RuntimeError(
                f"step() needs an epoch with updates left, but all updates of epoch {ended} are committed; call "
                f"set_epoch({ended + 1}) on the sampler and on the optimizer"
            )
        self.clock.set_epoch(due)

    def _begin(self, iteration: Iteration) -> int:
        """Return how many microbatches an iteration has before the next one, which it must contain."""
        here, start = self.clock.position, iteration.start
        if iteration.use is Use.STALE:
            raise RuntimeError(
                f"the loader must be iterated again after set_epoch(), discard_step() or load_state_dict(), and after "
                f"an optimizer is created, but this iteration was begun before the optimizer moved to {here}; start a "
                f"new loop over the loader"
            )
        iteration.use = Use.STALE  # if an error follows, its microbatch is lost
        if self.begun:
            raise RuntimeError(
                f"a step must get all its microbatches from one iteration, but step {here.step} had {self._round} of "
                f"{self.step.rounds(self._world)} when the loader was iterated again; call optimizer.discard_step() "
                f"first to start the step over, or set_epoch on both"
            )
        begins_here = start == here and iteration.first_round == 0
        # A loader that restores its iterator may have read on from an older snapshot, up to this position.
        leads_here = iteration.resumed and start.epoch == here.epoch and start.step < here.step
        if not (begins_here or leads_here):
            raise RuntimeError(
                f"sampler and optimizer must be at the same update, but the sampler's iteration began at {start} and "
                f"the optimizer is at {here}; call set_epoch with the same epoch on both, or restore both"
            )
        iteration.use = Use.CURRENT
        steps = (self.clock.plan.step(self.clock.epoch, number) for number in range(start.step, here.step))
        return sum(step.rounds(self._world) for step in steps) - iteration.first_round


def check_sampler(sampler: object) -> None:
    """Raise TypeError unless it is a `CustomSampler`."""
    if not isinstance(sampler, CustomSampler):
        raise TypeError(
            f"the sampler must be the vbs.CustomSampler that feeds the loop, got {type(sampler).__name__}; create one "
            f"and pass it to the loader as batch_sampler"
        )


def _check_world(sampler: CustomSampler, backend: Backend) -> CustomSampler:
    world = backend.world
    if sampler.world != world:
        raise ValueError(
            f"sampler and optimizer must have the same rank and world size, but the sampler deals for rank "
            f"{sampler.world.rank} of {sampler.world.size} and the optimizer's {type(backend).__name__} is rank "
            f"{world.rank} of {world.size}; pass num_replicas and rank of this process, and initialize "
            f"torch.distributed (or move the model to its XLA device) before the optimizer is created"
        )
    return sampler
