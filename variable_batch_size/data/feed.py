"""What a sampler and the optimizers that it feeds share: plan, clocks, what was read, and the cut of steps."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeGuard, final

from torch import Tensor

from variable_batch_size._log import stacklevel_of_user
from variable_batch_size._validation import IntArray, value_error
from variable_batch_size.adaptive.decided_trace import warn_if_changed
from variable_batch_size.data.arrival import Arrival
from variable_batch_size.data.clock import Clock, Position
from variable_batch_size.data.deal import Dealing
from variable_batch_size.data.equal_rounds import check_constant
from variable_batch_size.data.planning import PlanState, Resumed
from variable_batch_size.data.reading import Reading, Use
from variable_batch_size.data.shares import Speeds
from variable_batch_size.data.shuffle import order
from variable_batch_size.data.state import VERSION, check_position, check_same_samples
from variable_batch_size.world import World

_ARRIVES = "batches that arrive"  # in the place of the trace, in a state


class RandomStates(Protocol):
    """Saved states of the host's random number generators."""

    def set(self) -> None:
        """Set the generators to the states."""

    def keep(self) -> None:
        """Take the states that the generators have now."""


@final
class BeforeReading:
    """States that are set right before an iteration is first read, until the next update or another epoch.

    A `DataLoader` calls `iter()` and draws its seed before it reads. A run that was saved within an epoch had drawn it
    by then.
    """

    def __init__(self) -> None:
        self._position: Position | None = None
        self._states: RandomStates | None = None

    def wait(self, position: Position | None, states: RandomStates) -> None:
        """Set these states at a position; None: at none, because the saved run had not begun to read its epoch."""
        self._position, self._states = position, states

    def waits_at(self, position: Position) -> bool:
        """Return whether states are set at this position."""
        return self._states is not None and self._position == position

    def begin(self, position: Position) -> None:
        """Set the states that wait for this position, and forget others."""
        if self._states is not None and self._position == position:
            self._states.set()
        else:
            self._states = None

    def keep(self, position: Position) -> None:
        """Set, at this position, what there is now: undo what starting workers draws, which the saved run had."""
        if self._states is not None and self._position != position:
            self._states.keep()
            self._position = position


@final
class Feed:
    """What a `CustomSampler` and the optimizers that it feeds share.

    Args:
        world: this rank, and the number of ranks.
        plans: the plan of the sampler, and the clocks that follow it.
        seed: seed of the shuffle.
        shuffle: whether the order of an epoch is a permutation.
        epochs: number of epochs that will be trained, if known.
        cut_is_known: whether the user or a state has said whether shapes are fixed.
        equal_rounds: whether every rank must compute equally many microbatches in every step, and no replay.
        speeds: of each rank; empty if they are equal.
        arriving: whether batches arrive, so that there is no trace and no order of samples.

    Attributes:
        arrival: the step whose rows have arrived last.
        reading: the iteration that was read last.
        before_reading: the random states of a checkpoint that wait for the next read.
    """

    def __init__(
        self,
        world: World,
        plans: PlanState,
        seed: int,
        *,
        shuffle: bool,
        epochs: int | None,
        cut_is_known: bool,
        equal_rounds: bool,
        speeds: Speeds,
        arriving: bool = False,
    ) -> None:
        self.world, self.plans, self.seed, self.shuffle, self.epochs = world, plans, seed, shuffle, epochs
        self.equal_rounds, self.speeds, self._cut_is_known = equal_rounds, speeds, cut_is_known
        self.arriving = arriving
        self.facts: dict[str, Any] = {}  # further ones that all ranks must have in common, by name
        self.arrival: Arrival | None = None
        self.reading: Reading | None = None
        self.before_reading = BeforeReading()
        self._clock = plans.clock()
        self._leader = self._clock, 0  # the clock that moves this one by its commits, and those that were followed
        self._attached = False  # whether an optimizer counts what is yielded
        self._trained: dict[int, weakref.ref[Tensor]] = {}  # the parameters of the optimizers, by id
        self._followed = False  # whether the clock of an optimizer has ever been followed
        self._spread = True  # whether no optimizer depends on how a step is split
        self._padded = False  # whether an optimizer needs equal rounds, with replays
        self._elastic = False  # whether the world may change between two steps
        self._check_rounds()

    def __getstate__(self) -> dict[str, Any]:  # of a copy, which no optimizer feeds from
        return {**vars(self), "_trained": {}}

    @property
    def clock(self) -> Clock:
        """The position of the next iteration; a commit of an optimizer moves it at the same moment."""
        self.follow()
        return self._clock

    @property
    def dealing(self) -> Dealing:
        """How steps are split into microbatches and rounds."""
        spread = self._spread and not self.plans.plan.fixed_shape
        equal = self._padded or self.equal_rounds
        # A round takes as long as a microbatch on the slowest rank: whole ones in equal rounds do not go by speed.
        speeds = self.speeds if spread or not equal else ()
        return Dealing(self.world.size if spread else 1, equal, speeds, self.arrival)

    def order(self, epoch: int) -> Callable[[IntArray], IntArray]:
        """Return the map from positions in an epoch's order to indices in the dataset, for arrays of any shape."""
        return order(self.plans.plan.dataset_size, self.seed, epoch, shuffle=self.shuffle)

    # Optimizers. ------------------------------------------------------------------------------------------------------

    def attach(
        self,
        *,
        spread: bool = True,
        compiles_shapes: bool = False,
        elastic: bool = False,
        equal_rounds: bool = False,
        padded: bool = False,
    ) -> Clock:
        """Return a clock for an optimizer that will call `step()` for every microbatch.

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
        if self.arriving and elastic:
            found = "an elastic backend"
            raise value_error("batches that arrive need ranks that stay", found, "pass a vbs.CustomSampler")
        if self.speeds and (compiles_shapes or elastic):
            found = "a world that may change" if elastic else "a device on which all ranks run one graph, as with XLA"
            raise value_error("speeds= needs a fixed world whose ranks run on their own", found, "omit speeds=")
        if elastic and self.plans.decided is not None and self.plans.decided.adaptive.every is None:
            requirement = "where the world may change, an AdaptiveTrace must ask its controller again"
            raise value_error(requirement, "every=None", "pass every=")
        if compiles_shapes and not self._cut_is_known:
            self.plans.fix_shape(self.world.size)
        self._cut_is_known = True
        # Where each of several optimizers has a DistributedDataParallel, its first forward after a sum is a collective.
        padded |= self.arriving and self._attached
        self._attached, self._elastic = True, elastic
        self._spread, self._padded = self._spread and spread, self._padded or padded
        self.equal_rounds |= equal_rounds
        self._check_rounds()
        self.reading = None  # microbatches that were read before are not for this optimizer
        clock = self.plans.clock()
        clock.follow(self.clock)
        return clock

    def knows(self, step: int) -> bool:
        """Return whether the samples of a step are known, or will be when it is read."""
        return not self.arriving or (self.arrival is not None and self.arrival.step == step)

    def enter_world(self, world: World) -> None:
        """Deal for another world from the next iteration on; before the first step a controller decides for it.

        Raises:
            ValueError: if `equal_rounds` are not possible in it.
        """
        self.world = world
        if self.clock.step == 0:
            self.plans.decide_first(world.size)
        self._check_rounds()

    def watch_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Note which gradients there are when an iteration begins: they are left from before."""
        self._trained |= {id(parameter): weakref.ref(parameter) for parameter in parameters}

    def lead(self, clock: Clock) -> None:
        """Let the commits of an optimizer's clock move that of the sampler from now on."""
        self.follow()  # what another one has committed
        self._leader = clock, clock.commits

    def follow(self) -> None:
        """Move to where the clock that leads is, if it has committed an update since."""
        leader, followed = self._leader
        if leader.commits != followed:
            self.plans.plan = leader.plan
            self._clock.follow(leader)
            self._followed, self._leader = True, (leader, leader.commits)

    def set_epoch(self, epoch: int) -> None:
        """See `CustomSampler.set_epoch`."""
        self.check_epoch(epoch)
        if epoch > self.clock.epoch.number:
            self.check_stepped()  # otherwise the next iteration yields again what did not reach step()
        skipped, self.reading = self.clock.set_epoch(epoch), None  # it was checked
        self.plans.skip_to(self.clock.step if skipped.updates else None)

    def check_epoch(self, epoch: int) -> None:
        """Raise ValueError if batches arrive, which have no epoch but the first."""
        if self.arriving and epoch > 0:
            raise value_error("batches that arrive have one epoch, 0", epoch, "loop over vbs.updates without set_epoch")

    # Iterations. ------------------------------------------------------------------------------------------------------

    @property
    def under_way(self) -> Reading | None:
        """The iteration of this epoch over which a loop has begun and, as far as that is known, not ended."""
        reading, clock = self.reading, self.clock
        if reading is None or reading.use is Use.STALE or reading.start.epoch != clock.epoch.number:
            return None
        return None if reading.counts.exhausted and clock.finished else reading

    def begin_reading(self, reading: Reading) -> None:
        """Prepare for the first read of an iteration: set random states that wait for it, and note the gradients.

        Raises:
            RuntimeError: if the last iteration was read to its end without calls of `optimizer.step()`, or all updates
                of the epoch are committed.
        """
        last = self.reading
        if last is not None and last.start.epoch == self.clock.epoch.number:
            self.check_stepped()
        read_twice = last is not None and last.counts.exhausted and last.start == self.clock.position
        if self.clock.finished and (self.clock.finished_now or (read_twice and last is not None and not last.resumed)):
            due = self.clock.due_epoch
            raise RuntimeError(
                f"an epoch can be iterated until its last update, but all updates of epoch {due - 1} are committed; "
                f"call set_epoch({due}) on the sampler and on the optimizer before the next iteration"
            )
        self.before_reading.begin(self.clock.position)
        known = (parameter() for parameter in self._trained.values())
        reading.gradients = [one.grad for one in known if one is not None and one.grad is not None]

    def end_reading(self) -> None:
        """Note that what was left of an epoch was read: of one that is over, the end is not pending any more."""
        if self.clock.finished:
            self.clock.end()

    @property
    def reads_epoch(self) -> bool:
        """Whether a loop has begun to read the epoch of the position, or had when that was saved."""
        here, last = self.clock.position, self.reading
        return self.before_reading.waits_at(here) or (last is not None and last.start.epoch == here.epoch)

    def keep_random_states(self) -> None:
        """Undo what starting the workers of a loader, which the saved run had, draws in the epoch after a restore."""
        if self.clock.just_loaded:
            self.before_reading.keep(self.clock.position)

    def check_stepped(self) -> None:
        """Raise RuntimeError if the last loop, which has ended, has not trained what it read."""
        if self._may_be_left(last := self.reading) and last.counts.incomplete:
            self.reading = None
            raise last.left_over()

    def check_left_over(self) -> None:
        """Raise RuntimeError if a microbatch of a loop that has certainly ended did not reach `optimizer.step()`."""
        if self._may_be_left(last := self.reading) and last.counts.left_over:
            raise last.left_over()

    def _may_be_left(self, last: Reading | None) -> TypeGuard[Reading]:
        return last is not None and last.use is not Use.STALE and self._attached and not self.clock.finished

    # State. -----------------------------------------------------------------------------------------------------------

    def fingerprint(self) -> dict[str, Any]:
        """Return what the samplers of all ranks have in common, besides the cut into microbatches."""
        return {**self._order_of_samples(), "trace": _ARRIVES if self.arriving else self.plans.plan.trace.fingerprint}

    def state_dict(self, clock: Clock) -> dict[str, Any]:
        """Return the position of a clock, what must be the same for it to mean the same samples, and the cut.

        All are plain numbers and strings, without rank, world or prefetched items. The past of the trace must be the
        same; its future may change.
        """
        plan = self.plans.plan
        past = {"past": _ARRIVES if self.arriving else plan.past(clock.step), "fixed_shape": plan.fixed_shape}
        ended = {"end_pending": clock.end_pending and self.clock.end_pending}  # it may have been read since
        counted = {"epoch_samples": clock.samples} if self.arriving else {}
        own = {**clock.state_dict(), **counted, **ended, **self.fingerprint(), **past, **self.plans.state()}
        return {"version": VERSION, **own}

    def load_state_dict(self, state: dict[str, Any], *, strict: bool) -> None:
        """See `CustomSampler.load_state_dict`."""
        if not self._followed:
            check_position(state)
            if strict:
                self.check_samples(state)
            self.adopt(self.clock_at(state))
        self.reading = None

    def check_samples(self, state: dict[str, Any]) -> None:
        """Check that a state was saved with the same samples up to its position, and warn if later ones differ.

        Raises:
            ValueError: if not, naming each difference.
        """
        past = _ARRIVES if self.arriving else self.plans.past(state)
        check_same_samples(state, self._order_of_samples(), past)
        fixed = self.plans.decided is None and not self.arriving
        if fixed and self.plans.plan.trace.fingerprint != state["trace"] and self.world.rank == 0:
            warnings.warn(
                f"The batch trace differs from that of the saved run after update {state['step']} (allowed)",
                UserWarning,
                stacklevel=stacklevel_of_user(),
            )

    def clock_at(self, state: dict[str, Any]) -> Resumed:
        """Return a clock at a saved position, with the plan that leads on from there.

        Raises:
            ValueError: if there is no such position, or the trace ends before the training does.
        """
        if self.arriving:
            return self.plans.counted(state)
        resumed = self.plans.clock_at(state, None if self._elastic else self.world.size)
        if resumed.decided is not None and "growth" in state and self.world.rank == 0:
            warn_if_changed(resumed.decided.adaptive, state["growth"])
        resumed.clock.plan.check_trace(self.epochs)
        return resumed

    def adopt(self, resumed: Resumed, *, followed: bool = False) -> None:
        """Take the position and the plan of a saved state; `followed`: an optimizer counts from there."""
        self._followed, self._cut_is_known = self._followed or followed, True
        self.plans.restore(resumed)
        self.clock.follow(resumed.clock)

    def _order_of_samples(self) -> dict[str, Any]:
        own = {"seed": self.seed, "shuffle": self.shuffle, "drop_last": self.plans.plan.drop_last}
        return {"dataset_size": self.plans.plan.dataset_size, **own}

    def _check_rounds(self) -> None:
        if self.equal_rounds and self.plans.decided is None and not self.arriving:
            check_constant(self.plans.plan, self.world, self.dealing)
