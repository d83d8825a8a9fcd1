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
    """The next update: its epoch, and its step in the trace. Positions are ordered.

    After the last update of an epoch it is the end of that epoch, until the next one begins.
    """

    epoch: int
    step: int

    def __str__(self) -> str:
        return f"epoch {self.epoch}, step {self.step}"


@final
class Place(NamedTuple):
    """How far a training is: the next update, and the samples of those that were made, over all ranks."""

    position: Position
    samples: int


@final
class Batch(NamedTuple):
    """The samples of one update, and how they are computed.

    Attributes:
        step: number of the update.
        batch_size: its samples, over all ranks.
        start: position of the first one in the order of the epoch.
        num_microbatches: of all ranks, without replays.
        microbatches: those of this rank, replays first.
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
        spread: whether a step may be split further, so that no rank is idle: none depends on the split.
        padded: whether every rank computes equally many microbatches, by replays.
        equal_rounds: whether every rank computes equally many without replays, see `CustomSampler`.
        unequal: how ranks share a step that are not equal; None if they are.
    """

    spread: bool = True
    padded: bool = False
    equal_rounds: bool = False
    unequal: UnequalRanks | None = None


_EVEN = Split()


class Dealt(Protocol):
    """Microbatches of one rank in consecutive steps, as `Deal`."""

    @property
    def first_step(self) -> int:
        """The first of these steps."""

    @property
    def ends(self) -> IntArray:
        """The number of microbatches at the end of each step, (steps,)."""

    def __len__(self) -> int: ...

    def rows(self, begin: int, end: int, order: Callable[[IntArray], IntArray]) -> list[list[int]]:
        """Return the samples of microbatches, by the order of the epoch."""


@dataclass(frozen=True)
class Batches:
    """The batches of a training, cut into microbatches for one rank of a world. A value: it holds no position.

    Attributes:
        plan: epochs and steps, independent of the world.
        world: this rank, and the number of ranks.
        seed: of the shuffle.
        shuffle: whether the order of an epoch is a permutation, or that of the dataset.
        split: how steps become microbatches.
        decided: what a controller has decided, whose batch sizes the plan has; None for a fixed trace.
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
        """How steps are split into microbatches and rounds."""
        spread = self.split.spread and not self.plan.fixed_shape and not self.reproducible
        equal = self.split.padded or self.split.equal_rounds
        # A round takes as long as a microbatch on the slowest rank: whole ones in equal rounds do not go by speed.
        return Dealing(self.world.size if spread else 1, equal, self.split.unequal if spread or not equal else None)

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
        """Warn if a reference batch size is in another unit than the batches."""

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
        """Return whether a position is the end of its epoch, which a plan that has grown may not know any more."""
        return position.epoch < self.plan.first_epoch or position.step == self.epoch(position).end_step

    def is_within_epoch(self, position: Position) -> bool:
        """Return whether some updates of the epoch of a position are made, and others are to come."""
        return not self.ends_epoch(position) and position.step > self.epoch(position).first_step

    def next_update(self, position: Position) -> Position:
        """Return the first update of the next epoch for the end of an epoch, and any other position as it is."""
        return Position(position.epoch + 1, position.step) if self.ends_epoch(position) else position

    def place_after(self, place: Place, batch: Batch) -> Place:
        """Return the place of a training that has made its next update."""
        due = self.next_update(place.position)
        return Place(Position(due.epoch, due.step + 1), place.samples + batch.batch_size)

    def enter_epoch(self, position: Position, epoch: int) -> Position:
        """Return where a training goes on in an epoch: where it is, or at the start of a later one."""
        return position if epoch == position.epoch else Position(epoch, self.plan.epoch(epoch).first_step)

    def done(self, position: Position) -> bool:
        """Return whether the training has ended: by `max_updates` or `max_samples` of the plan, or with its trace."""
        known = position.epoch >= self.plan.first_epoch
        return known and self.ends_epoch(position) and self.plan.ends_with(self.epoch(position))

    def step(self, position: Position) -> Step:
        """Return the update at a position: its samples and how they are cut."""
        return self.plan.step(self.epoch(position), position.step, self.dealing)

    def batch(self, position: Position) -> Batch:
        """Return the update at a position as this rank computes it."""
        step = self.step(position)
        world = self.world
        microbatches = tuple(step.microbatch(number, world) for number in range(step.rounds(world)))
        return Batch(step.number, step.batch_size, step.start, step.num_microbatches, microbatches)

    def deal(self, number: int, first_step: int, end_step: int) -> Dealt:
        """Return this rank's microbatches in some of the next steps of an epoch, up to `end_step`."""
        return self.plan.deal(self.plan.epoch(number), first_step, self.world, self.dealing, end_step)

    def count(self, position: Position) -> int:
        """Return how many microbatches this rank computes from a position to the end of its epoch."""
        return self.plan.count(self.epoch(position), position.step, self.world, self.dealing)

    def samples_before(self, position: Position) -> int:
        """Return the samples of all updates before a position, over all ranks."""
        return self.plan.samples_before(self.epoch(position), position.step)

    # Another cut, another world. -------------------------------------------------------------------------------------

    def with_split(self, split: Split, *, fixed_shape: bool | None = None) -> Batches:
        """Return the batches cut in another way, before any is read.

        Args:
            split: how optimizers need steps to be split.
            fixed_shape: whether every microbatch has `minibatch_size` rows; None: as it is.

        Raises:
            ValueError: if the trace is constant, and equal rounds are not possible.
        """
        changed = replace(self, split=split)
        if fixed_shape is not None and fixed_shape != self.plan.fixed_shape:
            changed = replace(changed, plan=replace(self.plan, fixed_shape=fixed_shape))
            if self.decided is not None:
                changed = changed.decide_first(self.decided.adaptive)
        return changed.with_checked_rounds()

    def in_world(self, world: World, position: Position) -> Batches:
        """Return the batches for another world; before the first step a controller decides for it.

        Raises:
            ValueError: if equal rounds are not possible in it.
        """
        changed = replace(self, world=world)
        if self.decided is not None and position.step == 0:
            changed = changed.decide_first(self.decided.adaptive)
        return changed.with_checked_rounds()

    def with_checked_rounds(self) -> Batches:
        """Return these batches; raise ValueError if the trace is constant, and has no equal rounds that are needed."""
        if self.split.equal_rounds and self.decided is None and not self.arriving:
            check_constant(self.plan, self.world, self.dealing)
        return self

    # Batch sizes that a controller decides. --------------------------------------------------------------------------

    def decide_first(self, adaptive: AdaptiveTrace) -> Batches:
        """Return the batches with what a controller decides before the first step."""
        rows, fixed = self.plan.minibatch_size, self.plan.fixed_shape
        return self.grow(DecidedTrace.begin(adaptive, self.world.size, rows, fixed_shape=fixed), self.first_position)

    def grow(self, decided: DecidedTrace, position: Position) -> Batches:
        """Return the batches with what was decided since; what lies before the position is the same."""
        if self.decided is not None and decided.trace is self.decided.trace:
            return replace(self, decided=decided)
        state = {**self.position_state(position), "fixed_shape": self.plan.fixed_shape}
        return replace(self, decided=decided, plan=replace(self.plan, trace=decided.trace).resume(state))

    @property
    def max_batch_size(self) -> int:
        """The largest batch size that an update may have, in samples."""
        return self.plan.trace.max_batch_size if self.decided is None else largest_size(self.decided.adaptive)

    @property
    def known_until(self) -> int:
        """The first step whose batch size is not known yet."""
        end = None if self.decided is None else self.decided.known_until
        return MAX_INT if end is None else end

    # A position that is saved, in any world. -------------------------------------------------------------------------

    def fingerprint(self) -> dict[str, Any]:
        """Return what the samplers of all ranks have in common, besides the cut into microbatches."""
        plan = self.plan
        order = {"seed": self.seed, "shuffle": self.shuffle, "drop_last": plan.drop_last}
        bits = ""
        if self.reproducible:
            threads = importlib.import_module("torch").get_num_threads()  # a plan needs no torch
            bits = f"minibatch_size={plan.minibatch_size}, torch.set_num_threads({threads})"
        return {"dataset_size": plan.dataset_size, **order, "trace": plan.trace.fingerprint, "reproducible": bits}

    def past_before(self, step: int) -> str:
        """Return the fingerprint of the batch sizes before a step."""
        return self.plan.past(step)

    def past_of_state(self, state: dict[str, Any]) -> str:
        """Return the fingerprint of the batch sizes that this training has before a saved position."""
        step = check_int(state["step"], "step")
        if self.decided is None:
            return self.past_before(step)
        if "growth" in state:  # which brings its own
            return str(state["past"])
        return replace(self.plan, trace=DecidedTrace.after_constant(self.decided.adaptive, step).trace).past(step)

    def position_state(self, position: Position) -> dict[str, Any]:
        """Return a position with the past of its epoch, as plain numbers, valid in every world."""
        epoch = self.epoch(position)
        used = self.plan.samples_before(epoch, position.step) - epoch.samples_before
        past = {"first_step": epoch.first_step, "samples_before": epoch.samples_before, "epoch_samples": used}
        return {**position._asdict(), **past, "ended": self.ends_epoch(position) and epoch.complete}

    def state_dict(self, place: Place, *, end_pending: bool) -> dict[str, Any]:
        """Return a place, what must be the same for it to mean the same samples, and the cut.

        All are plain numbers and strings, without rank, world or prefetched items. The past of the trace must be the
        same; its future may change.

        Args:
            place: the place.
            end_pending: whether what the loop does at the end of the epoch is to come.
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
            devices: the number of devices now; a controller whose answer depends on it decides again, from the next
                step on. None: its decisions stay as they were saved.

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
    """Return what a controller has decided in a saved run; of a fixed trace, its last batch size goes on."""
    updates = check_int(state["step"], "step")
    if "growth" not in state:  # that of a fixed trace
        return DecidedTrace.after_constant(decided.adaptive, updates)
    # With drop_last, the size of the next step has ended an epoch before its last samples: it stays.
    by_size = bool(state["ended"]) and check_int(state["epoch_samples"], "epoch_samples") < dataset_size
    try:
        return DecidedTrace.resume(decided.adaptive, state["growth"], devices, updates, updates + by_size)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(
            f"a state of version {VERSION} must hold growth as it was saved, but its decisions cannot be read "
            f"({error!r:.80}); restore another state"
        ) from error
