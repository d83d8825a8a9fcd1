"""With a learning rate tuned at the reference only, what does each rule do to the accuracy at larger batch sizes?

The claim to look for is that of AdaScale (Johnson et al. 2020, arXiv 2007.05105): it keeps the accuracy of the
reference, within 0.3 points, at sizes where the linear rule loses it.

A run trains a small CNN from a new start with one batch size, k = 1, 4, 16 or 64 times the reference of 32 samples,
and is evaluated once, at its end, on the 10,000 test samples. A cosine schedule is written for the reference, over
T = 4096 updates there; every other run reads it by `ProgressScheduler`, whose `done` ends the run:

- by samples for the rules that count k reference updates an update, and for the constant rule, which counts 1 and
  would else see k times the samples. So all of these see the same T * 32 samples, in T / k updates.
- by progress for AdaScale and AdamScale, as in the paper: an update counts as its gain, between 1 and k, so they make
  more than T / k updates and see more samples. Both numbers are in the table, and `--updates` with a longer T gives
  as many samples to the others: whether the rule or the samples kept the accuracy.

SGD has momentum 0.9, as in the paper; Adam has torch's betas. LEGW warms up over T / 256 updates: a quarter of the run
at k = 64. AdaScale measures the noise between 4, 16 and 16 microbatches; k = 1 is a single one, for the gain is 1 there
whatever the noise is. The other rules give the same with any microbatch, and have few.

The learning rate is tuned with the constant rule at k = 1 on the last 10,000 training samples, with the others to train
on and seeds that no other run has: the largest of a grid of powers of two whose mean accuracy is within 0.1 points of
the best. The largest, because that is what the rules multiply: with a smaller one every rule has room at the reference.
`--tune` does it and prints the grid; `TUNED` holds what came out, and RESULTS.md the grids.

"Refused" is a rule that will not be made for that size, "diverged" a run whose loss is not finite, and "at chance" one
that is no better than naming one class in the end. The accuracy's mean and standard deviation are over the other runs.
"""

from __future__ import annotations

import argparse
import functools
import gzip
import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

import variable_batch_size as vbs
from helpers import mnist
from results import record

REF, UPDATES = 32, 4096  # samples of an update at the reference, and how many of these a training lasts
HELD_OUT = 10_000  # training samples, when tuning
CHANCE = 0.12  # naming one class is right for at most 11.35 % of MNIST's test set
INNER: dict[str, Any] = {"SGD": functools.partial(torch.optim.SGD, momentum=0.9), "Adam": torch.optim.Adam}
RULES: dict[str, dict[str, Any]] = {
    "SGD": {
        "constant": vbs.ConstantOptimizer,
        "linear": vbs.LinearRuleOptimizer,
        "root": vbs.RootRuleOptimizer,
        "linear-momentum": vbs.LinearRuleMomentumOptimizer,
        "LEGW": vbs.LEGWRuleOptimizer,
        "AdaScale": vbs.AdaScaleOptimizer,
    },
    "Adam": {
        "constant": vbs.ConstantOptimizer,
        "root": vbs.RootRuleOptimizer,
        "SqrtSDE": vbs.SqrtSDERuleOptimizer,
        "AdamScale": vbs.AdamScaleOptimizer,
    },
}
BY_PROGRESS = ("AdaScale", "AdamScale")
GRID = {"SGD": [2.0**-power for power in range(8, 0, -1)], "Adam": [2.0**-power for power in range(12, 4, -1)]}
TUNED = {("MNIST", "SGD"): 2**-5, ("MNIST", "Adam"): 2**-8, ("Fashion", "SGD"): 2**-5, ("Fashion", "Adam"): 2**-8}


class Samples(NamedTuple):
    """Images, float32 (n, 1, 28, 28), and labels, int64 (n,)."""

    images: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Run:
    """What is trained; `updates` is T."""

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
    """What came of it."""

    end: Literal["trained", "at chance", "diverged", "refused"]
    accuracy: float = math.nan
    updates: int = 0
    samples: int = 0
    progress: float = 0.0


# One run, in a process that has the data. -----------------------------------------------------------------------------

DATA: dict[tuple[str, bool], Samples] = {}  # (name, whether to train on it)


def prepare(folders: dict[str, str | None]) -> None:
    """Load the data once a process, which computes on one core."""
    torch.set_num_threads(1)
    for name, folder in folders.items():
        for train in (True, False):
            DATA[name, train] = load(name, folder, train)


def load(name: str, folder: str | None, train: bool) -> Samples:
    """MNIST from its folder or the cache, Fashion-MNIST's idx files, raw or .gz, from their folder."""
    if name == "MNIST":
        return Samples(*mnist.load(folder, train=train).tensors)
    arrays = []
    for kind, header in (("images-idx3", 16), ("labels-idx1", 8)):
        path = Path(folder or "") / f"{'train' if train else 't10k'}-{kind}-ubyte"
        raw = path.is_file()
        content = path.read_bytes() if raw else gzip.decompress(path.with_name(f"{path.name}.gz").read_bytes())
        arrays.append(np.frombuffer(content, np.uint8, offset=header))
    images = torch.from_numpy(arrays[0].reshape(-1, 1, 28, 28).astype(np.float32)).div_(255).sub_(0.2860).div_(0.3530)
    return Samples(images, torch.from_numpy(arrays[1].astype(np.int64)))


def train(run: Run) -> Outcome:
    """Train once, and evaluate at the end."""
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
    warmup = {"warmup_epochs": run.updates / 256 * REF / size} if run.rule == "LEGW" else {}
    try:
        optimizer = RULES[run.optimizer][run.rule](inner, sampler, ref_batchsize=REF, **warmup)
    except ValueError:
        return Outcome("refused")
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
    """A CNN of 22,000 parameters, with strides in the place of pooling: it has to be fast on one core."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 5, stride=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def microbatches(
    sampler: vbs.CustomSampler, optimizer: vbs.CustomOptimizer, samples: Samples
) -> Iterator[tuple[Tensor, Tensor]]:
    """Epoch after epoch, without end."""
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        optimizer.set_epoch(epoch)
        for indices in sampler:
            chosen = torch.tensor(indices)
            yield samples.images[chosen], samples.labels[chosen]


@torch.no_grad()
def evaluate(model: nn.Module, test: Samples) -> float:
    parts = zip(test.images.split(1000), test.labels.split(1000), strict=True)
    correct = sum(int((model(images).argmax(1) == labels).sum()) for images, labels in parts)
    return correct / len(test.labels)


# Many runs, and what to say about them. -------------------------------------------------------------------------------


def train_all(runs: Iterable[Run], flags: argparse.Namespace) -> Iterator[tuple[Run, Outcome]]:
    """Each run with its outcome, as they come, from one process a core."""
    folders = {"MNIST": flags.data_dir, "Fashion": flags.fashion_dir}
    folders = {name: folders[name] for name in flags.data}
    with ProcessPoolExecutor(flags.processes, get_context("spawn"), prepare, (folders,)) as pool:
        futures = {pool.submit(train, run): run for run in runs}
        for future in as_completed(futures):
            yield futures[future], future.result()


def tune(flags: argparse.Namespace) -> None:
    """The held-out accuracy over the grid, and the learning rate that follows."""
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
        table = ", ".join(f"{lr:g}: {points(found[data, optimizer, lr])}" for lr in GRID[optimizer])
        say(flags, f"held-out accuracy at {REF} by learning rate, {data}, {optimizer}", f"{table}; chosen: {chosen:g}")


def compare(flags: argparse.Namespace) -> None:
    """Every rule at every size: a line when its last seed is there, and the table at the end."""
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
        answer = "; ".join(f"{k}x: {points(cell)}{sample_ratio(cell)}" for k, cell in by_size.items())
        say(flags, f"accuracy by batch / {REF}, {data}, {optimizer} at lr {TUNED[data, optimizer]:g}, {rule}", answer)


def row(data: str, optimizer: str, rule: str, times: int, outcomes: list[Outcome]) -> str:
    means = [mean_of(name, outcomes) for name in ("updates", "samples", "progress")]
    numbers = [f"{mean:,.0f}" if mean else "-" for mean in means]
    return f"| {' | '.join([data, optimizer, rule, str(times), points(outcomes), *numbers])} |"


def mean_of(name: str, outcomes: list[Outcome]) -> float:
    """Over the runs that came to their end; 0 where none did."""
    values = [getattr(outcome, name) for outcome in outcomes if outcome.end in ("trained", "at chance")]
    return statistics.mean(values) if values else 0.0


def points(outcomes: list[Outcome]) -> str:
    """Mean and standard deviation of the accuracy of the runs that were trained, in percent; what became of others."""
    trained = [100 * outcome.accuracy for outcome in outcomes if outcome.end == "trained"]
    spread = f" ± {statistics.stdev(trained):.2f}" if len(trained) > 1 else ""
    said = [f"{statistics.mean(trained):.2f}{spread}"] if trained else []
    for end, count in Counter(outcome.end for outcome in outcomes if outcome.end != "trained").items():
        said.append(end if count == len(outcomes) else f"{end} {count} of {len(outcomes)}")
    return ", ".join(said)


def sample_ratio(outcomes: list[Outcome]) -> str:
    """How many samples were seen, against those of `UPDATES` at the reference, where that is not 1."""
    ratio = mean_of("samples", outcomes) / (REF * UPDATES)
    return f" with {ratio:.1f}x the samples" if ratio and abs(ratio - 1) >= 0.05 else ""


def say(flags: argparse.Namespace, question: str, answer: str) -> None:
    """A smoke test is no measurement."""
    if flags.quick:
        print(f"{question}: {answer}")
    else:
        record(question, answer)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--tune", action="store_true", help="tune the learning rates, and do nothing else")
    add("--quick", action="store_true", help="a smoke test of a minute, which leaves no row in RESULTS.md")
    add("--seeds", type=int, default=3, help="how many runs a cell")
    add("--rules", nargs="+", choices=sorted({rule for rules in RULES.values() for rule in rules}))
    add("--sizes", type=int, nargs="+", default=[1, 4, 16, 64], help="batch sizes, in references")
    add("--updates", type=int, default=UPDATES, help="T, the length of a training in reference updates")
    add("--data-dir", help="folder with MNIST's idx files; by default they are downloaded once")
    add("--fashion-dir", help="folder with Fashion-MNIST's idx files; by default it is left out")
    add("--processes", type=int, default=2, help="runs at once, of one thread each")
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
