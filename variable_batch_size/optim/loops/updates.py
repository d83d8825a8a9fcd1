"""The loops: `updates` reads a loader update by update, behind its prefetch; `remaining_epochs` yields epochs."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, Generic, Literal, TypeVar, final, get_args, overload

from torch import Tensor
from torch.utils.data import DataLoader

from variable_batch_size._log import log
from variable_batch_size._validation import check_int, check_number, type_error, value_error
from variable_batch_size.backend import ElasticBackend
from variable_batch_size.data.batches import Batch, Position
from variable_batch_size.data.decided import wait_for
from variable_batch_size.data.sampler import CustomSampler, collecting_error
from variable_batch_size.data.streams.arriving import ArrivingBatches
from variable_batch_size.optim.beside.lr_scheduler import ProgressScheduler
from variable_batch_size.optim.checks.consistency import common_facts
from variable_batch_size.optim.loops.arriving import Arrivals
from variable_batch_size.optim.loops.counts import Count, check_counts
from variable_batch_size.optim.loops.yielded_update import Update, incomplete_update, stale_loop
from variable_batch_size.optim.optimizer import CustomOptimizer

T = TypeVar("T")


@final
class Updates(Generic[T]):
    """The updates of an epoch; see `updates`."""

    def __init__(
        self, loader: Iterable[T], optimizer: CustomOptimizer, ahead: int = 0, counts: Count | None = None
    ) -> None:
        if not isinstance(optimizer, CustomOptimizer):
            raise type_error("optimizer must be a vbs.CustomOptimizer", optimizer, "pass the loader, then the wrapper")
        if not isinstance(loader, Iterable):
            raise type_error("loader must be iterable", loader, "pass the loader, then the optimizer")
        _check_reads_batches(loader, optimizer.sampler)
        self._loader, self._optimizer = loader, optimizer
        self._ahead = check_int(ahead, "ahead", 0, remedy="pass the number of updates that a framework reads ahead")
        if self._ahead and optimizer.backend.elastic:
            raise value_error("where the world may change, ahead must be 0", ahead, "read no update before its turn")
        if self._ahead and optimizer.sampler.batches.reproducible:
            requirement = "reproducible=True needs microbatches that are read in their turn, with ahead=0"
            raise value_error(requirement, f"ahead={ahead}, as a trainer has", "train by a loop over vbs.updates()")
        if counts is not None and self._ahead:
            raise value_error("with counts= ahead must be 0", ahead, "read no update before its turn")
        if counts is not None and optimizer.sampler.batches.packs:
            remedy = "omit counts=, and pass means over the tokens of a microbatch"
            raise value_error("batches in tokens have one denominator", "counts= beside lengths=", remedy)
        self._counts = counts
        self._epoch: int | None = None  # the epoch of the iteration under way

    def __len__(self) -> int:
        """Return the number of updates of the epoch: of an iteration under way, or of one that begins now.

        All updates of that epoch count, also those that were made before a restore.
        """
        plan = self._optimizer.sampler.plan
        return plan.epoch(self._optimizer.epoch if self._epoch is None else self._epoch).updates

    def __iter__(self) -> Iterator[Update[T]]:
        """Set the epoch of the next update, and yield the updates of it that were not made yet."""
        try:
            world_has_changed = True
            while world_has_changed:  # then the rest of the epoch is read again
                world_has_changed = yield from self._yield_updates(self._begin_epoch())
        finally:
            self._epoch = None

    def _begin_epoch(self) -> int:
        """Set the epoch of the next update, and return it.

        Where ranks may come and go, one that joins gets the state of the others first, which may be in a later epoch.
        """
        optimizer = self._optimizer
        optimizer._followers.call("discard")  # if an earlier loop was left within a step
        while True:
            self._epoch = optimizer.epoch
            optimizer.set_epoch(self._epoch)
            if optimizer.done or not _meet_world(optimizer):
                return self._epoch

    def _yield_updates(self, number: int) -> Generator[Update[T], None, bool]:
        """Yield the updates that are left of epoch `number`, and check that each is made before the next is asked for.

        It returns whether ranks have come or gone, so that the rest of the epoch is read from the loader again.
        """
        optimizer, loader = self._optimizer, self._loader
        training, elastic = optimizer.sampler.training, optimizer.backend.elastic
        # `_iterator` is private: it tells whether persistent workers have been started. To start them draws a random
        # number, which the saved run had drawn before its checkpoint.
        if isinstance(loader, DataLoader) and loader.persistent_workers and loader._iterator is None:
            training.before_reading.wait_with_present(training.due)
        microbatches = enumerate(self._loader)
        restarts = training.restarts  # how often the training has moved, as by a discarded step or a loaded state
        for step in count(training.position.step):
            training.finish_update()
            waiting = step - training.position.step  # number of updates that were read, but not made
            if training.restarts != restarts:  # since then the loader yields the wrong microbatches
                if elastic:
                    return True
                raise stale_loop()
            if waiting > self._ahead or (waiting == 0 and optimizer.inside_step and not self._ahead):
                raise incomplete_update(optimizer.updates)
            batches = wait_for(training, number, step, waiting + 1)  # a controller may move the end of the epoch
            if step == batches.plan.epoch(number).end_step:
                break
            if _meet_world(optimizer):
                return True
            batch = training.batches.batch(Position(number, step))
            of_update = self._read_microbatches(microbatches, batch)
            if self._counts is not None:
                begins = step == batches.plan.epoch(number).first_step
                batch, of_update = self._with_totals(self._counts, [*of_update], batch, compares=begins)
            update = self._hand_out(of_update, batch, restarts)
            if training.batches.reproducible:
                update = self._seed_microbatches(update, batch)
            if self._ahead:  # the loader must be read in its order, whenever the framework trains on the update
                update = iter(list(update))
            yield Update(update, batch)
        # Read to the end of the loader, so that its workers end as in a plain loop: it must yield nothing more.
        for _ in microbatches:
            raise RuntimeError(
                f"the loader must yield the microbatches of the optimizer's sampler, but it yields more than epoch "
                f"{number} has; create it with batch_sampler=sampler, and filter or repeat samples in the dataset"
            )
        if optimizer.done and isinstance(optimizer.backend, ElasticBackend):
            optimizer.backend.part(optimizer.updates)  # this rank leaves the others
        return False

    def _with_totals(self, counts: Count, read: list[T], batch: Batch, *, compares: bool) -> tuple[Batch, Iterator[T]]:
        """Return an update with the totals of its counts over all ranks, and an iterator over its microbatches.

        `read`: the microbatches of this rank. `compares`: whether ranks compare the names that `counts` returns.
        """
        optimizer = self._optimizer
        options = {"compares": compares, "may_repeat": True}
        totals = optimizer._abilities.totals.sum_counts(counts, read, batch, optimizer.agreement, **options)
        return batch._replace(totals=totals), iter(read)

    def _seed_microbatches(self, update: Iterator[T], batch: Batch) -> Iterator[T]:
        """Yield the microbatches of an update, each with random generators that are seeded by its number.

        So random numbers, as of dropout, do not depend on the ranks (`reproducible=True`). `update`: what the loader
        yields for the microbatches of `batch`.
        """
        seeding = self._optimizer._abilities.seeding
        assert seeding is not None
        # In between, the loader is read with the user's generators in their own state, which `give_back` restores.
        for microbatch, loaded in zip(batch.microbatches, update, strict=True):
            seeding_number = seeding.seed(microbatch)
            try:
                yield loaded
            finally:
                seeding.give_back(seeding_number)

    def _hand_out(self, microbatches: Iterator[T], batch: Batch, restarts: int) -> Iterator[T]:
        """Yield the microbatches of an update to the user's loop, and record which one the next `step()` has to count.

        Args:
            microbatches: the microbatches of this rank.
            batch: the update.
            restarts: how often a state had been loaded, or a step had begun anew, when the loop began. If that has
                changed, the loop yields microbatches of an earlier place, and raises.

        Raises:
            RuntimeError: if the training was moved, or if the update is read before its turn (without `ahead=`).
        """
        training = self._optimizer.sampler.training
        for number in range(len(batch.microbatches)):
            if training.restarts != restarts:
                raise stale_loop()
            is_read_in_turn = batch.step == training.position.step
            if self._ahead == 0 and not is_read_in_turn:
                raise RuntimeError(
                    f"an update yields its microbatches until it is made, but update {batch.step} is read when "
                    f"{training.position.step} updates are made; read it within its turn of the loop"
                )
            microbatch = next(microbatches)
            training.expect(batch, number + 1)
            yield microbatch

    def _read_microbatches(self, microbatches: Iterator[tuple[int, T]], batch: Batch) -> Iterator[T]:
        """Yield the microbatches of an update from the loader; check that none of it is missing or comes twice.

        Args:
            microbatches: what the loader yields in this epoch, with its number since the loop began.
            batch: the update.
        """
        training = self._optimizer.sampler.training
        for number in range(len(batch.microbatches)):
            try:
                received, microbatch = next(microbatches)
            except StopIteration:
                total = len(batch.microbatches)
                raise RuntimeError(
                    f"the loader must yield the sampler's microbatches, but it ended with {number} of the {total} of "
                    f"update {batch.step}; see above whether it has failed in a thread, or create it with "
                    f"batch_sampler=sampler"
                ) from None
            lost = 0 if training.iteration is None else training.iteration.count_lost(received)
            if lost:
                found = f"{lost} of those that were read did not come" if lost > 0 else f"{-lost} came once more"
                raise RuntimeError(
                    f"the loader must yield each microbatch of the optimizer's sampler once, but before update "
                    f"{batch.step} {found}; create it with batch_sampler=sampler, and filter or repeat samples in the "
                    "dataset"
                )
            yield microbatch


def _meet_world(optimizer: CustomOptimizer) -> bool:
    """Find out which ranks make the next update. Return whether they have changed, or this one has loaded a state.

    Only with an elastic backend can ranks come and go.
    """
    backend, training = optimizer.backend, optimizer.sampler.training
    if not isinstance(backend, ElasticBackend):
        return False
    loaded = backend.meet(training.updates)
    has_changed = training.enter_world(backend.world, loaded=loaded)
    backend.posted = ""  # a text that the next sum carries to all ranks, such as the answer of a controller
    optimizer._followers.call("post", backend)
    backend.facts = common_facts(optimizer._updater, optimizer.sampler, optimizer.inner, backend)
    return loaded or has_changed


def _check_reads_batches(loader: object, sampler: object) -> None:
    """Raise ValueError if a `DataLoader` reads another sampler than the optimizer's. Other loaders are not checked."""
    loader = getattr(loader, "_loader", loader)  # private: the loader within an MpDeviceLoader of torch_xla
    if not isinstance(loader, DataLoader):
        return
    if loader.batch_sampler is not None and isinstance(loader.sampler, CustomSampler):
        raise collecting_error(loader.batch_size)
    sampler_of_loader = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    if sampler_of_loader is not sampler:
        kind = type(sampler_of_loader).__name__
        raise ValueError(
            f"the loader must read the optimizer's own sampler, but it reads another {kind}; create it "
            "with batch_sampler=optimizer.sampler, and keep it out of accelerator.prepare() and the like"
        )


@overload
def updates(
    loader: ArrivingBatches,
    optimizer: CustomOptimizer,
    ahead: int = 0,
    *,
    counts: Callable[[Any], Mapping[str, Tensor | float]] | None = None,
) -> Arrivals[Any]: ...


@overload
def updates(
    loader: Iterable[T],
    optimizer: CustomOptimizer,
    ahead: int = 0,
    *,
    counts: Callable[[T], Mapping[str, Tensor | float]] | None = None,
) -> Updates[T] | Arrivals[T]: ...


def updates(
    loader: Iterable[T] | ArrivingBatches,
    optimizer: CustomOptimizer,
    ahead: int = 0,
    *,
    counts: Callable[[T], Mapping[str, Tensor | float]] | None = None,
) -> Updates[T] | Arrivals[T]:
    """Return an iterable over the updates of an epoch; each update yields this rank's microbatches.

    Each iteration sets the epoch of the next update on the sampler and on the optimizer, so that a loop needs no
    `set_epoch`, and after a restore continues with the next update. The loader prefetches as usual. An update has a
    `batch_size` and a `len`, and yields its microbatches once, as they are read; `list(update)` keeps them. When the
    next update is asked for, all of them must have reached `optimizer.step()`. The `len` of the result is the number of
    updates of the epoch, which is what frameworks count, schedule and log by. Create one for each epoch, or for all.

    With `ArrivingBatches` the loader is any iterable of batches, and an update is made of each; there is no epoch. If
    it has `streams`, pass it in the place of the loader: each iteration ends with a pass over them, whose number is
    `passes` of the result, which is a part of a `Checkpoint`.

    With `counts` a loss may have several denominators: G = sum_t (1 / C_t) sum_j grad S_tj, over the terms t and the
    microbatches j of all ranks. This rank's microbatches of an update are read first, and one more sum over the ranks,
    of a number for each name, makes the totals C_t = sum_j c_tj, `update.counts`. Divide each term by its total, and
    call `optimizer.backward(loss, divided=True)`. Repeated rows count once, replays not at all. A term whose total
    is 0 is left out, because its total is given as inf; an update in which all are 0 is skipped.

    Args:
        loader: the loader, created with `batch_sampler=optimizer.sampler`; or this rank's part of each batch; or the
            `ArrivingBatches` whose streams are read.
        optimizer: the optimizer.
        ahead: number of updates that a framework asks for before it trains on them; their microbatches are then read
            at once.
        counts: function of a microbatch, which returns what its rows count, by name: finite numbers >= 0, or tensors
            with one element; the same names for every microbatch and on all ranks.

    Raises:
        TypeError: if `loader` is not iterable, `optimizer` is not a `CustomOptimizer`, or `counts` not a function.
        ValueError: if `loader` is a `DataLoader` that was created with `sampler=` instead of `batch_sampler=`, or with
            another sampler than the optimizer has; or if there are `counts`, and the noise or squares of
            microbatches are measured, the world may change, or updates are read ahead.
    """
    if counts is not None and isinstance(optimizer, CustomOptimizer):
        check_counts(counts, optimizer.backend, measures=optimizer._updater.stages.any("compares_microbatches"))
    if isinstance(optimizer, CustomOptimizer) and isinstance(optimizer.sampler, ArrivingBatches):
        if ahead:
            raise value_error("ahead must be 0 with batches that arrive", ahead, "read each when its turn comes")
        return Arrivals(loader, optimizer, optimizer.sampler, counts)
    return Updates(loader, optimizer, ahead, counts)  # type: ignore[arg-type]


Unit = Literal["epochs", "progress", "samples", "updates"]


def remaining_epochs(
    sampler: CustomSampler,
    optimizer: CustomOptimizer | Sequence[CustomOptimizer],
    until: float | ProgressScheduler | None = None,
    by: Unit = "epochs",
) -> Iterator[int]:
    """Yield the number of each epoch that is left, after setting it on the sampler and on the optimizer.

    After a restore it begins with the epoch under way; the loader yields the rest of it. It ends when
    `optimizer.done` is True, or the training has reached `until`. That is only checked between epochs: to end at an
    update or a sample, pass `max_updates` or `max_samples` to the sampler; to end with a schedule, leave the loop over
    the loader when `scheduler.done` is True.

    Source: `remaining_epochs_until` of AdaptDL, Qiao et al. 2021, arXiv 2008.12260.

    Args:
        sampler: the sampler.
        optimizer: its optimizer; or all of its optimizers, whose first one says how far the training is.
        until: the end of the training, in the unit of `by`; or a `ProgressScheduler` with a `total`, which ends it when
            `scheduler.done` is True. Default: after the `epochs` of the sampler, or where it ends the training.
        by: "epochs", "progress" (updates at `ref_batchsize`), "samples" or "updates", as the optimizer counts them.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if `by` is unknown or passed with a schedule, an optimizer has another sampler, nothing ends the
            training, or the schedule has no `total` or counts another optimizer.
    """
    optimizers = [optimizer] if isinstance(optimizer, CustomOptimizer) else optimizer
    _check_arguments(sampler, optimizers, until, by)
    if until is None:
        until = sampler.epochs or math.inf
        by = "epochs"
    return _yield_remaining(sampler, optimizers, until, by)


def _yield_remaining(
    sampler: CustomSampler, optimizers: Sequence[CustomOptimizer], until: float | ProgressScheduler, by: Unit
) -> Iterator[int]:
    """Yield the number of each epoch that is left, after setting it on all optimizers; see `remaining_epochs`.

    `until` and `by`: the end of the training and its unit; a scheduler ends it by itself.
    """
    first = optimizers[0]
    epoch, has_yielded = -1, False
    is_within_epoch = sampler.batches.is_within_epoch(sampler.position)
    while not first.done:
        epoch = max(first.epoch, epoch + 1)  # the next one, also if the loop has left the last epoch before its end
        # A restored run first finishes the epoch under way, even if `until` is reached: it is checked between epochs.
        if isinstance(until, ProgressScheduler):
            reached = until.done and not sampler.training.end_pending
        elif by == "epochs":
            reached = epoch >= until
        else:
            reached = getattr(first, by) >= until and not (is_within_epoch or sampler.training.end_pending)
        if reached:
            break
        is_within_epoch = False
        for optimizer in optimizers:
            optimizer.set_epoch(epoch)
        has_yielded = True
        yield epoch
    was_restored = first.updates > 0 and first.last_batch is None
    if was_restored and not has_yielded and first.sampler is sampler and first.backend.world.rank == 0:
        text = f"The training has ended after {first.updates} updates; to train it again, pass another folder."
        log(text, rank=0, update=first.updates)


def _check_arguments(sampler: object, optimizers: object, until: object, by: object) -> None:
    """Raise TypeError or ValueError unless `remaining_epochs` can be called with these arguments."""
    if not isinstance(sampler, CustomSampler):
        remedy = "pass the sampler, then the optimizer; batches that arrive have no epochs, use vbs.updates()"
        raise type_error("sampler must be a vbs.CustomSampler", sampler, remedy)
    if not isinstance(optimizers, Sequence) or not optimizers:
        raise type_error("optimizer must be a vbs.CustomOptimizer, or a list of them", optimizers, "pass the wrapper")
    for number, optimizer in enumerate(optimizers):
        if not isinstance(optimizer, CustomOptimizer):
            raise type_error("optimizer must be a vbs.CustomOptimizer", optimizer, "pass the wrapper")
        if optimizer.sampler is not sampler:
            requirement = "remaining_epochs() needs the optimizers of the sampler"
            raise value_error(requirement, f"one of another sampler, number {number}", "pass optimizer.sampler")
    if by not in get_args(Unit):
        raise value_error('by must be "epochs", "progress", "samples" or "updates"', repr(by), "pass one of them")
    if isinstance(until, ProgressScheduler):
        if by != "epochs":
            raise value_error("a scheduler as until= has its own unit", f"by={by!r}", "leave out by=")
        until.check_ends(optimizers)
    elif until is not None:
        check_number(until, "until", "pass the end of the training in the unit of by=")
    elif not (sampler.plan.ends or sampler.epochs):
        requirement = "something must end the training"
        remedy = "pass until=, or epochs=, max_updates= or max_samples= to the sampler, or on_end='stop' with a trace"
        raise value_error(requirement, "neither an end of the sampler nor until=", remedy)
