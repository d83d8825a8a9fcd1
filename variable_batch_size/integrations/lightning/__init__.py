"""lightning.pytorch: `Trainer(strategy=VariableBatchStrategy(...))`, in which a batch is one update."""

from variable_batch_size.integrations.lightning.strategy import VariableBatchStrategy

__all__ = ["VariableBatchStrategy"]
