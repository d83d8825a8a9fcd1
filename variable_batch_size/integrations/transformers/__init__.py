"""transformers' Trainer with a batch size that changes: `VariableBatchTrainer`, and a mixin for its subclasses."""

from variable_batch_size.integrations.versions import require_version

require_version("transformers", "5.19", "transformers")
require_version("accelerate", "1.13", "transformers")

from variable_batch_size.integrations.transformers.trainer import VariableBatchMixin, VariableBatchTrainer  # noqa: E402

__all__ = ["VariableBatchMixin", "VariableBatchTrainer"]
