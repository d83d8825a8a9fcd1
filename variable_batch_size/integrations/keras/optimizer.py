"""A Keras optimizer as a torch optimizer, so that a rule scales its learning rate and ranks share its gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from variable_batch_size._validation import type_error, value_error
from variable_batch_size.integrations.keras.backend import keras


@final
class KerasOptimizer(Optimizer):
    """A torch optimizer whose `step()` is one `apply` of a Keras optimizer on the torch backend.

    Its group has the learning rate, which `read_learning_rate` takes from Keras: a number, a schedule of the updates or
    a function. The other hyperparameters, the clipping and the state stay in the Keras optimizer.

    Args:
        wrapped: the optimizer that `compile` was given; it is built here if it is not yet.
        variables: the trainable variables of the model.

    Raises:
        ValueError: if the model has none, or the optimizer was built for others.
    """

    def __init__(self, wrapped: keras.optimizers.Optimizer, variables: Sequence[Any]) -> None:
        if not variables:
            raise value_error("a model must have trainable variables", "none", "set trainable=True of a layer")
        if not wrapped.built:
            wrapped.build(list(variables))
        self.wrapped, self._variables = wrapped, list(variables)
        self._read: tuple[object, float] | None = None
        super().__init__([variable.value for variable in variables], {"lr": self._learning_rate()})

    def read_learning_rate(self) -> None:
        """Take the learning rate of the next update from Keras, between two updates."""
        self.param_groups[0]["lr"] = self._learning_rate()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Apply the gradients with the learning rate of the group."""
        gradients = [variable.value.grad for variable in self._variables]
        with self._at(self.param_groups[0]["lr"]):
            self.wrapped.apply(gradients, self._variables)

    def state_dict(self) -> dict[str, Any]:
        """Return all variables of the Keras optimizer, with their paths, and the learning rate."""
        # Not under "state": its keys are numbers of parameters.
        variables = [{"path": one.path, "value": one.value.detach()} for one in self.wrapped.variables]
        return {**super().state_dict(), "variables": variables}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state.

        Raises:
            ValueError: if it is that of another optimizer.
        """
        own, saved = self.wrapped.variables, state_dict["variables"]
        if [tuple(one["value"].shape) for one in saved] != [tuple(variable.shape) for variable in own]:
            raise value_error(
                "a state must be that of an optimizer of the same kind",
                f"{len(saved)} variables for the {len(own)} of {type(self.wrapped).__name__}, or other shapes",
                "compile with the optimizer that was saved",
            )
        for variable, one in zip(own, saved, strict=True):
            variable.assign(one["value"].to(variable.value.device))
        self.param_groups[0].update({k: v for k, v in state_dict["param_groups"][0].items() if k != "params"})
        self._read = None

    def _learning_rate(self) -> float:
        """Return the learning rate; that of a variable is read from its device only after it has changed."""
        value = self.wrapped.learning_rate
        if not isinstance(value, keras.Variable):
            return float(value)
        tensor: Tensor = value.value
        key = id(tensor), tensor._version
        if self._read is None or self._read[0] != key:
            self._read = key, float(tensor.detach())
        return self._read[1]

    @contextmanager
    def _at(self, scaled: float) -> Iterator[None]:
        """Set the learning rate for one `apply`, by the public setter."""
        reference, wrapped = self._learning_rate(), self.wrapped
        # Keras has no public access to a schedule: `learning_rate` is its value. A schedule that is set stays one.
        before = wrapped._learning_rate
        if scaled == reference:
            yield
            return
        is_number = isinstance(before, keras.Variable)
        wrapped.learning_rate = scaled if is_number else lambda: scaled
        try:
            yield
        finally:
            wrapped.learning_rate = reference if is_number else before
            if is_number:
                self._read = (id(before.value), before.value._version), reference


def check_optimizer(optimizer: object) -> None:
    """Check that a compiled optimizer makes an update at each `apply`.

    Raises:
        TypeError: if it is not a Keras optimizer.
        ValueError: if it accumulates gradients itself, scales the loss, or has several learning rates.
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise value_error(
            "the loss must not be scaled, because gradients are summed and measured before Keras unscales them",
            "a LossScaleOptimizer, which compile() adds for mixed_float16",
            'use keras.mixed_precision.set_global_policy("mixed_bfloat16")',
        )
    if isinstance(optimizer, getattr(keras.optimizers, "MultiOptimizer", ())):  # of newer versions of Keras
        raise value_error(
            "the optimizer must have one learning rate, which a rule scales",
            "a MultiOptimizer",
            "pass one optimizer for all variables",
        )
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise type_error("compile() must get a Keras optimizer", optimizer, 'pass "sgd" or keras.optimizers.SGD(0.1)')
    for name, remedy in _REMEDIES.items():
        if getattr(optimizer, name, None):
            raise value_error(f"the optimizer must have no {name}", getattr(optimizer, name), remedy)


_REMEDIES = {
    "gradient_accumulation_steps": "leave it out: the trace is the batch size, and batch_size of fit() the microbatch",
    "loss_scale_factor": "leave it out: gradients are summed and measured before Keras unscales them",
}
