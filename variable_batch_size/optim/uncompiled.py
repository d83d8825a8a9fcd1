"""What stays outside of compiled code: a compiled caller would trace the bookkeeping, and recompile it often."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def uncompiled(function: Function) -> Function:
    """Return a function that runs outside of the graphs of its callers; what it calls may be compiled by itself."""
    disabled: Function = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return disabled
