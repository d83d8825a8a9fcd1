"""Ignite: an Engine whose iterations are updates."""

from variable_batch_size.integrations.ignite.engine import (
    ProgressBar,
    UpdateEpochs,
    VariableBatchEngine,
    create_supervised_trainer,
    per_update,
    variable_batch,
)

__all__ = [
    "ProgressBar",
    "UpdateEpochs",
    "VariableBatchEngine",
    "create_supervised_trainer",
    "per_update",
    "variable_batch",
]
