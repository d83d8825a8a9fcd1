"""How ranks communicate where torch does not do it for us: one process, `torch.distributed`, or PyTorch/XLA.

`base.py` is the interface, `detection.py` chooses one. What hosts agree on without a collective is in `agreement.py`.
Elsewhere only `optim/tensors/arithmetic.py` and `optim/sums/squares.py` call a collective, over the mesh of sharded
parameters.
"""

from variable_batch_size.backend.base import Backend
from variable_batch_size.backend.detection import current_world, detect
from variable_batch_size.backend.distributed import DistributedBackend
from variable_batch_size.backend.elastic import BrokenStepError, ElasticBackend
from variable_batch_size.backend.local import LocalBackend
from variable_batch_size.backend.xla import XlaBackend
from variable_batch_size.world import World

__all__ = [
    "Backend",
    "BrokenStepError",
    "DistributedBackend",
    "ElasticBackend",
    "LocalBackend",
    "World",
    "XlaBackend",
    "current_world",
    "detect",
]
