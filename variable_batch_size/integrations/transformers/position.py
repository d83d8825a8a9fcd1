"""The callback that keeps a trainer's epoch and number of updates right."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

from transformers import TrainerCallback

from variable_batch_size.integrations.transformers.planned import epochs_passed
from variable_batch_size.optim.optimizer import CustomOptimizer


class PositionOwner(Protocol):
    """What the callback asks of a trainer."""

    callback_handler: Any

    @property
    def variable_optimizer(self) -> CustomOptimizer:
        """The optimizer."""
        ...

    def begin_training(self) -> None:
        """Note where the optimizer begins."""
        ...

    def updates_in_all(self, estimate: int) -> int:
        """Return the number of updates of the training, as far as it is known by now."""
        ...


class Position(TrainerCallback):
    """The first callback, so that others read what it has corrected: the epoch, and an estimated number of updates."""

    def __init__(self, trainer: PositionOwner) -> None:
        self._trainer = weakref.proxy(trainer)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Check that the optimizer is where the training resumes."""
        optimizer = self._trainer.variable_optimizer
        if state.global_step > optimizer.updates:
            raise RuntimeError(
                f"a training must resume with its optimizer, but the checkpoint of step {state.global_step} has none; "
                f"resume from one that was saved with save_only_model=False"
            )
        self._trainer.begin_training()
        self._correct(state)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Correct the state after an update, and what progress bars took for the end."""
        self._correct(state)
        for callback in self._trainer.callback_handler.callbacks:
            if (bar := getattr(callback, "training_bar", None)) is not None:
                bar.total = state.max_steps

    def _correct(self, state: Any) -> None:
        state.epoch = epochs_passed(self._trainer.variable_optimizer.sampler.clock)
        state.max_steps = self._trainer.updates_in_all(state.max_steps)
