"""Does a short branch predict which rule and learning rate a full training should have, and what does it cost?

    PYTHONPATH=test python benchmarks/branching.py
    PYTHONPATH=test python benchmarks/branching.py --data-dir FASHION_MNIST --folder runs

The first command computes the figures of the two committed tables, branching_trainings.csv.gz and
branching_branches.csv.gz, within a few minutes; the second one trains, which took 28 minutes on one of two shared
cores, and writes the tables before.

For each task and batch size, each candidate (a rule, and a factor on the learning rate that was tuned at the reference
batch size) trains in full, from the beginning, with three seeds. The means of the final validation losses are the
truth, which ranks the candidates; those that train alike are one candidate. A training at the reference batch size is
saved at 15 % of its samples. From there `evaluation.branch` trains each candidate at that batch size with a tenth of
the samples of a full training, and ranks them by their training losses. Spearman's correlation compares the two
rankings; a diverged training is the last one. The same branches also tell what half of their length, and the validation
loss at their end, would have said.

A second kind of branch lets the learning rate fall to 0 (`decay=1`), with a fifth of the samples, and is ranked by the
validation loss at its end. This kind was chosen after the first one had failed: among lengths of 5, 10 and 20 %, decays
over none, half and all of the branch, and four criteria (the training loss of the last 10, 25 or 50 % of the updates,
and the validation loss), 36 in all, on the 8 pairs of `CHOSEN_ON`. What it says of these is too good by the choice; the
other tasks had no part in it.

Two predictions train nothing. "The larger rate first" sorts candidates by their learning rates; AdaScale's, which lies
between that of the constant rule and the largest one, counts as their geometric mean. "The order of other tasks" is the
mean rank of a candidate in the truths of all other tasks with the same candidates, at the same multiple of the
reference batch size, or at the nearest one that they have. "A full training" is the correlation of one seed with the
mean of the others, averaged over the seeds: what a prediction could reach.

"Lost" is the final loss of the candidate that is ranked first, minus that of the best one, as a share of the distance
between the best and the median one: 1 is what a candidate of the middle loses.

What a branch says beyond a baseline is the difference of their correlations. Its mean over the batch sizes of a task is
one value; the interval is Student's over tasks.

The intervals of the differences are checked on simulated autoregressions, whose mean is known: also with a linear trend
whose ends are two standard deviations of the noise apart, and after the line that fits best is taken out. How many
pairs of candidates the branches tell apart, and how many of these as the truth does, is counted with and without that
line, too.

What is in the folder is not trained again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.signal import detrend
from scipy.stats import rankdata, spearmanr

import variable_batch_size as vbs
from helpers.coverage import series_coverage
from records import Measured, spread
from results import record
from variable_batch_size._files import written
from variable_batch_size.evaluation import Candidate, branch, load_task
from variable_batch_size.evaluation.branching.ranking import ranking
from variable_batch_size.evaluation.branching.start import Start
from variable_batch_size.evaluation.branching.trial import kept_random_numbers, train_trial, untrained_metrics
from variable_batch_size.evaluation.cell import rule_of
from variable_batch_size.evaluation.statistics import difference_interval, series_interval
from variable_batch_size.evaluation.table import read_table, write_table
from variable_batch_size.rules import RULES
from variable_batch_size.rules.base import Noise, RuleInput

BEGIN = 0.15  # of a full training
LENGTHS = {0.0: 0.1, 1.0: 0.2}  # of a full training, by the share of a branch in which the learning rate falls to 0
SEEDS = 3
TABLES = "branching_trainings.csv.gz", "branching_branches.csv.gz"
CHOSEN_ON = ("teacher-sgd", "teacher-adamw")  # tasks on which the second kind of branch was chosen
SGD = ("constant", "power:0.25", "root", "linear", "adascale", "root*0.5", "linear*0.5", "linear*2")
ADAM = ("constant", "power:0.25", "root", "linear", "adamscale", "root*0.5", "root*2", "linear*0.5")
JOINED = " = "  # candidates that train alike


class Kind(NamedTuple):
    """A task with its arguments, and what is trained."""

    task: str
    arguments: dict[str, Any]
    samples: int
    ref_batchsize: int
    ratios: tuple[int, ...]  # batch sizes / ref_batchsize
    candidates: tuple[str, ...]


TEACHER = "helpers.branching_tasks:Teacher"
RATIOS = (2, 4, 8, 16)
KINDS = {
    "teacher-sgd": Kind(TEACHER, {}, 2**16, 32, RATIOS, SGD),
    "teacher-adamw": Kind(TEACHER, {"optimizer": "adamw"}, 2**16, 32, RATIOS, ADAM),
    "noisy-teacher-sgd": Kind(TEACHER, {"width": 256, "wrong": 0.3}, 2**16, 32, RATIOS, SGD),
    "mnist-cnn": Kind("mnist-cnn", {}, 2**15, 32, RATIOS[:3], SGD),
    "fashion-cnn": Kind("fashion-cnn", {}, 2**15, 32, RATIOS[:3], SGD),
    "char-gpt": Kind("char-gpt", {"width": 32, "layers": 2}, 2**13, 16, RATIOS[:3], ADAM),
}


class Runs(NamedTuple):
    """What was trained.

    Attributes:
        trainings: of each full training its task, ratio, seed, candidate, and final validation loss, which is missing
            after a divergence.
        branches: what branches have brought, as values of JSON, by (name of the task, ratio, decay).
    """

    trainings: Sequence[Mapping[str, Any]]
    branches: Mapping[tuple[str, int, float], dict[str, Any]]

    @classmethod
    def read(cls, folder: Path) -> Runs:
        """Read the two tables of a folder."""
        trainings, branches = (read_table(folder / name) for name in TABLES)
        return cls(trainings, {(row["name"], row["ratio"], row["decay"]): row for row in branches})

    def write(self, folder: Path) -> None:
        """Write the two tables."""
        rows = [
            {"name": name, "ratio": k, "decay": decay, **found} for (name, k, decay), found in self.branches.items()
        ]
        for table, content in zip(TABLES, (self.trainings, rows), strict=True):
            write_table(content, folder / table)

    def candidates(self, name: str, ratio: int) -> list[str]:
        """Return the names of the candidates of a pair, of which those that train alike are one."""
        return [trial["name"] for trial in self.branches[name, ratio, 0.0]["trials"]]

    def final_losses(self, name: str, ratio: int) -> np.ndarray:
        """Return the final validation losses of full trainings, (seeds, candidates); inf after a divergence."""
        own = [row for row in self.trainings if (row["name"], row["ratio"]) == (name, ratio)]
        found = {(row["seed"], row["candidate"]): row.get("loss", np.inf) for row in own}
        seeds = sorted({row["seed"] for row in own})
        return np.array([[found[seed, one] for one in self.candidates(name, ratio)] for seed in seeds])


def trained(kind: Kind, ratio: int, data_dir: str | None, start: Path | None, share: float, **how: Any) -> Any:
    """Return what candidates bring with a share of the samples of a full training, as values of JSON."""
    size = ratio * kind.ref_batchsize
    return branch(
        start,
        load_task(kind.task, kind.arguments, data_dir if kind.task == "fashion-cnn" else None),
        batch_size=size,
        candidates=kind.candidates,
        updates=round(share * kind.samples / size),
        samples=kind.samples,
        minibatch_size=min(32, size // 2),
        **how,
    ).as_json()


def kept(path: Path, train: Callable[[], Any]) -> Any:
    """Return what is in a file; otherwise train, and write it."""
    if not path.exists():
        begun, found = time.perf_counter(), train()
        print(f"{path.stem}: {time.perf_counter() - begun:.0f} s", flush=True)
        with written(path) as file:
            json.dump(found, file)
    return json.loads(path.read_text())


def full_trainings(name: str, ratio: int, seed: int, folder: Path, data_dir: str | None) -> list[dict[str, Any]]:
    """Return the rows of the full trainings of a pair with a seed."""
    path = folder / f"full {name} {ratio} {seed}.json"
    found = kept(path, lambda: trained(KINDS[name], ratio, data_dir, None, 1.0, seed=seed))
    own = {"name": name, "ratio": ratio, "seed": seed}
    return [own | {"candidate": trial["name"]} | trial["metrics"] for trial in found["trials"]]


def checkpoint(kind: Kind, name: str, folder: Path, data_dir: str | None) -> Path:
    """Return the folder of a checkpoint of a training at the reference batch size."""
    place = folder / "checkpoints-of-branches" / name
    if next(place.glob("update-*"), None) is None:
        shutil.rmtree(place, ignore_errors=True)
        task = load_task(kind.task, kind.arguments, data_dir if kind.task == "fashion-cnn" else None)
        start = Start.read(None, task, samples=kind.samples, minibatch_size=16)
        with kept_random_numbers(1):
            parts = start.begin(Candidate("constant"), kind.ref_batchsize, 0, samples=int(BEGIN * kind.samples))
            train_trial(parts, name, 0, untrained_metrics(task, 0))
            own = {"model": parts.model, "optimizer": parts.optimizer, "scheduler": parts.scheduler}
            with vbs.Checkpoint(place, **own) as saved:
                saved.save()
    return place


def branched(name: str, ratio: int, decay: float, folder: Path, data_dir: str | None) -> dict[str, Any]:
    """Return what branches have brought, as values of JSON."""
    kind, path = KINDS[name], folder / f"branch {name} {ratio}{' decayed' if decay else ''}.json"
    start = checkpoint(kind, name, folder, data_dir)
    return kept(path, lambda: trained(kind, ratio, data_dir, start, LENGTHS[decay], decay=decay))  # type: ignore[no-any-return]


def predictions(found: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return what the branches say of each candidate, less is better, (candidates,), by criterion."""
    own = found["trials"]
    length = max(len(trial["losses"]) for trial in own)
    half = length // 2

    def mean(begin: int, end: int) -> np.ndarray:
        finished = [trial["status"] == "finished" for trial in own]
        return np.array(
            [np.mean(one["losses"][begin:end]) if ok else np.inf for one, ok in zip(own, finished, strict=True)]
        )

    return {
        "training loss": mean(length - half, length),
        "training loss, half as long": mean(half - max(1, half // 2), half),
        "validation loss at its end": np.array([trial["metrics"].get("loss", np.inf) for trial in own]),
    }


def rate(candidate: str, ratio: int) -> float:
    """Return the learning rate of a candidate, in those of the reference; a measured gain counts as sqrt(ratio)."""
    one = Candidate.of(candidate)
    rule: Any = rule_of(one.rule)
    rule = RULES[rule]() if isinstance(rule, str) else rule
    return one.lr_factor * float(rule(RuleInput(ratio, 1, noise=Noise(1.0, 1.0, ratio**0.5))).lr)


def order_of_others(name: str, ratio: int, runs: Runs) -> np.ndarray | None:
    """Return the mean rank of each candidate in the truths of other tasks, (candidates,); None if there are none."""
    others = [(n, k) for n, k in pairs_of(runs) if n != name and KINDS[n].candidates == KINDS[name].candidates]
    if not others:
        return None
    nearest = min((k for _, k in others), key=lambda k: abs(np.log(k / ratio)))
    ranks: dict[str, list[float]] = {}
    for other in (one for one in others if one[1] == nearest):
        for text, rank in zip(runs.candidates(*other), rankdata(truth(*other, runs)), strict=True):
            for candidate in text.split(JOINED):
                ranks.setdefault(candidate, []).append(rank / len(runs.candidates(*other)))
    return np.array([np.mean([ranks[one] for one in text.split(JOINED)]) for text in runs.candidates(name, ratio)])


def pairs_of(runs: Runs) -> list[tuple[str, int]]:
    """Return the pairs of task and ratio."""
    return list(dict.fromkeys((name, ratio) for name, ratio, _ in runs.branches))


def truth(name: str, ratio: int, runs: Runs) -> np.ndarray:
    """Return the mean final loss of each candidate over the seeds, (candidates,); inf if one has diverged."""
    means: np.ndarray = runs.final_losses(name, ratio).mean(axis=0)
    return means


def correlation(one: np.ndarray, other: np.ndarray) -> float:
    """Return Spearman's correlation; those that diverged share the last rank."""
    return float(spearmanr(np.nan_to_num(one, posinf=1e9), np.nan_to_num(other, posinf=1e9)).statistic)


def lost(predicted: np.ndarray, ends: np.ndarray) -> float:
    """Return how much worse the predicted candidate is than the best one, 1: as bad as the median one."""
    ends = np.minimum(ends, ends[np.isfinite(ends)].max())
    return float((ends[predicted.argmin()] - ends.min()) / (np.median(ends) - ends.min()))


RANK, LOST, COST, BEYOND = (
    "rank correlation with full trainings",
    "lost by the choice",
    "samples of branches / a full one",
    "rank correlation beyond a baseline's",
)
PLAIN, DECAYED = "a tenth, training loss", "a fifth, decayed, validation loss"
RATE, OTHERS = "the larger rate first, no branch", "the order of other tasks, no branch"


def judged(name: str, ratio: int, runs: Runs) -> dict[str, float]:
    """Return what is recorded of a pair of task and ratio, by "question: what"."""
    plain, decayed = (runs.branches[name, ratio, decay] for decay in LENGTHS)
    own, other, others = predictions(plain), predictions(decayed), order_of_others(name, ratio, runs)
    seeds, ends = runs.final_losses(name, ratio), truth(name, ratio, runs)
    by_kind = {
        PLAIN: own["training loss"],
        "a twentieth, training loss": own["training loss, half as long"],
        "a tenth, validation loss": own["validation loss at its end"],
        DECAYED: other["validation loss at its end"],
        RATE: -np.array([rate(one.split(JOINED)[0], ratio) for one in runs.candidates(name, ratio)]),
    } | ({} if others is None else {OTHERS: others})
    values = {f"{RANK}: {what}": correlation(predicted, ends) for what, predicted in by_kind.items()}
    for what in (one for one in (PLAIN, DECAYED, RATE, OTHERS) if one in by_kind):
        values[f"{LOST}: {what}"] = lost(by_kind[what], ends)
    rest = [correlation(seed, np.delete(seeds, index, 0).mean(axis=0)) for index, seed in enumerate(seeds)]
    values[f"{RANK}: a full training of one seed, those of the others"] = float(np.mean(rest))
    for text, result in (("a tenth", plain), ("a fifth", decayed)):
        values[f"{COST}: {text}, one candidate"] = result["cost"]["samples_each"] / KINDS[name].samples
        values[f"{COST}: {text}, all candidates"] = result["cost"]["samples"] / KINDS[name].samples
    return values


def confirmed(name: str, ratio: int, runs: Runs, *, trend: bool) -> tuple[int, int]:
    """Return how many pairs of candidates the first kind of branch tells apart, and how many as full trainings do.

    `trend`: whether what a line explains of a difference counts as noise.
    """
    found, names = runs.branches[name, ratio, 0.0], runs.candidates(name, ratio)
    ends = dict(zip(names, truth(name, ratio, runs), strict=True))
    losses: dict[str, list[np.ndarray] | None] = dict.fromkeys(names)
    for trial in found["trials"]:
        if trial["status"] == "finished":
            values = np.array(trial["losses"][-found["compared"] :])
            losses[trial["name"]] = [values if trend else values.mean() + detrend(values)]
    apart = [pair for pair in ranking(losses)[1] if pair.difference.decided]
    return len(apart), sum((ends[one.first] - ends[one.second]) * one.difference.value > 0 for one in apart)


def figures(runs: Runs) -> Iterator[tuple[str, str, Measured, str, str]]:
    """Yield what is recorded of the runs: question, what, the value, on, and a note."""
    pairs = pairs_of(runs)
    found = {pair: judged(*pair, runs) for pair in pairs}
    names = list(dict.fromkeys(name for name, _ in pairs))
    groups = {"all": pairs, "tasks of no choice": [pair for pair in pairs if pair[0] not in CHOSEN_ON]}
    for group, own in (groups | {name: [pair for pair in pairs if pair[0] == name] for name in names}).items():
        on = f"{len(own)} pairs of {group}" if group in groups else group
        for key in dict.fromkeys(key for pair in own for key in found[pair]):
            question, what = key.split(": ")
            shown = question == RANK and what in (PLAIN, DECAYED, RATE, OTHERS)
            if group == "all" or shown or (group in groups and question != COST):
                yield question, what, spread([found[pair][key] for pair in own if key in found[pair]]), on, ""
    for group, own in groups.items():
        for baseline in (RATE, OTHERS):
            yield from beyond(baseline, group, {pair: found[pair] for pair in own})
    for trend, what in ((True, "trend as noise"), (False, "trend taken out")):
        for name in names:
            counts = [confirmed(*pair, runs, trend=trend) for pair in pairs if pair[0] == name]
            apart, right = np.sum(counts, axis=0)
            if apart:
                share = Measured(float(right / apart))
                yield "differences seen that full trainings have", what, share, name, f"{right} of {apart}"


def beyond(
    baseline: str, group: str, found: Mapping[tuple[str, int], Mapping[str, float]]
) -> Iterator[tuple[str, str, Measured, str, str]]:
    """Yield by how much the correlation of decayed branches is larger than that of a baseline, over tasks."""
    tasks: dict[str, list[float]] = {}
    for (name, _), own in found.items():
        if (key := f"{RANK}: {baseline}") in own:
            tasks.setdefault(name, []).append(own[f"{RANK}: {DECAYED}"] - own[key])
    if tasks:
        value, low, high, n = difference_interval(np.array([np.mean(values) for values in tasks.values()]))
        note = "-" if np.isnan(low) else f"95%: {low:+.2f} to {high:+.2f}"
        yield BEYOND, baseline.removesuffix(", no branch"), Measured(value, n=n), f"{n} tasks of {group}", note


def train(names: Sequence[str], folder: Path, data_dir: str | None) -> Runs:
    """Return what is trained of some tasks; what is in the folder is not trained again."""
    folder.mkdir(parents=True, exist_ok=True)
    pairs = [(name, ratio) for name in names for ratio in KINDS[name].ratios]
    branches = {
        (name, ratio, decay): branched(name, ratio, decay, folder, data_dir)
        for name, ratio in pairs
        for decay in LENGTHS
    }
    each = [full_trainings(*pair, seed, folder, data_dir) for pair in pairs for seed in range(SEEDS)]
    return Runs([row for rows in each for row in rows], branches)


def coverages(repeats: int) -> Iterator[tuple[str, float, str, str]]:
    """Yield how often intervals contain the mean of simulated series, in %: what, the value, on, and the case."""
    kinds: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "mean": lambda values: values,
        "mean, with a trend": lambda values: values + np.linspace(-1, 1, len(values)),
        "mean, trend taken out": lambda values: values.mean() + detrend(values),
    }
    for what, changed in kinds.items():
        for coefficient in (0.0, 0.5, 0.8, 0.9, 0.95):
            for updates in (20, 50, 100, 400):
                bounds = series_coverage(
                    lambda values, changed=changed: series_interval(changed(values))[1:3], coefficient, updates, repeats
                )
                yield what, round(100 * bounds, 1), f"autoregression of {coefficient:g}", f"{updates} updates"


def main() -> None:
    """Measure, and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", help="folder of Fashion-MNIST; without it as the task finds the files")
    parser.add_argument("--folder", type=Path, help="train into this folder, and write the tables; otherwise read them")
    parser.add_argument("--tables", type=Path, default=Path(__file__).parent, help="folder of the two tables")
    parser.add_argument("--only", nargs="*", default=list(KINDS), help="tasks that are trained")
    parser.add_argument("--repeats", type=int, default=10_000, help="simulated series of each kind")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.folder:
        train(options.only, options.folder, options.data_dir).write(options.tables)
    for question, what, measured, on, note in figures(Runs.read(options.tables)):
        record(question, what, measured, on=on, note=note)
    for what, held, on, case in coverages(options.repeats):
        record("coverage of 95% intervals of a series", what, held, "%", on=on, case=case)


if __name__ == "__main__":
    main()
