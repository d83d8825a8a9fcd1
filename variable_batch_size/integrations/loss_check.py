"""Is the loss of a trainer a mean over rows? It is asked about rows of the dataset, and never ends a training."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any, Final, Literal, final

import numpy as np
from torch import Tensor, nn
from torch.utils.data import DataLoader

from variable_batch_size._log import log
from variable_batch_size._validation import IntArray, in_documentation
from variable_batch_size.backend.generators import kept_states, seed_host
from variable_batch_size.data.dataset.seeded import seed_of
from variable_batch_size.data.streams.rows import has_tensor_rows, take_rows
from variable_batch_size.data.tokens.token_batches import TokenBatches
from variable_batch_size.integrations.loading import read_rows
from variable_batch_size.optim.optimizer import CustomOptimizer
from variable_batch_size.testing.loss import REMEDY, Compared, compare_parts, unlike_rows
from variable_batch_size.testing.undisturbed import kept_attributes

CHECKED_UPDATES: Final = frozenset({0, 1, 10, 100, 1000})  # in the first ones a KL term may be 0
LossOf = Callable[[Any, Any, float], Tensor]  # of the model, a batch, and what its rows count


@final
class LossCheck:
    """Warns in some updates of a loss that depends on how a batch is cut; what is not checked is said, by a line.

    All ranks draw the same rows of the dataset by the sampler's seed, other ones in each of these updates, and the same
    random numbers, so that forwards may communicate.

    Args:
        enabled: whether to check anything.
        first: the update from which others are counted.
    """

    def __init__(self, enabled: bool = True, first: int = 0) -> None:
        self._due = {first + update for update in CHECKED_UPDATES} if enabled else set[int]()
        self._largest = np.zeros(2)

    def takes(self, optimizer: CustomOptimizer) -> bool:
        """Return whether the loss is to be checked before this update, once."""
        due = optimizer.updates in self._due
        self._due.discard(optimizer.updates)
        return due

    def leave(self, optimizer: CustomOptimizer, why: str) -> None:
        """Say once why the loss is not checked, and end all checks."""
        if self._due and optimizer.backend.world.rank == 0:
            advice = f"call vbs.testing.check_loss(), {in_documentation('Means over tokens')}"
            log(f"The loss is not checked for a dependence on microbatches: {why}; {advice}.", rank=0)
        self._due.clear()

    def __call__(
        self,
        optimizer: CustomOptimizer,
        loader: DataLoader[Any],
        model: nn.Module,
        loss_of: LossOf,
        *,
        reduction: Literal["mean", "sum"],
        remedy: str = REMEDY,
        owner: object = None,
    ) -> None:
        """Warn if the loss of rows of the loader's dataset is not the mean, or the sum, of those of parts.

        `owner` has other attributes that forwards change, and that are put back, as those of a trainer.
        """
        options: Any = {"reduction": reduction, "tolerance": None, "remedy": remedy, "largest": self._largest}
        try:
            with kept_states(), kept_attributes(owner, loader.dataset, loader.collate_fn):
                compared = _compare(optimizer, loader, model, loss_of, **options)
        except Exception as error:  # of whatever is called; the training's own forward is to raise it
            compared = Compared(f"{type(error).__name__} in a forward of drawn rows ({str(error)[:80]})")
        if compared.left_out:
            self.leave(optimizer, compared.left_out)
        compared.warn()


def _compare(
    optimizer: CustomOptimizer, loader: DataLoader[Any], model: nn.Module, loss_of: LossOf, **options: Any
) -> Compared:
    """Compare rows that are read once: parts that are collated by themselves or, if the collator draws, cut."""
    numbers, counts = _drawn_rows(optimizer)
    number, seeds = len(numbers), count(seed_of("microbatch", optimizer.updates))
    seed_host(next(seeds))
    read = read_rows(loader.dataset, numbers.tolist())
    batch = loader.collate_fn(read)
    order, counted = unlike_rows(batch, number), np.ones(number) if counts is None else counts
    takes = list[Callable[[IntArray], Any]]()
    if isinstance(read, list) and len(read) == number:
        takes.append(lambda part: loader.collate_fn([read[row] for row in part]))
    if has_tensor_rows(batch, number) and not (takes and not has_tensor_rows(takes[0](order[1:]), number - 1)):
        takes.append(partial(take_rows, batch))  # not along time

    def loss(take: Callable[[IntArray], Any], model: nn.Module, part: IntArray) -> Tensor:
        seed_host(next(seeds))  # another one in each call, so that what draws is found
        return loss_of(model, take(part), float(counted[part].sum()))

    compared = Compared("its batches have another number of rows")
    for take in takes:
        compared = compare_parts(model, partial(loss, take), order, counts=counts, **options)
        if not compared.left_out:
            break
    return compared


def _drawn_rows(optimizer: CustomOptimizer) -> tuple[IntArray, IntArray | None]:
    """Return indices of the dataset, as many as a microbatch has, (rows,), and what each counts unless all 1."""
    sampler: Any = optimizer.sampler
    if isinstance(batches := sampler.batches, TokenBatches):  # more rows may not fit
        numbers = np.array(batches.budget.unlike())
        return numbers, batches.budget.counts[numbers]
    size = batches.dataset_size
    drawn = np.random.default_rng([sampler.seed, optimizer.updates]).permutation(size)
    return drawn[: max(2, sampler.plan.minibatch_size)], None
