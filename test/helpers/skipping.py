"""Trainings on XLA that skip updates by `skip_grad_norm`, in a module that a child process can import."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import variable_batch_size as vbs
from helpers.features import largest_norm
from helpers.reference import Array, Training, training
from variable_batch_size.backend import Backend

SIZES = (9, 4, 17, 1, 12, 3, 2, 30, 20, 9, 12, 5, 40)
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {}),
    "SGD with momentum": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "Adam": (torch.optim.Adam, {"eps": 0.01, "amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {"eps": 0.01, "weight_decay": 0.1}),
    "NAdam": (torch.optim.NAdam, {"eps": 0.01}),
    "RAdam": (torch.optim.RAdam, {"eps": 0.01, "betas": (0.85, 0.9)}),
    "Adamax": (torch.optim.Adamax, {"eps": 0.01}),
    "Adagrad": (torch.optim.Adagrad, {"lr_decay": 0.1}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 0.5}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.5, "centered": True, "eps": 0.01}),
    "Rprop": (torch.optim.Rprop, {}),
    "ASGD": (torch.optim.ASGD, {"t0": 3}),
    "Muon": (torch.optim.Muon, {}),
}


class Outcome(NamedTuple):
    """What a training ends with."""

    weights: list[Array]
    state: list[Array]
    numbers: list[float]  # skipped updates, these in a row, progress
    average: list[Array]  # of the weights


def begin(name: str, backend: Backend, device: torch.device | None = None, **options: Any) -> Training:
    """Begin a training with an optimizer of KINDS."""
    kind, own = KINDS[name]

    def inner(parameters: Any, **hyperparameters: Any) -> torch.optim.Optimizer:
        every = [one for one in parameters if one.ndim == 2 or kind is not torch.optim.Muon]
        return kind(every, **hyperparameters)  # type: ignore[no-any-return]

    options = {"sampling": {"fixed_shape": True}, "skip_grad_norm": largest_norm, **options}
    common = {"inner": inner, "hyperparameters": {"lr": 0.02} | own, "backend": backend, "device": device}
    return training(vbs.ConstantOptimizer, SIZES, **common, **options)


def outcome(run: Training) -> Outcome:
    """Train to the end, with an average of the weights."""
    average, optimizer = vbs.WeightAverage(run.model.parameters(), 0.9, run.optimizer), run.optimizer
    while optimizer.updates < len(SIZES):
        for _ in run.steps():
            if optimizer.updates == len(SIZES):
                break
    optimizer.backend.mark_step()
    state = optimizer.state_dict()
    tensors = [one for own in state["state"].values() for one in own.values() if isinstance(one, Tensor)]
    numbers = [*state["vbs"]["skipped"].values(), optimizer.progress]
    return Outcome(run.weights(), _on_host(tensors), numbers, _on_host(average.averages))


def _on_host(tensors: list[Tensor]) -> list[Array]:
    return [one.detach().cpu().double().numpy() for one in tensors]


def outcomes(backend: Backend) -> tuple[dict[str, Outcome], str, list[int]]:
    """Train with each of KINDS on a core; return an error, too, and what is known of skipped updates along a training.

    That training skips all of them but the first.
    """
    import torch_xla

    found = {name: outcome(begin(name, backend, torch_xla.device())) for name in KINDS}
    message = ""
    try:
        training(vbs.ConstantOptimizer, inner=torch.optim.Adafactor, hyperparameters={}, **_on(backend))
    except TypeError as error:
        message = str(error)
    run, known = training(vbs.ConstantOptimizer, (4,), **_on(backend)), list[int]()
    while run.optimizer.updates < 70:
        for updated in run.steps():
            assert updated
            known.append(run.optimizer.skipped)
    return found, message, known[:70]


def _on(backend: Backend) -> dict[str, Any]:
    import torch_xla

    sampling = {"fixed_shape": True}
    return {"backend": backend, "device": torch_xla.device(), "skip_grad_norm": 1e-9, "sampling": sampling}
