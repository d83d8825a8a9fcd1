"""One pass over the rest of an epoch, as an iterator over lists of indices that also checks how it is used."""

from __future__ import annotations

from typing import Any, final

from variable_batch_size._validation import MAX_INT
from variable_batch_size.data.clock import Position
from variable_batch_size.data.deal import Deal, Dealing
from variable_batch_size.data.equal_rounds import check_equal_rounds
from variable_batch_size.data.feed import Feed
from variable_batch_size.data.planning import AbandonedError
from variable_batch_size.data.reading import ReadAhead, Reading, Use

INDICES_PER_CHUNK = 8192  # large enough for NumPy to be fast, small enough for the first microbatch to be ready soon


@final
class Iteration:
    """One pass over the rest of an epoch, as an iterator over lists of indices.

    It does not move a clock: prefetched microbatches do not count. `reading` compares what is read with what reaches
    `optimizer.step()`, which finds loops that do not feed the optimizer.

    Errors are raised at the first read and not by `iter()`: loaders call `iter()` more often than they read, and the
    device loader of torch_xla, which does so in a thread, would hang.

    Attributes:
        reading: what was read, and what reached `optimizer.step()`.
    """

    def __init__(self, feed: Feed) -> None:
        self.plan, self.world = feed.plans.plan, feed.world
        self.reading = Reading(feed.dealing, feed.clock.position)
        self._feed = feed
        self._start_at(feed.clock.position, 0)

    def __iter__(self) -> Iteration:
        return self

    def __next__(self) -> list[int]:
        if not self.reading.counts.begun:
            self._feed.begin_reading(self.reading)
        self._feed.reading = self.reading
        self.reading.counts.count_read()
        if self._row == len(self._rows):
            self._refill()
        row = self._rows[self._row]
        self._row += 1
        self.reading.counts.yielded += 1
        return row

    def _start_at(self, position: Position, round_index: int) -> None:
        """Let the next microbatch be that of a round of a step."""
        self.reading.start, self.reading.first_round = position, round_index
        self._epoch = self.plan.epoch(position.epoch)
        self._order = self._feed.order(position.epoch)
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
        end_step, plans = MAX_INT, self._feed.plans
        if plans.decided is not None:
            ahead = self.reading.counts.yielded - self.reading.counts.stepped + 1
            try:
                known = plans.known_plan(
                    self._epoch.number, self._next_step, ahead, abandoned=lambda: self.reading.use is Use.STALE
                )
            except AbandonedError:
                raise StopIteration from None
            self.plan, self._epoch, end_step = known
        if self._next_step == self._epoch.end_step:
            if not (self.reading.resumed and self.reading.counts.stepped == 0 and self._next_epoch_is_due):
                self.reading.counts.exhausted = True
                self._feed.end_reading()
                raise StopIteration
            self._start_at(self._feed.clock.position, 0)
            self.reading.counts = ReadAhead()
            self.reading.counts.count_read()
        if self._feed.equal_rounds and (self._deal is None or plans.decided is not None):  # else all were checked
            check_equal_rounds(self.plan, self._epoch, self._next_step, self.world, self.reading.dealing, end_step)
        deal = self.plan.deal(self._epoch, self._next_step, self.world, self.reading.dealing, end_step)
        self._next_step += len(deal.ends)
        self._converted = self._converted if self._deal is None else 0
        return deal

    @property
    def _next_epoch_is_due(self) -> bool:
        ends = self.plan.ends_with(self._epoch)  # the next epoch would have no step
        return not ends and self._feed.clock.position == (self._epoch.number + 1, self._epoch.end_step)

    def state_dict(self) -> dict[str, Any]:
        """Return which microbatch comes next, for loaders that save the position of their iterator."""
        step, round_index = self._next_step, 0
        number = self._converted - len(self._rows) + self._row
        if self._deal is None:
            round_index = self._converted
        elif number < len(self._deal):
            (index,), (round_index,) = (array.tolist() for array in self._deal.locate(number, number + 1))
            step = self._deal.first_step + index
        return {"epoch": self._epoch.number, "step": step, "round": round_index, **self._split()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume at a saved position.

        A loader that was saved after the last update of an epoch may not have met its end. If the next epoch is due,
        the iteration continues there: at once, or when it has read on to that end.

        Raises:
            ValueError: if the position is within a step that is split differently here, or before what the resumed
                training knows.
        """
        own = self._split()
        saved = {**Dealing()._asdict(), "speeds": [], **state_dict}  # older states lack it
        saved = {key: saved[key] for key in own}
        if state_dict["round"] and saved != own:
            raise ValueError(
                f"a loader saved within a step can resume only with the same split, but it was {saved} and is "
                f"{own}; restore these arguments, or save when optimizer.step() has returned True, with "
                f"snapshot_every_n_steps=1"
            )
        self.reading.resumed = saved == own
        position = Position(state_dict["epoch"], state_dict["step"])
        here = self._feed.clock.position
        if self.reading.resumed and position == (self.plan.first_epoch - 1, here.step) and not state_dict["round"]:
            position = here  # the loader was saved when the epoch before had ended
        if position.epoch < self.plan.first_epoch or position.step < self.plan.epoch(position.epoch).known_from:
            raise ValueError(
                f"loader and optimizer must be at the same update, but the loader was saved at {position} and the "
                f"optimizer is at {here}; restore both from the same checkpoint"
            )
        self._start_at(position, state_dict["round"])
        if self._next_step == self._epoch.end_step and self._next_epoch_is_due:
            self._start_at(self._feed.clock.position, 0)

    def _split(self) -> dict[str, Any]:
        """Return what determines the microbatches of this rank within a step."""
        world, plan, dealing = self.world, self.plan, self.reading.dealing
        split = {"minibatch_size": plan.minibatch_size, "fixed_shape": plan.fixed_shape}
        dealt = {**dealing._asdict(), "speeds": [*dealing.speeds]}
        del dealt["arrival"]  # of no sampler
        return {**split, **dealt, "num_replicas": world.size, "rank": world.rank}
