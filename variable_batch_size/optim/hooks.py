"""The caller of an update: the line that a warning is attributed to, and what `torch.compile` leaves alone.

How many frames lie between that line and a warning varies: a scheduler of torch, a `GradScaler`, decorators and
`torch.compile` add their own. (`skip_file_prefixes` of `warnings.warn` needs Python 3.12.)
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

_INSIDE = tuple(f"{folder}{os.sep}" for folder in (Path(__file__).parents[1], Path(torch.__file__).parent))


def stacklevel_of_user() -> int:
    """Return the `stacklevel` of a warning of the caller at the first line outside of this package and of torch."""
    frame, level = sys._getframe(1), 1
    while frame.f_code.co_filename.startswith(_INSIDE) and frame.f_back is not None:
        frame, level = frame.f_back, level + 1
    return level


Function = TypeVar("Function", bound=Callable[..., Any])


def uncompiled(function: Function) -> Function:
    """Return a function that runs outside of the graphs of its callers; what it calls may be compiled by itself."""
    disabled: Function = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return disabled
