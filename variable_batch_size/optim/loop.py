"""Which microbatch comes next, and whether the user's loop passes the one that its sampler dealt.

Errors of a user's loop are raised here (`Loop.receive`), when the sampler is read again
(`Feed.begin_reading`), and when gradients are not those of a `backward()` (`optim/backward_check.py`).
`data/reading.py` distinguishes skipped microbatches from prefetched ones in a plain loop; `vbs.updates` knows them.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple, Protocol, final
from weakref import WeakSet

from torch import Tensor

from variable_batch_size.backend import Backend
from variable_batch_size.data.clock import Clock, Position
from variable_batch_size.data.deal import Dealing, Step
from variable_batch_size.data.plan import Plan
from variable_batch_size.data.reading import Reading, Use
from variable_batch_size.data.source import Source
from variable_batch_size.microbatching import Microbatch
from variable_batch_size.world import World


class Watcher(Protocol):
    """An object that also counts microbatches, and must know which of them are committed."""

    def commit(self, *, updated: bool) -> None:
        """Handle the commit of the accumulated step; not `updated`: its update was skipped as non-finite.

        It may be called again after an interrupt, until it has returned.
        """

    def discard(self) -> None:
        """Handle the discarding of the accumulated step, if any."""


@final
class Phase(Enum):
    """Where in a step an optimizer is."""

    BETWEEN_STEPS = auto()
    INSIDE_STEP = auto()  # some microbatches are accumulated, others are to come
    INTERRUPTED = auto()  # an exception has left step(): what is accumulated is unknown, the weights have not changed
    HALF_UPDATED = auto()  # an exception has left the inner optimizer's step: the weights are unknown, too
    UNSETTLED = auto()  # an exception has left step() after the commit: its gradients are still there


_WAY_OUT = {
    Phase.INSIDE_STEP: "call it when optimizer.step() has returned True, or call discard_step() first",
    Phase.INTERRUPTED: "call optimizer.discard_step() and iterate the loader again, or load a state",
    Phase.HALF_UPDATED: "restore the states of model and optimizer, as of the last checkpoint, or create both again",
    Phase.UNSETTLED: "call optimizer.discard_step() and iterate the loader again, or load a state",
}


class _Progress(NamedTuple):
    """How far a step is, as one value: an interrupt finds the old one or the new one."""

    commits: int  # of the clock; after the next commit this does not count any more
    round: int = 0  # microbatches of the step received on this rank
    phase: Phase = Phase.BETWEEN_STEPS


class _Cut(NamedTuple):
    """The step that is due, and its microbatches by round: each is needed several times."""

    key: tuple[Plan, Position, Dealing, World]
    step: Step
    microbatches: dict[int, Microbatch]


@final
class Loop:
    """Counts the microbatches of a sampler that reach `step()`, along the sampler's plan.

    It reads the plan and counts by itself, because microbatches that the sampler yielded may only be prefetched.

    An update is committed at one moment, when the clock advances. What shows that it has happened is either derived
    from the clock or settled afterwards (`settle`), again if an interrupt comes in between.
    """

    def __init__(self, sampler: Source, backend: Backend, **cut: bool) -> None:
        self.sampler = _check_world(sampler, backend)
        self.feed = sampler._feed
        self.clock: Clock = self.feed.attach(compiles_shapes=backend.static_graph, elastic=backend.elastic, **cut)
        self.watchers: WeakSet[Watcher] = WeakSet()
        self.running = False  # whether step() is under way
        self._progress = _Progress(0)
        self.made: Step | None = None  # the last step that was committed, or is about to be
        self._settled, self._updated = 0, True  # commits that are settled, and whether the last one changed the weights
        self._cut: _Cut | None = None
        self._reading: Reading | None = None
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
        return self.clock.end_pending and self.feed.clock.end_pending

    @property
    def phase(self) -> Phase:
        """Where in a step the optimizer is."""
        if self._progress.commits != self.clock.commits:
            return Phase.BETWEEN_STEPS if self.settled else Phase.UNSETTLED
        return self._progress.phase

    def enter(self, phase: Phase) -> None:
        """Record where in the step the optimizer is."""
        self._progress = _Progress(self.clock.commits, self._round, phase)

    @property
    def _round(self) -> int:
        """The number of microbatches of the current step received on this rank."""
        return self._progress.round if self._progress.commits == self.clock.commits else 0

    @property
    def begun(self) -> bool:
        """Whether a microbatch of the current step was accumulated."""
        return self._round > 0

    @property
    def step(self) -> Step:
        """The current step: the next update."""
        return self._due().step

    def _due(self) -> _Cut:
        clock = self.clock
        # An optimizer that attaches later changes the dealing, and ranks that come and go the world.
        key = clock.plan, clock.position, self.feed.dealing, self.feed.world
        if self._cut is None or self._cut.key[0] is not key[0] or self._cut.key[1:] != key[1:]:
            self._cut = _Cut(key, clock.plan.step(clock.epoch, clock.step, key[2]), {})
        return self._cut

    @property
    def several_rounds(self) -> bool:
        """Whether this rank has several microbatches in the current step; True if the step is not known yet."""
        known = not self.clock.finished and self.feed.knows(self.clock.step)
        return not known or self.step.rounds(self.feed.world) > 1

    def check_phase(self, what: str, *allowed: Phase) -> None:
        """Check that a method may be called now."""
        phase = self.phase
        if phase in allowed:
            return
        if self.running:
            raise RuntimeError(
                f"{what} must be called when optimizer.step() has returned, but it was called within it, as by a hook "
                f"of the inner optimizer; call it after step()"
            )
        state = {
            Phase.INSIDE_STEP: "has accumulated only some of its microbatches",
            Phase.INTERRUPTED: "was interrupted by an exception",
            Phase.HALF_UPDATED: "was interrupted by an exception in the inner optimizer's step, or in a hook of it, "
            "so that the weights may be half updated",
            Phase.UNSETTLED: "had made its update when it was interrupted by an exception",
        }[phase]
        step = self.clock.step - (phase is Phase.UNSETTLED)
        when = "between steps" if Phase.INSIDE_STEP not in allowed else "in an intact step"
        raise RuntimeError(f"{what} must be called {when}, but step {step} {state}; {_WAY_OUT[phase]}")

    def check_receiving(self) -> None:
        """Check that `step()` may be called now; otherwise a microbatch that was read for it is lost."""
        allowed = Phase.BETWEEN_STEPS, Phase.INSIDE_STEP
        if self.phase not in allowed and self.feed.reading is not None:
            self.feed.reading.use = Use.STALE
        self.check_phase("step()", *allowed)

    def microbatch(self, ahead: int = 0) -> Microbatch:
        """Return the next microbatch of this rank, or one that is `ahead` rounds later in the same step."""
        if self.clock.finished:
            self._enter_next_epoch()
        if not self.feed.knows(self.clock.step):
            raise RuntimeError(
                f"step() must be called for microbatches of a batch that has arrived, but none has for update "
                f"{self.clock.step}; loop over vbs.updates(batches, optimizer), and over the microbatches of each"
            )
        (_, step, known), round_index = self._due(), self._round + ahead
        if round_index not in known:
            known[round_index] = step.microbatch(round_index, self.feed.world)
        return known[round_index]

    def upcoming(self) -> Microbatch | None:
        """Return what the next `step()` counts; None if nothing was read for it, or `step()` must not be called."""
        if self.phase not in (Phase.BETWEEN_STEPS, Phase.INSIDE_STEP):
            return None
        try:
            return self.microbatch()
        except (RuntimeError, ValueError):  # the epoch has ended
            return None

    def receive(self, parameters: Sequence[Tensor]) -> Microbatch:
        """Count the next microbatch as received, and return it."""
        microbatch = self.microbatch()
        self.feed.lead(self.clock)
        reading = self.feed.reading
        if reading is not None and reading is not self._reading:
            self._received = self._begin(reading)
            reading.counts.pass_over(self._received)
            self._reading = reading
            _check_new(parameters, reading)
        if reading is not None and reading.dealing != self.feed.dealing:
            reading.use = Use.STALE
            raise RuntimeError(
                "the loader must be iterated again after an optimizer is created whose result depends on how steps "
                "are split, but this iteration was begun before; call optimizer.discard_step() and start a new loop "
                "over the loader"
            )
        if reading is None or self._received >= reading.counts.available:
            raise RuntimeError(
                f"step() must be called once per microbatch of the optimizer's own sampler, but that sampler has "
                f"yielded {0 if reading is None else reading.counts.available} and this is number "
                f"{self._received + 1}; pass the same CustomSampler to the optimizer and, as batch_sampler, to the "
                f"loader (in a trainer: use the loader or the engine that the integration returns), and call step() "
                f"once per microbatch; pass optimizer.inner to functions that make a step of their own, as "
                f"get_state_dict() of torch.distributed.checkpoint does"
            )
        if skipped := reading.counts.count_step(self._received):
            what = (
                f"{skipped} of those that were read did not reach step() before step {microbatch.step} continued"
                if skipped > 0
                else f"step() was called {-skipped} times more than microbatches were read"
            )
            raise RuntimeError(
                f"step() must follow the backward() of every microbatch, but {what}; call it once per microbatch, skip "
                f"none (after an exception call discard_step() and iterate the loader again), pass the sampler to the "
                f"loader as batch_sampler, give an optimizer that steps more rarely a sampler of its own, and read "
                f"several at once only by vbs.updates"
            )
        self._received += 1
        return microbatch

    def next_round(self) -> None:
        """Advance to the next microbatch of the same step."""
        due, done = self._due(), self._round
        due.microbatches.pop(done, None)
        self._progress = _Progress(self.clock.commits, done + 1, Phase.INSIDE_STEP)

    def commit(self, *, updated: bool) -> None:
        """Commit the step, at one moment: not `updated`, it was skipped as non-finite."""
        self.made, self._updated = self.step, updated
        self.clock.advance(self.made.batch_size)

    @property
    def settled(self) -> bool:
        """Whether all that follows from the last commit was done."""
        return self._settled == self.clock.commits

    def settle(self) -> None:
        """Notify the sampler and the watchers of the last commit."""
        self.feed.follow()
        for watcher in list(self.watchers):
            watcher.commit(updated=self._updated)
        self._settled = self.clock.commits

    def set_epoch(self, epoch: int) -> None:
        """Move the clock, see `Clock.set_epoch`, and return to the first microbatch of its step."""
        self.feed.check_epoch(epoch)
        before = self.clock.position
        skipped = self.clock.set_epoch(epoch)
        self.restart()
        if skipped.updates and self.clock.position != before:
            warnings.warn(
                f"set_epoch({epoch}) skips {skipped.updates} updates and {skipped.samples} samples, which are not "
                f"trained on; call it with optimizer.epoch to continue",
                UserWarning,
                stacklevel=3,
            )

    def enter_world(self, world: World, *, loaded: bool) -> bool:
        """Let the sampler deal for a world from the next step on; return whether it is another one.

        `loaded`: a state has come, in which a controller may have decided the first step for a world of one.
        """
        if world == self.feed.world and not (loaded and self.clock.step == 0):
            return False
        self.feed.enter_world(world)
        self.restart()
        return True

    def restart(self) -> None:
        """Return to the first microbatch of the step at which the clock stands; it must come from a new iteration."""
        for reading in (self._reading, self.feed.reading):
            if reading is not None:
                reading.use = Use.STALE
        self._progress, self._reading, self.running = _Progress(self.clock.commits), None, False
        for watcher in self.watchers:
            watcher.discard()

    def _enter_next_epoch(self) -> None:
        """Move to the next epoch if the sampler was read there: `set_epoch` of the sampler is then enough."""
        due, reading = self.epoch, self.feed.reading
        if reading is None or reading.use is Use.STALE or reading.start != (due, self.clock.step):
            ended = self.clock.epoch.number
            raise RuntimeError(
                f"step() needs an epoch with updates left, but all updates of epoch {ended} are committed; call "
                f"set_epoch({ended + 1}) on the sampler and on the optimizer, or loop over vbs.updates"
            )
        self.clock.set_epoch(due)

    def _begin(self, reading: Reading) -> int:
        """Return how many microbatches an iteration has before the next one, which it must contain."""
        here, start = self.clock.position, reading.start
        if reading.use is Use.STALE:
            raise RuntimeError(
                f"the loader must be iterated again after set_epoch(), discard_step() or load_state_dict(), and after "
                f"an optimizer is created, but this iteration was begun before the optimizer moved to {here}; start a "
                f"new loop over the loader"
            )
        reading.use = Use.STALE  # if an error follows, its microbatch is lost
        if self.begun:
            raise RuntimeError(
                f"a step must get all its microbatches from one iteration, but step {here.step} had {self._round} of "
                f"{self.step.rounds(self.feed.world)} when the loader was iterated again; call "
                f"optimizer.discard_step() first to start the step over, or set_epoch on both"
            )
        begins_here = start == here and reading.first_round == 0
        # A loader that restores its iterator may have read on from an older snapshot, up to this position.
        leads_here = reading.resumed and start.epoch == here.epoch and start.step < here.step
        if not (begins_here or leads_here):
            raise RuntimeError(
                f"sampler and optimizer must be at the same update, but the sampler's iteration began at {start} and "
                f"the optimizer is at {here}; call set_epoch with the same epoch on both, or restore both"
            )
        reading.use = Use.CURRENT
        plan, epoch, dealing = self.clock.plan, self.clock.epoch, self.feed.dealing
        steps = (plan.step(epoch, number, dealing) for number in range(start.step, here.step))
        return sum(step.rounds(self.feed.world) for step in steps) - reading.first_round


def _check_new(parameters: Sequence[Tensor], reading: Reading) -> None:
    """Check that the gradients are new since an iteration began, at its first microbatch."""
    left, reading.gradients = reading.gradients, ()
    left_in = {id(gradient) for gradient in left}
    if left_in and any(id(parameter.grad) in left_in for parameter in parameters if parameter.grad is not None):
        raise RuntimeError(
            "the gradients must be those of the microbatches that step() counts, but a backward() that no step() has "
            "counted had left some when the loader was iterated, as a loop does that an exception has ended; call "
            "optimizer.discard_step() or zero_grad() before a new loop"
        )


def check_sampler(sampler: object) -> None:
    """Raise TypeError unless it is a `CustomSampler`, or `ArrivingBatches`."""
    if not isinstance(sampler, Source):
        raise TypeError(
            f"the sampler must be the vbs.CustomSampler that feeds the loop, got {type(sampler).__name__}; create one "
            f"and pass it to the loader as batch_sampler, or pass vbs.ArrivingBatches"
        )


def _check_world(sampler: Source, backend: Backend) -> Source:
    world = backend.world
    if sampler.world != world:
        raise ValueError(
            f"sampler and optimizer must have the same rank and world size, but the sampler deals for rank "
            f"{sampler.world.rank} of {sampler.world.size} and the optimizer's {type(backend).__name__} is rank "
            f"{world.rank} of {world.size}; pass num_replicas and rank of this process, and initialize "
            f"torch.distributed (or move the model to its XLA device) before the optimizer is created"
        )
    return sampler
