"""transformers' Trainer with a batch size that changes: `VariableBatchTrainer`, and a mixin for its subclasses."""

from variable_batch_size.integrations.transformers.trainer import VariableBatchMixin, VariableBatchTrainer

__all__ = ["VariableBatchMixin", "VariableBatchTrainer"]
