"""Save a training to disk and resume it on any world, also after a signal that asks it to stop.

`checkpoint.py` is the public class and `format.py` the one list of what is saved. A save goes through `saving.py`,
`shards.py` and `publishing.py` to `disk.py` or `object_store.py`; `reading.py` finds the newest one that is intact.
"""

from variable_batch_size.checkpoint.checkpoint import Checkpoint
from variable_batch_size.checkpoint.parts import Stateful
from variable_batch_size.checkpoint.reading import read_checkpoint

__all__ = ["Checkpoint", "Stateful", "read_checkpoint"]
