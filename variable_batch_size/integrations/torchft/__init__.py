"""torchft: replica groups that fail and come back within a training whose updates stay the same."""

from variable_batch_size.integrations.versions import require_version

require_version("torchft", "0.2.0", "torchft", below="0.3")  # private names of Manager are used

from variable_batch_size.integrations.torchft.backend import TorchftBackend  # noqa: E402

__all__ = ["TorchftBackend"]
