"""Which rule for AdamW, and which for Muon, while clouds give and take machines?

    python benchmarks/evaluation_adam.py --capacity-traces FOLDER --data-dir FOLDER --folder runs/adam --jobs 2

As evaluation_large.py, under pieces of the same two traces, but of another task: a perceptron on images of
Fashion-MNIST at half the resolution, whose parameters are all matrices, because torch's Muon takes nothing else.
evaluation_adam.csv.gz beside this file has the trainings of an earlier version, with seeds of their own, from 1000 on,
that chose learning rates.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer

from evaluation_large import LOGS, arguments, options, train, under
from fashion import FashionCnn
from variable_batch_size.lab.evaluation import Cell, Experiment

REF_BATCHSIZE, MINIBATCH_SIZE, SAMPLES = 64, 16, 2**15
RULES = {
    "AdamW": ("constant", "root", "adamscale", "power:0.6", "invariant-adam"),
    "Muon": ("constant", "root", "adamscale", "power:0.6"),
}


class Perceptron(FashionCnn):
    """A perceptron without biases; the learning rate of each optimizer is the best power of 2 at `REF_BATCHSIZE`."""

    def model(self, seed: int) -> nn.Module:
        """Return the model with the weights of a seed."""
        torch.manual_seed(seed)
        layers = (nn.Linear(196, 64, bias=False), nn.ReLU(), nn.Linear(64, 64, bias=False), nn.ReLU())
        return nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), *layers, nn.Linear(64, 10, bias=False))


class WithAdamW(Perceptron):
    """Trained with AdamW."""

    lr = 2**-7

    def optimizer(self, model: nn.Module, lr: float) -> Optimizer:
        """Return the optimizer."""
        return AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)


class WithMuon(Perceptron):
    """Trained with Muon."""

    lr = 2**-5

    def optimizer(self, model: nn.Module, lr: float) -> Optimizer:
        """Return the optimizer."""
        return Muon(model.parameters(), lr=lr, weight_decay=0.01)


TASKS = {"AdamW": "evaluation_adam:WithAdamW", "Muon": "evaluation_adam:WithMuon"}


def cells(flags: argparse.Namespace) -> list[Cell]:
    """Return the trainings of both optimizers."""
    traces: dict[str, Any] = dict(under(log, flags.capacity_traces, REF_BATCHSIZE // 2, SAMPLES) for log in LOGS)
    own = options(flags, SAMPLES) | {"ref_batchsize": REF_BATCHSIZE, "minibatch_size": MINIBATCH_SIZE}
    experiments = [Experiment({TASKS[name]: {"images": 2**14}}, traces, rules, **own) for name, rules in RULES.items()]
    return [cell for experiment in experiments for cell in experiment.cells()]


if __name__ == "__main__":
    given = arguments(__doc__, __file__, "runs/adam")
    train(cells(given), given, RULES["AdamW"][-1])
