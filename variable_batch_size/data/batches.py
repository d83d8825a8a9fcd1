"""Which samples make up which update, and which of them are this rank's: values, and pure functions of them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Protocol, final

from variable_batch_size._validation import MAX_INT, IntArray, check_int
from variable_batch_size.adaptive.adaptive_trace import AdaptiveTrace, largest_size
from variable_batch_size.adaptive.decided_trace import DecidedTrace
from variable_batch_size.data.plan.deal import Dealing, Step, UnequalRanks
from variable_batch_size.data.plan.equal_rounds import check_constant
from variable_batch_size.data.plan.plan import Epoch, Plan
from variable_batch_size.data.plan.shuffle import order
from variable_batch_size.data.plan.state import VERSION
from variable_batch_size.microbatching import Microbatch
from variable_batch_size.world import World


@final
class Position(NamedTuple):
    """The next update: its epoch, and its step in the trace, which counts on over epochs. Positions are ordered.

    After the last update of an epoch the position is the end of that epoch, until the next epoch begins.
    """

    epoch: int
    step: int

    def __str__(self) -> str:
        return f"epoch {self.epoch}, step {self.step}"


@final
class Place(NamedTuple):
    """How far a training is: the next update, and the samples of all updates that were made, over all ranks."""

    position: Position
    samples: int


@final
class Batch(NamedTuple):
    """The samples of one update, and how they are computed.

    Attributes:
        step: number of the update.
        batch_size: number of its samples, over all ranks.
        start: position of its first sample in the order of the epoch.
        num_microbatches: number of its microbatches, over all ranks, without replays.
        microbatches: this rank's microbatches, replays first. A replay repeats a microbatch with weight 0, so that
            this rank computes as often as the others.
        totals: what all ranks have counted for the terms of the loss, by name; None without `updates(counts=)`.
    """

    step: int
    batch_size: int
    start: int
    num_microbatches: int
    microbatches: tuple[Microbatch, ...]
    totals: Mapping[str, Any] | None = None


@final
class Split(NamedTuple):
    """How optimizers need steps to be split.

    Attributes:
        spread: whether a step may be split into more microbatches than memory needs, so that no rank is idle; it may
            if no optimizer's result depends on the split.
        padded: whether every rank computes equally many microbatches, by replays.
        equal_rounds: whether every rank computes equally many without replays, see `CustomSampler`.
        unequal: how ranks of unequal speed share a step; None if all are equally fast.
    """

    spread: bool = True
    padded: bool = False
    equal_rounds: bool = False
    unequal: UnequalRanks | None = None


_EVEN = Split()


class Dealt(Protocol):
    """The microbatches of one rank in consecutive steps; `Deal` and `TokenDeal` are such."""

    @property
    def first_step(self) -> int:
        """The number of the first of these steps."""

    @property
    def ends(self) -> IntArray:
        """The number of microbatches that the rank has computed at the end of each step, (steps,)."""

    def __len__(self) -> int:
        """Return the number of microbatches in all of these steps."""

    def rows(self, begin: int, end: int, order: Callable[[IntArray], IntArray]) -> list[list[int]]:
        """Return the samples of microbatches `begin .. end - 1`; `order` maps positions in the epoch to samples."""


@dataclass(frozen=True)
class Batches:
    """The batches of a training, cut into microbatches for one rank of a world. A value: it holds no position.

    Attributes:
        plan: epochs and steps, independent of the world.
        world: this rank, and the number of ranks.
        seed: seed of the shuffle.
        shuffle: whether an epoch permutes the samples, or takes them in the order of the dataset.
        split: how steps become microbatches.
        decided: the decisions of a controller, which has chosen the batch sizes of the plan; None for a fixed trace.
        reproducible: whether updates are the same to the last bit in any world.
    """

    plan: Plan
    world: World
    seed: int = 0
    shuffle: bool = True
    split: Split = _EVEN
    decided: DecidedTrace | None = None
    reproducible: bool = False
    arriving: ClassVar[bool] = False  # whether nobody knows the samples of an update before its turn
    packs: ClassVar[bool] = False  # whether samples have lengths, by which microbatches are packed

    @cached_property
    def dealing(self) -> Dealing:
        """How steps are split into microbatches and rounds, as the optimizers and the ranks need it.

        A round is one microbatch on each rank.
        """
        spread = self.split.spread and not self.plan.fixed_shape and not self.reproducible
        equal = self.split.padded or self.split.equal_rounds
        # Without `spread` ranks take whole microbatches. In equal rounds each takes one a round then, at any speed.
        unequal = self.split.unequal if spread or not equal else None
        return Dealing(multiple_of=self.world.size if spread else 1, padded=equal, unequal=unequal)

    def order(self, epoch: int) -> Callable[[IntArray], IntArray]:
        """Return the map from positions in an epoch's order to indices in the dataset, for arrays of any shape."""
        return order(self.plan.dataset_size, self.seed, epoch, shuffle=self.shuffle)

    @property
    def dataset_size(self) -> int:
        """The number of samples in the dataset."""
        return self.plan.dataset_size

    @property
    def in_tokens(self) -> bool:
        """Whether batch sizes are in tokens."""
        return False

    def check_reference(self, reference: int) -> None:
        """Warn if a reference batch size seems to be in another unit than the batches; only tokens can differ."""

    # Positions. ------------------------------------------------------------------------------------------------------

    @property
    def first_position(self) -> Position:
        """The first update that the plan knows."""
        epoch = self.plan.epoch(self.plan.first_epoch)
        return Position(epoch.number, epoch.first_step)

    def epoch(self, position: Position) -> Epoch:
        """Return the epoch of a position."""
        return self.plan.epoch(position.epoch)

    def ends_epoch(self, position: Position) -> bool:
        """Return whether a position is the end of its epoch.

        A plan that was resumed or has grown forgets earlier epochs; a position in one of them can only be its end.
        """
        return position.epoch < self.plan.first_epoch or position.step == self.epoch(position).end_step

    def is_within_epoch(self, position: Position) -> bool:
        """Return whether some updates of the epoch of a position are made, and others are to come."""
        return not self.ends_epoch(position) and position.step > self.epoch(position).first_step

    def next_update(self, position: Position) -> Position:
        """Return the first update of the next epoch if a position is the end of an epoch; otherwise the position."""
        return Position(position.epoch + 1, position.step) if self.ends_epoch(position) else position

    def place_after(self, place: Place, batch: Batch) -> Place:
        """Return how far a training is after its next update: the position, and the number of samples so far.

        Args:
            place: how far it is before this update.
            batch: the update.
        """
        position_of_batch = self.next_update(place.position)
        return Place(Position(position_of_batch.epoch, position_of_batch.step + 1), place.samples + batch.batch_size)

    def enter_epoch(self, position: Position, epoch: int) -> Position:
        """Return where a training continues in an epoch: at its position, or at the start of a later epoch."""
        return position if epoch == position.epoch else Position(epoch, self.plan.epoch(epoch).first_step)

    def done(self, position: Position) -> bool:
        """Return whether the training has ended: by `max_updates` or `max_samples` of the plan, or with its trace."""
        if position.epoch < self.plan.first_epoch:  # an epoch that the plan has forgotten, because others follow
            return False
        return self.ends_epoch(position) and self.plan.ends_with(self.epoch(position))

    def step(self, position: Position) -> Step:
        """Return the update at a position: its samples and how they are cut."""
        return self.plan.step(self.epoch(position), position.step, self.dealing)

    def batch(self, position: Position) -> Batch:
        """Return the update at a position: its samples, and the microbatches that this rank computes."""
        step = self.step(position)
        world = self.world
        microbatches = tuple(step.microbatch(round_index, world) for round_index in range(step.rounds(world)))
        return Batch(step.number, step.batch_size, step.start, step.num_microbatches, microbatches)

    def deal(self, number: int, first_step: int, end_step: int) -> Dealt:
        """Return the microbatches of this rank in the next steps of an epoch, many steps at once.

        Args:
            number: number of the epoch.
            first_step: the first step.
            end_step: the step before which it ends at the latest.
        """
        return self.plan.deal(self.plan.epoch(number), first_step, self.world, self.dealing, end_step)

    def count(self, position: Position) -> int:
        """Return how many microbatches this rank computes from a position to the end of its epoch."""
        return self.plan.count(self.epoch(position), position.step, self.world, self.dealing)

    def samples_before(self, position: Position) -> int:
        """Return the number of samples of all updates before a position, over all ranks."""
        return self.plan.samples_before(self.epoch(position), position.step)

    # Another cut, another world. -------------------------------------------------------------------------------------

    def with_split(self, split: Split, *, fixed_shape: bool | None = None) -> Batches:
        """Return the batches cut in another way, before any is read.

        Args:
            split: how optimizers need steps to be split.
            fixed_shape: whether every microbatch has `minibatch_size` rows; None leaves that unchanged.

        Raises:
            ValueError: if the trace is constant, and equal rounds are needed but not possible.
        """
        changed = replace(self, split=split)
        if fixed_shape is not None and fixed_shape != self.plan.fixed_shape:
            changed = replace(changed, plan=replace(self.plan, fixed_shape=fixed_shape))
            if self.decided is not None:
                changed = changed.decide_first(self.decided.adaptive)
        return changed.with_checked_rounds()

    def in_world(self, world: World, position: Position) -> Batches:
        """Return the batches for another number of ranks; a controller decides its first batch size anew.

        Args:
            world: the rank, and the number of ranks, from now on.
            position: the next update. If updates were made before, the decisions of the controller stay.

        Raises:
            ValueError: if equal rounds are needed, but not possible in that world.
        """
        changed = replace(self, world=world)
        if self.decided is not None and position.step == 0:
            changed = changed.decide_first(self.decided.adaptive)
        return changed.with_checked_rounds()

    def with_checked_rounds(self) -> Batches:
        """Return these batches; raise ValueError if equal rounds are needed that a constant trace does not have."""
        if self.split.equal_rounds and self.decided is None and not self.arriving:
            check_constant(self.plan, self.world, self.dealing)
        return self

    # Batch sizes that a controller decides. --------------------------------------------------------------------------

    def decide_first(self, adaptive: AdaptiveTrace) -> Batches:
        """Return the batches with the sizes of the first updates, as a controller chooses them for this world."""
        rows, fixed = self.plan.minibatch_size, self.plan.fixed_shape
        decided = DecidedTrace.begin(adaptive, self.world.size, rows, fixed_shape=fixed)
        return self.grow(decided, self.first_position)

    def grow(self, decided: DecidedTrace, position: Position) -> Batches:
        """Return the batches with later decisions of a controller; updates before `position` stay as they were.

        Args:
            decided: the decisions so far, which determine more batch sizes than before.
            position: the next update.
        """
        if self.decided is not None and decided.trace is self.decided.trace:  # no batch size was added
            return replace(self, decided=decided)
        # The plan begins at the position, as if it were resumed there: earlier epochs need not be planned again.
        state = {**self.position_state(position), "fixed_shape": self.plan.fixed_shape}
        return replace(self, decided=decided, plan=replace(self.plan, trace=decided.trace).resume(state))

    @property
    def max_batch_size(self) -> int:
        """The largest batch size that an update may have, in samples."""
        return self.plan.trace.max_batch_size if self.decided is None else largest_size(self.decided.adaptive)

    @property
    def known_until(self) -> int:
        """The first step whose batch size is not known yet, because a controller has yet to decide it."""
        end = None if self.decided is None else self.decided.known_until
        return MAX_INT if end is None else end

    # A position that is saved, in any world. -------------------------------------------------------------------------

    def fingerprint(self) -> dict[str, Any]:
        """Return what must be equal on all ranks and in a saved run, by name, besides the cut into microbatches."""
        plan = self.plan
        order = {"seed": self.seed, "shuffle": self.shuffle, "drop_last": plan.drop_last}
        needed_for_equal_bits = ""
        if self.reproducible:
            threads = importlib.import_module("torch").get_num_threads()  # a plan works without torch installed
            needed_for_equal_bits = f"minibatch_size={plan.minibatch_size}, torch.set_num_threads({threads})"
        common = {"dataset_size": plan.dataset_size, **order, "trace": plan.trace.fingerprint}
        return {**common, "reproducible": needed_for_equal_bits}

    def past_before(self, step: int) -> str:
        """Return the fingerprint of the batch sizes before a step."""
        return self.plan.past(step)

    def past_of_state(self, state: dict[str, Any]) -> str:
        """Return a hash of the batch sizes that this run has before a saved position.

        A state can be restored if its own hash is the same.
        """
        step = check_int(state["step"], "step")
        if self.decided is None:
            return self.past_before(step)
        if "growth" in state:  # the decisions of the saved run, which replace those of this one: nothing to compare
            return str(state["past"])
        # The saved run had a fixed trace: a controller continues it only if all its batch sizes were `start`.
        trace = DecidedTrace.after_constant(self.decided.adaptive, step).trace
        return replace(self.plan, trace=trace).past(step)

    def position_state(self, position: Position) -> dict[str, Any]:
        """Return a position and what its epoch has used before it, as plain numbers, valid in every world."""
        epoch = self.epoch(position)
        used_samples = self.plan.samples_before(epoch, position.step) - epoch.samples_before
        past = {"first_step": epoch.first_step, "samples_before": epoch.samples_before, "epoch_samples": used_samples}
        return {**position._asdict(), **past, "ended": self.ends_epoch(position) and epoch.complete}

    def state_dict(self, place: Place, *, end_pending: bool) -> dict[str, Any]:
        """Return the state of a training: how far it is, and what determines its samples and their cut.

        All values are plain numbers and strings, without rank, world or prefetched items. Of the trace, the batch sizes
        before the position must be the same when the state is restored; later ones may change.

        Args:
            place: how far the training is.
            end_pending: whether the epoch has ended, but the loop has not yet done what it does at its end.
        """
        plan = self.plan
        past = {"past": self.past_before(place.position.step), "fixed_shape": plan.fixed_shape}
        growth = {} if self.decided is None else {"growth": self.decided.state_dict()}
        position = {**self.position_state(place.position), "samples": place.samples, "end_pending": end_pending}
        return {"version": VERSION, **position, **self.fingerprint(), **past, **growth}

    def resume(self, state: dict[str, Any], devices: int | None) -> Batches:
        """Return the batches of a training that continues at a saved position.

        Args:
            state: the saved state.
            devices: the number of devices of this run; a controller whose answer depends on it decides again, from the
                next step on. None keeps its decisions as they were saved.

        Raises:
            ValueError: if the trace and the dataset have no such position.
        """
        plan, decided = self.plan, self.decided
        if decided is not None:  # the trace is what the controller had chosen when the state was saved
            decided = _resume(decided, state, devices, plan.dataset_size)
            plan = replace(plan, trace=decided.trace)
        plan = plan.resume(state)
        position = position_of(state)
        epoch = plan.epoch(position.epoch)
        if not epoch.first_step <= position.step <= epoch.end_step:
            raise ValueError(
                f"the state is at step {position.step}, but here epoch {position.epoch} begins at step "
                f"{epoch.first_step} and ends before step {epoch.end_step}; restore it with the trace and the dataset "
                "size of the saved run"
            )
        return replace(self, plan=plan, decided=decided)


def position_of(state: dict[str, Any]) -> Position:
    """Return the position that a state holds."""
    return Position(check_int(state["epoch"], "epoch"), check_int(state["step"], "step"))


def _resume(decided: DecidedTrace, state: dict[str, Any], devices: int | None, dataset_size: int) -> DecidedTrace:
    """Return the decisions of a controller at a saved position.

    They are the decisions of the saved run. If that run had a fixed trace instead of a controller, its updates count as
    ones of a constant size.

    Args:
        decided: the decisions of the controller of this run, before the state.
        state: the saved state.
        devices: number of devices of this run; a controller whose answer depends on it decides again. None: as saved.
        dataset_size: samples of an epoch.
    """
    updates = check_int(state["step"], "step")
    if "growth" not in state:  # the state was saved with a fixed trace
        return DecidedTrace.after_constant(decided.adaptive, updates)
    # With drop_last, an epoch may have ended early because the next step was too large for its rest. The size of that
    # step was used then, and must not be decided again.
    ended_early = bool(state["ended"]) and check_int(state["epoch_samples"], "epoch_samples") < dataset_size
    first_open_step = updates + 1 if ended_early else updates
    try:
        return DecidedTrace.resume(decided.adaptive, state["growth"], devices, updates, first_open_step)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(
            f"a state of version {VERSION} must hold growth as it was saved, but its decisions cannot be read "
            f"({error!r:.80}); restore another state"
        ) from error
