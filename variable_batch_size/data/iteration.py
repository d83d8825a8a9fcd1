"""One pass over the rest of an epoch, as an iterator over lists of indices."""

from __future__ import annotations

import threading
from typing import Any, final

from variable_batch_size.data.batches import Position
from variable_batch_size.data.deal import Deal
from variable_batch_size.data.dealer import Dealer
from variable_batch_size.data.equal_rounds import check_equal_rounds
from variable_batch_size.data.growing import AbandonedError
from variable_batch_size.data.passes import Pass
from variable_batch_size.data.seeded import Indices

INDICES_PER_CHUNK = 8192  # large enough for NumPy to be fast, small enough for the first microbatch to be ready soon


@final
class Iteration(Pass):
    """A pass as an iterator over lists of indices, which begins where the training is when it is first read.

    It does not move the training: prefetched microbatches do not count. Errors are raised at the first read and not by
    `iter()`: loaders call `iter()` more often than they read, and the device loader of torch_xla, which does so in a
    thread, would hang.
    """

    def __init__(self, dealer: Dealer) -> None:
        super().__init__(dealer.due)
        self._dealer = dealer

    def __iter__(self) -> Iteration:
        return self

    def __next__(self) -> list[int]:
        if not self.reads:
            self._begin_reading()
        self._dealer.iteration = self
        self.reads += 1
        if self._row == len(self._rows):
            self._convert_rows()
        row = self._rows[self._row]
        self._row += 1
        self.yielded += 1
        return row if self._seed is None else Indices(row, self._seed, self._epoch.number)

    # What is read. ---------------------------------------------------------------------------------------------------

    def _begin_reading(self) -> None:
        """Begin the iteration in this thread, where the training is, or where a loader has resumed."""
        dealer = self._dealer
        if not self.loaded:
            self.start = dealer.due
        dealer.begin_iteration()
        self.thread = threading.get_ident()
        self._start_at(self.start, self.first_round)

    def _start_at(self, position: Position, round_index: int) -> None:
        """Let the next microbatch be that of a round of a step."""
        self.start, self.first_round = position, round_index
        self._batches = self._dealer.batches
        self._seed = self._batches.seed if self._batches.reproducible else None
        self._epoch = self._batches.epoch(position)
        self._order = self._batches.order(position.epoch)
        self._rows: list[list[int]] = []
        self._row = 0
        self._next_step = position.step  # the first step that is in no deal yet
        self._deal: Deal | None = None
        self._converted = round_index  # microbatches of the deal that were converted to rows

    def _convert_rows(self) -> None:
        """Make the indices of the next microbatches, about `INDICES_PER_CHUNK`."""
        if self._deal is None or self._converted == len(self._deal):
            self._deal = self._next_deal()
        plan = self._batches.plan
        end = min(len(self._deal), self._converted + max(1, INDICES_PER_CHUNK // plan.minibatch_size))
        start, size = self._deal.microbatches(*self._deal.locate(self._converted, end))  # (microbatches,) each
        rows = self._order(self._deal.positions(start, size)).tolist()  # (microbatches, minibatch_size)
        self._rows = rows if plan.fixed_shape else [row[:n] for row, n in zip(rows, size.tolist(), strict=True)]
        self._row, self._converted = 0, end

    def _next_deal(self) -> Deal:
        """Return the next steps of the epoch, or of one that follows it; raise StopIteration at the end."""
        dealer = self._dealer
        if self._batches.decided is not None:
            self._wait_for_next_step()
        batches, end_step = self._batches, self._batches.known_until
        if self._next_step == self._epoch.end_step:
            if not (self.resumed and self.stepped == 0 and self._next_epoch_is_due):
                self.exhausted = True
                if dealer.position == (self._epoch.number, self._next_step):
                    dealer.end_pending = False  # the loop reads on
                raise StopIteration
            self._start_at(dealer.due, 0)
            self.reads, self.yielded = 1, 0
            return self._next_deal()
        plan, world, dealing = batches.plan, batches.world, batches.dealing
        if batches.split.equal_rounds and (self._deal is None or batches.decided is not None):  # else all were checked
            check_equal_rounds(plan, self._epoch, self._next_step, world, dealing, end_step)
        deal = plan.deal(self._epoch, self._next_step, world, dealing, end_step)
        self._next_step += len(deal.ends)
        self._converted = self._converted if self._deal is None else 0
        return deal

    def _wait_for_next_step(self) -> None:
        """Wait until a controller has decided the next step; raise StopIteration if nobody reads it any more."""
        dealer, ahead = self._dealer, self.yielded - self.stepped + 1
        number, step = self._epoch.number, self._next_step
        try:
            self._batches = dealer.growing.wait_for(
                number, step, ahead, abandoned=lambda: self.stale or dealer.iteration is not self
            )
        except AbandonedError:
            raise StopIteration from None
        self._epoch = self._batches.plan.epoch(number)

    @property
    def _next_epoch_is_due(self) -> bool:
        ends = self._batches.plan.ends_with(self._epoch)  # the next epoch would have no step
        return not ends and self._dealer.due == (self._epoch.number + 1, self._epoch.end_step)

    # The state of a loader that saves the position of its iterator. --------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return which microbatch comes next."""
        if not self.reads:
            return {**self.start._asdict(), "round": self.first_round, **self._facts_of_split()}
        step, round_index = self._next_step, 0
        number = self._converted - len(self._rows) + self._row
        if self._deal is None:
            round_index = self._converted
        elif number < len(self._deal):
            (index,), (round_index,) = (array.tolist() for array in self._deal.locate(number, number + 1))
            step = self._deal.first_step + index
        return {"epoch": self._epoch.number, "step": step, "round": round_index, **self._facts_of_split()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume at a saved position.

        A loader that was saved after the last update of an epoch may not have met its end. If the next epoch is due,
        the iteration continues there: at once, or when it has read on to that end.

        Raises:
            ValueError: if the position is within a step that is split differently here, or before what the resumed
                training knows.
        """
        split, batches = self._facts_of_split(), self._dealer.batches
        saved = {key: state_dict[key] for key in split}
        if state_dict["round"] and saved != split:
            raise ValueError(
                f"a loader saved within a step can resume only with the same split, but it was {saved} and is "
                f"{split}; restore these arguments, or save when optimizer.step() has returned True, with "
                f"snapshot_every_n_steps=1"
            )
        self.resumed = saved == split
        position = Position(state_dict["epoch"], state_dict["step"])
        due = self._dealer.due
        first = batches.plan.first_epoch
        if self.resumed and position == (first - 1, due.step) and not state_dict["round"]:
            position = due  # the loader was saved when the epoch before had ended
        if position.epoch < first or position.step < batches.epoch(position).known_from:
            raise ValueError(
                f"loader and optimizer must be at the same update, but the loader was saved at {position} and the "
                f"optimizer is at {due}; restore both from the same checkpoint"
            )
        if batches.ends_epoch(position) and due == batches.next_update(position) and not batches.done(position):
            position = due
        self.start = position
        self.first_round = state_dict["round"]
        self.loaded = True

    def _facts_of_split(self) -> dict[str, Any]:
        """Return what determines the microbatches of this rank within a step."""
        batches = self._dealer.batches
        split = {"minibatch_size": batches.plan.minibatch_size, "fixed_shape": batches.plan.fixed_shape}
        dealt = {**batches.dealing._asdict(), "speeds": [*batches.dealing.speeds]}
        return {**split, **dealt, "num_replicas": batches.world.size, "rank": batches.world.rank}
