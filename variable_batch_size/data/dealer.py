"""What feeds optimizers: batches, and how far the training on them is."""

from __future__ import annotations

import copy
import warnings
from typing import Any, Protocol
from weakref import WeakSet

from variable_batch_size._log import stacklevel_of_user
from variable_batch_size._validation import check_int, value_error
from variable_batch_size.adaptive.adaptive_trace import largest_size
from variable_batch_size.adaptive.decided_trace import DecidedTrace, describe, warn_if_changed
from variable_batch_size.data.batches import Batch, Batches, Place, Position, Split, position_of
from variable_batch_size.data.deal import Dealing
from variable_batch_size.data.growing import Growing
from variable_batch_size.data.passes import Pass
from variable_batch_size.data.plan import Plan
from variable_batch_size.data.random_states import BeforeReading
from variable_batch_size.data.state import check_position, check_same_samples
from variable_batch_size.world import World


class Counter(Protocol):
    """An optimizer's own place in the training."""

    @property
    def place(self) -> Place:
        """How far it is."""


class Listener(Protocol):
    """Whatever must know when an iteration begins."""

    def note_iteration(self) -> None:
        """Handle the first read of an iteration."""


class Dealer:
    """What optimizers need of what feeds them: a sampler, or batches that arrive.

    It has one place in the training: that of the optimizer that counted a microbatch last, or one that `set_epoch` or
    `load_state_dict` has chosen. An iteration begins there. What a loader prefetches does not move it.

    Args:
        batches: what is dealt; an optimizer that attaches says how it is split.
        epochs: number of epochs that will be trained, if known.
        cut_is_known: whether the user has said whether shapes are fixed.
        facts: further facts that all ranks must have in common, by name.

    Attributes:
        growing: the batches, which the decisions of a controller replace.
        epochs: number of epochs that will be trained, if known.
        facts: further facts that all ranks must have in common, by name.
        end_pending: whether the epoch of the position has ended, but what the loop does at its end is to come: the
            state was saved in the loop, after the last update.
        iteration: the iteration that was read last.
        expected: the update that a loop has announced; None in a loop that announces none.
        handed_out: how many of its microbatches the loop has got.
        before_reading: the random states of a checkpoint that wait for the next read.
        listeners: whatever must know of the beginning of an iteration.
    """

    def __init__(
        self, batches: Batches, *, epochs: int | None, cut_is_known: bool, facts: dict[str, Any] | None = None
    ) -> None:
        super().__init__()
        self.growing = Growing(batches)
        self.epochs = epochs
        self.facts = facts or {}
        self._place = Place(batches.first_position, 0)
        self.end_pending = False
        self._chosen: tuple[Place, DecidedTrace | None] | None = None  # by set_epoch, and what was decided before it
        self._counter: Counter | None = None  # the optimizer that has counted a microbatch last
        self._counted = False  # whether an optimizer has the place
        self._announced = False  # whether set_epoch has said that an iteration comes
        self._cut_is_known, self._attached, self._elastic = cut_is_known, False, False
        self.iteration: Pass | None = None
        self.expected: Batch | None = None
        self.handed_out = 0
        self.before_reading = BeforeReading()
        self.listeners: WeakSet[Listener] = WeakSet()

    def __copy__(self) -> Any:
        return copy.deepcopy(self)  # what is read of one must not move the other

    def __getstate__(self) -> dict[str, Any]:  # of a copy, which no optimizer feeds from
        attributes = {**vars(self), "_place": self.committed, "_counter": None, "iteration": None}
        return {name: value for name, value in attributes.items() if name != "listeners"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, listeners=WeakSet())

    # What is dealt. --------------------------------------------------------------------------------------------------

    @property
    def batches(self) -> Batches:
        """What is dealt: pure functions of positions."""
        return self.growing.batches

    @property
    def world(self) -> World:
        """This rank, and the number of ranks."""
        return self.batches.world

    @property
    def rank(self) -> int:
        """This rank."""
        return self.world.rank

    @property
    def num_replicas(self) -> int:
        """The number of ranks."""
        return self.world.size

    def __repr__(self) -> str:
        """Return what is dealt, for which rank, and how far the training is."""
        samples = "" if self.batches.arriving else f"{self.plan.dataset_size:,} samples, "
        decided = self.batches.decided
        trace = (
            "" if self.batches.arriving else f"{self.plan.trace if decided is None else describe(decided.adaptive)}, "
        )
        return f"{type(self).__name__}({samples}{trace}rank {self.rank} of {self.num_replicas}, at {self.position})"

    @property
    def plan(self) -> Plan:
        """Which samples make up which update."""
        return self.batches.plan

    @property
    def dealing(self) -> Dealing:
        """How steps are split into microbatches and rounds."""
        return self.batches.dealing

    @property
    def max_batch_size(self) -> int:
        """The largest batch size that an update may have, in samples."""
        decided = self.batches.decided
        return self.plan.trace.max_batch_size if decided is None else largest_size(decided.adaptive)

    # Where the training is. ------------------------------------------------------------------------------------------

    @property
    def committed(self) -> Place:
        """How far the training is, whatever `set_epoch` has chosen."""
        return self._place if self._counter is None else max(self._place, self._counter.place)

    @property
    def place(self) -> Place:
        """How far the training is, or where it goes on by `set_epoch`."""
        return self.committed if self._chosen is None else self._chosen[0]

    def _batches_at(self, place: Place) -> Batches:
        """Return the batches without what `set_epoch` has skipped, for a place before that."""
        batches, chosen = self.batches, self._chosen
        if chosen is None or chosen[1] is None or place.position >= chosen[0].position:
            return batches
        return batches.grow(chosen[1], place.position)

    @property
    def position(self) -> Position:
        """The next update of the training; after the last one of an epoch, the end of that epoch."""
        return self.place.position

    @property
    def due(self) -> Position:
        """Where the next iteration begins: after an epoch has ended at the next one, unless its end is pending."""
        position = self.position
        return position if self.end_pending or self._chosen is not None else self.batches.next_update(position)

    @property
    def epoch(self) -> int:
        """The epoch of the next update: the following one if all updates of an epoch are committed."""
        return self.batches.next_update(self.position).epoch if not self.end_pending else self.position.epoch

    def set_epoch(self, epoch: int) -> None:
        """Move to the first step of a later epoch; in the epoch under way, continue after the last committed update.

        It is optional for an epoch that follows the one that was trained.

        Raises:
            ValueError: if the trace ends before the epoch does.
            RuntimeError: if the last iteration was read to its end without calls of `optimizer.step()`, or all updates
                of that epoch are committed.
        """
        epoch = check_int(epoch, "epoch", 0, remedy="count epochs from 0")
        place = self.committed
        batches = self._batches_at(place)
        due = place.position if self.end_pending else batches.next_update(place.position)
        # An empty epoch, after the end of the training, is never over.
        is_empty = batches.done(place.position) and not batches.epoch(place.position).updates
        if epoch < due.epoch and not (is_empty and epoch == place.position.epoch):
            raise RuntimeError(
                f"set_epoch() can choose the epoch under way or a later one, but epoch {epoch} is over and the next "
                f"update is in epoch {due.epoch}; loop over range(optimizer.epoch, epochs), and to go back load an "
                f"earlier state, or create sampler and optimizer again"
            )
        last = self.iteration
        if epoch > place.position.epoch and last is not None and (last.loaded or last.start.epoch < epoch):
            self.check_left_over(ended=True)
        batches.plan.epoch(epoch)  # raises if the trace ends before
        self.growing.batches, self._chosen, self._announced = batches, None, True
        if last is not None:
            last.note_leaving()
        if epoch > place.position.epoch:
            self._choose_epoch(epoch)

    def _choose_epoch(self, epoch: int) -> None:
        """Go on in a later epoch, which nothing else has chosen."""
        place, batches, decided = self.committed, self.batches, self.batches.decided
        position = batches.enter_epoch(batches.next_update(place.position), epoch)
        self.end_pending = False
        self._chosen = Place(position, place.samples), decided
        if decided is not None and position.step > place.position.step:
            self.growing.batches = batches.grow(decided.skip_to(position.step), place.position)

    @property
    def updates(self) -> int:
        """The number of updates of the training so far, with those of skipped epochs: the next step of the trace."""
        return self.position.step

    @property
    def samples(self) -> int:
        """The number of samples that were trained on so far, over all ranks."""
        return self.place.samples

    @property
    def done(self) -> bool:
        """Whether the training has ended: by `max_updates` or `max_samples`, or with its trace."""
        return not self.end_pending and self.batches.done(self.position)

    @property
    def batch(self) -> Batch:
        """The next update, for a loop that has no optimizer of this library: its samples and microbatches."""
        return self.batches.batch(self.due)

    def advance(self) -> None:
        """Commit the next update, in a loop that has no optimizer of this library; one with an optimizer does it."""
        made = self.batches.place_after(self.place, self.batch)
        self.follow_counter(None)
        self._place = made

    def is_counted_by_other(self, counter: Counter) -> bool:
        """Return whether another optimizer has counted a microbatch last."""
        return self._counter is not None and self._counter is not counter

    def follow_counter(self, counter: Counter | None) -> None:
        """Let the place of an optimizer be that of the training from now on."""
        if counter is not self._counter:
            self._place, self._counter = self.committed, counter
            self._counted |= counter is not None
        self._chosen = None

    # Optimizers. -----------------------------------------------------------------------------------------------------

    def attach(
        self,
        *,
        spread: bool = True,
        compiles_shapes: bool = False,
        elastic: bool = False,
        equal_rounds: bool = False,
        padded: bool = False,
    ) -> None:
        """Deal for an optimizer that will call `step()` for every microbatch.

        Args:
            spread: whether steps may be split further, so that no rank is idle.
            compiles_shapes: whether the device of its parameters does, so that shapes are fixed by default.
            elastic: whether the world may change between two steps.
            equal_rounds: whether it needs them, see `CustomSampler`.
            padded: whether it needs them by replays.

        Raises:
            ValueError: if the trace is constant, and `equal_rounds` are not possible; or if ranks have unequal speeds,
                and one graph for all ranks, or a world that may change.
        """
        batches = self._batches_at(self.committed)
        split = batches.split
        _check_can_attach(batches, compiles_shapes=compiles_shapes, elastic=elastic)
        # Where each of several optimizers has a DistributedDataParallel, its first forward after a sum is a collective.
        padded |= batches.arriving and self._attached
        split = Split(split.spread and spread, split.padded or padded, split.equal_rounds or equal_rounds, split.speeds)
        fixed = True if compiles_shapes and not self._cut_is_known else None
        chosen = self._chosen
        self._chosen = None
        self.growing.batches = batches.with_split(split, fixed_shape=fixed)
        if chosen is not None:  # in other batches
            self._choose_epoch(chosen[0].position.epoch)
        self._cut_is_known, self._attached, self._elastic = True, True, elastic
        self.ask_for_iteration()  # microbatches that were read before are not for this optimizer

    def enter_world(self, world: World) -> None:
        """Deal for another world from the next iteration on.

        Raises:
            ValueError: if `equal_rounds` are not possible in it.
        """
        self.growing.batches = self.batches.in_world(world, self.position)

    # Iterations. -----------------------------------------------------------------------------------------------------

    def begin_iteration(self) -> None:
        """Prepare for the first read of an iteration.

        Raises:
            RuntimeError: if the last iteration was read to its end without calls of `optimizer.step()`; or if the
                training has ended, and no `set_epoch` has announced an empty epoch.
        """
        self.check_last_loop()
        announced, self._announced = self._announced, False
        if self._attached and self.done and not announced:
            raise RuntimeError(
                f"the loader of a training must be read within it, but the training has ended after {self.updates} "
                f"updates; read the data by another loader, DataLoader(dataset, batch_size=...), for update_bn() or an "
                f"evaluation; and loop over epochs by vbs.remaining_epochs, or with set_epoch()"
            )
        self.expected = None  # by a loop that was left
        self.before_reading.set_waiting(self.due)
        self.note_iteration()

    def note_iteration(self) -> None:
        """Let all listeners know that an iteration begins."""
        for listener in list(self.listeners):
            listener.note_iteration()

    def check_last_loop(self) -> None:
        """Raise RuntimeError if the loop over this epoch that has ended has left out microbatches, see below."""
        last = self.iteration
        if last is not None and last.stepped and last.start.epoch == self.due.epoch:
            self.check_left_over(ended=True)

    def ask_for_iteration(self) -> None:
        """Note that the iteration under way does not have the next microbatch: a new one must begin."""
        if self.iteration is not None:
            self.iteration.stale = True

    @property
    def reads_epoch(self) -> bool:
        """Whether a loop has begun to read the epoch of the position, or had when that was saved."""
        position, last = self.position, self.iteration
        return self.before_reading.waits_at(position) or (last is not None and last.start.epoch == position.epoch)

    def check_left_over(self, *, ended: bool = False) -> None:
        """Raise RuntimeError if a microbatch of the last loop, which has ended, did not reach `optimizer.step()`.

        Args:
            ended: whether it has, also if a loader that prefetches does not tell.
        """
        last, batches = self.iteration, self.batches
        if last is None or not self._attached or not last.has_left_over(ended=ended):
            return
        number = last.start.epoch
        if number < batches.plan.first_epoch:
            return
        if self.committed.position.step >= batches.plan.epoch(number).end_step:
            return
        last.stale |= ended  # it was said
        raise RuntimeError(
            f"every microbatch of an epoch must reach optimizer.step(), but epoch {last.start.epoch} was read from "
            f"{last.start} to the end, {last.yielded} microbatches, with {last.stepped} calls of step(); "
            f"call it once per microbatch, and restore loader and optimizer together (to leave an epoch early, call "
            f"optimizer.discard_step(); to look at the data, use another sampler)"
        )

    # State. ----------------------------------------------------------------------------------------------------------

    def state_of(self, place: Place) -> dict[str, Any]:
        """Return the state of a place, see `state_dict`."""
        pending = self.end_pending and place.position == self.position
        return self._batches_at(place).state_dict(place, end_pending=pending)

    def state_dict(self) -> dict[str, Any]:
        """Return the committed position and what determines its samples: plain numbers, without rank or world."""
        return self.state_of(self.place)

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Move to a saved position, unless that of an optimizer already defines the position.

        The past of the trace must be that of the saved run; its future may change, with a UserWarning.

        Raises:
            ValueError: if the state was saved with another dataset size, seed or past of the trace, unless `strict` is
                False; or if there is no such position.
        """
        if not self._counted:
            check_position(state_dict)
            if strict:
                self.check_samples(state_dict)
            self.adopt_state(state_dict, self.resume(state_dict))
        self.ask_for_iteration()

    def check_samples(self, state: dict[str, Any]) -> None:
        """Check that a state was saved with the same samples up to its position, and warn if later ones differ.

        Raises:
            ValueError: if not, naming each difference.
        """
        batches = self.batches
        fingerprint = batches.fingerprint()
        trace = fingerprint.pop("trace")
        check_same_samples(state, fingerprint, batches.past_of_state(state))
        if batches.decided is None and trace != state["trace"] and self.world.rank == 0:
            warnings.warn(
                f"The batch trace differs from that of the saved run after update {state['step']} (allowed)",
                UserWarning,
                stacklevel=stacklevel_of_user(),
            )

    def resume(self, state: dict[str, Any]) -> Batches:
        """Return the batches of a training that goes on at a saved position.

        Raises:
            ValueError: if there is no such position, or the trace ends before the training does.
        """
        batches = self.batches.resume(state, None if self._elastic else self.world.size)
        if batches.decided is not None and "growth" in state and self.world.rank == 0:
            warn_if_changed(batches.decided.adaptive, state["growth"])
        batches.plan.check_trace(self.epochs)
        return batches

    def adopt_state(self, state: dict[str, Any], batches: Batches, *, counted: bool = False) -> Place:
        """Go on at a saved position, which is returned; `counted`: an optimizer counts from there."""
        place = Place(position_of(state), check_int(state["samples"], "samples"))
        self.growing.batches, self.growing.decided_at = batches, place.position.step
        self._place, self._chosen, self._counter = place, None, None
        self._counted |= counted
        self._cut_is_known = True
        self.end_pending = bool(state["end_pending"]) and batches.ends_epoch(place.position)
        return place


def _check_can_attach(batches: Batches, *, compiles_shapes: bool, elastic: bool) -> None:
    """Raise ValueError if batches cannot be dealt for an optimizer with such a device, or such a world."""
    if batches.arriving and elastic:
        found = "an elastic backend"
        raise value_error("batches that arrive need ranks that stay", found, "pass a vbs.CustomSampler")
    if batches.split.speeds and (compiles_shapes or elastic):
        found = "a world that may change" if elastic else "a device on which all ranks run one graph, as with XLA"
        raise value_error("speeds= needs a fixed world whose ranks run on their own", found, "omit speeds=")
    if elastic and batches.decided is not None and batches.decided.adaptive.every is None:
        requirement = "where the world may change, an AdaptiveTrace must ask its controller again"
        raise value_error(requirement, "every=None", "pass every=")
