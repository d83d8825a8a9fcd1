"""A loader whose batches are updates, for a trainer that asks for its loader before its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, final

from torch import Tensor
from torch.utils.data import DataLoader

from variable_batch_size.data.batches import Position
from variable_batch_size.data.sampler import CustomSampler
from variable_batch_size.integrations.loading import with_sampler
from variable_batch_size.microbatching import Microbatch
from variable_batch_size.optim.optimizer import CustomOptimizer
from variable_batch_size.optim.updates import updates


@final
class Update(list[Any]):
    """This rank's microbatches of an update: the batch that Trainer sees, and who looks at the loader.

    Attributes:
        counts: labels of each microbatch, scalars, if they were counted.
        total: labels of the update, over all ranks.
    """

    counts: list[Tensor] | None = None
    total: Tensor

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, str):
            raise _not_a_microbatch(repr(index))
        return super().__getitem__(index)

    def keys(self) -> Any:
        """Raise TypeError: `model(**inputs)` was written for a microbatch."""
        raise _not_a_microbatch("names")


def _not_a_microbatch(part: str) -> TypeError:
    return TypeError(
        f"a batch of the training's loader is an update, the list of its microbatches, but was used as one of them, "
        f"which has {part}; take batch[0] to look at one. If training_step() does it, override compute_loss() instead, "
        f"or keep the method in a class below: class Mine(VariableBatchMixin, TrainerWithIt)"
    )


@final
class UpdateLoader:
    """The training's loader, whose batches are updates: lists of this rank's microbatches. Its `len` is the epoch's.

    Args:
        loader: the loader of the class below.
        sampler: the sampler that deals the microbatches.
        optimizer: function that returns the optimizer, or None before the training.
    """

    def __init__(
        self, loader: DataLoader[Any], sampler: CustomSampler, optimizer: Callable[[], CustomOptimizer | None]
    ) -> None:
        self.loader, self.sampler = with_sampler(loader, sampler), sampler
        self._optimizer = optimizer
        self._epoch = 0  # of Trainer, which leaves an epoch early if a callback wants that

    @property
    def dataset(self) -> Any:
        """The dataset, whose samples Trainer counts."""
        return self.loader.dataset

    def set_epoch(self, epoch: int) -> None:
        """Move to an epoch when the next iteration begins."""
        self._epoch = epoch

    def __len__(self) -> int:
        return self.sampler.plan.epoch(max(self._epoch, self.sampler.position.epoch)).updates

    def __iter__(self) -> Iterator[Update]:
        optimizer = self._optimizer()
        if optimizer is None or optimizer.sampler is not self.sampler:
            return self._look()
        if self._epoch > optimizer.epoch:
            optimizer.agreement.gather("the end of an epoch that a callback has left", str(self._epoch))  # on all ranks
            self.sampler.set_epoch(self._epoch)
            optimizer.set_epoch(self._epoch)
        return map(Update, updates(self.loader, optimizer))

    def _look(self) -> Iterator[Update]:
        """Yield the updates of the first epoch, while there is no optimizer that could count what is trained."""
        batches, due, microbatches = self.sampler.batches, self.sampler.due, iter(self.loader)
        for step in range(due.step, batches.epoch(due).end_step):
            yield Update(islice(microbatches, batches.step(Position(due.epoch, step)).rounds(batches.world)))


def counted(values: Tensor, part: Microbatch) -> Tensor:
    """Return the values of the rows of a microbatch that count, each once, as a vector."""
    if part.samples == 0:
        values = values[:0]
    elif len(values) == part.rows:
        values = values[:: part.rows // part.samples]
    return values.flatten()
