"""Sums of FSDP2 in float32, where Accelerate would reduce gradients in bfloat16."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch


def sum_in_float32(accelerator: Any) -> None:
    """Let FSDP2 reduce gradients in float32, if an accelerator's mixed precision would do it in 16 bits.

    Sums of several microbatches need it: in bfloat16 small ones vanish in large ones.
    """
    plugin: Any = getattr(accelerator.state, "fsdp_plugin", None)
    policy: Any = getattr(plugin, "mixed_precision_policy", None)
    if getattr(policy, "reduce_dtype", None) in (torch.bfloat16, torch.float16):
        plugin.mixed_precision_policy = replace(policy, reduce_dtype=torch.float32)
