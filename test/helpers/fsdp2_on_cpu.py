"""Accelerate's FSDP2 in the processes of a test: on a CPU Accelerate drops its plugin, and uses DDP.

Every test that calls it checks that parameters are DTensors.
"""

from __future__ import annotations

from typing import Any

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.tensor import DTensor

_init = AcceleratorState.__init__


def enable() -> None:
    """Let an Accelerator with a plugin of FSDP2 use it, for the rest of the process."""
    AcceleratorState.__init__ = _init_with_plugin


def _init_with_plugin(self: Any, *args: Any, **options: Any) -> None:
    _init(self, *args, **options)
    plugin = options.get("fsdp_plugin")
    if plugin is not None and self.device.type == "cpu":
        if self.mixed_precision != "no":
            plugin.set_mixed_precision(self.mixed_precision)
        AcceleratorState._shared_state.update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP  # of which others take it


def check_sharded(model: nn.Module) -> None:
    """Check that all parameters are DTensors."""
    kinds = {type(parameter) for parameter in model.parameters()}
    assert kinds == {DTensor}, kinds
