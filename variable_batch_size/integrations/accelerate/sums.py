"""Who sums gradients under Accelerate, and in which dtype."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch


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
