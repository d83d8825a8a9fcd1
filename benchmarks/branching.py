"""Does a short branch predict which rule and learning rate a full training should have, and what does it cost?

    PYTHONPATH=test python benchmarks/branching.py
    PYTHONPATH=test python benchmarks/branching.py --data-dir FASHION_MNIST --folder runs --second-seed teacher-sgd

The first command computes the figures of the two committed tables, branching_trainings.csv.gz and
branching_branches.csv.gz, within a minute; the second one trains, and writes the tables before.

For each task and batch size, each candidate (a rule, and a factor on the learning rate that was tuned at the reference
batch size) trains in full, from the beginning, and the final validation losses rank the candidates. A training at the
reference batch size is saved at 15 % of its samples. From there `evaluation.branch` trains each candidate at that batch
size with a tenth of the samples of a full training, and ranks them by their training losses. Spearman's correlation
compares the two rankings; a diverged training is the last one. The same branches also tell what half of their length,
and the validation loss at their end, would have said.

A second kind of branch lets the learning rate fall to 0 (`decay=1`), with a fifth of the samples, and is ranked by the
validation loss at its end. This kind was chosen after the first one had failed: among lengths of 5, 10 and 20 %, decays
over none, half and all of the branch, and four criteria (the training loss of the last 10, 25 or 50 % of the updates,
and the validation loss), 36 in all, on the 8 pairs of `CHOSEN_ON`. What it says of these is too good by the choice; the
other tasks had no part in it.

The correlation between full trainings of two seeds, for the pairs that have both, is what a perfect prediction could
reach. "Lost" is the final loss of the candidate that a branch has ranked first, minus that of the best one, as a share
of the distance between the best and the median one: 1 is what a candidate of the middle loses.

The intervals of the differences are checked on simulated autoregressions, whose mean is known.

Full trainings are records of an evaluation, and branches are files beside them: what is in the folder is not computed
again. `--second-seed` names the tasks that are also trained in full with a second seed, for the comparison between
seeds.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.stats import spearmanr

import variable_batch_size as vbs
from helpers.coverage import series_coverage
from records import Measured, spread
from results import record
from variable_batch_size._files import written
from variable_batch_size.evaluation import (
    Candidate,
    Experiment,
    Record,
    branch,
    load_task,
    read_records,
    run,
    write_records,
)
from variable_batch_size.evaluation.branching.start import Start
from variable_batch_size.evaluation.branching.trial import kept_random_numbers, train_trial, untrained_metrics
from variable_batch_size.evaluation.statistics import series_interval
from variable_batch_size.evaluation.table import read_table, write_table

BEGIN = 0.15  # of a full training
LENGTHS = {0.0: 0.1, 1.0: 0.2}  # of a full training, by the share of a branch in which the learning rate falls to 0
TABLES = "branching_trainings.csv.gz", "branching_branches.csv.gz"
CHOSEN_ON = ("teacher-sgd", "teacher-adamw")  # tasks on which the second kind of branch was chosen
SGD = ("constant", "power:0.25", "root", "linear", "adascale", "root*0.5", "linear*0.5", "linear*2")
ADAM = ("constant", "power:0.25", "root", "linear", "adamscale", "root*0.5", "root*2", "linear*0.5")


class Kind(NamedTuple):
    """A task with its arguments, and what is trained."""

    task: str
    arguments: dict[str, Any]
    samples: int
    batch_sizes: tuple[int, ...]
    candidates: tuple[str, ...]


TEACHER = "helpers.branching_tasks:Teacher"
SIZES = (64, 128, 256, 512)
KINDS = {
    "teacher-sgd": Kind(TEACHER, {}, 2**16, SIZES, SGD),
    "teacher-adamw": Kind(TEACHER, {"optimizer": "adamw"}, 2**16, SIZES, ADAM),
    "noisy-teacher-sgd": Kind(TEACHER, {"width": 256, "wrong": 0.3}, 2**16, SIZES, SGD),
    "mnist-cnn": Kind("mnist-cnn", {}, 2**15, SIZES[:3], SGD),
    "fashion-cnn": Kind("fashion-cnn", {}, 2**15, SIZES[:3], SGD),
    "char-gpt": Kind("char-gpt", {"width": 32, "layers": 2}, 2**13, (32, 64, 128), ADAM),
}


class Runs(NamedTuple):
    """What was trained.

    Attributes:
        records: the full trainings.
        branches: what branches have brought, as values of JSON, by (name of the task, batch size, decay).
    """

    records: Sequence[Record]
    branches: Mapping[tuple[str, int, float], dict[str, Any]]

    @classmethod
    def read(cls, folder: Path) -> Runs:
        """Read the two tables of a folder."""
        trainings, branches = (folder / name for name in TABLES)
        rows = read_table(branches)
        return cls(read_records(trainings), {(row["name"], row["batch_size"], row["decay"]): row for row in rows})

    def write(self, folder: Path) -> None:
        """Write the two tables."""
        trainings, branches = (folder / name for name in TABLES)
        write_records(self.records, trainings)
        rows = [{"name": name, "decay": decay, **found} for (name, _, decay), found in self.branches.items()]
        write_table(rows, branches)

    def final_losses(self, kind: Kind, size: int) -> np.ndarray:
        """Return the final validation losses of full trainings, (seeds, candidates); inf after a divergence."""
        found: dict[int, dict[tuple[str, float], float]] = {}
        for training in self.records:
            cell = training.cell
            if (cell["task"], cell["task_arguments"], cell["trace"]) == (kind.task, kind.arguments, str(size)):
                end = (training.curve["loss"] or [np.inf])[-1] if training.status == "finished" else np.inf
                found.setdefault(cell["seed"], {})[cell["rule"], cell["lr_factor"]] = end
        candidates = [(one.rule, one.lr_factor) for one in map(Candidate.of, kind.candidates)]
        return np.array([[found[seed][one] for one in candidates] for seed in sorted(found)])


def full_trainings(kind: Kind, size: int, seeds: int, folder: Path, data_dir: str | None) -> list[Record]:
    """Return the records of the full trainings."""
    records: list[Record] = []
    for candidate in map(Candidate.of, kind.candidates):
        experiment = Experiment(
            {kind.task: kind.arguments},
            [str(size)],
            [candidate.rule],
            seeds=seeds,
            lr_factors=[candidate.lr_factor],
            samples=kind.samples,
            minibatch_size=min(32, size // 2),
            between=kind.samples,
            data_dir=data_dir if kind.task == "fashion-cnn" else None,
        )
        records += run(experiment, folder, progress=False)
    return records


def checkpoint(kind: Kind, task: Any, name: str, folder: Path) -> Path:
    """Return the folder of a checkpoint of a training at the reference batch size."""
    place = folder / "checkpoints-of-branches" / name
    if next(place.glob("update-*"), None) is None:
        shutil.rmtree(place, ignore_errors=True)
        start = Start.read(None, task, samples=kind.samples, minibatch_size=16)
        with kept_random_numbers(1):
            parts = start.begin(Candidate("constant"), task.ref_batchsize, 0, samples=int(BEGIN * kind.samples))
            train_trial(parts, name, 0, untrained_metrics(task, 0))
            own = {"model": parts.model, "optimizer": parts.optimizer, "scheduler": parts.scheduler}
            with vbs.Checkpoint(place, **own) as saved:
                saved.save()
    return place


def branched(kind: Kind, size: int, name: str, decay: float, folder: Path, data_dir: str | None) -> dict[str, Any]:
    """Return what branches have brought, as values of JSON."""
    how = " decayed" if decay else ""
    path = folder / f"branch {name} {size}{how}.json"
    if not path.exists():
        task = load_task(kind.task, kind.arguments, data_dir if kind.task == "fashion-cnn" else None)
        updates, begun = round(LENGTHS[decay] * kind.samples / size), time.perf_counter()
        found = branch(
            checkpoint(kind, task, name, folder),
            task,
            batch_size=size,
            candidates=kind.candidates,
            updates=updates,
            decay=decay,
            samples=kind.samples,
            minibatch_size=min(32, size // 2),
        )
        print(f"{name}, batch size {size}{how}, {time.perf_counter() - begun:.0f} s\n{found}", flush=True)
        with written(path) as file:
            json.dump(found.as_json(), file)
    return json.loads(path.read_text())  # type: ignore[no-any-return]


def predictions(kind: Kind, found: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return what the branches say of each candidate, less is better, (candidates,), by criterion."""
    trials = {trial["name"]: trial for trial in found["trials"]}
    own = [trials[name] for name in kind.candidates]
    bad = np.array([trial["status"] == "diverged" for trial in own])
    length = max(len(trial["losses"]) for trial in own)

    def mean(begin: int, end: int) -> np.ndarray:
        values = [
            np.mean(trial["losses"][begin:end]) if not lost else np.inf for trial, lost in zip(own, bad, strict=True)
        ]
        return np.array(values)

    finals = np.array([trial["metrics"].get("loss", np.inf) for trial in own])
    half = length // 2
    return {
        "training loss": mean(length - half, length),
        "training loss, half as long": mean(half - max(1, half // 2), half),
        "validation loss at its end": finals,
    }


def correlation(one: np.ndarray, other: np.ndarray) -> float:
    """Return Spearman's correlation; those that diverged share the last rank."""
    return float(spearmanr(np.nan_to_num(one, posinf=1e9), np.nan_to_num(other, posinf=1e9)).statistic)


def lost(predicted: np.ndarray, ends: np.ndarray) -> float:
    """Return how much worse the predicted candidate is than the best one, 1: as bad as the median one."""
    best, median = ends.min(), float(np.median(np.minimum(ends, 1e9)))
    return float((ends[predicted.argmin()] - best) / (median - best))


RANK, LOST, COST = (
    "rank correlation with full trainings",
    "lost by a branch's choice",
    "samples of branches / a full one",
)
PLAIN, DECAYED = f"{RANK}: a tenth, training loss", f"{RANK}: a fifth, decayed, validation loss"


def judged(name: str, size: int, runs: Runs) -> dict[str, float]:
    """Return what is recorded of a pair of task and batch size, by "question: what"."""
    kind, values = KINDS[name], {}
    plain, decayed = (runs.branches[name, size, decay] for decay in LENGTHS)
    own, other = predictions(kind, plain), predictions(kind, decayed)
    ends = runs.final_losses(kind, size)
    by_kind = {
        PLAIN: own["training loss"],
        f"{RANK}: a twentieth, training loss": own["training loss, half as long"],
        f"{RANK}: a tenth, validation loss": own["validation loss at its end"],
        DECAYED: other["validation loss at its end"],
    }
    for what, predicted in by_kind.items():
        values[what] = correlation(predicted, ends[0])
        if what in (PLAIN, DECAYED):
            values[what.replace(RANK, LOST)] = lost(predicted, ends[0])
    if len(ends) > 1:
        values[f"{RANK}: another seed"] = correlation(*ends)
    for text, result in (("a tenth", plain), ("a fifth", decayed)):
        values[f"{COST}: {text}, one candidate"] = result["cost"]["samples_each"] / kind.samples
        values[f"{COST}: {text}, all 8 candidates"] = result["cost"]["samples"] / kind.samples
    return values


def confirmed(name: str, size: int, runs: Runs) -> tuple[int, int]:
    """Return how many pairs of candidates the first kind of branch tells apart, and how many as full trainings do."""
    ends = dict(zip(KINDS[name].candidates, runs.final_losses(KINDS[name], size)[0], strict=True))
    pairs = runs.branches[name, size, 0.0]["pairs"]
    known = [(pair, pair["difference"]) for pair in pairs if pair["difference"]["low"] is not None]
    apart = [(pair, one["value"]) for pair, one in known if one["low"] > 0 or one["high"] < 0]
    return len(apart), sum((ends[pair["first"]] - ends[pair["second"]]) * value > 0 for pair, value in apart)


def figures(runs: Runs) -> Iterator[tuple[str, str, Measured, str, str]]:
    """Yield what is recorded of the runs: question, what, the value, on, and a note."""
    pairs = list(dict.fromkeys((name, size) for name, size, _ in runs.branches))
    found = {pair: judged(*pair, runs) for pair in pairs}
    for (name, size), values in found.items():
        print(f"{name}, {size}: {', '.join(f'{key} {value:.2f}' for key, value in values.items())}", flush=True)
    names = list(dict.fromkeys(name for name, _ in pairs))
    groups = {"all": pairs, "tasks of no choice": [pair for pair in pairs if pair[0] not in CHOSEN_ON]}
    for group, own in (groups | {name: [pair for pair in pairs if pair[0] == name] for name in names}).items():
        for key in dict.fromkeys(key for pair in own for key in found[pair]):
            values = [found[pair][key] for pair in own if key in found[pair]]
            if group == "all" or key in (PLAIN, DECAYED) or (group in groups and not key.startswith(COST)):
                question, what = key.split(": ")
                yield (
                    question,
                    what,
                    spread(values),
                    f"{len(values)} pairs of {group}" if group in groups else group,
                    "",
                )
    for name in names:
        apart, right = np.sum([confirmed(*pair, runs) for pair in pairs if pair[0] == name], axis=0)
        if apart:
            share = Measured(float(right / apart))
            yield (
                "differences seen that full trainings have",
                "a tenth, training loss",
                share,
                name,
                f"{right} of {apart}",
            )


def train(names: Sequence[str], second_seed: Sequence[str], folder: Path, data_dir: str | None) -> Runs:
    """Return what is trained of some tasks; what is in the folder is not trained again."""
    folder.mkdir(parents=True, exist_ok=True)
    pairs = [(name, size) for name in names for size in KINDS[name].batch_sizes]
    branches = {
        (name, size, decay): branched(KINDS[name], size, name, decay, folder, data_dir)
        for name, size in pairs
        for decay in LENGTHS
    }
    records = [
        training
        for name, size in pairs
        for training in full_trainings(KINDS[name], size, 1 + (name in second_seed), folder, data_dir)
    ]
    return Runs(records, branches)


def main() -> None:
    """Measure, and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", help="folder of Fashion-MNIST; without it as the task finds the files")
    parser.add_argument("--folder", type=Path, help="train into this folder, and write the tables; otherwise read them")
    parser.add_argument("--tables", type=Path, default=Path(__file__).parent, help="folder of the two tables")
    parser.add_argument("--second-seed", nargs="*", default=[], help="tasks that are trained in full with two seeds")
    parser.add_argument("--only", nargs="*", default=list(KINDS), help="tasks that are trained")
    parser.add_argument("--repeats", type=int, default=10_000, help="simulated series of each kind")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.folder:
        train(options.only, options.second_seed, options.folder, options.data_dir).write(options.tables)
    for question, what, measured, on, note in figures(Runs.read(options.tables)):
        record(question, what, measured, on=on, note=note)
    for coefficient in (0.0, 0.5, 0.8, 0.9, 0.95):
        for updates in (20, 50, 100, 400):
            held = series_coverage(lambda values: series_interval(values)[1:3], coefficient, updates, options.repeats)
            on, case = f"autoregression of {coefficient:g}", f"{updates} updates"
            record("coverage of 95% intervals of a series", "mean", round(100 * held, 1), "%", on=on, case=case)


if __name__ == "__main__":
    main()
