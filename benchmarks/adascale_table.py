"""Does AdaScale hold at 8 to 64 times the batch size, where the linear rule with warm-up breaks?

    python benchmarks/adascale_table.py --task fashion-cnn --data-dir FOLDER

The shape of the table of Johnson et al. 2020 (arXiv 2007.05105) on a small CNN: batches of k = 8, 16, 32 and 64 times
the reference during the whole training, a learning rate that was tuned at the reference only, T = 4096 updates there.

- "AdaScale, equal progress", as in the paper: it reads its cosine by progress and ends when the progress is T. An
  update counts as its gain, between 1 and k, so it makes more than T / k updates.
- "linear with warm-up": k times the learning rate, and T / k updates. In the first 5 of 90 parts, as of the epochs of
  Goyal et al. 2017 (arXiv 1706.02677), the factor grows from 1 to k. Its update counts as k of the reference, so that
  equal progress is equal samples.
- "linear with warm-up, longer": the same with as many samples as AdaScale used with this k and seed, which tells
  whether AdaScale or its samples kept the accuracy.
- "linear": without warm-up. "AdaScale, equal samples": T / k updates, so that it ends before its progress is T.

Every training ends with one evaluation on the 10,000 test samples. The learning rate ends at 0 in all of them. AdaScale
measures the noise between k microbatches of the reference's size. Accuracies and differences to the reference with the
same seed have 95% intervals over the seeds (`vbs.lab.evaluation.statistics`). Where seeds diverged or ended at chance
(below 12 %), the mean is that of the others, without an interval. `--lr-factor 0.25 --kinds "linear
with warm-up"` tells whether the linear rule would hold with a lower learning rate at the reference. Records are kept in
--folder: kill it, and the same command continues with the training that was under way; more seeds train only these.
About 20 minutes on one core with 3 seeds.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from records import Measured
from results import record
from variable_batch_size.lab.evaluation import Cell, Experiment, load_task, run
from variable_batch_size.lab.evaluation.records import REFERENCE as TRACE
from variable_batch_size.lab.evaluation.statistics import ConfidenceInterval, mean_interval
from variable_batch_size.lab.evaluation.task import FUNCTIONS

TASKS = {"mnist-cnn": "mnist-cnn", "fashion-cnn": "fashion:FashionCnn"}
TIMES = (8, 16, 32, 64)
UPDATES = 4096  # T
WARMUP = 5 / 90
LARGEST = 512  # rows of a microbatch of a rule that does not read the noise: it computes the same, faster
CHANCE, NEAR_CHANCE = 0.1, 0.12
REFERENCE = "reference"
PROGRESS, SAMPLES = "AdaScale, equal progress", "AdaScale, equal samples"
LINEAR, WARMED, LONGER = "linear", "linear with warm-up", "linear with warm-up, longer"
TABLE = "AdaScale's table"
ACCURACY, DIFFERENCE = f"test accuracy, {TABLE}", f"difference to the reference, {TABLE}"
KINDS = (PROGRESS, SAMPLES, WARMED, LONGER, LINEAR)


class Table:
    """A task of images with a warm-up of the linear rule.

    Args:
        images: name of the task.
        warmup: k, if the learning rate of k times the batch size is to grow from that of the reference.
        data_dir: folder of the files of the task.
    """

    def __init__(self, images: str, warmup: int = 1, data_dir: str | None = None) -> None:
        task: Any = load_task(TASKS[images], data_dir=data_dir)
        for name in (*FUNCTIONS, "ref_batchsize", "lr"):
            setattr(self, name, getattr(task, name))
        self.warmup = warmup

    def schedule(self, samples: int, total: int) -> float:
        """Return a cosine that falls to 0, after the warm-up."""
        passed = min(1.0, samples / total)
        ramp = 1 / self.warmup + (1 - 1 / self.warmup) * min(1.0, passed / WARMUP)
        return 0.5 * (1 + math.cos(math.pi * passed)) * ramp


def cells(kind: str, times: int, flags: argparse.Namespace, samples: dict[int, int]) -> list[Cell]:
    """Return the trainings of a kind with k times the batch size.

    Args:
        kind: what is trained.
        times: k.
        flags: the arguments of the command.
        samples: seed -> samples that AdaScale used.
    """
    task: Any = load_task(TASKS[flags.task], data_dir=flags.data_dir)
    ref, arguments = task.ref_batchsize, {"images": flags.task}
    reads_noise, total = kind in (PROGRESS, SAMPLES), flags.updates * task.ref_batchsize
    if kind in (WARMED, LONGER):
        arguments |= {"warmup": times}
    rule = "constant" if kind == REFERENCE else "adascale" if reads_noise else "linear"
    found = []
    for seed in range(flags.seeds):
        own = samples[seed] if kind == LONGER else total
        experiment = Experiment(
            {"adascale_table:Table": arguments},
            {f"{times} times": ref * times},
            [rule],
            baseline=rule,
            seeds=[seed],
            samples=own,
            ends=[f"progress:{flags.updates}" if kind == PROGRESS else "samples"],
            between=own,
            lr=flags.lr_factor * task.lr,
            minibatch_size=ref if reads_noise else min(ref * times, LARGEST),
            data_dir=flags.data_dir,
        )
        found += [cell for cell in experiment.cells() if cell.trace != TRACE]
    return found


def train_all(flags: argparse.Namespace) -> dict[tuple[str, int], pd.DataFrame]:
    """Return kind and k -> the trainings by seed, after those that are missing."""
    found: dict[tuple[str, int], pd.DataFrame] = {}
    for kind, times in ((REFERENCE, 1), *((kind, times) for times in flags.times for kind in flags.kinds)):
        samples = {}
        if kind == LONGER:
            own = found[PROGRESS, times]
            samples = {seed: curve["samples"][-1] for seed, curve in zip(own["seed"], own["curve"], strict=True)}
        wanted = cells(kind, times, flags, samples)
        rows = run(wanted, flags.folder, progress=False).trainings
        found[kind, times] = rows.set_index("key").loc[[cell.key for cell in wanted]]
        print(kind, times, [round(accuracy(row), 4) for row in found[kind, times].itertuples()], flush=True)
    return found


def accuracy(training: Any) -> float:
    """Return the accuracy at the end, that of chance if it diverged."""
    return CHANCE if training.status == "diverged" else float(training.curve["accuracy"][-1])


def report(found: dict[tuple[str, int], pd.DataFrame], flags: argparse.Namespace) -> None:
    """Record accuracies, differences to the reference, and how long the trainings were."""
    reference = np.array([accuracy(row) for row in found[REFERENCE, 1].itertuples()])
    put = (lambda *row, **more: print(row, more)) if flags.quick else record
    on = f"{flags.task}, {flags.updates} updates at the reference"
    if flags.lr_factor != 1:
        on += f", {flags.lr_factor:g} x the learning rate"
    for (kind, times), rows in found.items():
        own, n = {"on": on, "case": f"{times}x"}, len(rows)
        values = np.array([accuracy(row) for row in rows.itertuples()])
        trained = values[values >= NEAR_CHANCE]
        if len(trained) == n:
            measured = points(mean_interval(values), n)
            put(ACCURACY, kind, measured, "%", note="95% interval", **own)
            if kind != REFERENCE:
                apart = points(mean_interval(values - reference), n)
                put(DIFFERENCE, kind, apart, "points", note="95% interval", **own)
        elif len(trained):
            mean = Measured(100 * float(trained.mean()), n=len(trained))
            put(ACCURACY, kind, mean, "%", note=f"at chance {n - len(trained)} of {n}", **own)
        else:
            put(ACCURACY, kind, Measured(n, n=n), "runs at chance", **own)
        for column in ("updates", "samples"):
            ends = [float(curve[column][-1]) for curve in rows[rows["status"] == "finished"]["curve"]]
            if ends:
                put(f"{column}, {TABLE}", kind, Measured(float(np.mean(ends)), n=len(ends)), column, **own)


def points(interval: ConfidenceInterval, n: int) -> Measured:
    """Return an estimate in points, without an interval if there is none."""
    value, low, high = (100 * bound for bound in interval)
    return Measured(value, n=n) if math.isnan(low) else Measured(value, low, high, n=n)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--task", choices=TASKS, default="mnist-cnn", help="what is trained")
    add("--data-dir", help="folder of its files")
    add("--folder", type=Path, default=Path("runs/adascale_table"), help="folder of the records")
    add("--seeds", type=int, default=3, help="number of seeds")
    add("--times", type=int, nargs="+", default=TIMES, help="batch sizes, as multiples of the reference")
    add("--updates", type=int, default=UPDATES, help="T, the updates of the reference")
    add("--kinds", nargs="+", choices=KINDS, default=KINDS, help="what is trained; longer ones need AdaScale's")
    add("--lr-factor", type=float, default=1.0, help="factor on the learning rate of the reference")
    add("--quick", action="store_true", help="try it with 64 updates and a seed, without rows in records.csv")
    flags = parser.parse_args()
    if flags.quick:
        flags.updates, flags.seeds, flags.folder = 64, 1, flags.folder / "quick"
    if LONGER in flags.kinds and PROGRESS not in flags.kinds:
        parser.error(f'--kinds "{LONGER}" needs "{PROGRESS}", whose samples it takes')
    flags.folder.mkdir(parents=True, exist_ok=True)
    return flags


if __name__ == "__main__":
    arguments = parse()
    report(train_all(arguments), arguments)
