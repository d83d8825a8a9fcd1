"""One pass over the rest of an epoch, as an iterator over lists of indices that also checks how it is used."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol, final

from variable_batch_size._validation import IntArray
from variable_batch_size.data.clock import Position
from variable_batch_size.data.deal import Deal
from variable_batch_size.data.plan import Plan
from variable_batch_size.world import World

INDICES_PER_CHUNK = 8192  # large enough for NumPy to be fast, small enough for the first microbatch to be ready soon


class Source(Protocol):
    """What an iteration needs of its sampler."""

    plan: Plan
    world: World
    iteration: Iteration | None

    def order(self, epoch: int) -> Callable[[IntArray], IntArray]:
        """Return the map from positions in an epoch's order to indices in the dataset."""

    def check_readable(self) -> None:
        """Raise RuntimeError if continuing to iterate would be wrong."""

    def begin_reading(self) -> None:
        """Prepare for the first read of an iteration."""


@final
class Iteration:
    """One pass over the rest of an epoch, as an iterator over lists of indices.

    It counts the microbatches that it `yielded`; the optimizer counts in `stepped` those that reached `step()`. This
    detects loops that do not feed the optimizer. Neither moves a clock: prefetched microbatches do not count.

    Errors are raised at the first read and not by `iter()`: loaders call `iter()` more often than they read, and the
    device loader of torch_xla, which does so in a thread, would hang.

    Attributes:
        start: position of the first step.
        first_round: round of that step at which it starts.
        yielded: number of microbatches it has yielded.
        stepped: number of microbatches that reached `optimizer.step()`.
        exhausted: whether it has reached the end of the epoch.
        resumed: whether its loader may have resumed from a snapshot before the optimizer's position.
        stale: whether its next microbatch is not the one that the optimizer expects.
    """

    def __init__(self, source: Source, start: Position) -> None:
        self.plan, self.world = source.plan, source.world
        self.yielded, self.stepped = 0, 0
        self.exhausted = False
        self.resumed = False
        self.stale = False
        self._source = source
        self._reads = 0  # calls of __next__, including those that met the end
        self._prefetched: int | None = None  # reads that had not reached step() when the first one did
        self._reader = 0  # the thread of the last read
        self._start_at(start, 0)

    def __iter__(self) -> Iteration:
        return self

    def __next__(self) -> list[int]:
        if self._reads == 0:
            self._source.check_readable()
            self._source.begin_reading()
        self._source.iteration, self._reader = self, threading.get_ident()
        self._reads += 1
        if self._row == len(self._rows):
            self._refill()
        row = self._rows[self._row]
        self._row += 1
        self.yielded += 1
        return row

    def count_step(self, received: int) -> int:
        """Count a microbatch that reached `step()` after `received` others; return how many were skipped before it.

        Loaders prefetch a constant number, so the number of reads ahead grows only if the loop skips microbatches. A
        loader that reads in a thread of its own may be any number ahead; then nothing is known and the result is 0.
        """
        self.stepped = max(self.stepped, received + 1)
        if self._reader != threading.get_ident():
            return 0
        ahead = self._reads - received
        self._prefetched = ahead if self._prefetched is None else self._prefetched
        return max(0, ahead - self._prefetched)

    @property
    def incomplete(self) -> bool:
        """Whether the loop read it to the end but did not call `step()` for all of it, as far as that is known."""
        if not self.exhausted or 0 < self.stepped == self.yielded:
            return False
        if self._prefetched is None:
            return 2 * self.stepped <= self.yielded
        return self._reads - self._prefetched > self.stepped  # a loop that breaks may have read one more

    def _start_at(self, position: Position, round_index: int) -> None:
        """Let the next microbatch be that of a round of a step."""
        self.start, self.first_round = position, round_index
        self._epoch = self.plan.epoch(position.epoch)
        self._order = self._source.order(position.epoch)
        self._rows: list[list[int]] = []
        self._row = 0
        self._next_step = position.step  # the first step that is in no deal yet
        self._deal: Deal | None = None
        self._converted = round_index  # microbatches of the deal that were converted to rows

    def _refill(self) -> None:
        if self._deal is None or self._converted == len(self._deal):
            self._deal = self._next_deal()
        end = min(len(self._deal), self._converted + max(1, INDICES_PER_CHUNK // self.plan.minibatch_size))
        start, size = self._deal.microbatches(*self._deal.locate(self._converted, end))  # (microbatches,) each
        rows = self._order(self._deal.positions(start, size)).tolist()  # (microbatches, minibatch_size)
        self._rows = rows if self.plan.fixed_shape else [row[:n] for row, n in zip(rows, size.tolist(), strict=True)]
        self._row, self._converted = 0, end

    def _next_deal(self) -> Deal:
        if self._next_step == self._epoch.end_step:
            self.exhausted = True
            raise StopIteration
        deal = self.plan.deal(self._epoch, self._next_step, self.world)
        self._next_step += len(deal.ends)
        self._converted = self._converted if self._deal is None else 0
        return deal

    def state_dict(self) -> dict[str, int]:
        """Return which microbatch comes next, for loaders that save the position of their iterator."""
        step, round_index = self._next_step, 0
        number = self._converted - len(self._rows) + self._row
        if self._deal is None:
            round_index = self._converted
        elif number < len(self._deal):
            (index,), (round_index,) = (array.tolist() for array in self._deal.locate(number, number + 1))
            step = self._deal.first_step + index
        return {"epoch": self._epoch.number, "step": step, "round": round_index, **self._split()}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Resume at a saved position.

        Raises:
            ValueError: if the position is within a step that is split differently here.
        """
        saved = {key: state_dict[key] for key in self._split()}
        if state_dict["round"] and saved != self._split():
            raise ValueError(
                f"a loader saved within a step can resume only with the same split, but it was {saved} and is "
                f"{self._split()}; restore these arguments, or save when optimizer.step() has returned True, with "
                f"snapshot_every_n_steps=1"
            )
        self.resumed = saved == self._split()
        self._start_at(Position(state_dict["epoch"], state_dict["step"]), state_dict["round"])

    def _split(self) -> dict[str, int]:
        """Return what determines the microbatches of this rank within a step."""
        world, plan = self.world, self.plan
        split = {"minibatch_size": plan.minibatch_size, "fixed_shape": plan.fixed_shape}
        return {**split, "num_replicas": world.size, "rank": world.rank}
