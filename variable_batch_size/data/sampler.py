"""A plan as the `batch_sampler` of a `torch.utils.data.DataLoader`."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence, Sized
from typing import Any, TypeGuard, final

from torch import Tensor
from torch.utils.data import Sampler

from variable_batch_size._validation import IntArray, check_int, type_error, value_error
from variable_batch_size.adaptive.adaptive_trace import AdaptiveTrace
from variable_batch_size.adaptive.decided_trace import DecidedTrace, prepare, warn_if_changed
from variable_batch_size.backend.detection import world_of
from variable_batch_size.data.clock import Clock
from variable_batch_size.data.dataset import number_of_samples
from variable_batch_size.data.deal import Dealing
from variable_batch_size.data.equal_rounds import check_constant
from variable_batch_size.data.iteration import Iteration, Use
from variable_batch_size.data.plan import Plan
from variable_batch_size.data.planning import PlanState, Resumed
from variable_batch_size.data.random_states import BeforeReading
from variable_batch_size.data.shuffle import order
from variable_batch_size.data.state import VERSION, check_position, check_same_samples
from variable_batch_size.trace.batch_trace import BatchTrace, OnEnd

TraceLike = BatchTrace | AdaptiveTrace | str | os.PathLike[str] | int | Sequence[int]


@final
class CustomSampler(Sampler[list[int]]):
    """A batch sampler that deals one rank its microbatches of every update.

    Over all ranks, the microbatches of an update hold exactly the samples of its batch. Use it as
    `DataLoader(dataset, batch_sampler=sampler)`. Each item is a list of the indices of one microbatch. A step of B
    samples takes ceil(B / (`minibatch_size` * `num_replicas`)) rounds, in each of which every rank computes a
    microbatch; their sizes differ by at most one. With fewer samples than microbatches there is one for each sample. If
    a `CustomOptimizer` measures the gradient noise, or has parameters of a batch normalization, the result depends on
    the split, which then is ceil(B / `minibatch_size`) microbatches in every world. With a fixed shape there are full
    ones and partial ones whose sizes divide `minibatch_size`, in which each sample is repeated, so that the mean loss
    over the rows is the mean over the samples. A rank without a share in a step replays one of its microbatches, which
    `CustomOptimizer` weighs with 0.

    Every microbatch must reach `optimizer.step()`, in order. To resume a training call `load_state_dict`; never skip
    microbatches.

    Args:
        dataset_size: number of samples in the dataset, or the dataset.
        trace: path of a CSV file, `BatchTrace`, batch sizes, one batch size, or a schedule `"0:128 2000:256"`; global
            batch sizes, in samples. Or an `AdaptiveTrace`, whose controller chooses them: the length of an epoch is an
            estimate then, as if the last batch size stayed.
        num_replicas: number of ranks. Default, together with `rank`: that of `torch.distributed` or PyTorch/XLA.
        rank: this rank, `0 <= rank < num_replicas`.
        minibatch_size: maximum number of rows of a microbatch.
        seed: seed of the shuffle, the same on every rank; 0 <= seed < 2**64.
        shuffle: whether the order of an epoch is a permutation drawn by (seed, epoch), or that of the dataset.
        drop_last: whether a step that exceeds the rest of an epoch becomes the first step of the next one; otherwise it
            is shortened.
        on_end: what follows the last step of the trace: "error", "stop", "hold" or "cycle". Default: what the trace
            says. "stop" ends the training there, also inside an epoch.
        fixed_shape: whether every microbatch has exactly `minibatch_size` rows, so that XLA compiles one graph.
            Default: whether the parameters of the optimizer that attaches live on a device that compiles shapes, xla or
            tpu; False before. A restored state brings its own, because the noise and normalization layers depend on it.
        equal_rounds: whether every rank must compute the same number of microbatches in every step, and no replay, as
            layers and losses that communicate in forward need. A step that breaks it raises ValueError when an epoch
            with it is read; if the trace is constant, now.
        epochs: number of epochs that will be trained, if known. A trace with `on_end="error"` that ends before them, or
            before `max_updates` or `max_samples`, raises now.
        max_updates: number of updates after which the training ends: an iteration ends there, later epochs are empty,
            and `optimizer.done` is True. Updates and samples of epochs that `set_epoch` has skipped count.
        max_samples: number of samples after which it ends; the last update is shortened to it.

    Raises:
        TypeError: if a number is not an integer, or `trace` has another type.
        ValueError: if a number is out of range, only one of `num_replicas` and `rank` is given, a batch size of the
            trace exceeds the dataset, the trace is too short, or `equal_rounds` are not possible.
        RuntimeError: if neither is given, and a launcher has started several processes without an initialized
            `torch.distributed`.

    >>> sampler = CustomSampler(6, trace=4, num_replicas=1, rank=0, minibatch_size=2, shuffle=False)
    >>> list(sampler)
    [[0, 1], [2, 3], [4, 5]]
    """

    def __init__(
        self,
        dataset_size: int | Sized,
        trace: TraceLike,
        num_replicas: int | None = None,
        rank: int | None = None,
        minibatch_size: int = 32,
        seed: int = 0,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        on_end: OnEnd | None = None,
        fixed_shape: bool | None = None,
        equal_rounds: bool = False,
        epochs: int | None = None,
        max_updates: int | None = None,
        max_samples: int | None = None,
    ) -> None:
        super().__init__()
        self.world = world_of(rank, num_replicas)
        samples = number_of_samples(dataset_size)
        self._cut_is_known, fixed_shape = fixed_shape is not None, bool(fixed_shape)
        decided = None
        if callable(trace):
            raise type_error(
                "trace must be a batch trace, or an AdaptiveTrace", trace, "put AdaptiveTrace(...) around it"
            )
        if isinstance(trace, AdaptiveTrace):
            if on_end is not None:
                raise value_error("on_end must be left out with a trace that never ends", repr(on_end), "omit it")
            rows = check_int(minibatch_size, "minibatch_size", 1)
            decided = DecidedTrace.begin(prepare(trace, samples), self.world.size, rows, fixed_shape=fixed_shape)
        plan = Plan(
            trace=decided.trace if decided is not None else BatchTrace.of(trace, on_end=on_end),
            dataset_size=samples,
            minibatch_size=minibatch_size,
            drop_last=drop_last,
            fixed_shape=fixed_shape,
            max_updates=max_updates,
            max_samples=max_samples,
        )
        if on_end == "stop" and plan.trace.steps is None and epochs is None and not plan.ends:
            remedy = "pass epochs=, max_updates= or max_samples="
            raise value_error('on_end="stop" needs a trace with a last step', "one that goes on for ever", remedy)
        self.planning = PlanState(plan, decided)
        self.seed, self.shuffle = check_int(seed, "seed", 0, 2**64 - 1, "take it modulo 2**64"), shuffle
        self.order(0)  # raises if there is no order for the dataset's size
        self.epochs = None if epochs is None else check_int(epochs, "epochs")
        self.plan.check_trace(self.epochs)
        self._clock = self.planning.clock()
        self._leader = self._clock, 0  # the clock that moves this one by its commits, and those that were followed
        self.iteration: Iteration | None = None  # the one that was read last
        self.before_reading = BeforeReading()
        self._attached = False  # whether an optimizer counts what is yielded
        self._trained: dict[int, weakref.ref[Tensor]] = {}  # the parameters of the optimizers, by id
        self._followed = False  # whether the clock of that optimizer has ever been followed
        self._spread = True  # whether no optimizer depends on how a step is split
        self._padded = False  # whether an optimizer needs equal rounds, with replays
        self.equal_rounds = equal_rounds
        self._check_rounds()

    def __getstate__(self) -> dict[str, Any]:  # of a copy, which no optimizer feeds from
        return {**vars(self), "_trained": {}}

    @property
    def clock(self) -> Clock:
        """The position of the next iteration; a commit of an optimizer moves it at the same moment."""
        self.follow()
        return self._clock

    @property
    def plan(self) -> Plan:
        """Which samples make up which update."""
        return self.planning.plan

    @property
    def trace(self) -> BatchTrace:
        """The batch trace; of a controller, the batch sizes of the updates so far.

        Raises:
            ValueError: if a controller has chosen them, and there was no update yet.
        """
        return self.planning.trace(self.clock.step)

    @property
    def max_batch_size(self) -> int:
        """The largest batch size that an update may have, in samples."""
        return self.planning.max_batch_size

    @property
    def dealing(self) -> Dealing:
        """How steps are split into microbatches and rounds."""
        return Dealing(self.world.size if self._spread and not self.plan.fixed_shape else 1, self._padded)

    @property
    def epoch(self) -> int:
        """The epoch of the next update: the following one if all updates of an epoch are committed."""
        return self.clock.due_epoch

    def set_epoch(self, epoch: int) -> None:
        """Move to the first step of a later epoch; in the epoch under way, continue after the last committed update.

        Raises:
            ValueError: if the trace ends before the epoch does.
            RuntimeError: if the last iteration was read to its end without calls of `optimizer.step()`, or all updates
                of that epoch are committed.
        """
        if check_int(epoch, "epoch", 0, remedy="count epochs from 0") > self.clock.epoch.number:
            self.check_stepped()  # otherwise the next iteration yields again what did not reach step()
        skipped, self.iteration = self.clock.set_epoch(epoch), None  # it was checked
        self.planning.skip_to(self.clock.step if skipped.updates else None)

    def __iter__(self) -> Iteration:
        """Return an iterator over the rest of this epoch, from the last committed update on."""
        return Iteration(self, self.clock.position)

    def __len__(self) -> int:
        """Return how many microbatches the iteration under way yields on this rank, or else the next one.

        At the end of an epoch, also of one whose empty rest is still to be read after a restore, it is that over the
        epoch that follows; 0 if none does. With workers, a loader has read the end before the loop is there: the last
        `step()` of an epoch then ends it.
        """
        clock, iteration = self.clock, self.iteration
        epoch, step, computed = clock.epoch, clock.step, 0
        if iteration is not None and iteration.under_way and iteration.start.epoch == epoch.number:
            step, computed = iteration.start.step, iteration.first_round
        elif clock.finished:
            try:
                epoch = self.plan.epoch(epoch.number + 1)
            except ValueError:  # the trace ends
                return 0
            step = epoch.first_step
        return self.plan.count(epoch, step, self.world, self.dealing) - computed

    def attach(
        self, *, spread: bool = True, compiles_shapes: bool = False, equal_rounds: bool = False, padded: bool = False
    ) -> Clock:
        """Return a clock for an optimizer that will call `step()` for every microbatch.

        Args:
            spread: whether steps may be split further, so that no rank is idle.
            compiles_shapes: whether the device of its parameters does, so that shapes are fixed unless told otherwise.
            equal_rounds: whether it needs them, see the class.
            padded: whether it needs them by replays.

        Raises:
            ValueError: if the trace is constant, and `equal_rounds` are not possible.
        """
        if compiles_shapes and not self._cut_is_known:
            self.planning.fix_shape(self.world.size)
        self._cut_is_known = True
        self._attached = True
        self._spread, self._padded = self._spread and spread, self._padded or padded
        self.equal_rounds |= equal_rounds
        self._check_rounds()
        self.iteration = None  # microbatches that were read before are not for this optimizer
        clock = self.planning.clock()
        clock.follow(self.clock)
        return clock

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
            self.planning.plan = leader.plan
            self._clock.follow(leader)
            self._followed, self._leader = True, (leader, leader.commits)

    def fingerprint(self) -> dict[str, Any]:
        """Return what the samplers of all ranks have in common, besides the cut into microbatches."""
        return {**self._order_of_samples(), "trace": self.plan.trace.fingerprint}

    def state_of(self, clock: Clock) -> dict[str, Any]:
        """Return the position of a clock, what must be the same for it to mean the same samples, and the cut.

        All are plain numbers and strings, without rank, world or prefetched items. The past of the trace must be the
        same; its future may change.
        """
        past = {"past": self.plan.past(clock.step), "fixed_shape": self.plan.fixed_shape}
        ended = {"end_pending": clock.end_pending and self.clock.end_pending}  # it may have been read since
        own = {**clock.state_dict(), **ended, **self.fingerprint(), **past, **self.planning.state()}
        return {"version": VERSION, **own}

    def check_samples(self, state: dict[str, Any]) -> None:
        """Check that a state was saved with the same samples up to its position, and tell if later ones differ.

        Raises:
            ValueError: if not, naming each difference.
        """
        check_same_samples(state, self._order_of_samples(), self.planning.past(state))
        if self.planning.decided is None and self.plan.trace.fingerprint != state["trace"] and self.world.rank == 0:
            warnings.warn(
                f"The batch trace differs from that of the saved run after update {state['step']} (allowed)",
                UserWarning,
                stacklevel=3,
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the committed position and what determines its samples: plain numbers, without rank or world."""
        return self.state_of(self.clock)

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Move to a saved position, unless an optimizer's clock already defines the position.

        The past of the trace must be that of the saved run; its future may change, which a UserWarning tells.

        Raises:
            ValueError: if the state was saved with another dataset size, seed or past of the trace, unless `strict` is
                False; or if there is no such position.
        """
        if not self._followed:
            check_position(state_dict)
            if strict:
                self.check_samples(state_dict)
            self.adopt(self.resumed(state_dict))
        self.iteration = None

    def resumed(self, state: dict[str, Any]) -> Resumed:
        """Return a clock at a saved position, with the plan that leads on from there.

        Raises:
            ValueError: if there is no such position, or the trace ends before the training does.
        """
        resumed = self.planning.resumed(state, self.world.size)
        if resumed.decided is not None and "growth" in state and self.world.rank == 0:
            warn_if_changed(resumed.decided.adaptive, state["growth"])
        resumed.clock.plan.check_trace(self.epochs)
        return resumed

    def adopt(self, resumed: Resumed, *, followed: bool = False) -> None:
        """Take the position and the plan of a saved state; `followed`: an optimizer counts from there."""
        self._followed, self._cut_is_known = self._followed or followed, True
        self.planning.adopt(resumed)
        self.clock.follow(resumed.clock)

    def check_readable(self) -> None:
        """Check that an iteration may be read now.

        Raises:
            RuntimeError: if the last iteration was read to its end without calls of `optimizer.step()`, or all updates
                of the epoch are committed.
        """
        last = self.iteration
        if last is not None and last.start.epoch == self.clock.epoch.number:
            self.check_stepped()
        read_twice = last is not None and last.counts.exhausted and last.start == self.clock.position
        if self.clock.finished and (self.clock.finished_now or (read_twice and last is not None and not last.resumed)):
            raise RuntimeError(
                f"an epoch can be iterated until its last update, but all updates of epoch {self.epoch - 1} are "
                f"committed; call set_epoch({self.epoch}) on the sampler and on the optimizer before the next iteration"
            )

    @property
    def reads_epoch(self) -> bool:
        """Whether a loop has begun to read the epoch of the position, or had when that was saved."""
        here, last = self.clock.position, self.iteration
        return self.before_reading.waits_at(here) or (last is not None and last.start.epoch == here.epoch)

    def begin_reading(self) -> list[Tensor]:
        """Set the random states that wait for this position; return the gradients that there are."""
        self.before_reading.begin(self.clock.position)
        return [one.grad for known in self._trained.values() if (one := known()) is not None and one.grad is not None]

    def end_reading(self) -> None:
        """Note that what was left of an epoch was read: of one that is over, the end is not pending any more."""
        if self.clock.finished:
            self.clock.end()

    def keep_random_states(self) -> None:
        """Undo what starting the workers of a loader, which the saved run had, draws in the epoch after a restore."""
        if self.clock.just_loaded:
            self.before_reading.keep(self.clock.position)

    def order(self, epoch: int) -> Callable[[IntArray], IntArray]:
        """Return the map from positions in an epoch's order to indices in the dataset, for arrays of any shape."""
        return order(self.plan.dataset_size, self.seed, epoch, shuffle=self.shuffle)

    def _order_of_samples(self) -> dict[str, Any]:
        own = {"seed": self.seed, "shuffle": self.shuffle, "drop_last": self.plan.drop_last}
        return {"dataset_size": self.plan.dataset_size, **own}

    def _check_rounds(self) -> None:
        if self.equal_rounds and self.planning.decided is None:
            check_constant(self.plan, self.world, self.dealing)

    def check_stepped(self) -> None:
        """Raise RuntimeError if the last loop, which has ended, has not trained what it read."""
        if self._may_be_left(last := self.iteration) and last.counts.incomplete:
            self.iteration = None
            raise last.left_over()

    def check_left_over(self) -> None:
        """Raise RuntimeError if a microbatch of a loop that has certainly ended did not reach `optimizer.step()`."""
        if self._may_be_left(last := self.iteration) and last.counts.left_over:
            raise last.left_over()

    def _may_be_left(self, last: Iteration | None) -> TypeGuard[Iteration]:
        return last is not None and last.use is not Use.STALE and self._attached and not self.clock.finished
