"""The loop: a loader read update by update, behind its prefetch, so that what the loop has got is known."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count
from typing import Generic, TypeVar, final

from torch.utils.data import DataLoader

from variable_batch_size._validation import check_int, type_error
from variable_batch_size.data.reading import Use
from variable_batch_size.data.sampler import CustomSampler
from variable_batch_size.optim.optimizer import CustomOptimizer

T = TypeVar("T")


@final
class Update(Generic[T]):
    """This rank's microbatches of one update, read as they are asked for, once; its `len` is their number."""

    def __init__(self, microbatches: Iterator[T], number: int) -> None:
        self._microbatches, self._number = microbatches, number

    def __len__(self) -> int:
        return self._number

    def __iter__(self) -> Iterator[T]:
        return self._microbatches


@final
class Updates(Generic[T]):
    """The updates of an epoch; see `updates`."""

    def __init__(self, loader: Iterable[T], optimizer: CustomOptimizer, ahead: int = 0) -> None:
        if not isinstance(optimizer, CustomOptimizer):
            raise type_error("optimizer must be a vbs.CustomOptimizer", optimizer, "pass the loader, then the wrapper")
        if not isinstance(loader, Iterable):
            raise type_error("loader must be iterable", loader, "pass the loader, then the optimizer")
        if isinstance(loader, DataLoader) and loader.batch_sampler is not None:
            _check_reads_batches(loader)
        self._loader, self._optimizer = loader, optimizer
        self._ahead = check_int(ahead, "ahead", 0, remedy="pass the number of updates that a framework reads ahead")
        self._epoch: int | None = None  # that of the iteration under way

    def __len__(self) -> int:
        """Return the number of updates of the epoch: of an iteration under way, or of one that begins now.

        All updates of that epoch count, also those that were made before a restore.
        """
        plan = self._optimizer.sampler.plan
        return plan.epoch(self._optimizer.epoch if self._epoch is None else self._epoch).updates

    def __iter__(self) -> Iterator[Update[T]]:
        """Set the epoch of the next update, and yield the updates that are left of it.

        Raises:
            RuntimeError: if an update was read, but did not reach `optimizer.step()` whole; or if the loader does not
                read the optimizer's sampler, or ends within an update.
        """
        optimizer, sampler = self._optimizer, self._optimizer.sampler
        epoch, feed = optimizer.epoch, sampler._feed
        last = feed.reading
        if last is not None and last.use is not Use.STALE and epoch == last.start.epoch and self._ahead == 0:
            feed.check_stepped()  # of a plain loop
            if last.counts.handed is not None and last.counts.handed > last.counts.stepped:
                raise _incomplete(optimizer.updates)
        sampler.set_epoch(epoch)
        optimizer.set_epoch(epoch)
        self._epoch = epoch
        try:
            yield from self._read(epoch)
        finally:
            self._epoch = None

    def _read(self, number: int) -> Iterator[Update[T]]:
        optimizer, loader = self._optimizer, self._loader
        feed = optimizer.sampler._feed
        if isinstance(loader, DataLoader) and loader.persistent_workers and loader._iterator is None:
            feed.keep_random_states()
        microbatches = iter(self._loader)
        for step in count(feed.clock.step):
            waiting = step - optimizer.updates  # updates that were read, but not made
            if feed.reading is not None and feed.reading.use is Use.STALE:
                raise RuntimeError(
                    "the loop must end after discard_step() or load_state_dict(), but it asks for another update; "
                    "break, and begin a new loop over vbs.updates"
                )
            if waiting > self._ahead:
                raise _incomplete(optimizer.updates)
            plan, epoch, _ = feed.plans.known_plan(number, step, waiting + 1)  # a controller may move its end
            if step == epoch.end_step:
                break
            rounds = plan.step(epoch, step, feed.dealing).rounds(feed.world)
            update = self._handed(microbatches, step, rounds)
            yield Update(iter(list(update)) if self._ahead else update, rounds)
        for _ in microbatches:  # lets the loader end as in a loop
            raise RuntimeError(
                f"the loader must yield the microbatches of the optimizer's sampler, but it yields more than epoch "
                f"{number} has; create it with batch_sampler=sampler"
            )

    def _handed(self, microbatches: Iterator[T], step: int, rounds: int) -> Iterator[T]:
        """Yield the microbatches of an update, and count them as those that the loop has got."""
        for number in range(rounds):
            if self._ahead == 0 and step != self._optimizer.updates:
                raise RuntimeError(
                    f"an update yields its microbatches until it is made, but update {step} is read when "
                    f"{self._optimizer.updates} updates are made; read it within its turn of the loop"
                )
            try:
                microbatch = next(microbatches)
            except StopIteration:
                raise RuntimeError(
                    f"the loader must yield the microbatches of the optimizer's sampler, but it ended with {number} of "
                    f"the {rounds} of update {step}; create it with batch_sampler=sampler"
                ) from None
            if (reading := self._optimizer.sampler._feed.reading) is not None:
                reading.counts.hand(begins_update=number == 0 and self._ahead == 0)
            yield microbatch


def _check_reads_batches(loader: DataLoader[T]) -> None:
    if isinstance(loader.sampler, CustomSampler):
        raise ValueError(
            f"the loader must take each list of indices of a CustomSampler as one microbatch, but it was created with "
            f"sampler=, which collects batch_size={loader.batch_size} of them; pass it as batch_sampler=, and no "
            f"batch_size, shuffle or drop_last"
        )


def _incomplete(update: int) -> RuntimeError:
    return RuntimeError(
        f"every microbatch of an update must reach optimizer.step(), but the loop asks for the next update and update "
        f"{update} is not complete; call step() once for each microbatch, also for one whose loss is nan (give it a "
        f"gradient of 0), and pass ahead= if a framework or a thread reads updates early; or call "
        f"optimizer.discard_step() and begin a new loop"
    )


def updates(loader: Iterable[T], optimizer: CustomOptimizer, ahead: int = 0) -> Updates[T]:
    """Return an iterable over the updates of an epoch, each of which yields this rank's microbatches.

    Each iteration sets the epoch of the next update on the sampler and on the optimizer, so that a loop needs no
    `set_epoch`, and after a restore continues with the next update. The loader prefetches as usual. An update has a
    `len` and yields its microbatches once, as they are read; `list(update)` keeps them. When the next update is asked
    for, all of them must have reached `optimizer.step()`. The `len` of the result is the number of updates of the
    epoch, which is what frameworks count, schedule and log by. Create one for each epoch, or one for all.

    Args:
        loader: the loader, created with `batch_sampler=optimizer.sampler`.
        optimizer: the optimizer.
        ahead: number of updates that a framework asks for before it trains on them; their microbatches are then read
            at once.

    Raises:
        TypeError: if `loader` is not iterable, or `optimizer` is not a `CustomOptimizer`.
        ValueError: if `loader` is a `DataLoader` that was created with `sampler=` instead of `batch_sampler=`.
    """
    return Updates(loader, optimizer, ahead)
