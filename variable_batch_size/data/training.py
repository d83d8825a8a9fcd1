"""How far a training is, and the checks that a loop passes to `step()` the microbatch that is due.

A sampler has one `Training`, which alone writes the position, the round, the phase and the update that a loop over
`vbs.updates` has handed out. Its optimizers report each microbatch to it; when all of them have made the update, the
update is committed: the position moves, at one moment.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, final
from weakref import WeakKeyDictionary

from variable_batch_size._log import log, stacklevel_of_user
from variable_batch_size._validation import check_int, value_error
from variable_batch_size.adaptive.decided_trace import DecidedTrace
from variable_batch_size.data.batches import Batch, Batches, Place, Position, Split, position_of
from variable_batch_size.data.random_states import BeforeReading
from variable_batch_size.data.steps import Due, Earlier, Phase, Reads, too_many_steps, wrong_phase
from variable_batch_size.microbatching import Microbatch
from variable_batch_size.world import World


class Member(Protocol):
    """An optimizer that reports the microbatches of a sampler."""

    def note_commit(self, batch: Batch) -> None:
        """Tell everything that counts with this optimizer that an update which it has made is committed."""

    def follow_up(self, batch: Batch, *, first: bool) -> None:
        """Do what follows a commit and may raise; the update stays committed.

        `first`: do also what only one of several optimizers has to do.
        """

    def note_discard(self) -> None:
        """Forget what was accumulated: the step starts over, or the training has moved."""

    def note_iteration(self) -> None:
        """Handle the first read of an iteration."""


_OF_ALL = (
    "step() of all optimizers of a sampler must be called once per microbatch, but {}; call each for every microbatch, "
    "and give an optimizer that steps more rarely a sampler of its own"
)


class _Report:
    """What one optimizer has reported.

    Attributes:
        round: number of microbatches of its update that it has counted.
        works: whether it has ever called `backward()` or `step()`, since the last state was loaded.
        late: an update that the others have made before this optimizer worked for the first time, and that it may
            still make; None if there is none.
        passed: whether the others have continued after such an update without it, so that it must not work any more.
    """

    round = 0
    works = False
    late: Due | None = None
    passed = False


class _Choice(NamedTuple):
    """The position to which `set_epoch` has moved a training, and the decisions of a controller before that call.

    They come back if another call replaces the choice, because the skip has changed the decisions.
    """

    position: Position
    decided: DecidedTrace | None


@final
class Training:
    """The position of a training in the batches of a sampler, and the optimizers that take part.

    Only optimizers that have called `backward()` or `step()` take part; the others are ignored. Each of them counts all
    microbatches of every update: the optimizers may take turns at each microbatch, or one after the other may make the
    whole update. An optimizer joins by being created, and leaves by being deleted.

    Args:
        batches: the batches that are dealt to this rank.
        epochs: number of epochs that will be trained, if known.
        cut_is_known: whether the user has said whether shapes are fixed.

    Attributes:
        earlier: the counts of earlier samplers, which the optimizers had before the sampler of this training.
        later: the state of a later sampler that was loaded, and waits for `continue_with`; None if there is none.
        left: whether the optimizers have continued with another sampler.
        phase: where in the step the training is.
        running: whether a `step()` is under way.
        restarts: how often the training has moved otherwise than by commits; a loop over the loader that was begun
            before must begin again.
        iteration: the iteration over the sampler that was read last.
        expected: the update whose microbatches a loop over `vbs.updates` has handed out last; None in a plain loop.
        handed_out: number of its microbatches that were handed out.
        read_epoch: the last epoch that a loop has begun to read. At the end of an epoch it tells whether the loop has
            read that epoch, or a state was restored there, so that the loop still has to do what it does at the end.
        owned: whether an optimizer has counted a microbatch or loaded a state. From then on a state of the sampler
            alone does not move the training.
        elastic: whether the world may change between two steps.
        unrestored: whether the sampler was restored, but not the optimizers that it had.
        before_reading: the random states of a checkpoint that wait for the next read.
    """

    def __init__(self, batches: Batches, *, epochs: int | None, cut_is_known: bool) -> None:
        """Begin before the first update, without optimizers."""
        self._batches, self.epochs = batches, epochs
        self.earlier, self.left = Earlier(), False
        self.later: dict[str, Any] | None = None
        self._committed = Place(batches.first_position, 0)
        self._choice: _Choice | None = None  # by set_epoch, until the next commit
        self.phase, self.running, self.restarts = Phase.BETWEEN_STEPS, False, 0
        self.iteration: Reads | None = None
        self.expected: Batch | None = None
        self.handed_out = 0
        self.read_epoch = self._committed.position.epoch - 1
        self.owned = self.elastic = self.unrestored = False
        self._cut_is_known = cut_is_known
        self.before_reading = BeforeReading()
        self._restart_outside()

    def _restart_outside(self) -> None:
        """Create what belongs to one process: locks, threads, and optimizers with the loops that feed them.

        A copy, as in another process, begins without them.
        """
        self.changed = threading.Condition()  # notified when the batches have changed
        self.trainer: int | None = None  # the thread of the last update
        self.members: WeakKeyDictionary[Any, _Report] = WeakKeyDictionary()  # the optimizers
        self._feeding: Reads | None = None  # the iteration from which the last microbatch came
        self._planned: tuple[Batches, Position, Batch] | None = None  # the last planned batch, and what it is of

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes of a copy, which has no optimizers and no iterations."""
        batches = self._batches
        if batches.decided is not None:
            batches = replace(batches, decided=batches.decided.copy())
        names = ["epochs", "earlier", "later", "left", "_committed", "_choice", "restarts", "read_epoch", "owned"]
        names += ["elastic", "unrestored", "_cut_is_known", "before_reading"]
        return {**{name: getattr(self, name) for name in names}, "_batches": batches}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy, which is between two steps, and has no optimizers and no iteration over a loader."""
        vars(self).update(state, phase=Phase.BETWEEN_STEPS, running=False)
        vars(self).update(iteration=None, expected=None, handed_out=0)
        self._restart_outside()

    # What is dealt. --------------------------------------------------------------------------------------------------

    @property
    def batches(self) -> Batches:
        """What is dealt: which samples make up which update, as pure functions of positions."""
        return self._batches

    @batches.setter
    def batches(self, batches: Batches) -> None:
        with self.changed:  # loaders may wait for it in `wait_for`
            self._batches = batches
            self.changed.notify_all()

    def grow(self, decided: DecidedTrace) -> None:
        """Continue with batch sizes that a controller has chosen; updates before the position stay as they were."""
        self.batches = self._batches.grow(decided, self.position)

    def attach(self, member: Member | None, *, compiles_shapes: bool, elastic: bool, split: Split) -> None:
        """Deal microbatches to an optimizer that will report each of them; see `Dealer.attach`.

        Args:
            member: the optimizer; None if it takes part already, and only needs another split.
            compiles_shapes: whether its device compiles each shape, so that shapes are fixed by default.
            elastic: whether the world may change between two steps.
            split: how it needs steps to be split into microbatches.
        """
        batches, choice = self._batches_before_choice, self._choice
        earlier_split, self._choice = batches.split, None
        # With batches that arrive each rank has its own number of rows. If several optimizers each have a
        # DistributedDataParallel, the first forward of each after a sum is a collective, which needs equal rounds.
        padded = split.padded or (batches.arriving and len(self.members) > 0)
        # The split has to suit this optimizer and those that were attached before.
        split = Split(
            spread=earlier_split.spread and split.spread,
            padded=earlier_split.padded or padded,
            equal_rounds=earlier_split.equal_rounds or split.equal_rounds,
            unequal=earlier_split.unequal,
        )
        fixed = True if compiles_shapes and not self._cut_is_known else None  # None: as it is, perhaps by the user
        self.batches = batches.with_split(split, fixed_shape=fixed)
        if choice is not None:  # repeat the choice of set_epoch, along the new batches
            self._choose_epoch(choice.position.epoch)
        self._cut_is_known, self.elastic = True, self.elastic or elastic
        if member is not None:
            for report in self.members.values():
                # The new optimizer may take the place of another one, which then must not be waited for: what has
                # counted no microbatch of this update takes part again only when it is next used.
                report.works &= report.round > 0
            self.members[member] = _Report()
        self.restarts += 1  # microbatches that were read before are not for this optimizer

    def continue_with(self, other: Training) -> None:
        """Continue with the batches of another sampler, from their beginning, for `optimizer.continue_with(sampler)`.

        The updates and samples so far are added to those of earlier samplers.

        Args:
            other: the training of that sampler, with which no optimizer has begun.
        """
        self.earlier = Earlier(self.earlier.stage + 1, self.updates, self.samples)
        self._choice, self._committed = None, other.place
        self.batches, self.epochs, self.read_epoch = other.batches, other.epochs, other.read_epoch
        self.iteration = self._feeding = None
        self.restart()

    def enter_world(self, world: World, *, loaded: bool) -> bool:
        """Deal microbatches for another number of ranks from the next step on; return whether anything has changed.

        If so, the step starts over, as its microbatches are now those of other ranks.

        Args:
            world: this rank, and the number of ranks.
            loaded: whether a state was loaded. In one of step 0 a controller may have decided for a world of one rank,
                so that it decides again.
        """
        if world == self._batches.world and not (loaded and self.position.step == 0):
            return False
        self.batches = self._batches.in_world(world, self.position)
        self.restart()
        return True

    # Where the training is. ------------------------------------------------------------------------------------------

    @property
    def place(self) -> Place:
        """How far the training is: the next update, which `set_epoch` may have chosen, and the samples it has used."""
        return self._committed if self._choice is None else self._committed._replace(position=self._choice.position)

    @property
    def stage(self) -> int:
        """How many samplers came before the one of the position, by `continue_with`.

        It is this sampler, or a later one if `later` has a state of it.
        """
        return self.earlier.stage if self.later is None else Earlier.of(self.later).stage

    @property
    def updates(self) -> int:
        """The number of updates so far, of all samplers."""
        return self.earlier.updates + self.position.step

    @property
    def samples(self) -> int:
        """The number of samples that were trained on so far, of all samplers."""
        return self.earlier.samples + self._committed.samples

    @property
    def position(self) -> Position:
        """The next update; after the last one of an epoch, the end of that epoch."""
        return self.place.position

    @property
    def round(self) -> int:
        """How many microbatches of the update under way this rank has counted.

        With several optimizers, it is the count of the one that is ahead of the others.
        """
        if len(self.members) == 1:  # each microbatch asks several times, and values() of weak keys is slow
            (report,) = self.members.data.values()  # type: ignore[attr-defined]
            return report.round if report.late is None else 0
        return max((report.round for report in self.members.values() if report.late is None), default=0)

    def round_of(self, member: object) -> int:
        """Return how many microbatches of the step an optimizer has counted."""
        return self.members[member].round

    @property
    def restored_position(self) -> Position:
        """The position of a state that was loaded last, which may be that of a later sampler."""
        return self.position if self.later is None else position_of(self.later)

    @property
    def due(self) -> Position:
        """Where the next iteration begins: at the next update, or at an epoch's end that no loop has begun to read.

        A state that was saved within the loop, after the last update of an epoch, is at such an end: the loop reads
        nothing there, and does once more what it does at the end of an epoch.
        """
        position = self.position
        return self._batches.next_update(position) if self.read_epoch >= position.epoch else position

    @property
    def end_pending(self) -> bool:
        """Whether the epoch of the position has ended, but the loop has not yet done what it does at its end.

        That is so after a restore of a state that was saved in between, before evaluation and schedulers, for example.
        """
        batches, position = self._batches, self.position
        if self.read_epoch >= position.epoch or position.epoch < batches.plan.first_epoch:
            return False
        epoch = batches.epoch(position)
        return position.step == epoch.end_step > epoch.first_step

    @property
    def epoch(self) -> int:
        """The epoch of the next update; while the end of an epoch is pending, that epoch."""
        position = self.position
        return position.epoch if self.end_pending else self._batches.next_update(position).epoch

    @property
    def done(self) -> bool:
        """Whether the training has ended, and no end of an epoch is pending."""
        return self.later is not None or (self._batches.done(self.position) and not self.end_pending)

    def set_epoch(self, epoch: int) -> None:
        """Move to the first step of a later epoch; in the epoch under way, continue after the last committed update.

        An incomplete step starts over.

        Raises:
            ValueError: if the trace ends before the epoch does.
            RuntimeError: if all updates of that epoch are committed, or an exception has interrupted a step.
        """
        epoch = check_int(epoch, "epoch", 0, remedy="count epochs from 0")
        self.check_phase("set_epoch()", Phase.BETWEEN_STEPS, Phase.INSIDE_STEP)
        self.finish_update()
        batches, position_before = self._batches_before_choice, self.position  # an earlier choice is undone
        self._check_not_over(epoch, batches)
        batches.plan.epoch(epoch)  # raises if the trace ends before
        self.batches, self._choice = batches, None
        if epoch > self._committed.position.epoch:
            self._choose_epoch(epoch)
        if not self._batches.epoch(self.position).updates:
            self.read_epoch = min(self.read_epoch, self.position.epoch - 1)  # so that an empty epoch is read, too
        skips_updates = position_before.step != self.position.step
        if skips_updates and self.members:
            self._warn_of_skipped(position_before, epoch)
        if skips_updates or self.round:
            self.restart()

    def _check_not_over(self, epoch: int, batches: Batches) -> None:
        """Raise RuntimeError if `set_epoch` goes back to an epoch whose updates are all committed.

        Args:
            epoch: the chosen epoch.
            batches: the batches before any choice of an epoch.
        """
        committed = self._committed.position
        due = batches.next_update(committed) if self.read_epoch >= committed.epoch else committed
        if epoch >= due.epoch:
            return
        is_empty = batches.done(committed) and not batches.epoch(committed).updates  # such an epoch is never over
        if not (is_empty and epoch == committed.epoch):
            raise RuntimeError(
                f"epoch {epoch} was chosen, but it is over and the next update is in epoch {due.epoch}; loop over "
                "vbs.remaining_epochs(sampler, optimizer), and to go back load an earlier state, or create both again"
            )

    @property
    def _batches_before_choice(self) -> Batches:
        """The batches with the decisions that a controller had made before `set_epoch` skipped updates."""
        decided = None if self._choice is None else self._choice.decided
        return self._batches if decided is None else self._batches.grow(decided, self._committed.position)

    def _choose_epoch(self, epoch: int) -> None:
        """Move to the first step of a later epoch, until the next commit or another choice; see `_Choice`.

        A controller that chooses batch sizes skips the updates in between.
        """
        batches, committed = self._batches, self._committed.position
        chosen = batches.enter_epoch(batches.next_update(committed), epoch)
        self._choice = _Choice(chosen, batches.decided)
        if batches.decided is not None and chosen.step > committed.step:
            self.batches = batches.grow(batches.decided.skip_to(chosen.step), committed)

    def _warn_of_skipped(self, before: Position, epoch: int) -> None:
        """Warn of the updates between a position and the present one, which `set_epoch` has left out."""
        batches, position = self._batches, self.position
        skipped = position.step - before.step
        if skipped > 0:
            samples = batches.samples_before(position) - batches.samples_before(before)
            warnings.warn(
                f"set_epoch({epoch}) skips {skipped} updates and {samples} samples, as after a break in the loop over "
                f"the loader; call it with optimizer.epoch to continue, or leave the loop over epochs as well",
                UserWarning,
                stacklevel=stacklevel_of_user(),
            )

    def load(self, state: dict[str, Any], batches: Batches, *, owned: bool) -> None:
        """Continue at a saved position.

        Args:
            state: the saved state, with the position.
            batches: the batches of the continued training.
            owned: whether an optimizer has loaded the state, and counts from there; otherwise only the sampler has.
        """
        place = Place(position_of(state), check_int(state["samples"], "samples"))
        self.batches, self._committed, self._choice = batches, place, None
        self.read_epoch = place.position.epoch
        if state["end_pending"] or not batches.ends_epoch(place.position):
            self.read_epoch -= 1  # the loop is still to read this epoch, or to come to its end
        self.earlier, self.later = Earlier.of(state), None
        self.owned, self._cut_is_known = self.owned or owned, True
        self.unrestored = not owned and len(self.members) > 0 and place.position.step > 0
        self.restart(anew=True)

    def check_stage(self, state: dict[str, Any]) -> bool:
        """Return whether a state is one of a later sampler; raise ValueError if it is one of an earlier sampler.

        Samplers that follow one another by `continue_with` are numbered by their stage.
        """
        saved = Earlier.of(state).stage
        if saved < self.earlier.stage:
            remedy = "restore before continue_with(), which continues from the restored state"
            raise value_error(f"a state of stage {self.earlier.stage} is needed here", f"one of stage {saved}", remedy)
        return saved > self.earlier.stage

    def wait_for_sampler(self, state: dict[str, Any]) -> None:
        """End the training of this sampler: a state is of a later sampler, with which the optimizer will continue.

        All updates of the saved run count as ones of earlier samplers, until `continue_with` names the later one.
        """
        earlier_samplers = Earlier.of(state)
        updates, samples = earlier_samplers.updates + state["step"], earlier_samplers.samples + state["samples"]
        self.later, self.earlier = state, Earlier(self.earlier.stage, updates, samples)
        self._committed, self._choice = Place(self._batches.first_position, 0), None
        self.owned, self.unrestored = True, False
        self.restart(anew=True)
        log(
            f"The state is of stage {Earlier.of(state).stage}: loops of earlier stages have ended, and "
            f"optimizer.continue_with(sampler) continues there.",
            rank=self._batches.world.rank,
            update=self.updates,
        )

    # The next update and microbatch. ---------------------------------------------------------------------------------

    @property
    def batch(self) -> Batch:
        """The next update: its samples, and its microbatches on this rank.

        Raises:
            RuntimeError: if there is none, or it is not known.
            ValueError: if the trace has ended.
        """
        expected = self.expected
        if expected is not None and expected.step == self.position.step:
            return expected
        if self._batches.arriving:
            raise self._not_handed_out(0)
        return self._planned_batch(self.position)

    def due_of(self, member: object) -> Due:
        """Return the update that an optimizer is to make, with the number of updates and samples before it.

        It is the next update, or one that the other optimizers of the sampler have just made.
        """
        return self.members[member].late or self._due()

    def _due(self) -> Due:
        """Return the next update of the training, with the counts and the epoch before it."""
        return Due(self.batch, self.updates, self.samples, self.epoch)

    def batch_of(self, member: object) -> Batch:
        """Return the samples and microbatches of the update that an optimizer is to make.

        It is `due_of(member).batch`, but faster: each microbatch asks for it.
        """
        late = self.members[member].late
        return self.batch if late is None else late.batch

    def _planned_batch(self, position: Position) -> Batch:
        """Return the update at a position as it is planned; raise RuntimeError if the training has ended."""
        batches = self._batches
        # Stored, because each microbatch asks for its update.
        if self._planned is None or self._planned[0] is not batches or self._planned[1] is not position:
            due = batches.next_update(position)
            if batches.ends_epoch(due):
                raise RuntimeError(
                    f"step() needs an update, but the training has ended after {due.step} of them; leave the loop when "
                    f"optimizer.done is True, or pass another max_updates=, max_samples= or trace"
                )
            self._planned = batches, position, batches.batch(due)
        return self._planned[2]

    def microbatch(self, member: object, ahead: int = 0) -> Microbatch:
        """Return the microbatch that an optimizer counts next, or the one that comes `ahead` microbatches after it.

        Raises:
            RuntimeError: if its epoch has not begun, or the training has ended.
        """
        position, begins_update = self.position, self.round == 0 and self.members[member].late is None
        # After the end of an epoch, the loop has to read the next one first: a schedule or `set_epoch` may come before.
        if begins_update and self._batches.ends_epoch(position) and self.read_epoch <= position.epoch:
            raise RuntimeError(
                f"all updates of epoch {position.epoch} are made, but a microbatch came before the next epoch was "
                f"begun; read it from the loader again, and not from memory"
            )
        microbatches, round_index = self.batch_of(member).microbatches, self.round_of(member) + ahead
        if round_index < len(microbatches):
            return microbatches[round_index]
        # This optimizer has counted the whole update, but others are still to make it: look into the following one.
        following = self._batches.place_after(self.place, self.batch)
        return self._planned_batch(following.position).microbatches[0]

    def upcoming(self, member: object) -> Microbatch | None:
        """Return the microbatch that the next `step()` counts; None if it is unknown, or `step()` is not allowed."""
        if self.phase in (Phase.INTERRUPTED, Phase.HALF_UPDATED, Phase.OUTSIDE):
            return None
        try:
            return self.microbatch(member)
        except (RuntimeError, ValueError):  # the training, or the trace, has ended
            return None

    def is_handed_out_last(self, member: object) -> bool:
        """Return whether an optimizer's next microbatch is the one that a loop over `vbs.updates` has yielded last."""
        return self.expected is not None and self.round_of(member) + 1 == self.handed_out

    def is_made_without(self, member: object) -> bool:
        """Return whether another optimizer has already made the update that this optimizer is still to make."""
        report = self.members[member]
        if report.late is not None:
            return True
        return self.phase is Phase.PARTLY_MADE and report.round < len(self.batch.microbatches)

    def _not_handed_out(self, number: int) -> RuntimeError:
        """Return the error of a microbatch that `vbs.updates` has not yielded; `number`: how many it has yielded."""
        return RuntimeError(
            f"step() needs a microbatch, but update {self.position.step} has yielded {number or 'none'} yet; call it "
            "once for each of an update of vbs.updates(loader, optimizer), and read optimizer.batch before the last"
        )

    def expect(self, batch: Batch, handed_out: int = 0) -> None:
        """Note the update whose microbatches a loop over `vbs.updates` yields; `step()` accepts only these.

        Args:
            batch: the update.
            handed_out: number of its microbatches that were yielded.
        """
        self.expected, self.handed_out = batch, handed_out

    # Reading. --------------------------------------------------------------------------------------------------------

    def begin_iteration(self) -> Reads:
        """Begin an iteration in this thread, at its first read, where the training is.

        Returns:
            A record of the iteration: where it begins, and how many microbatches are read and trained on.

        Raises:
            RuntimeError: if the training has ended, and no `set_epoch` has announced an empty epoch.
        """
        if self.left:
            raise RuntimeError(
                "a loader must read the sampler that its optimizer has now, but that has gone on with another one, by "
                "continue_with(); create the loader with batch_sampler=optimizer.sampler"
            )
        self.finish_update()
        position = self.position
        if self.members and self.done and self.read_epoch >= position.epoch:
            raise RuntimeError(
                f"the training has ended after {position.step} updates, but its loader is read again; use another "
                "loader for update_bn() or an evaluation, and loop over vbs.remaining_epochs(sampler, optimizer)"
            )
        due = self.due
        self._batches.epoch(due)  # raises, at each read, if the trace ends before the epoch does
        self.expected = None  # a loop over `vbs.updates` that was left may have set it
        self.before_reading.set_waiting(due)
        self.note_iteration()
        self.read_epoch = due.epoch
        return Reads(due, self.restarts, threading.get_ident())

    def note_iteration(self) -> None:
        """Let the optimizers know that a new iteration over the loader begins."""
        for member in list(self.members):
            member.note_iteration()

    @property
    def reads_epoch(self) -> bool:
        """Whether a loop has begun to read the epoch of the next update, in this run or in the one that was saved."""
        return self.before_reading.waits_at(self.position) or self.read_epoch == self.position.epoch

    # What a loop calls. ----------------------------------------------------------------------------------------------

    def check_phase(self, call: str, *allowed: Phase) -> None:
        """Raise RuntimeError unless the phase is one of those in which `call`, named in the error, may be called."""
        self.settle()
        phase = self.phase
        if phase in allowed:
            return
        raise wrong_phase(call, phase, self.position.step, running=self.running, inside=Phase.INSIDE_STEP in allowed)

    def begin_step(self, member: object) -> None:
        """Check that the `step()` of an optimizer may be called now.

        Raises:
            RuntimeError: if not. After an exception in an earlier step the loader must be iterated anew, because this
                loop has read a microbatch that is not counted.
        """
        if self.phase in (Phase.INTERRUPTED, Phase.HALF_UPDATED):
            self.restarts += 1  # so that the present loop over the loader is refused
        if self.phase in (Phase.INTERRUPTED, Phase.HALF_UPDATED, Phase.OUTSIDE):
            self.check_phase("step()", Phase.BETWEEN_STEPS)  # raises, as none of the three is that
        self.note_work(member)
        report = self.members[member]
        if report.late is None and self.round == 0:
            self.finish_update()
        elif report.late is None and report.round == len(self.batch.microbatches):  # it has made its update
            raise self._not_made_by_all()

    def note_work(self, member: object) -> None:
        """Note that an optimizer works: from now on, an update is committed only when this optimizer has made it.

        Raises:
            RuntimeError: if the training has continued without it.
        """
        report = self.members[member]
        if report.passed:
            raise RuntimeError(
                _OF_ALL.format(f"this one has missed updates before update {self.position.step}")
                + "; create it anew to let it join, or restore a state"
            )
        report.works = True

    def receive_microbatch(self, member: object) -> Microbatch:
        """Return the microbatch that the `step()` of an optimizer counts, after the checks that it is due.

        The phase says that the step was interrupted until `end_step` says otherwise, so that an exception in between
        is remembered. A microbatch of the plan must have been read from the loader; several optimizers count it once.
        """
        if self.unrestored:
            raise RuntimeError(
                f"sampler and optimizer must be at the same update, but only the sampler was restored, to "
                f"{self.position}; restore both, with load_state_dict() of the optimizer"
            )
        report = self.members[member]
        late = report.late is not None
        # Once another optimizer has made the update, its weights have changed, and discard_step() cannot repair it.
        self.phase = Phase.HALF_UPDATED if late or self.phase is Phase.PARTLY_MADE else Phase.INTERRUPTED
        step = self.position.step if report.late is None else report.late.batch.step
        expected, round_index = self.expected, report.round
        if expected is not None and (step, round_index) >= (expected.step, self.handed_out):
            raise self._not_handed_out(self.handed_out if expected.step == step else 0)
        if round_index == self.round and not (late or self._batches.arriving):  # the first optimizer that reports it
            self._count_read_microbatch()
        microbatch = self.microbatch(member)
        self.owned = True
        return microbatch

    def _count_read_microbatch(self) -> None:
        """Count a microbatch that reaches `step()`, if it was read by the present loop and none before it was lost.

        Raises:
            RuntimeError: if the loop was begun before the training has moved, or microbatches that were read are lost.
        """
        iteration, step = self.iteration, self.position.step
        if iteration is None:
            raise too_many_steps(0, 1)
        if iteration.restarts != self.restarts:
            raise RuntimeError(
                f"the optimizer has moved to {self.position}, but this loop over the loader was begun before; start a "
                "new one after set_epoch(), discard_step() or load_state_dict(), and after an optimizer is created"
            )
        if iteration.stepped >= iteration.number:  # more steps than microbatches that were read
            raise too_many_steps(iteration.number, iteration.stepped + 1)
        if self.expected is None:  # a plain loop, not one over `vbs.updates`, which reads ahead
            if iteration is not self._feeding:
                self._check_feeds(iteration)
            lost = iteration.count_lost(iteration.stepped)
            if lost:
                found = f"{lost} of those that were read did not reach step() before step {step} continued"
                if lost < 0:
                    found = f"step() was called {-lost} times more than microbatches were read"
                raise RuntimeError(
                    f"step() must follow the backward() of every microbatch, but {found}; call it once for each (after "
                    "an error discard_step()), read several only by vbs.updates, and give a rarer optimizer its own "
                    "sampler"
                )
        self._feeding = iteration
        iteration.stepped += 1

    def _check_feeds(self, iteration: Reads) -> None:
        """Raise RuntimeError unless an iteration whose first microbatch reaches `step()` began at the next update."""
        due = self._batches.next_update(self.position)
        if self.round:
            raise RuntimeError(
                f"step {due.step} had {self.round} of {len(self.batch.microbatches)} microbatches, but the loader was "
                "iterated again; call optimizer.discard_step() first to start the step over, or set_epoch() on both"
            )
        if iteration.stepped or iteration.start != due:
            self.restarts += 1
            raise RuntimeError(
                f"sampler and optimizer must be at the same update, but the sampler's iteration began at "
                f"{iteration.start} and the optimizer is at {due}; call set_epoch with the same epoch on both, or "
                f"restore both"
            )

    def begin_update(self) -> None:
        """Note that the inner optimizer's step begins: from now on only a restored state repairs an exception."""
        self.phase = Phase.HALF_UPDATED

    def end_step(self, member: object, *, ends_update: bool) -> None:
        """Count a microbatch that an optimizer has accumulated, and commit the update if all optimizers have made it.

        Args:
            member: the optimizer.
            ends_update: whether it has made its update with this microbatch.
        """
        report = self.members[member]
        report.round += 1
        if report.late is not None:
            self.phase = Phase.PARTLY_MADE
            if ends_update:  # the other optimizers have made the update before, and it is committed already
                batch, report.late, report.round = report.late.batch, None, 0
                self._tell([member], batch, leads=False)
            return
        self.phase = Phase.PARTLY_MADE if ends_update or self._is_made_by_some else Phase.INSIDE_STEP
        self.settle()

    @property
    def _is_made_by_some(self) -> bool:
        """Whether at least one optimizer has made the update under way."""
        return self.round > 0 and any(report.round == len(self.batch.microbatches) for report in self._reports)

    @property
    def _reports(self) -> list[_Report]:
        """What the optimizers that take part in the update under way have counted.

        An optimizer that was never used, or that makes the last update after the others, does not take part.
        """
        return [report for report in self.members.values() if report.works and report.late is None]

    def settle(self) -> None:
        """Commit the update if all optimizers have made it.

        It is called from many places, because the last optimizer that had not made it may have been deleted meanwhile.
        """
        is_made_by_some = self.phase is Phase.PARTLY_MADE and self.round > 0
        if is_made_by_some and all(report.round == len(self.batch.microbatches) for report in self._reports):
            self._commit()

    def finish_update(self) -> None:
        """Check that all optimizers have made the last update, before the loop continues.

        Optimizers that have never worked do not count; the training continues without them.

        Raises:
            RuntimeError: if an optimizer that works has not made it.
        """
        self.settle()
        if self._is_made_by_some or any(report.late and report.works for report in self.members.values()):
            raise self._not_made_by_all()
        for report in self.members.values():  # an optimizer that has not made the last update may not join any more
            report.passed |= report.late is not None
            report.late = None

    def _not_made_by_all(self) -> RuntimeError:
        """Return the error of an update that some of the optimizers have not made."""
        return RuntimeError(
            _OF_ALL.format("one has not made the last update")
            + "; delete one that is not used any more, and after an exception between two of them restore a state"
        )

    def _commit(self) -> None:
        """Commit the update: move the position, at one moment, and tell the optimizers that have made it.

        An optimizer that was never used so far may still make the update, as its first one, before the next begins.
        """
        self.phase = Phase.HALF_UPDATED  # until the optimizers know of it
        batch, update, makers = self.batch, self._due(), []
        for member, report in list(self.members.items()):  # in the order of creation, the same on all ranks
            if report.round > 0:
                makers.append(member)
            report.late = None if report.works or report.passed else update
            report.round = 0
        self._committed, self._choice = self._batches.place_after(self.place, batch), None
        self.trainer = threading.get_ident()
        self._tell(makers, batch)

    def _tell(self, members: Sequence[Any], batch: Batch, *, leads: bool = True) -> None:
        """Tell optimizers that an update is committed.

        Args:
            members: the optimizers that have made it.
            batch: the update.
            leads: whether the first of them does what only one has to do, such as logging.
        """
        for member in members:
            member.note_commit(batch)
        self.phase = Phase.BETWEEN_STEPS
        for member in members:
            member.follow_up(batch, first=leads and member is members[0])

    def advance(self) -> None:
        """Commit the next update in a loop that has no optimizer of this library, which would do so in `step()`."""
        batch = self._batches.batch(self._batches.next_update(self.position))
        self._committed, self._choice = self._batches.place_after(self.place, batch), None
        self.read_epoch = max(self.read_epoch, self.position.epoch)

    def restart(self, *, anew: bool = False) -> None:
        """Start the step over: its first microbatch must come from a new iteration over the loader.

        It is called when the training has moved, as by a restored state, and by `discard_step()`.

        Args:
            anew: whether a state was loaded, so that optimizers count as ones that were never used.
        """
        self.phase, self.running, self.expected = Phase.BETWEEN_STEPS, False, None
        self.restarts += 1
        for member in list(self.members):
            report = self.members[member]
            report.round = 0
            if anew:
                self.members[member] = _Report()
            elif report.late is not None:
                report.late, report.passed = None, True  # the update that it could still make is over
            member.note_discard()


def check_can_attach(batches: Batches, *, compiles_shapes: bool, elastic: bool) -> None:
    """Check that the steps of these batches can be split as an optimizer that attaches needs it.

    Args:
        batches: the batches of the sampler.
        compiles_shapes: whether the device of the optimizer compiles each shape, as XLA does.
        elastic: whether the number of ranks may change between two steps.

    Raises:
        ValueError: if they cannot.
    """
    if batches.arriving and elastic:
        found = "an elastic backend"
        raise value_error("batches that arrive need ranks that stay", found, "pass a vbs.CustomSampler")
    if batches.split.unequal is not None and (compiles_shapes or elastic):
        found = "a world that may change" if elastic else "a device on which all ranks run one graph, as with XLA"
        raise value_error("speeds= needs a fixed world whose ranks run on their own", found, "omit speeds=")
    if elastic and batches.decided is not None and batches.decided.adaptive.every is None:
        requirement = "where the world may change, an AdaptiveTrace must ask its controller again"
        raise value_error(requirement, "every=None", "pass every=")
