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
WITH_CLASS_WEIGHTS: Final = "(weight[y] * cross_entropy(logits, y, reduction='none')).mean()"  # a mean over rows
LossOf = Callable[[Any, Any, float], Tensor]  # of the model, a batch, and what its rows count


@final
class LossCheck:
    """Warns in some updates of a loss that depends on how a batch is cut; a line of the log says what is not checked.

    All ranks draw the same rows of the dataset by the sampler's seed, other ones in each of these updates, and the same
    random numbers, so that forwards may communicate.

    Args:
        enabled: whether to check anything.
        first: the update from which `CHECKED_UPDATES` are counted.
    """

    def __init__(self, enabled: bool = True, first: int = 0) -> None:
        self._due = {first + update for update in CHECKED_UPDATES} if enabled else set[int]()
        self._largest = np.zeros(2)  # see `compare_parts`

    def takes(self, optimizer: CustomOptimizer) -> bool:
        """Return whether the loss is to be checked before the next update; True at most once for each update."""
        is_due = optimizer.updates in self._due
        self._due.discard(optimizer.updates)
        return is_due

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
        """Warn if the loss of rows of the loader's dataset is not the mean, or the sum, of the losses of parts of them.

        Args:
            optimizer: the optimizer of the training.
            loader: has the dataset, and the function that collates rows.
            model: the model.
            loss_of: returns the loss, given the model, a batch, and what its rows count.
            reduction, remedy: see `vbs.testing.check_loss`.
            owner: an object whose attributes forward passes change, such as a trainer; they are restored.
        """
        options: Any = {"reduction": reduction, "tolerance": None, "remedy": remedy, "largest": self._largest}
        try:
            with kept_states(), kept_attributes(owner, loader.dataset, loader.collate_fn):
                compared = _compare(optimizer, loader, model, loss_of, **options)
        except Exception as error:  # of the user's code; the forward pass of the training raises it where it matters
            compared = Compared(f"{type(error).__name__} in a forward pass of drawn rows ({str(error)[:80]})")
        if compared.left_out:
            self.leave(optimizer, compared.left_out)
        compared.warn()


def _compare(
    optimizer: CustomOptimizer, loader: DataLoader[Any], model: nn.Module, loss_of: LossOf, **options: Any
) -> Compared:
    """Compare the loss of rows of the dataset with the losses of parts of them, see `compare_parts`.

    The rows are read once. Parts are collated by themselves or, if that cannot be compared, as where the collator draws
    random numbers, cut from the collated batch.
    """
    indices, counts = _drawn_rows(optimizer)
    num_rows, seeds = len(indices), count(seed_of("microbatch", optimizer.updates))
    seed_host(next(seeds))
    drawn_rows = read_rows(loader.dataset, indices.tolist())
    batch = loader.collate_fn(drawn_rows)
    order, counted = unlike_rows(batch, num_rows), np.ones(num_rows) if counts is None else counts
    take_functions = list[Callable[[IntArray], Any]]()  # two ways to get the batch of some rows, the better one first
    if isinstance(drawn_rows, list) and len(drawn_rows) == num_rows:
        take_functions.append(lambda part: loader.collate_fn([drawn_rows[row] for row in part]))
    # If fewer rows do not make a shorter batch, the first dimension is not that of rows, but time, for example.
    has_rows = has_tensor_rows(batch, num_rows)
    if has_rows and (not take_functions or has_tensor_rows(take_functions[0](order[1:]), num_rows - 1)):
        take_functions.append(partial(take_rows, batch))

    def loss(take: Callable[[IntArray], Any], model: nn.Module, part: IntArray) -> Tensor:
        seed_host(next(seeds))  # another seed in each call, so that a loss that draws random numbers is found
        return loss_of(model, take(part), float(counted[part].sum()))

    compared = Compared("its batches have another number of rows")
    for take in take_functions:
        compared = compare_parts(model, partial(loss, take), order, counts=counts, **options)
        if not compared.left_out:
            break
    return compared


def _drawn_rows(optimizer: CustomOptimizer) -> tuple[IntArray, IntArray | None]:
    """Draw rows for a check: return their indices in the dataset, (rows,), and what each counts; None: all count 1."""
    sampler: Any = optimizer.sampler
    batches = sampler.batches
    if isinstance(batches, TokenBatches):  # its budget knows a short and a long row that fit into a microbatch
        indices = np.array(batches.budget.unlike())
        return indices, batches.budget.counts[indices]
    size = batches.dataset_size
    drawn = np.random.default_rng([sampler.seed, optimizer.updates]).permutation(size)
    return drawn[: max(2, sampler.plan.minibatch_size)], None
