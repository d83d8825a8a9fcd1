"""A loader read update by update: what loops and frameworks count as steps are then updates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count, islice
from typing import Generic, TypeVar, final

from variable_batch_size._validation import type_error
from variable_batch_size.data.iteration import Use
from variable_batch_size.optim.optimizer import CustomOptimizer

T = TypeVar("T")


@final
class Updates(Generic[T]):
    """The updates of an epoch, each as the list of this rank's microbatches; see `updates`."""

    def __init__(self, loader: Iterable[T], optimizer: CustomOptimizer) -> None:
        if not isinstance(optimizer, CustomOptimizer):
            raise type_error("optimizer must be a vbs.CustomOptimizer", optimizer, "pass the loader, then the wrapper")
        if not isinstance(loader, Iterable):
            raise type_error("loader must be iterable", loader, "pass the loader, then the optimizer")
        self._loader, self._optimizer = loader, optimizer
        self._epoch: int | None = None  # that of the iteration under way

    def __len__(self) -> int:
        """Return the number of updates of the epoch: of an iteration under way, or of one that begins now.

        All updates of that epoch count, also those that were made before a restore.
        """
        plan = self._optimizer.sampler.plan
        return plan.epoch(self._optimizer.epoch if self._epoch is None else self._epoch).updates

    def __iter__(self) -> Iterator[list[T]]:
        """Set the epoch of the next update, and yield the updates that are left of it.

        Raises:
            RuntimeError: if an update was read, but did not reach `optimizer.step()` whole; or if the loader does not
                read the optimizer's sampler, or ends within an update.
        """
        optimizer, sampler = self._optimizer, self._optimizer.sampler
        epoch, last = optimizer.epoch, sampler.iteration
        if (
            last is not None
            and last.counts.all_updates_read
            and last.use is not Use.STALE
            and epoch == last.start.epoch
        ):
            raise RuntimeError(
                f"every microbatch of an update must reach optimizer.step(), but all updates of epoch {epoch} were "
                f"read and update {optimizer.updates} is not complete; call step() once for each microbatch of each "
                f"list, or optimizer.discard_step() to read the rest again"
            )
        sampler.set_epoch(epoch)
        optimizer.set_epoch(epoch)
        self._epoch = epoch
        try:
            yield from self._read(epoch)
        finally:
            self._epoch = None

    def _read(self, number: int) -> Iterator[list[T]]:
        optimizer, sampler = self._optimizer, self._optimizer.sampler
        first = sampler.clock.step
        microbatches, ahead, known = iter(self._loader), 0, False
        for step in count(first):
            waiting = step - optimizer.updates  # updates that were read, but not made
            plan, epoch, _ = sampler.planning.known_plan(number, step, waiting + 1)  # a growing trace may move its end
            if step == epoch.end_step:
                break
            if known and waiting > ahead:
                raise RuntimeError(
                    f"every microbatch of an update must reach optimizer.step(), but update {optimizer.updates} is not "
                    f"complete and update {step} is read; call step() once for each microbatch of the list"
                )
            ahead = max(ahead, waiting)  # a framework may read ahead, as far as before the first update
            known = optimizer.updates > first
            rounds = plan.step(epoch, step).rounds(sampler.world)
            update = list(islice(microbatches, rounds))
            if (iteration := sampler.iteration) is not None:
                iteration.counts.read_by_update()
                iteration.counts.all_updates_read = step + 1 == epoch.end_step
            if len(update) < rounds:
                raise RuntimeError(
                    f"the loader must yield the microbatches of the optimizer's sampler, but it ended with "
                    f"{len(update)} of the {rounds} of update {step}; create it with batch_sampler=sampler"
                )
            yield update
        for _ in microbatches:  # lets the loader end as in a loop
            raise RuntimeError(
                f"the loader must yield the microbatches of the optimizer's sampler, but it yields more than epoch "
                f"{number} has; create it with batch_sampler=sampler"
            )


def updates(loader: Iterable[T], optimizer: CustomOptimizer) -> Updates[T]:
    """Return an iterable over the updates of an epoch, each as the list of this rank's microbatches.

    Each iteration sets the epoch of the next update on the sampler and on the optimizer, so that a loop needs no
    `set_epoch`, and after a restore continues with the next update. The loader prefetches as usual. Its `len` is the
    number of updates of the epoch, which is what frameworks count, schedule and log by. Create one for each epoch, or
    one for all.

    Args:
        loader: the loader, created with `batch_sampler=optimizer.sampler`.
        optimizer: the optimizer.

    Raises:
        TypeError: if `loader` is not iterable, or `optimizer` is not a `CustomOptimizer`.
    """
    return Updates(loader, optimizer)
