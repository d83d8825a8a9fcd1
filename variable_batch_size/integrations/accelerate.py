"""Accelerate: a loop needs nothing from here, but for states of FSDP2; see docs/trainers/accelerate.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, final

import torch

from variable_batch_size.optim.optimizer import CustomOptimizer


@final
class PositionState:
    """The position in a training whose inner optimizer Accelerate saves by itself, as it does with FSDP2.

    `accelerator.register_for_checkpointing(PositionState(optimizer), scheduler)`
    """

    def __init__(self, optimizer: CustomOptimizer) -> None:
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and the noise; every rank has to call it."""
        return {"vbs": self._optimizer.state_dict()["vbs"]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Move the optimizer, whose own state was restored, to the position."""
        optimizer = self._optimizer
        optimizer.load_state_dict({**optimizer.inner.state_dict(), "vbs": state_dict["vbs"]})


# What the adapter of transformers asks an accelerator. ---------------------------------------------------------------


def distributed_type(accelerator: Any) -> str:
    """Return the `distributed_type` of an accelerator, with the version of FSDP, such as "FSDP2"."""
    kind, plugin = accelerator.distributed_type.value, getattr(accelerator.state, "fsdp_plugin", None)
    return f"FSDP{plugin.fsdp_version}" if kind == "FSDP" and plugin is not None else str(kind)


def sums_by_torch(kind: str) -> bool:
    """Return whether there is one process, or DistributedDataParallel or FSDP2 sums."""
    return kind in ("NO", "FSDP2") or kind.startswith("MULTI_")


def sum_in_float32(accelerator: Any) -> None:
    """Let FSDP2 reduce gradients in float32, if an accelerator's mixed precision would do it in 16 bits.

    Sums of several microbatches need it: in bfloat16 small ones vanish in large ones.
    """
    plugin: Any = getattr(accelerator.state, "fsdp_plugin", None)
    policy: Any = getattr(plugin, "mixed_precision_policy", None)
    if getattr(policy, "reduce_dtype", None) in (torch.bfloat16, torch.float16):
        plugin.mixed_precision_policy = replace(policy, reduce_dtype=torch.float32)
