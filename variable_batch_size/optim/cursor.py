"""Where an optimizer is: which microbatch `step()` takes next, and whether the user's loop passes the one that is due.

A plain loop counts calls of `step()`. What it must not do is found here (`Cursor.receive_microbatch`), when the sampler
is read again (`Dealer.begin_iteration`), and where gradients are not those of a `backward()`
(`optim/backward_check.py`). `vbs.updates` sets `Dealer.expected`, what comes and no more.
"""

from __future__ import annotations

import warnings
from enum import Enum, auto
from typing import NamedTuple, Protocol, final
from weakref import WeakSet

from variable_batch_size._log import stacklevel_of_user
from variable_batch_size.backend import Backend
from variable_batch_size.data.batches import Batch, Batches, Place, Position
from variable_batch_size.data.dealer import Dealer
from variable_batch_size.data.passes import Pass
from variable_batch_size.microbatching import Microbatch
from variable_batch_size.world import World


class Watcher(Protocol):
    """An object that also counts microbatches, and must know which of them are committed."""

    def commit(self, *, updated: bool) -> None:
        """Handle the commit of the accumulated step; not `updated`: its update was skipped.

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
    UNSETTLED = auto()  # after the commit, until its gradients are cleared and the watchers know of it


_WAY_OUT = {
    Phase.INSIDE_STEP: "call it when optimizer.step() has returned True, or call discard_step() first",
    Phase.INTERRUPTED: "call optimizer.discard_step() and iterate the loader again, or load a state",
    Phase.HALF_UPDATED: "restore the states of model and optimizer, as of the last checkpoint, or create both again",
    Phase.UNSETTLED: "call optimizer.discard_step() and iterate the loader again, or load a state",
}


class _CursorState(NamedTuple):
    """Where the optimizer is, as one value: an interrupt finds the old one or the new one."""

    place: Place
    commits: int = 0  # of this optimizer: no state that it loads moves this back
    round: int = 0  # microbatches of the step received on this rank
    phase: Phase = Phase.BETWEEN_STEPS


@final
class Cursor:
    """Counts the microbatches that reach `step()`, along the batches of a sampler.

    Several optimizers may share a sampler, as the two of a GAN do: one of them commits a step before the other. An
    optimizer is never behind the start of the iteration that feeds it. An update is committed at one moment; what
    follows happens afterwards (`notify_watchers`), again if an interrupt comes in between.

    Attributes:
        watchers: objects that follow the commits.
        running: whether `step()` is under way.
        last_batch: the batch that was committed last, or is about to be.
        restarts: how often the step has started over, so that a loop over the loader must begin again.
    """

    def __init__(self, sampler: Dealer, backend: Backend, **cut: bool) -> None:
        self.sampler = _check_world(sampler, backend)
        sampler.attach(compiles_shapes=backend.static_graph, elastic=backend.elastic, **cut)
        self.watchers: WeakSet[Watcher] = WeakSet()
        self.running, self.restarts = False, 0
        self.last_batch: Batch | None = None
        self._state, self.updated = _CursorState(sampler.place), True  # and whether the last commit changed the weights
        self._due: tuple[Batches, Position, Batch] | None = None  # each is needed several times
        self._iteration: Pass | None = None  # from which the present microbatches come
        self._received = 0  # microbatches of the iteration received

    # Where the optimizer is. -----------------------------------------------------------------------------------------

    @property
    def place(self) -> Place:
        """How far this optimizer is."""
        return self._state.place

    @property
    def position(self) -> Position:
        """The next update; after the last one of an epoch, the end of that epoch."""
        return self._state.place.position

    @property
    def commits(self) -> int:
        """How many updates the optimizer has committed: no state that it loads moves this back."""
        return self._state.commits

    @property
    def phase(self) -> Phase:
        """Where in a step the optimizer is."""
        return self._state.phase

    @property
    def begun(self) -> bool:
        """Whether a microbatch of the current step was accumulated."""
        return self._state.round > 0

    @property
    def watchers_know(self) -> bool:
        """Whether all that follows from the last commit was done."""
        return self.phase is not Phase.UNSETTLED

    @property
    def ends_epoch(self) -> bool:
        """Whether all updates of an epoch are committed, and what the loop does at its end is not to come."""
        sampler, position = self.sampler, self.position
        pending = sampler.end_pending and position == sampler.position
        return not pending and sampler.batches.ends_epoch(position)

    @property
    def between_epochs(self) -> bool:
        """Whether an epoch has ended, and the loop has not begun the next one."""
        sampler, iteration = self.sampler, self.sampler.iteration
        if not self.ends_epoch or sampler.position != self.position:
            return False
        return iteration is None or iteration.start != sampler.due

    @property
    def epoch(self) -> int:
        """The epoch of the next update; of one whose end is pending, that one."""
        return self.position.epoch + self.ends_epoch

    @property
    def done(self) -> bool:
        """Whether the training has ended, and the loop has read the end of its last epoch."""
        return self.ends_epoch and self.sampler.batches.done(self.position)

    # What comes. -----------------------------------------------------------------------------------------------------

    @property
    def batch(self) -> Batch:
        """The next update.

        Raises:
            RuntimeError: if there is none, or it is not known.
            ValueError: if the trace has ended.
        """
        expected = self.sampler.expected
        if expected is not None or self.sampler.batches.arriving:
            if expected is None or expected.step != self.position.step:
                raise self._not_yielded(0)
            return expected
        return self._planned_batch()

    @property
    def is_handed_out_last(self) -> bool:
        """Whether the next microbatch is the one that `vbs.updates` has yielded last."""
        return self.sampler.expected is not None and self._state.round + 1 == self.sampler.handed_out

    def _not_yielded(self, number: int) -> RuntimeError:
        """Return the error of a microbatch that `vbs.updates` has not yielded: it has yielded `number` of them."""
        return RuntimeError(
            f"step() must be called once for each microbatch that vbs.updates has yielded, but update "
            f"{self.position.step} has yielded {number or 'none'} yet; loop over vbs.updates(loader, optimizer), and "
            f"over the microbatches of each update, call step() once for each, and read optimizer.batch before the last"
        )

    def _planned_batch(self) -> Batch:
        """Return the next update as the sampler plans it; raise RuntimeError if the training has ended."""
        batches, position = self.sampler.batches, self.position
        if self._due is None or self._due[0] is not batches or self._due[1] is not position:
            due = batches.next_update(position)
            if batches.ends_epoch(due):
                raise RuntimeError(
                    f"step() needs an update, but the training has ended after {due.step} of them; leave the loop when "
                    f"optimizer.done is True, or pass another max_updates=, max_samples= or trace"
                )
            self._due = batches, position, batches.batch(due)
        return self._due[2]

    def microbatch(self, ahead: int = 0) -> Microbatch:
        """Return the next microbatch of this rank, or one that is `ahead` rounds later in the same step."""
        self._catch_up_with_iteration()
        if not self.begun and self.between_epochs:
            raise RuntimeError(
                f"a microbatch must be of an epoch that has begun, but all updates of epoch {self.epoch - 1} are "
                f"committed; read the loader first"
            )
        return self.batch.microbatches[self._state.round + ahead]

    def upcoming(self) -> Microbatch | None:
        """Return what the next `step()` counts; None if it is not known, or `step()` must not be called."""
        if self.phase not in (Phase.BETWEEN_STEPS, Phase.INSIDE_STEP):
            return None
        try:
            return self.microbatch()
        except (RuntimeError, ValueError):  # the training, or the trace, has ended
            return None

    @property
    def several_rounds(self) -> bool:
        """Whether this rank has several microbatches in the next step; True if that is not known yet."""
        try:
            return self.sampler.batches.arriving or len(self._planned_batch().microbatches) > 1
        except (RuntimeError, ValueError):
            return True

    def _catch_up_with_iteration(self) -> None:
        """Move to the start of the iteration that feeds the optimizer, if it is behind."""
        iteration = self.sampler.iteration
        if iteration is None or iteration is self._iteration or iteration.stale or iteration.loaded or self.begun:
            return
        batches, start = self.sampler.batches, iteration.start
        known = self.position.epoch >= batches.plan.first_epoch or self.position.step == start.step
        if known and batches.next_update(self.position) < start:
            self._move_to(start)

    def _move_to(self, position: Position) -> None:
        """Move to a later position, and warn of the updates that this skips."""
        sampler = self.sampler
        left_out = position.step - self.position.step
        if left_out > 0:
            samples = sampler.batches.samples_before(position) - sampler.batches.samples_before(self.position)
            other = "The loop of another optimizer of the sampler"
            who = other if sampler.is_counted_by_other(self) else f"set_epoch({position.epoch})"
            warnings.warn(
                f"{who} skips {left_out} updates and {samples} samples, which are not trained on; call it with "
                f"optimizer.epoch to continue",
                UserWarning,
                stacklevel=stacklevel_of_user(),
            )
        self._state = self._state._replace(place=Place(position, self.place.samples))

    # What a loop calls. ----------------------------------------------------------------------------------------------

    def enter_phase(self, phase: Phase) -> None:
        """Record where in the step the optimizer is."""
        self._state = self._state._replace(phase=phase)

    def check_phase(self, call: str, *allowed: Phase) -> None:
        """Raise RuntimeError unless the phase is one of those in which `call`, named in the error, may be called."""
        phase = self.phase
        if phase in allowed:
            return
        if self.running:
            raise RuntimeError(
                f"{call} must be called when optimizer.step() has returned, but it was called within it, as by a hook "
                f"of the inner optimizer; call it after step()"
            )
        state = {
            Phase.INSIDE_STEP: "has accumulated only some of its microbatches",
            Phase.INTERRUPTED: "was interrupted by an exception",
            Phase.HALF_UPDATED: "was interrupted by an exception in the inner optimizer's step, or in a hook of it, "
            "so that the weights may be half updated",
            Phase.UNSETTLED: "had made its update when it was interrupted by an exception",
        }[phase]
        step = self.position.step - (phase is Phase.UNSETTLED)
        when = "between steps" if Phase.INSIDE_STEP not in allowed else "in an intact step"
        raise RuntimeError(f"{call} must be called {when}, but step {step} {state}; {_WAY_OUT[phase]}")

    def check_receiving(self) -> None:
        """Check that `step()` may be called now; otherwise a microbatch that was read for it is lost."""
        allowed = Phase.BETWEEN_STEPS, Phase.INSIDE_STEP
        if self.phase not in allowed:
            self._leave_iteration()
        self.check_phase("step()", *allowed)

    def receive_microbatch(self) -> Microbatch:
        """Count the next microbatch as received, and return it."""
        sampler = self.sampler
        if sampler.expected is not None and self._state.round >= sampler.handed_out:
            raise self._not_yielded(sampler.handed_out)
        if sampler.batches.arriving:
            microbatch = self.microbatch()
        else:
            self._catch_up_with_iteration()
            iteration = sampler.iteration
            if iteration is None:
                raise _too_many_steps(0, 1)
            if iteration is not self._iteration or iteration.stale:
                self._begin_iteration(iteration)
            if self._received >= iteration.yielded:
                raise _too_many_steps(iteration.yielded, self._received + 1)
            microbatch = self.microbatch()
            iteration.count_step(self, self._received, microbatch.step, begins_update=not self.begun)
            self._received += 1
        sampler.follow_counter(self)
        return microbatch

    def _begin_iteration(self, iteration: Pass) -> None:
        """Take microbatches from an iteration that has begun; raise RuntimeError if the next one is not in it."""
        batches = self.sampler.batches
        if iteration.stale:
            raise RuntimeError(
                f"the loader must be iterated again after set_epoch(), discard_step() or load_state_dict(), and after "
                f"an optimizer is created, but this iteration was begun before the optimizer moved to "
                f"{self.position}; start a new loop over the loader"
            )
        due = batches.next_update(self.position)
        start = iteration.start
        if self.begun:
            raise RuntimeError(
                f"a step must get all its microbatches from one iteration, but step {due.step} had {self._state.round} "
                f"of {len(self.batch.microbatches)} when the loader was iterated again; call "
                f"optimizer.discard_step() first to start the step over, or set_epoch on both"
            )
        begins_here = start == due and iteration.first_round == 0
        # A loader that restores its iterator may have read on from an older snapshot, up to this position.
        leads_here = iteration.resumed and start.epoch == due.epoch and start.step < due.step
        if not (begins_here or leads_here):
            self._leave_iteration()
            raise RuntimeError(
                f"sampler and optimizer must be at the same update, but the sampler's iteration began at {start} and "
                f"the optimizer is at {due}; call set_epoch with the same epoch on both, or restore both"
            )
        earlier = (batches.step(Position(due.epoch, number)) for number in range(start.step, due.step))
        self._received = sum(step.rounds(batches.world) for step in earlier) - iteration.first_round
        self._iteration = iteration

    def _leave_iteration(self) -> None:
        """Take no more microbatches from the present iteration: `step()` then needs a new one."""
        self.sampler.ask_for_iteration()
        if self._iteration is not None:
            self._iteration.stale, self._iteration = True, None

    def next_round(self) -> None:
        """Advance to the next microbatch of the same step."""
        self._state = self._state._replace(round=self._state.round + 1, phase=Phase.INSIDE_STEP)

    def commit(self, *, updated: bool) -> None:
        """Commit the step, at one moment: not `updated`, it was skipped."""
        self.last_batch, self.updated = self.batch, updated
        after = self.sampler.batches.place_after(self.place, self.last_batch)
        self._state = _CursorState(after, self.commits + 1, phase=Phase.UNSETTLED)

    def notify_watchers(self) -> None:
        """Tell the watchers of the last commit; then the optimizer is between two steps."""
        for watcher in list(self.watchers):
            watcher.commit(updated=self.updated)
        self.enter_phase(Phase.BETWEEN_STEPS)

    def set_epoch(self, epoch: int) -> None:
        """Move sampler and optimizer to an epoch, see `Dealer.set_epoch`; an incomplete step starts over."""
        sampler = self.sampler
        sampler.set_epoch(epoch)
        due = sampler.batches.next_update(self.position)
        moves = due.epoch < epoch
        if moves or self.begun or self.phase is not Phase.BETWEEN_STEPS:
            self.restart()
        if moves:
            self._move_to(sampler.batches.enter_epoch(due, epoch))

    def enter_world(self, world: World, *, loaded: bool) -> bool:
        """Let the sampler deal for a world from the next step on; return whether it is another one.

        `loaded`: a state has come, in which a controller may have decided the first step for a world of one.
        """
        if world == self.sampler.world and not (loaded and self.position.step == 0):
            return False
        self.sampler.enter_world(world)
        self.restart()
        return True

    def restart(self, place: Place | None = None) -> None:
        """Return to the first microbatch of a step, which must come from a new iteration; None: the present one."""
        self._leave_iteration()
        self._state = _CursorState(place or self.place, self.commits)
        self.running = False
        self.restarts += 1
        self.sampler.expected = None
        for watcher in self.watchers:
            watcher.discard()


def _too_many_steps(read: int, number: int) -> RuntimeError:
    """Return the error of call `number` of `step()`, of a sampler that has yielded only `read` microbatches."""
    return RuntimeError(
        f"step() must be called once per microbatch of the optimizer's own sampler, but that sampler has yielded "
        f"{read} and this is number {number}; pass the same CustomSampler to the optimizer and, as batch_sampler, to "
        f"the loader (in a trainer: use its adapter, such as Ignite's VariableBatchEngine), and call step() once "
        f"per microbatch; pass optimizer.inner to functions that make a step of their own, as get_state_dict() of "
        f"torch.distributed.checkpoint does"
    )


def check_sampler(sampler: object) -> None:
    """Raise TypeError unless it is a `CustomSampler`, or `ArrivingBatches`."""
    if not isinstance(sampler, Dealer):
        raise TypeError(
            f"the sampler must be the vbs.CustomSampler that feeds the loop, got {type(sampler).__name__}; create one "
            f"and pass it to the loader as batch_sampler, or pass vbs.ArrivingBatches"
        )


def _check_world(sampler: Dealer, backend: Backend) -> Dealer:
    """Return a sampler; raise ValueError unless it deals for the rank of the backend."""
    world = backend.world
    if sampler.world != world:
        raise ValueError(
            f"sampler and optimizer must have the same rank and world size, but the sampler deals for rank "
            f"{sampler.world.rank} of {sampler.world.size} and the optimizer's {type(backend).__name__} is rank "
            f"{world.rank} of {world.size}; pass num_replicas and rank of this process, and initialize "
            f"torch.distributed (or move the model to its XLA device) before the optimizer is created"
        )
    return sampler
