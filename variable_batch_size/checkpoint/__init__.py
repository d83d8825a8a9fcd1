"""Stop anywhere, resume anywhere: a training's state on disk, and the signals that ask for it."""

from variable_batch_size.checkpoint.checkpoint import Checkpoint, Stateful

__all__ = ["Checkpoint", "Stateful"]
