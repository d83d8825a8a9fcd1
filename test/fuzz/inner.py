"""torch's optimizers as equations, one parameter at a time, with hyperparameters that may change at each update.

A parameter without a gradient is left alone, as torch does. Adam corrects its bias by the product of the betas that the
parameter has seen, which is 1 - beta^t if they do not change.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

Numbers = dict[str, Any]  # floats and tensors by name
State: TypeAlias = Numbers  # of one parameter
Hyperparameters: TypeAlias = Numbers


def sgd(w: Tensor, g: Tensor, state: State, h: Hyperparameters) -> Any:
    g = g + h["weight_decay"] * w
    state["velocity"] = velocity = h["momentum"] * state.get("velocity", torch.zeros_like(w)) + g
    return w - h["lr"] * (g + h["momentum"] * velocity if h["nesterov"] else velocity)


def adam(w: Tensor, g: Tensor, state: State, h: Hyperparameters, *, decoupled: bool = False) -> Any:
    if decoupled:
        w = w - h["lr"] * h["weight_decay"] * w
    else:
        g = g + h["weight_decay"] * w
    beta1, beta2 = h["betas"]
    state["m"] = beta1 * state.get("m", torch.zeros_like(w)) + (1 - beta1) * g
    state["v"] = beta2 * state.get("v", torch.zeros_like(w)) + (1 - beta2) * g * g
    state["product1"], state["product2"] = state.get("product1", 1.0) * beta1, state.get("product2", 1.0) * beta2
    mean, square = state["m"] / (1 - state["product1"]), state["v"] / (1 - state["product2"])
    return w - h["lr"] * mean / (square.sqrt() + h["eps"])


def adamw(w: Tensor, g: Tensor, state: State, h: Hyperparameters) -> Any:
    return adam(w, g, state, h, decoupled=True)


def rmsprop(w: Tensor, g: Tensor, state: State, h: Hyperparameters) -> Any:
    g = g + h["weight_decay"] * w
    state["v"] = h["alpha"] * state.get("v", torch.zeros_like(w)) + (1 - h["alpha"]) * g * g
    step = g / (state["v"].sqrt() + h["eps"])
    state["velocity"] = h["momentum"] * state.get("velocity", torch.zeros_like(w)) + step
    return w - h["lr"] * state["velocity"]


def adagrad(w: Tensor, g: Tensor, state: State, h: Hyperparameters) -> Any:
    g = g + h["weight_decay"] * w
    state["sum"] = state.get("sum", torch.zeros_like(w)) + g * g
    state["updates"] = state.get("updates", 0) + 1
    rate = h["lr"] / (1 + (state["updates"] - 1) * h["lr_decay"])
    return w - rate * g / (state["sum"].sqrt() + h["eps"])


INNER = {"SGD": sgd, "Adam": adam, "AdamW": adamw, "RMSprop": rmsprop, "Adagrad": adagrad}
