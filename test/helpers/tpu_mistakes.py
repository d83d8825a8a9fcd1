"""Trainings of benchmarks/tpu_trainings.py with mistakes in the update, which test_tpu_compiler.py has to find."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

import tpu_trainings
from tpu_trainings import SIDES, Side
from variable_batch_size.backend import xla


def sum_again(inner: torch.optim.Optimizer, *_: object) -> None:
    """Sum the gradients over the cores once more."""
    import torch_xla.core.xla_model as xm

    xm.all_reduce(xm.REDUCE_SUM, [parameter.grad for parameter in inner.param_groups[0]["params"]])


def read_weights(inner: torch.optim.Optimizer, *_: object) -> None:
    """Drop the gradients of an update if a weight is not finite."""
    parameters = inner.param_groups[0]["params"]
    finite = torch.stack([parameter.detach().square().sum() for parameter in parameters]).sum().isfinite()
    for parameter in parameters:
        parameter.grad = parameter.grad * finite


SIDES["linear, sums twice"] = Side("linear", before_step=sum_again)
SIDES["linear, reads the weights"] = Side("linear", before_step=read_weights)


def train(folder: Path, name: str, sides: Sequence[str]) -> None:
    """Train in a process that imports this module, with its sides."""
    tpu_trainings.train(folder, name, sides)


def main(folder: str, name: str, *sides: str) -> None:
    """Train on two cores."""
    xla.launch(train, (Path(folder), name, sides), cores=tpu_trainings.CORES)
