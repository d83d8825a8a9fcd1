"""lightning.pytorch: `Trainer(strategy=VariableBatchStrategy(...))`, in which a batch is one update."""

from variable_batch_size.integrations.versions import require_version

require_version("lightning", "2.5", "lightning")

from variable_batch_size.integrations.lightning.strategy import (  # noqa: E402
    VariableBatchModelParallelStrategy,
    VariableBatchStrategy,
)

__all__ = ["VariableBatchModelParallelStrategy", "VariableBatchStrategy"]
