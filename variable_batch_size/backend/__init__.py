"""How ranks communicate: one process, `torch.distributed`, or PyTorch/XLA. No other package calls their collectives."""

from variable_batch_size.backend.agreement import Agreement
from variable_batch_size.backend.base import Backend
from variable_batch_size.backend.detection import current_world, detect
from variable_batch_size.backend.distributed import DistributedBackend
from variable_batch_size.backend.local import LocalBackend
from variable_batch_size.backend.xla import XlaBackend
from variable_batch_size.world import World

__all__ = [
    "Agreement",
    "Backend",
    "DistributedBackend",
    "LocalBackend",
    "World",
    "XlaBackend",
    "current_world",
    "detect",
]
