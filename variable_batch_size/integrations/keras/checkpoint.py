"""The checkpoints of the library as a callback of Keras."""

from __future__ import annotations

import os
import warnings
from datetime import timedelta
from typing import Any, final

import keras
from torch import nn

from variable_batch_size.checkpoint.checkpoint import Checkpoint
from variable_batch_size.checkpoint.checks import HyperparametersWarning


@final
class VariableBatchCheckpoint(keras.callbacks.Callback):
    """Restores the newest checkpoint of a folder when the first `fit` begins, and saves while it runs.

    A run that was stopped after any update continues there, on any number of ranks; the metrics of the epoch under way
    begin anew. Pass it on every rank, after the callbacks whose work comes before the save.

    Args:
        folder: see `vbs.Checkpoint`.
        every: a number of updates, or a timedelta, after which it saves, besides the ends of epochs.
        **options: further arguments of `vbs.Checkpoint`, such as `keep`.
    """

    def __init__(self, folder: str | os.PathLike[str], *, every: int | timedelta | None = None, **options: Any) -> None:
        """Store the arguments of the `vbs.Checkpoint`, which `fit` creates."""
        super().__init__()
        self._options: dict[str, Any] = {"dir": folder, "every": every, **options}
        self._checkpoint: Any = None

    def restored(self, model: Any) -> Checkpoint:
        """Restore the newest checkpoint, if there is one and the model was not trained yet, and return the checkpoint.

        `fit` calls this when it begins, and closes what it returns.
        """
        variables = [*model.variables, *model.optimizer.variables]
        # By position: the names of Keras have numbers, which depend on the models that the process made before.
        values = nn.ParameterList([variable.value for variable in variables])
        self._checkpoint = Checkpoint(model=values, optimizer=model.custom_optimizer, **self._options)
        if not model.custom_optimizer.updates:
            with warnings.catch_warnings():  # it advises optimizer.param_groups; in Keras a callback sets the rate
                warnings.simplefilter("ignore", HyperparametersWarning)
                self._checkpoint.restore()
        return self._checkpoint  # type: ignore[no-any-return]

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Save after an update within an epoch, if `every` says so. `on_epoch_end` saves after its last update."""
        sampler = self.model.custom_optimizer.sampler
        if not sampler.batches.ends_epoch(sampler.position):
            self._checkpoint.step()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Save at the end of an epoch, whatever `every` says."""
        self._checkpoint.step()
        self._checkpoint.save(wait=False)
