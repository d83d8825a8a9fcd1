"""How does each rule change the accuracy at larger batch sizes, with a learning rate tuned at the reference only?

    PYTHONPATH=test python benchmarks/rules.py

The claim to check is that of AdaScale (Johnson et al. 2020, arXiv 2007.05105): it keeps the accuracy of the reference,
within 0.3 points, at batch sizes where the linear rule loses it.

A run trains a small CNN from scratch with one batch size, k = 1, 4, 16 or 64 times the reference of 32 samples, and
evaluates it once, at the end, on the 10,000 test samples. A cosine schedule is written for the reference, over T = 4096
updates. Every other run reads it by `ProgressScheduler`, whose `done` ends the run:

- by samples for rules whose update counts as k reference updates, and for the constant rule, whose update counts as 1:
  by progress it would use k times the samples. All of these use the same T * 32 samples, in T / k updates.
- by progress for AdaScale and AdamScale, as in the paper. An update counts as its gain, between 1 and k, so these runs
  make more than T / k updates and use more samples. The table shows both numbers. `--updates` with a longer T gives the
  other rules as many samples, which shows whether the rule or the samples kept the accuracy.

SGD has momentum 0.9, as in the paper; Adam has torch's betas. LEGW warms up over T / 256 updates, a quarter of the run
at k = 64. AdaScale measures the noise between 4, 16 and 16 microbatches at k = 4, 16 and 64; at k = 1 there is a single
one, because the gain is 1 there for any noise. The result of the other rules does not depend on the microbatch size, so
they use large ones.

The learning rate is tuned with the constant rule at k = 1. The last 10,000 training samples are held out, and the seeds
differ from those of all other runs. Of a grid of powers of two, the largest learning rate is chosen whose mean accuracy
is within 0.1 points of the best. The largest, because rules multiply it: a smaller one would leave every rule a margin
at the reference. `--tune` prints the grid and the choice; `TUNED` holds the choices, and records.csv the grids.

In the results, "rejected" is a rule that raises for a batch size, "diverged" a run whose loss is not finite, and "at
chance" a run that ends no better than predicting one class. Means and standard deviations are over the other runs.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

import fashion
import variable_batch_size as vbs
from helpers import mnist
from records import Measured
from results import record

REF, UPDATES = 32, 4096  # reference batch size in samples, and T
HELD_OUT = 10_000  # training samples that tuning evaluates on
CHANCE = 0.12  # the most frequent class is 11.35 % of the test set of MNIST
INNER: dict[str, Any] = {"SGD": functools.partial(torch.optim.SGD, momentum=0.9), "Adam": torch.optim.Adam}
RULES = {  # names in vbs.rules.RULES
    "SGD": ["constant", "linear", "root", "linear-momentum", "legw", "adascale"],
    "Adam": ["constant", "root", "sqrt-sde", "adamscale"],
}
BY_PROGRESS = ("adascale", "adamscale")
GRID = {"SGD": [2.0**-power for power in range(8, 0, -1)], "Adam": [2.0**-power for power in range(12, 4, -1)]}
TUNED = {("MNIST", "SGD"): 2**-5, ("MNIST", "Adam"): 2**-8, ("Fashion", "SGD"): 2**-5, ("Fashion", "Adam"): 2**-8}


class Samples(NamedTuple):
    """Images, float32 (n, 1, 28, 28), and labels, int64 (n,)."""

    images: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Run:
    """The arguments of a run; `times` is k, and `updates` is T."""

    data: str
    optimizer: str
    rule: str
    times: int
    lr: float
    seed: int
    updates: int
    tuning: bool = False


@dataclass(frozen=True)
class Outcome:
    """The result of a run."""

    end: Literal["trained", "at chance", "diverged", "rejected"]
    accuracy: float = math.nan
    updates: int = 0
    samples: int = 0
    progress: float = 0.0


# A run, in a process that has loaded the data. ------------------------------------------------------------------------

DATA: dict[tuple[str, bool], Samples] = {}  # (name, whether to train on it)


def prepare(folders: dict[str, str | None]) -> None:
    """Load the data, once per process, and compute on one core."""
    torch.set_num_threads(1)
    for name, folder in folders.items():
        for train in (True, False):
            DATA[name, train] = load(name, folder, train)


def load(name: str, folder: str | None, train: bool) -> Samples:
    """Load MNIST from a folder or the cache, or the idx files of Fashion-MNIST, raw or .gz, from their folder."""
    if name == "MNIST":
        return Samples(*mnist.load(folder, train=train).tensors)
    return Samples(*fashion.load(folder or "", train=train))


def train(run: Run) -> Outcome:
    """Train, and evaluate at the end."""
    samples, test = DATA[run.data, True], DATA[run.data, False]
    if run.tuning:
        test = Samples(samples.images[-HELD_OUT:], samples.labels[-HELD_OUT:])
        samples = Samples(samples.images[:-HELD_OUT], samples.labels[:-HELD_OUT])
    size, batch = len(samples.labels), REF * run.times
    torch.manual_seed(run.seed)
    model = make_model()
    microbatch = max(REF, batch // 16) if run.rule in BY_PROGRESS else min(batch, 512)
    sampler = vbs.CustomSampler(size, batch, 1, 0, microbatch, run.seed, drop_last=True)
    inner = INNER[run.optimizer](model.parameters(), lr=run.lr)
    rule = vbs.rules.LEGWRule(warmup_updates=run.updates / 256) if run.rule == "legw" else run.rule
    try:
        optimizer = vbs.CustomOptimizer(inner, sampler, ref_batchsize=REF, rule=rule)
    except ValueError:
        return Outcome("rejected")
    by: Literal["progress", "samples"] = "progress" if run.rule in BY_PROGRESS else "samples"
    schedule = vbs.ProgressScheduler(CosineAnnealingLR(inner, run.updates), optimizer, by=by, total=run.updates)

    finite = True
    for images, labels in microbatches(sampler, optimizer, samples):
        loss = nn.functional.cross_entropy(model(images), labels)
        finite = math.isfinite(loss.item())
        if not finite:
            break
        loss.backward()
        if optimizer.step():
            schedule.step()
        if schedule.done:
            break
    accuracy = evaluate(model, test)
    end: Literal["trained", "at chance"] = "trained" if accuracy > CHANCE else "at chance"
    return Outcome(end if finite else "diverged", accuracy, optimizer.updates, optimizer.samples, optimizer.progress)


def make_model() -> nn.Module:
    """Return a CNN of 22,000 parameters that is fast on one core, with strides instead of pooling."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 5, stride=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def microbatches(
    sampler: vbs.CustomSampler, optimizer: vbs.CustomOptimizer, samples: Samples
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield images, (rows, 1, 28, 28), and labels, (rows,), of one epoch after another, without end."""
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        optimizer.set_epoch(epoch)
        for indices in sampler:
            chosen = torch.tensor(indices)
            yield samples.images[chosen], samples.labels[chosen]


@torch.no_grad()
def evaluate(model: nn.Module, test: Samples) -> float:
    """Return the accuracy."""
    parts = zip(test.images.split(1000), test.labels.split(1000), strict=True)
    correct = sum(int((model(images).argmax(1) == labels).sum()) for images, labels in parts)
    return correct / len(test.labels)


# Many runs, and their report. -------------------------------------------------------------------------------


def train_all(runs: Iterable[Run], flags: argparse.Namespace) -> Iterator[tuple[Run, Outcome]]:
    """Yield each run with its outcome, in the order of completion, computed in `flags.processes` processes."""
    folders = {"MNIST": flags.data_dir, "Fashion": flags.fashion_dir}
    folders = {name: folders[name] for name in flags.data}
    with ProcessPoolExecutor(flags.processes, get_context("spawn"), prepare, (folders,)) as pool:
        futures = {pool.submit(train, run): run for run in runs}
        for future in as_completed(futures):
            yield futures[future], future.result()


def tune(flags: argparse.Namespace) -> None:
    """Record the held-out accuracy over the grid, and the learning rate that it chooses."""
    seeds = range(1000, 1000 + flags.seeds)
    kinds = [(data, optimizer) for data in flags.data for optimizer in RULES]
    runs = [
        Run(data, optimizer, "constant", 1, lr, seed, flags.updates, tuning=True)
        for data, optimizer in kinds
        for lr in GRID[optimizer]
        for seed in seeds
    ]
    found: dict[tuple[str, str, float], list[Outcome]] = {}
    for run, outcome in train_all(runs, flags):
        found.setdefault((run.data, run.optimizer, run.lr), []).append(outcome)
    for data, optimizer in kinds:
        means = {lr: statistics.mean(o.accuracy for o in found[data, optimizer, lr]) for lr in GRID[optimizer]}
        chosen = max(lr for lr, mean in means.items() if mean >= max(means.values()) - 0.001)
        on = f"{data}, {optimizer}"
        for lr in GRID[optimizer]:
            question = f"held-out accuracy at batch size {REF}"
            report(flags, question, "constant", **points(found[data, optimizer, lr]), on=on, case=f"lr {lr:g}")
        question = f"learning rate chosen at batch size {REF}"
        report(flags, question, "constant", measured=chosen, unit="learning rate", on=on)


def compare(flags: argparse.Namespace) -> None:
    """Train with every rule at every size; print a row when the last seed of a cell is done, and a table at the end."""
    cells: dict[tuple[str, str, str, int], list[Outcome]] = {
        (data, optimizer, rule, times): []
        for data in flags.data
        for optimizer, rules in RULES.items()
        for rule in rules
        if not flags.rules or rule in flags.rules
        for times in flags.sizes
    }
    runs = [
        Run(*cell, lr=TUNED[cell[0], cell[1]], seed=seed, updates=flags.updates)
        for cell in cells
        for seed in range(flags.seeds)
    ]
    for run, outcome in train_all(runs, flags):
        cell = run.data, run.optimizer, run.rule, run.times
        cells[cell].append(outcome)
        if len(cells[cell]) == flags.seeds:
            print(row(*cell, cells[cell]), flush=True)
    print("\n| data | optimizer | rule | batch / ref | accuracy, % | updates | samples | reference updates |")
    print("|---|---|---|---|---|---|---|---|")
    for cell, outcomes in cells.items():
        print(row(*cell, outcomes))
    print()
    for data, optimizer, rule in dict.fromkeys(cell[:3] for cell in cells):
        by_size = {times: cells[data, optimizer, rule, times] for times in flags.sizes}
        own = {"what": rule, "on": f"{data}, {optimizer} at lr {TUNED[data, optimizer]:g}"}
        longer = f" with {flags.updates / UPDATES:g} times the samples" if flags.updates != UPDATES else ""
        for k, cell in by_size.items():
            report(flags, f"test accuracy{longer}", **points(cell), **own, case=f"{k}x")
        for k, cell in by_size.items():
            samples = mean_of("samples", cell) / (REF * flags.updates)
            if samples and abs(samples - 1) >= 0.05:
                more = {"measured": Measured(samples, n=len(cell)), "unit": "x the samples"}
                report(flags, f"samples of a run{longer}", **more, **own, case=f"{k}x")


def row(data: str, optimizer: str, rule: str, times: int, outcomes: list[Outcome]) -> str:
    """Return a row of the table."""
    means = [mean_of(name, outcomes) for name in ("updates", "samples", "progress")]
    numbers = [f"{mean:,.0f}" if mean else "-" for mean in means]
    accuracy = f"{statistics.mean(trained):.2f}" if (trained := percent(outcomes)) else "-"
    return f"| {' | '.join([data, optimizer, rule, str(times), accuracy, *numbers])} |"


def mean_of(name: str, outcomes: list[Outcome]) -> float:
    """Return the mean of an attribute over the runs that were neither rejected nor diverged; 0 if there are none."""
    values = [getattr(outcome, name) for outcome in outcomes if outcome.end in ("trained", "at chance")]
    return statistics.mean(values) if values else 0.0


def percent(outcomes: list[Outcome]) -> list[float]:
    """Return the accuracy of the runs above chance, in percent."""
    return [100 * outcome.accuracy for outcome in outcomes if outcome.end == "trained"]


def points(outcomes: list[Outcome]) -> dict[str, Any]:
    """Return the accuracy for a record: its mean and standard deviation, or how many runs ended otherwise."""
    trained, ends = percent(outcomes), Counter(outcome.end for outcome in outcomes if outcome.end != "trained")
    others = [f"{end} {count} of {len(outcomes)}" for end, count in ends.items()]
    if trained:
        deviation = statistics.stdev(trained) if len(trained) > 1 else None
        measured = Measured(statistics.mean(trained), deviation=deviation, n=len(trained))
        return {"measured": measured, "unit": "%", "note": ", ".join(others)}
    end, count = next(iter(ends.items()))
    return {"measured": Measured(count, n=len(outcomes)), "unit": f"runs {end}", "note": ", ".join(others[1:])}


def report(flags: argparse.Namespace, question: str, what: str, **measured: Any) -> None:
    """Record a measurement; only print it with `--quick`, which is not one."""
    if flags.quick:
        print(f"{question}, {what}: {measured}")
    else:
        record(question, what, **measured)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--tune", action="store_true", help="tune the learning rates only")
    add("--quick", action="store_true", help="smoke test of about a minute, without rows in records.csv")
    add("--seeds", type=int, default=3, help="runs per cell")
    add("--rules", nargs="+", choices=sorted({*RULES["SGD"], *RULES["Adam"]}), help="rules to compare; by default all")
    add("--sizes", type=int, nargs="+", default=[1, 4, 16, 64], help="batch sizes, as multiples of the reference")
    add("--updates", type=int, default=UPDATES, help="T, the length of a run in reference updates")
    add("--data-dir", help="folder with the idx files of MNIST; by default they are downloaded once")
    add("--fashion-dir", help="folder with the idx files of Fashion-MNIST; by default it is omitted")
    add("--processes", type=int, default=2, help="parallel runs, of one thread each")
    flags = parser.parse_args()
    flags.data = ["MNIST", "Fashion"] if flags.fashion_dir else ["MNIST"]
    if flags.quick:
        flags.seeds, flags.updates = 1, 256
    if flags.data_dir is None:
        mnist.fetch()
    return flags


if __name__ == "__main__":
    arguments = parse()
    (tune if arguments.tune else compare)(arguments)
