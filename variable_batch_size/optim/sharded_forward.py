"""Do all ranks call the same parts of a sharded model? FSDP2 gathers a part's parameters from all of them.

Each rank tells, before a part is first called, which one it is. Ranks that differ would wait for one another in torch,
or mistake the parameters of one part for those of another one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, final
from weakref import WeakMethod, finalize

import torch
from torch.nn import Module

from variable_batch_size.backend import Agreement
from variable_batch_size.optim.uncompiled import uncompiled

_PATIENCE = 120.0  # seconds to wait for a rank that does not call the same part; it may compile an earlier one


@final
class SameForwards:
    """Compares the ranks at the first forward of each part of a model.

    Args:
        parts: by name.
        agreement: of all ranks.
    """

    def __init__(self, parts: Iterable[tuple[str, Any]], agreement: Agreement) -> None:
        self._agreement = agreement
        for name, part in parts:
            hook = _BeforeForward(WeakMethod(self._compare), name or "the root")
            hook.handle = part.register_forward_pre_hook(hook, prepend=True)  # before that of FSDP2
            finalize(self, hook.handle.remove).atexit = False

    def _compare(self, name: str) -> None:
        self._agreement.gather(f"the first forward of {name} in a sharded model", "", _PATIENCE, within=True)


@final
class _BeforeForward:
    handle: Any

    def __init__(self, method: WeakMethod[Any], name: str) -> None:
        self._method, self._name = method, name

    @uncompiled
    def __call__(self, module: Module, args: Any) -> None:
        if torch.is_grad_enabled() and (call := self._method()) is not None:
            self.handle.remove()
            call(self._name)
