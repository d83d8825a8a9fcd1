"""The training's loader that `prepare` returns: the microbatches of this process, for a loop of Accelerate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

from accelerate import Accelerator
from accelerate.data_loader import DataLoaderStateMixin
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader

from variable_batch_size.data.batches import Position
from variable_batch_size.optim.optimizer import CustomOptimizer
from variable_batch_size.optim.updates import updates

_ABSENT = {
    "batch_sampler": "the training's microbatches must all come from its own loader; iterate the loader itself, which "
    "continues with the next update after load_state(), instead of skip_first_batches(), and take optimizer.sampler "
    "for anything else",
    "batch_size": "batch sizes change; take optimizer.microbatch before optimizer.step(): its rows are those of this "
    "process, its batch_size that of the whole update",
}
_ABSENT["total_batch_size"] = _ABSENT["batch_size"]


@final
class VariableBatchLoader(DataLoaderStateMixin):
    """The loader of the training: it yields the microbatches of this process that are left of the epoch.

    Each iteration sets the epoch of the next update, and each microbatch `accelerator.sync_gradients`.

    Args:
        loader: the loader that reads the sampler of `optimizer`.
        optimizer: the optimizer.
        accelerator: the accelerator, whose device the microbatches are moved to.
    """

    def __init__(self, loader: DataLoader[Any], optimizer: CustomOptimizer, accelerator: Accelerator) -> None:
        self.loader, self._optimizer, self._accelerator = loader, optimizer, accelerator
        self._updates = updates(loader, optimizer)
        self.gradient_state = accelerator.gradient_state
        self._begun: tuple[Position, int] | None = None  # where the last iteration began, and restarts before it
        self._loop: object = None  # that iteration

    def __len__(self) -> int:
        """Return how many microbatches an iteration yields in this process.

        That is the one under way, or the last one if it has reached the end of its epoch, because loops divide by it
        then; after one that was left, or after a state was loaded, it is the next one.
        """
        sampler, optimizer = self._optimizer.sampler, self._optimizer
        begun = self._begun
        position = sampler.due if begun is None or begun[1] != optimizer._cursor.restarts else begun[0]
        try:
            return sampler.batches.count(position)
        except ValueError:  # the trace has ended before that epoch
            return 0

    def __iter__(self) -> Iterator[Any]:
        """Yield what is left of the epoch; a step that an earlier loop has left incomplete starts over."""
        self._begun = None
        return self._iterate()

    def _iterate(self) -> Iterator[Any]:
        accelerator, optimizer = self._accelerator, self._optimizer
        self.set_epoch(optimizer.epoch)
        self._begun = optimizer.sampler.due, optimizer._cursor.restarts
        self._loop = loop = object()
        self.begin()
        try:
            for update in self._updates:
                for number, batch in enumerate(update, 1):
                    accelerator.sync_gradients = number == len(update)
                    sampler = optimizer.sampler
                    end = sampler.batches.epoch(sampler.due).end_step  # of a trace that grows, as far as it is known
                    self.end_of_dataloader = accelerator.sync_gradients and optimizer.updates + 1 == end
                    yield self._on_device(batch)
                    if self._loop is not loop:
                        raise RuntimeError(
                            "a loop over the training's loader must end before another one begins, but another one has "
                            "begun within it, as next(iter(loader)) does; look at samples with another DataLoader"
                        )
        finally:
            if self._loop is loop:
                accelerator.sync_gradients = True
                ended = optimizer.sampler.batches.ends_epoch(optimizer.sampler.position)
                self._begun = self._begun if ended else None
                self.end()

    def set_epoch(self, epoch: int) -> None:
        """Move to a later epoch; each iteration does it by itself."""
        self._begun = None
        for part in self._optimizer.sampler, self._optimizer, self.loader.dataset:
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the loader, but for those that are not what a loop of Accelerate takes them for."""
        if name in _ABSENT:
            raise AttributeError(f"the training's loader has no {name}: {_ABSENT[name]}")
        if name == "loader":  # there is none yet
            raise AttributeError(name)
        return getattr(self.loader, name)

    def _on_device(self, batch: Any) -> Any:
        accelerator = self._accelerator
        if not accelerator.device_placement:
            return batch
        return send_to_device(batch, accelerator.device, non_blocking=accelerator.non_blocking)
