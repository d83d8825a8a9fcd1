"""The protocol of objects whose state a checkpoint can hold."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Stateful(Protocol):
    """An object that can be a part of a checkpoint."""

    def state_dict(self) -> Any:
        """Return the state as tensors and plain Python values."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Restore a state that `state_dict()` returned."""
