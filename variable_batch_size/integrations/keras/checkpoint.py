"""The checkpoints of the library as a callback of Keras."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, final

import torch

from variable_batch_size._validation import value_error
from variable_batch_size.checkpoint.checkpoint import Checkpoint
from variable_batch_size.data.state import REGARDLESS
from variable_batch_size.integrations.keras.backend import keras


@final
class VariableBatchCheckpoint(keras.callbacks.Callback):
    """Restores the newest checkpoint of a folder when `fit` begins, and saves while it runs and when it ends.

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
        self._began_at = 0

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
        self._began_at = training.optimizer.updates
        with explaining_mismatch():
            if self._is_ahead(training) and self._checkpoint.restore():
                training.restored()

    def _is_ahead(self, training: Any) -> bool:
        """Return whether to restore: not what this process itself has just trained."""
        if training.interrupted or not training.optimizer.updates:
            return True
        latest = self.checkpoint.latest
        ahead = latest is not None and int(latest.name.split("-")[1]) > training.optimizer.updates
        return bool(training.optimizer.agreement.any_rank("fit()", ahead))

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
            self.checkpoint.report(**self._numbers(logs or {}))

    def on_train_end(self, logs: Any = None) -> None:
        """Save the last updates."""
        if self._options["every"] is not None and self.model.custom_optimizer.updates > self._began_at:
            self.checkpoint.save(wait=False)

    def _numbers(self, logs: dict[str, Any]) -> dict[str, float]:
        name = self._options["best"].partition(":")[2]
        if name not in logs:
            raise value_error(
                f'best="{self._options["best"]}" must name a value that is logged at the end of each epoch',
                f"{', '.join(logs)}",
                "pass validation_data to fit() for a name with val_, or one of these names",
            )
        return {key: value for key, value in logs.items() if isinstance(value, (int, float))}

    def close(self) -> None:
        """Wait for the write in progress, and unlock the folder; `fit` calls it."""
        if self._checkpoint is not None:
            self._checkpoint.close()
        self._checkpoint = None


@contextmanager
def explaining_mismatch() -> Iterator[None]:
    """Let the error of a checkpoint of other samples have a remedy of Keras, where there is no `strict`."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if REGARDLESS not in str(error):
            raise
        remedy = "pass another folder to begin another training"
        raise type(error)(str(error).replace(REGARDLESS, remedy)) from error
