"""The checkpoints of the library as a callback of Keras."""

from __future__ import annotations

import math
import os
from datetime import timedelta
from typing import Any, final

import torch

from variable_batch_size.checkpoint.checkpoint import Checkpoint
from variable_batch_size.integrations.keras.backend import keras


@final
class VariableBatchCheckpoint(keras.callbacks.Callback):
    """Restores the newest checkpoint of a folder when `fit` begins, and saves while it runs.

    A run that was stopped after any update continues there, on any number of ranks. Pass it on every rank. At the end
    of an epoch it saves after the validation and all other callbacks, whose own states are not saved.

    Args:
        folder: see `vbs.Checkpoint`, as for all others.
        every: a number of updates, or a timedelta; None: at the end of each epoch.
        keep: number of checkpoints to keep.
        best: "min:" or "max:" and the name of a value that Keras logs at the end of an epoch, such as "min:val_loss".
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        every: int | timedelta | None = None,
        keep: int = 2,
        best: str | None = None,
    ) -> None:
        super().__init__()
        self._options: dict[str, Any] = {"dir": folder, "every": every, "keep": keep, "best": best}
        self._checkpoint: Checkpoint | None = None

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoints.

        Raises:
            RuntimeError: before `fit`.
        """
        if self._checkpoint is None:
            raise RuntimeError(
                "the checkpoints must be open, but fit() has not begun, or has ended; use vbs.Checkpoint"
            )
        return self._checkpoint

    def on_train_begin(self, logs: Any = None) -> None:
        """Restore the newest checkpoint, if there is one."""
        training = getattr(self.model, "_variable_batch", None)
        if training is None:
            raise TypeError(
                f"VariableBatchCheckpoint needs a VariableBatchModel, got {type(self.model).__name__}; put "
                f"VariableBatchModel(..., trace=...) around the model"
            )
        # By their order: Keras numbers the names of layers in a process.
        variables = torch.nn.ParameterList([variable.value for variable in self.model.variables])
        parts = {"model": variables, "optimizer": training.optimizer, "metrics": training.metrics}
        self._checkpoint = Checkpoint(**parts, **self._options)
        if self._checkpoint.restore():
            training.restored()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Save if it is due, within an epoch."""
        if not self.model.sampler.clock.finished:
            self.checkpoint.step()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Save if it is due, at the end of an epoch."""
        self.checkpoint.step()
        if self._options["every"] is None:
            self.checkpoint.save(wait=False)
        if self._options["best"] is not None:
            self.checkpoint.report(**{name: value for name, value in (logs or {}).items() if math.isfinite(value)})

    def close(self) -> None:
        """Wait for the write in progress, and unlock the folder; `fit` calls it."""
        if self._checkpoint is not None:
            self._checkpoint.close()
        self._checkpoint = None
