"""A Keras optimizer as a torch optimizer, so that a rule scales its learning rate and ranks share its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import keras
import torch
from torch.optim import Optimizer

from variable_batch_size._validation import value_error
from variable_batch_size.integrations.keras.internals import rate_of


@final
class KerasOptimizer(Optimizer):
    """A torch optimizer whose `step()` is one `apply` of a Keras optimizer on the torch backend.

    Its group has the learning rate, which `read_learning_rate` takes from Keras: a number, a schedule of the updates or
    a function. The other hyperparameters, the clipping and the state stay in the Keras optimizer.
    """

    def __init__(self, wrapped: Any, variables: Sequence[Any]) -> None:
        self.wrapped, self._own = wrapped, list(variables)
        super().__init__([variable.value for variable in variables], {"lr": float(wrapped.learning_rate)})

    def applies(self, wrapped: Any, variables: Sequence[Any]) -> bool:
        """Return whether it applies this Keras optimizer to these variables."""
        return self.wrapped is wrapped and [*map(id, self._own)] == [*map(id, variables)]

    def read_learning_rate(self) -> None:
        """Take the learning rate of the next update from Keras, between two updates."""
        self.param_groups[0]["lr"] = float(self.wrapped.learning_rate)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Apply the gradients with the learning rate of the group."""
        scaled, own = self.param_groups[0]["lr"], rate_of(self.wrapped)  # a schedule stays one
        is_number = isinstance(own, keras.Variable)
        reference = own.value.clone() if is_number else own
        self.wrapped.learning_rate = scaled if is_number else lambda: scaled
        try:
            self.wrapped.apply([variable.value.grad for variable in self._own], self._own)
        finally:
            self.wrapped.learning_rate = reference

    def state_dict(self) -> dict[str, Any]:
        """Return all variables of the Keras optimizer, with their paths, and the learning rate."""
        # Not under "state": its keys are numbers of parameters.
        variables = [{"path": one.path, "value": one.value.detach()} for one in self.wrapped.variables]
        return {**super().state_dict(), "variables": variables}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state; raise ValueError if it is that of another optimizer."""
        own, saved = self.wrapped.variables, [one["value"] for one in state_dict["variables"]]
        if (shapes := [tuple(value.shape) for value in saved]) != [tuple(variable.shape) for variable in own]:
            remedy = "compile with the one that was saved"
            raise value_error("a state must be that of the same optimizer", f"variables of shapes {shapes}", remedy)
        for variable, value in zip(own, saved, strict=True):
            variable.assign(value.to(variable.value.device))
        self.param_groups[0]["lr"] = state_dict["param_groups"][0]["lr"]
