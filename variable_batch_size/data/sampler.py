"""A plan as the `batch_sampler` of a `torch.utils.data.DataLoader`."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence, Sized
from typing import Any, final

from torch.utils.data import Sampler

from variable_batch_size._validation import IntArray, check_int
from variable_batch_size.backend import current_world
from variable_batch_size.data.clock import Clock, Position
from variable_batch_size.data.plan import Deal, Plan
from variable_batch_size.data.shuffle import order
from variable_batch_size.trace.batch_trace import BatchTrace, OnEnd
from variable_batch_size.world import World

TraceLike = BatchTrace | str | os.PathLike[str] | int | Sequence[int]
INDICES_AT_ONCE = 8192  # long enough for numpy to be fast, short enough for the first microbatch to come at once


@final
class CustomSampler(Sampler[list[int]]):
    """Deals one rank its microbatches: for each update those that make up, over all ranks, exactly its batch.

    Use it as `DataLoader(dataset, batch_sampler=sampler)`. Each item is the list of the indices of one microbatch,
    `minibatch_size` of them: a step of B samples is cut into full microbatches and into pieces whose sizes divide
    `minibatch_size`, in which each sample is repeated, so that the mean loss over the rows is the mean over the
    samples. A rank with no share in a step replays one of its microbatches, which `CustomOptimizer` counts as zero.
    Every microbatch has to come to its `step()`, in order; a run goes on by `load_state_dict`, never by skipping some.

    Args:
        dataset_size: samples in the dataset, or the dataset.
        trace: path of a CSV, `BatchTrace`, sizes, one size, or a schedule `"0:128 2000:256"`: global batch sizes in
            samples.
        num_replicas: ranks in the world; with `rank`, by default what `torch.distributed` or PyTorch/XLA say.
        rank: this rank, `0 <= rank < num_replicas`.
        minibatch_size: rows of a microbatch.
        seed: of the shuffle, the same on every rank; 0 <= seed < 2**64.
        shuffle: whether an epoch's order is a permutation drawn by (seed, epoch), or that of the dataset.
        drop_last: whether a step that does not fit in an epoch opens the next one, instead of being shortened.
        on_end: what follows the trace's last step: "error", "hold" or "cycle"; by default what the trace says.
        fixed_shape: whether every microbatch has exactly `minibatch_size` rows; otherwise the rest of a step is one
            smaller microbatch, which is cheaper where shapes cost no compilation.
        epochs: how many epochs will be trained, if known: then a trace that is too short is refused at once.

    Raises:
        ValueError: where the arguments do not fit together; the text says what to do.
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
        fixed_shape: bool = True,
        epochs: int | None = None,
    ) -> None:
        super().__init__()
        self.world = _world(rank, num_replicas)
        self.plan = Plan(
            trace=BatchTrace.of(trace, on_end=on_end),
            dataset_size=len(dataset_size) if isinstance(dataset_size, Sized) else dataset_size,
            minibatch_size=minibatch_size,
            drop_last=drop_last,
            fixed_shape=fixed_shape,
        )
        self.seed, self.shuffle = check_int(seed, "seed", 0, 2**64 - 1, "take it modulo 2**64"), shuffle
        self.order(0)  # refuses a seed or a dataset size that has no order
        if epochs is not None:
            self.plan.epoch(check_int(epochs, "epochs", 1) - 1)
        self.clock = Clock(self.plan)
        self.iteration: Iteration | None = None  # the one that was read last
        self._attached = False  # whether an optimizer counts what is yielded
        self._followed = False  # whether that optimizer's clock has been anywhere

    @property
    def epoch(self) -> int:
        """The epoch that an iteration begun now belongs to."""
        return self.clock.epoch.number

    def set_epoch(self, epoch: int) -> None:
        """Go to the first step of an epoch, or, in the epoch that a state was restored in, to where it stood.

        Raises:
            ValueError: when the trace ends before the epoch does.
            RuntimeError: when the last iteration was read to its end without `optimizer.step()`.
        """
        self._check_stepped()
        self.clock.set_epoch(epoch)

    def __iter__(self) -> Iteration:
        """The microbatches of the rest of this epoch, from the last committed update on."""
        return Iteration(self, self.clock.position)

    def __len__(self) -> int:
        """How many microbatches an iteration begun now yields on this rank."""
        return self.plan.count(self.clock.epoch, self.clock.step, self.world)

    def attach(self) -> Clock:
        """A clock for an optimizer that will call `step()` for every microbatch."""
        self._attached = True
        self.iteration = None  # what was read before was only looked at
        clock = Clock(self.plan)
        clock.follow(self.clock)
        return clock

    def follow(self, clock: Clock) -> None:
        """Stand where an optimizer's clock stands: from now on it says what was committed."""
        self._followed = True
        self.clock.follow(clock)

    def fingerprint(self) -> dict[str, Any]:
        """What has to be the same where a saved position is to mean the same samples."""
        return {
            "dataset_size": self.plan.dataset_size,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "drop_last": self.plan.drop_last,
            "trace": self.plan.trace.fingerprint,
        }

    def check_fingerprint(self, state: dict[str, Any]) -> None:
        """Refuse a state that was made for other samples.

        Raises:
            ValueError: naming each difference.
        """
        own = self.fingerprint()
        different = [f"{key} was {state.get(key)!r} and is {own[key]!r}" for key in own if state.get(key) != own[key]]
        if different:
            raise ValueError(
                f"a state can go on only with the samples it was saved with, but {', '.join(different)}; restore what "
                f"it was, or pass strict=False to go on all the same"
            )

    def state_dict(self) -> dict[str, Any]:
        """The committed position and the fingerprint: a few numbers without rank or world, whatever was prefetched."""
        return {**self.clock.state_dict(), **self.fingerprint()}

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Go to a saved position, unless an optimizer's clock says already where the training stands.

        Raises:
            ValueError: when the state was made for another dataset size, seed or trace, unless `strict` is False.
        """
        if strict:
            self.check_fingerprint(state_dict)
        if not self._followed:
            self.clock.load_state_dict(state_dict)
        self.iteration = None

    def check_readable(self) -> None:
        """Refuse to read on where the loop has made a mistake.

        Raises:
            RuntimeError: when the last iteration was read to its end without `optimizer.step()`, or the epoch is over.
        """
        last = self.iteration
        if last is not None and last.start.epoch == self.epoch:
            self._check_stepped()
        read_out = last is not None and last.exhausted and last.start == self.clock.position and not last.resumed
        if self.clock.finished and (self.clock.ran_out or read_out):
            raise RuntimeError(
                f"an epoch can be iterated until its last update, but epoch {self.epoch} has had all of them; call "
                f"set_epoch({self.epoch + 1}) on the sampler and on the optimizer before iterating again"
            )

    def order(self, epoch: int) -> Callable[[IntArray], IntArray]:
        """Position in an epoch's order -> index in the dataset, for arrays."""
        return order(self.plan.dataset_size, self.seed, epoch, shuffle=self.shuffle)

    def _check_stepped(self) -> None:
        last = self.iteration
        if last is None or last.void or not last.neglected or not self._attached or self.clock.finished:
            return
        self.iteration = None
        raise RuntimeError(
            f"every microbatch of an epoch must come to optimizer.step(), but epoch {self.epoch} was read from "
            f"{last.start} to the end, {last.yielded} microbatches, with {last.stepped} calls of step(); call it once "
            f"a microbatch, and restore a loader and the optimizer together (to leave an epoch early, call "
            f"optimizer.discard_step(); to look at the data, use another sampler)"
        )


@final
class Iteration:
    """One pass over the rest of an epoch, as an iterator over lists of indices.

    It counts what it `yielded`, and the optimizer counts in `stepped` what came back: so the two can tell a loop that
    feeds the optimizer from one that does not. Neither moves a clock: what was prefetched has not happened.

    What forbids it is said at the first read: loaders call `iter` more often than they read, and torch_xla's, which
    does so in a thread, would hang.
    """

    def __init__(self, sampler: CustomSampler, start: Position) -> None:
        self.plan, self.world = sampler.plan, sampler.world
        self.yielded, self.stepped = 0, 0
        self.exhausted = False
        self.resumed = False  # whether its loader may have read on from an older snapshot
        self.void = False  # whether what it yields next is not what is due
        self._sampler = sampler
        self._reads = 0  # the ones that met the end among them
        self._ahead: int | None = None  # how many of them had not come when the first one came
        self._reader = 0  # the thread that read last
        self._go_to(start, 0)

    def __iter__(self) -> Iteration:
        return self

    def __next__(self) -> list[int]:
        if self._reads == 0:
            self._sampler.check_readable()
        self._sampler.iteration, self._reader = self, threading.get_ident()
        self._reads += 1
        if self._row == len(self._rows):
            self._refill()
        row = self._rows[self._row]
        self._row += 1
        self.yielded += 1
        return row

    def arrive(self, came: int) -> int:
        """Count a microbatch as come to the optimizer after `came` others; how many were left out before it.

        Loaders prefetch a constant number, so what is read ahead grows only where the loop leaves microbatches out.
        A loader that reads in a thread of its own is as far ahead as it likes, and nothing is known.
        """
        self.stepped = max(self.stepped, came + 1)
        if self._reader != threading.get_ident():
            return 0
        ahead = self._reads - came
        self._ahead = ahead if self._ahead is None else self._ahead
        return max(0, ahead - self._ahead)

    @property
    def neglected(self) -> bool:
        """Whether the loop saw its end and did not bring all of it to the optimizer, as far as that is known."""
        if not self.exhausted or 0 < self.stepped == self.yielded:
            return False
        if self._ahead is None:
            return 2 * self.stepped <= self.yielded
        return self._reads - self._ahead > self.stepped  # a loop that breaks off may have read one more

    def _go_to(self, position: Position, turn: int) -> None:
        """Be about to yield microbatch `turn` of a step."""
        self.start, self.first_turn = position, turn
        self._epoch = self.plan.epoch(position.epoch)
        self._order = self._sampler.order(position.epoch)
        self._rows: list[list[int]] = []
        self._row = 0
        self._next_step = position.step  # the first step that is in no deal yet
        self._deal: Deal | None = None
        self._dealt = turn  # microbatches of the deal that were turned into rows

    def _refill(self) -> None:
        if self._deal is None or self._dealt == len(self._deal):
            self._deal = self._next_deal()
        end = min(len(self._deal), self._dealt + max(1, INDICES_AT_ONCE // self.plan.minibatch_size))
        start, size = self._deal.microbatches(*self._deal.turns(self._dealt, end))
        rows = self._order(self._deal.positions(start, size)).tolist()
        self._rows = rows if self.plan.fixed_shape else [row[:n] for row, n in zip(rows, size.tolist(), strict=True)]
        self._row, self._dealt = 0, end

    def _next_deal(self) -> Deal:
        if self._next_step == self._epoch.end_step:
            self.exhausted = True
            raise StopIteration
        deal = self.plan.deal(self._epoch, self._next_step, self.world)
        self._next_step += len(deal.ends)
        self._dealt = self._dealt if self._deal is None else 0
        return deal

    def state_dict(self) -> dict[str, int]:
        """Which microbatch comes next, for loaders that save where their iterator stands."""
        step, turn = self._next_step, 0
        number = self._dealt - len(self._rows) + self._row
        if self._deal is None:
            turn = self._dealt
        elif number < len(self._deal):
            (index,), (turn,) = (array.tolist() for array in self._deal.turns(number, number + 1))
            step = self._deal.first_step + index
        return {"epoch": self._epoch.number, "step": step, "turn": turn, **self._cut()}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on where an iterator stood.

        Raises:
            ValueError: when it stood inside a step that is cut in another way here.
        """
        saved = {key: state_dict[key] for key in self._cut()}
        if state_dict["turn"] and saved != self._cut():
            raise ValueError(
                f"a loader that was saved inside a step can go on only with the same cut, but it was {saved} and is "
                f"{self._cut()}; restore what it was, or save when optimizer.step() has returned True, with "
                f"snapshot_every_n_steps=1"
            )
        self.resumed = saved == self._cut()
        self._go_to(Position(state_dict["epoch"], state_dict["step"]), state_dict["turn"])

    def _cut(self) -> dict[str, int]:
        world, plan = self.world, self.plan
        cut = {"minibatch_size": plan.minibatch_size, "fixed_shape": plan.fixed_shape}
        return {**cut, "num_replicas": world.size, "rank": world.rank}


def _world(rank: int | None, num_replicas: int | None) -> World:
    if rank is None and num_replicas is None:
        return current_world()
    if rank is None or num_replicas is None:
        raise ValueError(
            f"num_replicas and rank must be passed together, got num_replicas={num_replicas} and rank={rank}; pass "
            f"both, or neither to take them from torch.distributed or PyTorch/XLA"
        )
    return World(rank, num_replicas)
