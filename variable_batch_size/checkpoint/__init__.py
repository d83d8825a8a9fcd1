"""Save a training to disk and resume it on any world, also after a signal that asks it to stop.

`checkpoint.py` is the public class, and `saving.py` a save from top to bottom. `parts.py` has the states, `folder.py`
knows which checkpoints there are, `contents.py` what is in one, and `reading.py` puts it together for a rank.
"""

from variable_batch_size.checkpoint.checkpoint import Checkpoint
from variable_batch_size.checkpoint.parts import Stateful
from variable_batch_size.checkpoint.reading import read_checkpoint

__all__ = ["Checkpoint", "Stateful", "read_checkpoint"]
