"""A Keras optimizer as a torch optimizer, so that a rule scales its learning rate and ranks share its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import keras
import torch
from torch.optim import Optimizer


@final
class KerasOptimizer(Optimizer):
    """A torch optimizer whose `step()` is one `apply` of a Keras optimizer, with the learning rate of its group.

    Clipping, other hyperparameters and the state are those of the Keras optimizer, whose variables are saved elsewhere.
    """

    def __init__(self, wrapped: Any, variables: Sequence[Any]) -> None:
        """Show the values of Keras' variables to torch as one parameter group."""
        self.wrapped = wrapped
        self._trained = list(variables)
        super().__init__([variable.value for variable in variables], {"lr": float(wrapped.learning_rate)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Apply the gradients with the scaled learning rate, and then put back the user's number or schedule."""
        scaled = self.param_groups[0]["lr"]
        learning_rate = self.wrapped._learning_rate  # private: the schedule itself, if there is one
        is_number = isinstance(learning_rate, keras.Variable)
        reference = learning_rate.value.clone() if is_number else learning_rate
        self.wrapped.learning_rate = scaled if is_number else lambda: scaled
        try:
            self.wrapped.apply([variable.value.grad for variable in self._trained], self._trained)
        finally:
            self.wrapped.learning_rate = reference
