"""Which rule on spot machines? Each training has a window of its own, drawn at random of four public logs.

    python benchmarks/evaluation_windows.py --capacity-traces FOLDER --data-dir FOLDER --folder runs/windows --jobs 2

In the other evaluations a trace is one window, that with the most changes. Here seed s of every rule trains under
window s, so that the windows are a random effect: what is claimed holds for windows of these logs, and not for one of
them. A log is cut into windows of three hours, of which those in which the number of machines changes are drawn without
replacement; the logs take turns. The most machines of a log count as 16.

The perceptron of evaluation_adam.py with AdamW and with Muon, and the CNN of evaluation_large.py with SGD and a gradual
warm-up at half its length, train on these batches:

- "up to the reference": the most machines compute the reference's batch, k <= 1;
- "up to 8 times the reference": two machines do, k <= 8;
- at equal cost (AdamW only): the same price is paid for each training, where the gradients of an update take as long to
  exchange as a machine to compute its part at 8 times the reference. Either the batch follows the machines, up to 8
  times the reference, or it stays that of the reference.

What is asked was written down before the trainings: each rule against `constant` by the loss, in 12 windows, of seeds
from 3000 on that nobody had looked at. evaluation_windows.jsonl.gz beside this file has them.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

import evaluation_adam as adam
import evaluation_large as large
from evaluation_large import FIRST_SEED, SHARE, arguments, train
from variable_batch_size.adaptive import Throughput
from variable_batch_size.lab import cluster
from variable_batch_size.lab.cluster import CapacityTrace
from variable_batch_size.lab.evaluation import Cell, Experiment, UnderCapacity

FILES = (
    "bamboo-events-g4dn.csv",
    "skypilot-availability-16-node-us-east-2b_v100_1.json",
    "skypilot-availability-16-node-us-west-2c_v100_1.json",
    "skypilot-preemption-4-node-us-east-1f_v100_1.json",
)
HOURS, MOST, TIMES, WINDOWS = 3, 16, 8, 12
ALL = ("constant", "linear", "root")
PERCEPTRON: dict[str, Any] = {
    "samples": adam.SAMPLES,
    "ref_batchsize": adam.REF_BATCHSIZE,
    "minibatch_size": adam.MINIBATCH_SIZE,
}
CNN: dict[str, Any] = {
    "samples": large.SAMPLES // 2,
    "ref_batchsize": large.REF_BATCHSIZE,
    "minibatch_size": large.MINIBATCH_SIZE,
    "lr": large.LR,
}
TASKS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    adam.TASKS["AdamW"]: (PERCEPTRON, (*ALL, "adamscale", "invariant-adam")),
    adam.TASKS["Muon"]: (PERCEPTRON, (*ALL, "adamscale")),
    large.TASK: (CNN, (*ALL, "adascale")),
}


def windows(flags: argparse.Namespace) -> Iterator[tuple[int, CapacityTrace]]:
    """Yield seeds and their windows."""
    rng = np.random.default_rng(FIRST_SEED)
    drawn = [drawn_of(cluster.read(flags.capacity_traces / file), rng) for file in FILES]
    turns = (window for windows in itertools.zip_longest(*drawn) for window in windows if window is not None)
    return zip(range(FIRST_SEED, FIRST_SEED + flags.seeds), turns, strict=False)


def drawn_of(log: CapacityTrace, rng: np.random.Generator) -> list[CapacityTrace]:
    """Return the windows of a log in which the number of machines changes, in random order."""
    nodes = np.rint(log.nodes * (MOST / log.nodes.max())).astype(int)
    log = CapacityTrace(log.seconds, nodes, end=log.end)
    length = 3600 * HOURS
    windows = [log.slice(length * number, length * (number + 1)) for number in range(int(log.end / length))]
    changing = [window for window in windows if window.changes]
    return [changing[number] for number in rng.permutation(len(changing))]


def experiments(seed: int, window: CapacityTrace, flags: argparse.Namespace) -> Iterator[Experiment]:
    """Yield what trains under a window."""
    for task, (facts, rules) in TASKS.items():
        samples, size = facts["samples"], facts["ref_batchsize"]
        own = {**facts, "seeds": [seed], "between": samples // 4, "data_dir": flags.data_dir}
        if task == large.TASK:
            own["warmup"] = int(flags.warmup * samples)
        arguments = {task: {"images": 2**14}}
        rate = samples / (SHARE * window.mean * window.end)  # the training takes this part of the window
        simple = Throughput.simple(rate)
        traces: dict[str, Any] = {
            "spot machines, up to the reference": UnderCapacity(window, f"per-device:{size // MOST}", simple),
            f"spot machines, up to {TIMES} times the reference": UnderCapacity(
                window, f"per-device:{TIMES * size // MOST}", simple
            ),
        }
        yield Experiment(arguments, traces, rules, **own)
        if task == adam.TASKS["AdamW"]:
            share = TIMES * size // MOST
            model = Throughput.simple(2 * rate, communication_seconds=share / (2 * rate))
            price = 3600 / (SHARE * window.mean * window.end)  # the training with the larger batches costs 1
            follows = UnderCapacity(window, f"per-device:{share}", model, price=price)
            stays = UnderCapacity(window, f"constant:{size}", model, price=price)
            equal = {**own, "ends": ["cost:1"]}
            yield Experiment(arguments, {"batch that follows the machines": follows}, rules, **equal)
            yield Experiment(arguments, {"batch of the reference": stays}, ("constant",), **equal)


def cells(flags: argparse.Namespace) -> list[Cell]:
    """Return the trainings."""
    return [
        cell
        for seed, window in windows(flags)
        for experiment in experiments(seed, window, flags)
        for cell in experiment.cells()
    ]


if __name__ == "__main__":
    given = arguments(__doc__, __file__, "runs/windows", seeds=WINDOWS)
    train(cells(given), given, "adascale")
