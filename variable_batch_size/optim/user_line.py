"""Which line of the user's code an update was made by: warnings are attributed to it.

How many frames lie between it and the warning varies: a scheduler of torch, a `GradScaler`, decorators and
`torch.compile` add their own. (`skip_file_prefixes` of `warnings.warn` needs Python 3.12.)
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

_INSIDE = tuple(f"{folder}{os.sep}" for folder in (Path(__file__).parents[1], Path(torch.__file__).parent))


def stacklevel_of_user() -> int:
    """Return the `stacklevel` of a warning of the caller at the first line outside of this package and of torch."""
    frame, level = sys._getframe(1), 1
    while frame.f_code.co_filename.startswith(_INSIDE) and frame.f_back is not None:
        frame, level = frame.f_back, level + 1
    return level
