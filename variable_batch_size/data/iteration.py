"""One pass over the rest of an epoch, as an iterator over lists of indices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

import numpy as np

from variable_batch_size.data.batches import Batches, Dealt, Position
from variable_batch_size.data.dataset.seeded import Indices
from variable_batch_size.data.decided import PrefetchCancelled, wait_for
from variable_batch_size.data.plan.equal_rounds import check_equal_rounds
from variable_batch_size.data.steps import Reads
from variable_batch_size.data.training import Training

INDICES_PER_CHUNK = 8192  # large enough for NumPy to be fast, small enough for the first microbatch to be ready soon


@final
class Iteration:
    """Yields the microbatches of this rank, from the position that the training has at the first read.

    It does not move the training: prefetched microbatches do not count. Errors are raised at the first read and not by
    `iter()`: loaders call `iter()` more often than they read, and the device loader of torch_xla, which does so in a
    thread, would hang.
    """

    def __init__(self, training: Training) -> None:
        """Wait for the first read, at which the iteration begins; see the docstring of the class for why."""
        self._training, self._reads = training, Reads(training.due, training.restarts, 0)
        self._rows: Iterator[list[int]] | None = None
        self._deal: Dealt | None = None
        self._read_of_deal = 0  # number of microbatches of the deal that were read
        self._step = self._reads.start.step  # the step after the deal

    def __iter__(self) -> Iteration:
        return self

    def __next__(self) -> list[int]:
        """Return the indices in the dataset of the next microbatch of this rank.

        The first call begins the iteration, where the training is at that time.
        """
        training = self._training
        if self._rows is None:  # the first read, see the docstring of the class
            self._reads = training.begin_iteration()
            self._step = self._reads.start.step
            self._rows = self._yield_rows(self._reads.start.epoch, training.batches)
        training.iteration = self._reads
        indices = next(self._rows)
        self._reads.number += 1
        return indices

    def _yield_rows(self, number: int, batches: Batches) -> Iterator[list[int]]:
        """Yield the indices in the dataset of each microbatch of this rank, to the end of epoch `number`."""
        order, plan = batches.order(number), batches.plan
        chunk = max(1, INDICES_PER_CHUNK // plan.minibatch_size)  # microbatches
        for deal in self._deals(number):
            for begin in range(0, len(deal), chunk):
                for indices in deal.rows(begin, min(len(deal), begin + chunk), order):
                    self._read_of_deal += 1
                    yield Indices(indices, batches.seed, number) if batches.reproducible else indices
        self._reads.exhausted = True

    def _deals(self, number: int) -> Iterator[Dealt]:
        """Yield the microbatches of thousands of steps at once, to the end of epoch `number`.

        Where a controller decides batch sizes, wait until it has decided the next one.
        """
        while (batches := self._wait_for_next_step(number)) is not None:
            plan, world, dealing, end_step = batches.plan, batches.world, batches.dealing, batches.known_until
            epoch = plan.epoch(number)
            if self._step == epoch.end_step:
                return
            # The first check covers the whole epoch, unless a controller adds steps to it.
            if batches.split.equal_rounds and (self._deal is None or batches.decided is not None):
                check_equal_rounds(plan, epoch, self._step, world, dealing, end_step)
            deal = batches.deal(number, self._step, end_step)
            self._deal, self._read_of_deal, self._step = deal, 0, self._step + len(deal.ends)
            yield deal

    def _wait_for_next_step(self, number: int) -> Batches | None:
        """Return the batches once a controller has decided the next step; None if no loop reads the iteration any more.

        A loader's thread or process that reads ahead waits here for the training.
        """
        training, reads = self._training, self._reads
        ahead = reads.number - reads.stepped + 1  # microbatches that are read and not trained on, with the next one

        def is_replaced() -> bool:
            return reads.restarts != training.restarts or training.iteration is not reads

        try:
            return wait_for(training, number, self._step, ahead, abandoned=is_replaced)
        except PrefetchCancelled:
            return None

    # The state of a loader that saves the position of its iterator. --------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return which microbatch comes next: the epoch, the step, and the round, its number in the step on this rank.

        A loader such as StatefulDataLoader saves it with its own state.
        """
        step, round_index = self._step, 0
        if self._deal is not None and self._read_of_deal < len(self._deal):
            index = int(np.searchsorted(self._deal.ends, self._read_of_deal, side="right"))  # of the step in the deal
            step = self._deal.first_step + index
            round_index = self._read_of_deal - (int(self._deal.ends[index - 1]) if index else 0)
        return {"epoch": self._reads.start.epoch, "step": step, "round": round_index}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Check that a loader was saved where the training is; the first read then continues there, in any world.

        Raises:
            RuntimeError: if the loader was saved at another update than the optimizer, or within one.
        """
        training = self._training
        batches, due = training.batches, training.due
        position = Position(state_dict["epoch"], state_dict["step"])
        # A loader that was saved after the last update of an epoch may not have met its end: its position is that end,
        # and the training's is the first update of the next epoch.
        if position == due:
            is_due = True
        elif position.epoch < batches.plan.first_epoch:  # the plan has forgotten that epoch
            is_due = position == (due.epoch - 1, due.step)
        else:
            is_due = batches.next_update(position) == due
        if state_dict["round"] or not is_due:
            where_in_step = f", before its microbatch {state_dict['round']}" if state_dict["round"] else ""
            raise RuntimeError(
                f"the loader was saved at {position}{where_in_step}, but the optimizer is at {due}; save both when "
                "optimizer.step() has returned True, with snapshot_every_n_steps=1, and restore the optimizer first"
            )
