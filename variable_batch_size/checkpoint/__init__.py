"""Save a training to disk and resume it on any world, also after a signal that asks it to stop.

`checkpoint.py` is the public class. A save goes through `saving.py` to `folder.py`, which knows what a checkpoint is;
`reading.py` finds the newest one that is intact.
"""

from variable_batch_size.checkpoint.checkpoint import Checkpoint
from variable_batch_size.checkpoint.parts import Stateful
from variable_batch_size.checkpoint.reading import read_checkpoint

__all__ = ["Checkpoint", "Stateful", "read_checkpoint"]
