"""One pass over the rest of an epoch, as an iterator over lists of indices that also checks how it is used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Protocol, final

from torch import Tensor

from variable_batch_size._validation import MAX_INT, IntArray
from variable_batch_size.data.clock import Clock, Position
from variable_batch_size.data.deal import Deal, Dealing
from variable_batch_size.data.equal_rounds import check_equal_rounds
from variable_batch_size.data.planning import AbandonedError, PlanState
from variable_batch_size.data.read_ahead import ReadAhead
from variable_batch_size.world import World

INDICES_PER_CHUNK = 8192  # large enough for NumPy to be fast, small enough for the first microbatch to be ready soon


class Source(Protocol):
    """What an iteration needs of its sampler."""

    world: World
    planning: PlanState
    iteration: Iteration | None

    @property
    def clock(self) -> Clock:
        """The position of the sampler."""

    @property
    def dealing(self) -> Dealing:
        """How steps are split into microbatches and rounds."""

    @property
    def equal_rounds(self) -> bool:
        """Whether every rank must compute the same number of microbatches in every step, and no replay."""

    def order(self, epoch: int) -> Callable[[IntArray], IntArray]:
        """Return the map from positions in an epoch's order to indices in the dataset."""

    def check_readable(self) -> None:
        """Raise RuntimeError if continuing to iterate would be wrong."""

    def begin_reading(self) -> list[Tensor]:
        """Prepare for the first read of an iteration, and return the gradients that there are."""

    def end_reading(self) -> None:
        """Note that an iteration was read to its end."""


@final
class Use(Enum):
    """What an optimizer has made of an iteration."""

    NEW = auto()  # no microbatch of it has reached step()
    CURRENT = auto()  # its next microbatch is the one that the optimizer expects
    STALE = auto()  # its next microbatch is not: the optimizer has moved since


@final
class Iteration:
    """One pass over the rest of an epoch, as an iterator over lists of indices.

    It does not move a clock: prefetched microbatches do not count. `counts` compares what is read with what reaches
    `optimizer.step()`, which finds loops that do not feed the optimizer.

    Errors are raised at the first read and not by `iter()`: loaders call `iter()` more often than they read, and the
    device loader of torch_xla, which does so in a thread, would hang.

    Attributes:
        start: position of the first step.
        first_round: round of that step at which it starts.
        counts: what was read, and what reached `optimizer.step()`.
        dealing: how steps are split into microbatches and rounds.
        resumed: whether its loader may have resumed from a snapshot before the optimizer's position.
        use: what the optimizer has made of it.
        gradients: those that there were when it was first read, of which none may be that of a microbatch.
    """

    def __init__(self, source: Source, start: Position) -> None:
        self.plan, self.world, self.dealing = source.planning.plan, source.world, source.dealing
        self.counts = ReadAhead()
        self.resumed = False
        self.use = Use.NEW
        self.gradients: Sequence[Tensor] = ()
        self._source = source
        self._start_at(start, 0)

    @property
    def under_way(self) -> bool:
        """Whether a loop over it has begun and, as far as that is known, not ended."""
        return self.use is not Use.STALE and not (self.counts.exhausted and self._source.clock.finished)

    def __iter__(self) -> Iteration:
        return self

    def __next__(self) -> list[int]:
        if not self.counts.begun:
            self._source.check_readable()
            self.gradients = self._source.begin_reading()
        self._source.iteration = self
        self.counts.count_read()
        if self._row == len(self._rows):
            self._refill()
        row = self._rows[self._row]
        self._row += 1
        self.counts.yielded += 1
        return row

    def left_over(self) -> RuntimeError:
        """Return the error for microbatches that were read and did not reach `optimizer.step()`."""
        return RuntimeError(
            f"every microbatch of an epoch must reach optimizer.step(), but epoch {self.start.epoch} was read from "
            f"{self.start} to the end, {self.counts.yielded} microbatches, with {self.counts.stepped} calls of step(); "
            f"call it once per microbatch, and restore loader and optimizer together (to leave an epoch early, call "
            f"optimizer.discard_step(); to look at the data, use another sampler)"
        )

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
        end_step, planning = MAX_INT, self._source.planning
        if planning.decided is not None:
            ahead = self.counts.yielded - self.counts.stepped + 1
            try:
                known = planning.known_plan(
                    self._epoch.number, self._next_step, ahead, abandoned=lambda: self.use is Use.STALE
                )
            except AbandonedError:
                raise StopIteration from None
            self.plan, self._epoch, end_step = known
        if self._next_step == self._epoch.end_step:
            if not (self.resumed and self.counts.stepped == 0 and self._next_epoch_is_due):
                self.counts.exhausted = True
                self._source.end_reading()
                raise StopIteration
            self._start_at(self._source.clock.position, 0)
            self.counts = ReadAhead()
            self.counts.count_read()
        if self._source.equal_rounds and (self._deal is None or planning.decided is not None):  # else all were checked
            check_equal_rounds(self.plan, self._epoch, self._next_step, self.world, self.dealing, end_step)
        deal = self.plan.deal(self._epoch, self._next_step, self.world, self.dealing, end_step)
        self._next_step += len(deal.ends)
        self._converted = self._converted if self._deal is None else 0
        return deal

    @property
    def _next_epoch_is_due(self) -> bool:
        ends = self.plan.ends_with(self._epoch)  # the next epoch would have no step
        return not ends and self._source.clock.position == (self._epoch.number + 1, self._epoch.end_step)

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

        A loader that was saved after the last update of an epoch may not have met its end. If the next epoch is due,
        the iteration continues there: at once, or when it has read on to that end.

        Raises:
            ValueError: if the position is within a step that is split differently here, or before what the resumed
                training knows.
        """
        own = self._split()
        saved = {**Dealing()._asdict(), **state_dict}  # older states lack it
        saved = {key: saved[key] for key in own}
        if state_dict["round"] and saved != own:
            raise ValueError(
                f"a loader saved within a step can resume only with the same split, but it was {saved} and is "
                f"{own}; restore these arguments, or save when optimizer.step() has returned True, with "
                f"snapshot_every_n_steps=1"
            )
        self.resumed = saved == own
        position = Position(state_dict["epoch"], state_dict["step"])
        here = self._source.clock.position
        if self.resumed and position == (self.plan.first_epoch - 1, here.step) and not state_dict["round"]:
            position = here  # the loader was saved when the epoch before had ended
        if position.epoch < self.plan.first_epoch or position.step < self.plan.epoch(position.epoch).known_from:
            raise ValueError(
                f"loader and optimizer must be at the same update, but the loader was saved at {position} and the "
                f"optimizer is at {here}; restore both from the same checkpoint"
            )
        self._start_at(position, state_dict["round"])
        if self._next_step == self._epoch.end_step and self._next_epoch_is_due:
            self._start_at(self._source.clock.position, 0)

    def _split(self) -> dict[str, int]:
        """Return what determines the microbatches of this rank within a step."""
        world, plan = self.world, self.plan
        split = {"minibatch_size": plan.minibatch_size, "fixed_shape": plan.fixed_shape}
        return {**split, **self.dealing._asdict(), "num_replicas": world.size, "rank": world.rank}
