"""Undoes what a replay changes: afterwards buffers of the model and random numbers are as before its forward."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor
from torch.nn import Module

from variable_batch_size.backend import Backend
from variable_batch_size.microbatching import Microbatch
from variable_batch_size.optim.tensors.buffers import KeptBuffers
from variable_batch_size.optim.tensors.hooks import bare


@final
class Replays:
    """Undoes what the forward and backward of a replay change besides gradients.

    It does nothing on a device where all ranks must run the same graph, because only some of them have a replay.

    Attributes:
        module: the model whose buffers are restored; None if nothing is undone.
    """

    def __init__(self, module: Module | None, backend: Backend) -> None:
        self.module = None if backend.static_graph or backend.alone else bare(module)
        self._before: tuple[KeptBuffers, list[Tensor]] | None = None  # buffers, and random numbers

    def save_state(self, microbatch: Microbatch | None) -> None:
        """Save buffers and random numbers before the first forward pass of a microbatch without samples.

        Such a replay has weight 0, and repeats another microbatch so that all ranks communicate equally often.
        """
        if self.module is None or microbatch is None or microbatch.samples or self._before is not None:
            return
        cuda_states = [torch.cuda.get_rng_state(device) for device in self._cuda_devices()]
        self._before = KeptBuffers(self.module), [torch.get_rng_state(), *cuda_states]

    def restore_state(self) -> None:
        """Restore buffers and random numbers after a replay, which repeats a microbatch with weight 0.

        It does nothing if nothing was saved before its forward pass.
        """
        if self._before is None:
            return
        buffers, (cpu_state, *cuda_states) = self._before  # states of random generators
        self._before = None
        buffers.restore()
        torch.set_rng_state(cpu_state)
        for device, state in zip(self._cuda_devices(), cuda_states, strict=True):
            torch.cuda.set_rng_state(state, device)

    def drop_state(self) -> None:
        """Forget what was saved: the step starts over, or the training has moved."""
        self._before = None

    def _cuda_devices(self) -> list[torch.device]:
        """Return the CUDA devices of the model's parameters, whose random generators a forward pass may use."""
        parameters = [] if self.module is None else self.module.parameters()
        return list(dict.fromkeys(parameter.device for parameter in parameters if parameter.is_cuda))
