"""The yardstick of the integrations: one training in float64, by hand, with one whole batch an update."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

import variable_batch_size as vbs
from helpers.commands import free_port
from helpers.processes import run_job
from helpers.reference import EQUATIONS, OPTIMIZERS, batches, rule_at
from helpers.splitting import split_batch
from helpers.twins import Gradients, NoiseTwin, PlainTraining
from variable_batch_size.backend import Backend

SAMPLES, MICROBATCH, REF, EPOCHS = 203, 8, 16, 3
TRACE = "0:24 3:10 9:37 12:9 18:50"
SIZES = [*[24] * 3, *[10] * 6, *[37] * 3, *[9] * 6, *[50] * 20]
ENDS = (11, 21, 26)  # the updates after which the epochs end
UPDATES = ENDS[-1]
STOPS = (5, 11, 14, 21, 24)  # updates after which runs are resumed: 11 and 21 end an epoch
FEATURES, CLASSES = 6, 5
MAX_GRAD_NORM = 0.5

Loss = Callable[[nn.Module, NDArray[np.int64]], Tensor]  # the mean loss over samples, given by their numbers


def samples() -> tuple[Tensor, Tensor]:
    """The data: x, (203, 6) in float64, and the class of each sample, (203,)."""
    rng = np.random.default_rng(3)
    return torch.from_numpy(rng.normal(size=(SAMPLES, FEATURES))), torch.from_numpy(rng.integers(CLASSES, size=SAMPLES))


class Samples(TensorDataset):
    """`samples()` as a map-style dataset."""

    def __init__(self) -> None:
        super().__init__(*samples())


def network(dropout: float = 0.0) -> nn.Sequential:
    """A classifier in float64, with the same weights in each call."""
    generator = torch.Generator().manual_seed(5)
    middle: list[nn.Module] = [nn.Tanh(), nn.Dropout(dropout)] if dropout else [nn.Tanh()]
    model = nn.Sequential(nn.Linear(FEATURES, 16), *middle, nn.Linear(16, CLASSES)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2)
    return model


def mean_loss(model: nn.Module, indices: NDArray[np.int64]) -> Tensor:
    """The mean cross entropy over these samples."""
    x, target = samples()
    return nn.functional.cross_entropy(model(x[indices]), target[indices])


def by_hand(
    model: nn.Module,
    inner: Optimizer,
    *,
    loss: Loss = mean_loss,
    rule: str = "root",
    max_grad_norm: float | None = None,
    scheduler: Any = None,
    updates: int = UPDATES,
    sizes: Sequence[int] = SIZES,
    seed: int = 0,
) -> list[float]:
    """Train a model in float64 in place, a whole batch an update, and return the loss of each update.

    The rule has `REF`; a scheduler of torch is stepped after each update; `seed` is that of the shuffle.
    """
    parameters, losses = dict(enumerate(model.parameters())), []

    def backward(batch: NDArray[np.int64]) -> tuple[float, Gradients]:
        inner.zero_grad()
        value = loss(model, batch)
        value.backward()
        return value.item(), {i: p.grad.numpy() for i, p in parameters.items() if p.grad is not None}

    def step(gradients: Gradients, factors: Sequence[vbs.rules.Scaling]) -> None:
        for i, gradient in gradients.items():
            parameters[i].grad.copy_(torch.from_numpy(gradient))  # type: ignore[union-attr]
        reference = [group["lr"] for group in inner.param_groups]
        for group, lr in zip(inner.param_groups, reference, strict=True):
            group["lr"] = lr * factors[0].lr
        inner.step()
        for group, lr in zip(inner.param_groups, reference, strict=True):
            group["lr"] = lr

    noise = NoiseTwin(REF) if rule == "adascale" else None
    plain = PlainTraining({i: p.detach().numpy() for i, p in parameters.items()}, step, max_grad_norm, noise)
    for number, batch in zip(range(updates), batches(sizes, SAMPLES, seed), strict=False):
        parts = [] if noise is None else split_batch(batch, MICROBATCH)
        microbatches = [(len(part), backward(part)[1]) for part in parts]
        value, gradients = backward(batch)
        losses.append(value)
        factors = EQUATIONS[OPTIMIZERS[rule]].factors
        plain.update(gradients, microbatches, [rule_at(factors, len(batch), number + 1, SAMPLES, REF)])
        if scheduler is not None:
            scheduler.step()
    return losses


def weights(model: nn.Module) -> Tensor:
    """All parameters in one vector, a copy; of sharded ones, every rank has to call it."""
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return torch.cat([parameter.detach().flatten() for parameter in whole]).clone()


def difference(model: nn.Module, expected: Tensor) -> float:
    """The largest difference of a weight from `expected`, relative to the largest one there."""
    return float((weights(model) - expected).abs().max() / expected.abs().max())


def in_processes(function: Callable[..., Any], world: int, *args: Any) -> list[Any]:
    """Call `function(*args)` in processes that are ranks of a gloo group, also by their environment."""
    return run_job("gloo", _as_torchrun, free_port(), function, args, ranks=world)


def _as_torchrun(backend: Backend, port: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    rank, size = backend.world.rank, backend.world.size
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in variables.items()})
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    return function(*args)
