"""Accelerate: a loop needs nothing from here, but for states of FSDP2; see docs/trainers/accelerate.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

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
        """Move the optimizer to a saved position; Accelerate has restored the state of its inner optimizer before."""
        optimizer = self._optimizer
        optimizer.load_state_dict({**optimizer.inner.state_dict(), "vbs": state_dict["vbs"]})
