"""Checks whether forward writes buffers, which then depend on the microbatches, and on the number of ranks."""

from __future__ import annotations

import warnings
from typing import NamedTuple, final

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _NormBase

from variable_batch_size._log import stacklevel_of_user
from variable_batch_size._validation import value_error
from variable_batch_size.backend import Backend
from variable_batch_size.data.steps import Phase
from variable_batch_size.data.training import Training
from variable_batch_size.optim.stage import LoopStage
from variable_batch_size.optim.tensors.hooks import bare, call_before_forward
from variable_batch_size.optim.tensors.parameters import versions_of


class _Kept(NamedTuple):
    """A buffer as it was before a forward; `value` is a copy, None on a device whose graph a copy would change."""

    owner: Module
    name: str
    tensor: Tensor
    version: int
    value: Tensor | None

    @property
    def is_written(self) -> bool:
        """Whether forward has changed its values; one of another shape is a cache that grows, and does not count."""
        now = self.owner._buffers.get(self.name)
        if now is None or now.shape != self.tensor.shape:
            return False
        changed = now is not self.tensor or versions_of([now]) != [self.version]
        return changed and (self.value is None or not torch.equal(now, self.value))


@final
class Buffers(LoopStage):
    """Looks for buffers that forward writes, in the second microbatch: the first one may fill a cache.

    Batch normalization, and what else torch keeps as running statistics, has a check of its own.

    Args:
        module: the model; without one nothing is checked.
        backend: how ranks communicate.
        training: the training; forwards within `outside()` do not belong to it.
        reproducible: whether updates must be the same to the last bit in any world.
    """

    def __init__(self, module: Module | None, backend: Backend, training: Training, *, reproducible: bool) -> None:
        self._module = bare(module)
        self._backend, self._training, self._reproducible = backend, training, reproducible
        self._microbatches = 0  # number of microbatches for which `step()` was called
        self._before: list[_Kept] | None = None  # buffers before the second forward pass
        call_before_forward(self._module, self._keep)

    def _keep(self) -> None:
        """Copy the buffers of modules in training mode before the first forward pass of the second microbatch."""
        if self._module is None or self._microbatches != 1 or self._before is not None:  # 1: counted before this one
            return
        if self._training.phase is Phase.OUTSIDE or not any(part.training for part in self._module.modules()):
            return
        static = self._backend.static_graph
        self._before = [
            _Kept(module, name, buffer, versions_of([buffer])[0], None if static else buffer.clone())
            for module in self._module.modules()
            if module.training and not (isinstance(module, _NormBase) or type(module).__name__ == "_SpectralNorm")
            for name, buffer in module.named_buffers(recurse=False)
        ]

    def begin_microbatch(self, member: object, *, has_backward: bool) -> None:
        """Raise ValueError, or warn, if the forward pass of the second microbatch has written a buffer."""
        self._microbatches += 1
        buffers_before, self._before = self._before, None  # copies from before the forward pass; None but once
        for buffer in buffers_before or []:
            if buffer.is_written:
                self._tell(f"{buffer.name!r} of {type(buffer.owner).__name__}")
                return

    def _tell(self, name: str) -> None:
        """Warn that the forward pass writes this buffer; raise ValueError instead if updates must be reproducible."""
        remedy = 'change it once an update, in a hook, see "Buffers that forward writes" in losses.md'
        if self._reproducible:
            raise value_error("reproducible=True needs buffers that forward leaves alone", f"writes to {name}", remedy)
        if self._backend.world.rank == 0:
            warnings.warn(
                f"Forward writes buffer {name}: each microbatch changes it, on each rank by itself, so that it depends "
                f"on the number of ranks; {remedy}",
                UserWarning,
                stacklevel=stacklevel_of_user(),
            )
