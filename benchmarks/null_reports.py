"""How many reports of rules that are all alike claim anything? At most 5 % should, however they were come by.

    PYTHONPATH=test python benchmarks/null_reports.py

A report has 4, 8 or 12 rules, one of them the baseline, under 1, 2 or 4 traces. The noise of a training is normal, of
Student's t with 3 degrees of freedom or exponential; or the others, or the baseline, are 3, 5 or 10 times as noisy; or
trainings fail by chance, as often with all rules; or one rule, all others or the baseline are stuck, 10 standard
deviations behind, in a tenth of their trainings, and alike in the rest. Every claim counts, about differences, failures
and the tuned check, of which each report has one.

Ways: what a user may do in one folder of 4 rules, 2 traces and 5 seeds, and look at all reports of it, each written by
`judge`: a narrower command, of the rule and the trace that look best, or of fewer seeds; more seeds, twice; more rules;
each rule as the baseline; four metrics; both; four tasks; with 10 seeds a trace more, or a task more, in each of eight
commands.

Power: how many reports see a given rule that is better than the baseline by so many standard deviations. The tuned
check: how often it gives each answer, where the truth is that twice the learning rate is better by so many standard
deviations, and half of it is worse by as many.
"""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product

import numpy as np
import pandas as pd

from helpers import evaluations
from results import record
from variable_batch_size.lab.evaluation.judgement import Judgement, judge
from variable_batch_size.lab.evaluation.records import REFERENCE, Evaluation, EvaluationPlan
from variable_batch_size.lab.evaluation.statistics import claims, judge_tuning

NULLS = "reports of equal rules that claim anything"
WAYS = "equal rules of which one of several reports claims anything"
POWER = "reports that see a better rule"
TUNED = "answers of the tuned check"
KINDS = ["normal", "t3", "exponential", *(f"{who} {times}" for who in ("others", "baseline") for times in (3, 5, 10))]
WHO = {"one": slice(1, 2), "others": slice(1, None), "baseline": slice(0, 1)}
KINDS += [*(f"failures {rate}" for rate in (0.05, 0.1, 0.2)), *(f"{who} stuck" for who in WHO)]
SEEDS = (3, 5, 8, 10)
FACTORS = (0, 1, -1)  # what each factor loses, in parts of what is true
COMMANDS = 8
METRICS = ("loss", "accuracy", "error0", "error1")
STUCK, BEHIND = 0.1, 10.0


def noise(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return values of mean 0 and variance 1, but for the heavy tails of t."""
    if kind == "t3":
        return rng.standard_t(3, shape)
    return rng.exponential(size=shape) - 1 if kind == "exponential" else rng.standard_normal(shape)


def trainings(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return the metric of trainings, (..., rules, seeds), nan of those that failed, and which failed."""
    name, _, what = kind.partition(" ")
    values = noise(rng, name, shape)
    if name in WHO:
        of_some = values[..., WHO[name], :]
        values[..., WHO[name], :] = (
            of_some + BEHIND * (rng.random(of_some.shape) < STUCK) if what == "stuck" else float(what) * of_some
        )
    failed = rng.random(shape) < (float(what) if name == "failures" else 0)
    return np.where(failed, np.nan, values), failed


def claiming(rng: np.random.Generator, kind: str, rules: int, traces: int, seeds: int, reports: int) -> np.ndarray:
    """Return which reports of equal rules claim a difference, of means or of failures, or that 1 is not tuned."""
    found = claims(*trainings(rng, kind, (reports, traces, rules, seeds)))
    of_factors = "normal" if kind.partition(" ")[0] in WHO else kind
    answers = judge_tuning(*trainings(rng, of_factors, (reports, len(FACTORS), seeds)))[1]
    return (found.differs != 0).any((-1, -2)) | (found.fails != 0).any(-1) | (answers == 1)


def folder(
    rng: np.random.Generator, seeds: int, task: str = "simulated", traces: Sequence[str] = ("64", "spot")
) -> pd.DataFrame:
    """Return the trainings of 4 equal rules under traces, and of the reference, with four metrics."""
    kinds = [*product(traces, ("constant", "linear", "root", "legw:16"))]
    kinds += [(REFERENCE, "constant", factor) for factor in (0.5, 1.0, 2.0)]
    frame = evaluations.trainings({kind: 0.5 + 0.01 * rng.standard_normal(seeds) for kind in kinds}, task=task)
    frame["key"] += task
    for curve, values in zip(frame["curve"], rng.standard_normal((len(frame), 2)), strict=True):
        curve |= {f"error{number}": [value] * len(curve["loss"]) for number, value in enumerate(values.tolist())}
    return frame


def plan(frame: pd.DataFrame) -> EvaluationPlan:
    """Return what a command of these trainings wants."""
    return EvaluationPlan("", tuple(frame["key"]))


def reports_of_one(frame: pd.DataFrame) -> Iterator[list[Judgement]]:
    """Yield the report of one command."""
    yield judge(Evaluation(frame, (plan(frame),)))


def reports_of_narrower(frame: pd.DataFrame) -> Iterator[list[Judgement]]:
    """Yield the reports after the best-looking rule and trace alone, and after fewer and fewer seeds."""
    (wide,) = judge(Evaluation(frame, (plan(frame),)))
    yield [wide]
    rows = [(abs(row.difference.value), trace.name, row.rule) for trace in wide.traces for row in trace.rows[1:]]
    _, trace, rule = max(rows)
    best = (frame["trace"] == trace) & frame["rule"].isin(["constant", rule])
    seen = [plan(frame), plan(frame[best | (frame["trace"] == REFERENCE)])]
    for last in (4, 3, 2):
        yield judge(Evaluation(frame, tuple(seen)))
        seen.append(plan(frame[frame["seed"] < last]))


def reports_of_more(frames: Sequence[pd.DataFrame]) -> Iterator[list[Judgement]]:
    """Yield the reports of commands each of which wants these trainings, of a folder that keeps them."""
    plans = [plan(frame) for frame in frames]
    for number in range(1, len(frames) + 1):
        there = pd.concat(frames[:number], ignore_index=True).drop_duplicates("key")
        yield judge(Evaluation(there, tuple(plans[:number])))


def reports_of_more_seeds(frame: pd.DataFrame) -> Iterator[list[Judgement]]:
    """Yield the reports of 5, 10 and 15 seeds."""
    return reports_of_more([frame[frame["seed"] < last] for last in (5, 10, 15)])


def reports_of_more_rules(frame: pd.DataFrame) -> Iterator[list[Judgement]]:
    """Yield the reports of 2, 3 and 4 rules."""
    names = [*dict.fromkeys(frame["rule"])]
    return reports_of_more([frame[frame["rule"].isin(names[:number])] for number in (2, 3, 4)])


def reports_of_more_traces(frame: pd.DataFrame) -> Iterator[list[Judgement]]:
    """Yield the reports of one trace and of each one more."""
    names = [*frame["trace"].unique()]  # the reference comes last
    commands = range(1, len(names))
    return reports_of_more([frame[frame["trace"].isin([*names[:number], REFERENCE])] for number in commands])


def reports_of_more_tasks(frame: pd.DataFrame) -> Iterator[list[Judgement]]:
    """Yield the reports of one task and of each one more, with a command each."""
    return reports_of_more([of_task for _, of_task in frame.groupby("task")])


def reports_of_baselines(frame: pd.DataFrame, metrics: tuple[str, ...] = ("loss",)) -> Iterator[list[Judgement]]:
    """Yield the reports with each rule as the baseline."""
    for metric, baseline in product(metrics, dict.fromkeys(frame["rule"])):
        yield judge(Evaluation(frame, (plan(frame),)), metric, baseline, mode="min")


def reports_of_metrics(frame: pd.DataFrame) -> Iterator[list[Judgement]]:
    """Yield the reports of four metrics."""
    for metric in METRICS:
        yield judge(Evaluation(frame, (plan(frame),)), metric, mode="min")


def reports_of_both(frame: pd.DataFrame) -> Iterator[list[Judgement]]:
    """Yield the reports of four metrics with each rule as the baseline."""
    yield from reports_of_baselines(frame, METRICS)


def tasks(rng: np.random.Generator, seeds: int, number: int) -> pd.DataFrame:
    """Return the trainings of so many tasks."""
    return pd.concat([folder(rng, seeds, f"task {task}") for task in range(number)], ignore_index=True)


BY_COMMAND: dict[str, tuple[Callable[[pd.DataFrame], Iterator[list[Judgement]]], Callable[..., pd.DataFrame]]] = {
    "one command": (reports_of_one, partial(folder, seeds=5)),
    "narrower commands": (reports_of_narrower, partial(folder, seeds=5)),
    "5, 10 and 15 seeds": (reports_of_more_seeds, partial(folder, seeds=15)),
    "2, 3 and 4 rules": (reports_of_more_rules, partial(folder, seeds=5)),
    "each rule as the baseline": (reports_of_baselines, partial(folder, seeds=5)),
    "four metrics": (reports_of_metrics, partial(folder, seeds=5)),
    "each baseline and metric": (reports_of_both, partial(folder, seeds=5)),
    "four tasks": (reports_of_one, partial(tasks, seeds=5, number=4)),
    "a trace more, eight times": (
        reports_of_more_traces,
        partial(folder, seeds=10, traces=[f"trace {number}" for number in range(COMMANDS)]),
    ),
    "a task more, eight times": (reports_of_more_tasks, partial(tasks, seeds=10, number=COMMANDS)),
}


def says_something(judgements: list[Judgement]) -> bool:
    """Return whether a report claims anything."""
    return any(
        judgement.reference.answer == "not tuned"
        or any(row.answer in ("better", "worse") for trace in judgement.traces for row in trace.rows)
        or any(failures.claimed for failures in judgement.failures.values())
        for judgement in judgements
    )


def way(name: str, number: int) -> bool:
    """Return whether one of the reports that a user looks at claims anything."""
    reports, trainings_of = BY_COMMAND[name]
    rng = np.random.default_rng([zlib.crc32(name.encode()), number])
    return any(map(says_something, reports(trainings_of(rng))))


def seeing(rng: np.random.Generator, better: float, rules: int, traces: int, seeds: int, reports: int) -> np.ndarray:
    """Return which reports see that a given rule is better, by so many standard deviations, under the first trace."""
    values, failed = trainings(rng, "normal", (reports, traces, rules, seeds))
    values[:, :, 1] -= better
    return claims(values, failed).differs[:, 0, 1] < 0


def main(reports: int, folders: int) -> None:
    def keep(question: str, what: str, share: float, on: str, case: str) -> None:
        record(question, what, round(100 * share, 2), "%", on=on, case=case)

    for kind, seeds in product(KINDS, SEEDS):
        shares = {}
        for rules, traces in product((4, 8, 12), (1, 2, 4)):
            rng = np.random.default_rng(zlib.crc32(f"{kind} {seeds} {rules} {traces}".encode()))
            share = float(claiming(rng, kind, rules, traces, seeds, reports).mean())
            shares[f"{rules} rules, {traces} traces"] = share
        worst = max(shares, key=shares.__getitem__)
        keep(NULLS, "mean of 9 sizes", float(np.mean([*shares.values()])), kind, f"{seeds} seeds")
        keep(NULLS, "most", shares[worst], kind, f"{seeds} seeds")
        print(worst)
    for name in BY_COMMAND:
        keep(WAYS, "4 rules, 2 traces", float(np.mean([way(name, number) for number in range(folders)])), name, "")
    for better, seeds in product((1, 2, 3), SEEDS):
        rng = np.random.default_rng(better + 100 * seeds)
        share = float(seeing(rng, better, 4, 2, seeds, reports).mean())
        keep(POWER, "4 rules, 2 traces", share, f"{better} sd", f"{seeds} seeds")
    for better, seeds in product((0, 1, 2, 3), SEEDS):
        rng = np.random.default_rng(better + 100 * seeds)
        values, failed = trainings(rng, "normal", (reports, len(FACTORS), seeds))
        answers = judge_tuning(values + better * np.array(FACTORS)[:, None], failed)[1]
        for answer, name in ((-1, "tuned"), (0, "not decided"), (1, "not tuned")):
            keep(TUNED, name, float((answers == answer).mean()), f"{better} sd", f"{seeds} seeds")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reports", type=int, default=4000, help="reports of each kind")
    parser.add_argument("--folders", type=int, default=1000, help="folders of each way")
    main(**vars(parser.parse_args()))
