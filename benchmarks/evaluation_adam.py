"""Which rule for AdamW, and which for Muon, while clouds give and take machines?

    python benchmarks/evaluation_adam.py --capacity-traces FOLDER --data-dir FOLDER --folder runs/adam --jobs 2

As evaluation_large.py, under pieces of the same two traces, but of another task: a perceptron on images of
Fashion-MNIST at half the resolution, whose parameters are all matrices, because torch's Muon takes nothing else.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer
from variable_batch_size.lab.evaluation.tasks.fashion_cnn import FashionCnn

from evaluation_large import LOGS, arguments, options, take_time, under, write_report
from variable_batch_size.lab.evaluation import Experiment, engines, write_records

REF_BATCHSIZE, MINIBATCH_SIZE, SAMPLES = 64, 16, 2**15
RULES = {
    "AdamW": ("constant", "root", "adamscale", "power:0.6", "invariant-adam"),
    "Muon": ("constant", "root", "adamscale", "power:0.6"),
}
TABLE = Path(__file__).with_suffix(".csv.gz")


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


def experiments(flags: argparse.Namespace) -> dict[str, Experiment]:
    """Return the trainings of each optimizer."""
    traces: dict[str, Any] = dict(under(log, flags.capacity_traces, REF_BATCHSIZE // 2, SAMPLES) for log in LOGS)
    own = {"ref_batchsize": REF_BATCHSIZE, "minibatch_size": MINIBATCH_SIZE}
    return {
        name: Experiment({TASKS[name]: {"images": 2**14}}, traces, rules, **options(flags, SAMPLES), **own)
        for name, rules in RULES.items()
    }


def main() -> None:
    flags = arguments(__doc__, "runs/adam", TABLE).parse_args()
    wanted = []
    for name, experiment in experiments(flags).items():
        own = sorted(experiment.cells(), key=lambda cell: cell.seed)
        if flags.time:
            take_time(next(cell for cell in own if cell.rule == RULES[name][-1]), f"perceptron, {name}")
            continue
        found = engines.run(own, flags.folder, jobs=flags.jobs)
        wanted += [*own, *sorted(experiment.judged(found), key=lambda cell: cell.seed)]
    if flags.time:
        return
    found = engines.run(wanted, flags.folder, jobs=flags.jobs)
    write_records(sorted(found, key=lambda record: record.key), flags.table)
    write_report(flags, len(wanted))


if __name__ == "__main__":
    main()
