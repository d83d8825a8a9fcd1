"""The checkpoints of the library as a callback of Keras."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, final

import keras
from torch import nn

from variable_batch_size.checkpoint.checkpoint import Checkpoint


class Metrics(nn.Module):
    """The variables of a model's metrics and its `epoch_offset`: the name of this class is in errors about them."""


@final
class VariableBatchCheckpoint(keras.callbacks.Callback):
    """Restores the newest checkpoint of a folder when the first `fit` begins, and saves while it runs.

    A run that was stopped after any update continues there, on any number of ranks, with the metrics of the epoch under
    way, which are those of rank 0. Pass it on every rank, after the callbacks whose work comes before the save.

    Args:
        folder: see `vbs.Checkpoint`.
        every: a number of updates, or a timedelta; None: at the end of each epoch.
        **options: further arguments of `vbs.Checkpoint`, such as `keep`.
    """

    def __init__(self, folder: str | os.PathLike[str], *, every: int | timedelta | None = None, **options: Any) -> None:
        super().__init__()
        self._each_epoch = every is None
        self._options: dict[str, Any] = {"dir": folder, "every": every, **options}
        self._checkpoint: Any = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Restore the newest checkpoint, if there is one and nothing was trained."""
        optimizer, metrics = self.model.custom_optimizer, Metrics()
        metrics.register_buffer("epoch_offset", self.model.epoch_offset)
        for number, variable in enumerate(self.model.metrics_variables):
            metrics.register_buffer(str(number), variable.value)
        # By their order: Keras numbers the names of layers in a process.
        weights = nn.ParameterList([variable.value for variable in self.model.variables])
        self._checkpoint = Checkpoint(model=weights, metrics=metrics, optimizer=optimizer, **self._options)
        if not optimizer.updates:
            self._checkpoint.restore()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Save if it is due, within an epoch."""
        if not self.model.sampler.batches.ends_epoch(self.model.sampler.position):
            self._checkpoint.step()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Save if it is due, at the end of an epoch."""
        self._checkpoint.step()
        if self._each_epoch:
            self._checkpoint.save(wait=False)

    def on_train_end(self, logs: Any = None) -> None:
        """Save the last updates."""
        if not self._each_epoch:
            self._checkpoint.save(wait=False)

    def close(self) -> None:
        """Wait for the write in progress, and unlock the folder; `fit` calls it."""
        if self._checkpoint is not None:
            self._checkpoint.close()
        self._checkpoint = None
