"""How many reports of rules that are all alike claim anything? At most 5 % should.

    PYTHONPATH=test python benchmarks/null_reports.py

A report has 4, 8 or 12 rules, one of them the baseline, under 1, 2 or 4 traces. The noise of a training is normal, of
Student's t with 3 degrees of freedom or exponential; trainings fail by chance; or the other rules are 3, 5 or 10 times
as noisy as the baseline. Every claim counts, about differences, failures and the tuned check, of which each report has
one.

Looks: how many would claim a difference if one looked after each of 3 to 10 seeds, which no report does.

Power: how many reports see a given rule that is better than the baseline by so many standard deviations. The tuned
check: how often it gives each answer, where the truth is that twice the learning rate is better by so many standard
deviations, and half of it is worse by as many.
"""

from __future__ import annotations

import argparse
import zlib
from itertools import product

import numpy as np

from results import record
from variable_batch_size.lab.evaluation.statistics import claims, judge_tuning

NULLS = "reports of equal rules that claim anything"
LOOKS = "reports of equal rules that would claim a difference after one of 3 to 10 seeds"
POWER = "reports that see a better rule"
TUNED = "answers of the tuned check"
KINDS = "normal", "t3", "exponential", "failures 0.05", "failures 0.1", "failures 0.2"
KINDS += "unequal 3", "unequal 5", "unequal 10"
SEEDS = (3, 5, 8, 10)
FACTORS = (0, 1, -1)  # what each factor loses, in parts of what is true


def noise(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return values of mean 0 and variance 1, but for the heavy tails of t."""
    if kind == "t3":
        return rng.standard_t(3, shape)
    return rng.exponential(size=shape) - 1 if kind == "exponential" else rng.standard_normal(shape)


def trainings(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return the metric of trainings, (..., rules, seeds), nan of those that failed, and which failed."""
    name, _, number = kind.partition(" ")
    values = noise(rng, name, shape)
    if name == "unequal":
        values[..., 1:, :] *= float(number)
    failed = rng.random(shape) < (float(number) if name == "failures" else 0)
    return np.where(failed, np.nan, values), failed


def claiming(rng: np.random.Generator, kind: str, rules: int, traces: int, seeds: int, reports: int) -> np.ndarray:
    """Return which reports of equal rules claim a difference, of means or of failures, or that 1 is not tuned."""
    found = claims(*trainings(rng, kind, (reports, traces, rules, seeds)))
    answers = judge_tuning(*trainings(rng, kind, (reports, len(FACTORS), seeds)))[1]
    return (found.differs != 0).any((-1, -2)) | (found.fails != 0).any(-1) | (answers == 1)


def looking(rng: np.random.Generator, rules: int, traces: int, reports: int) -> np.ndarray:
    """Return which reports of equal rules would claim a difference at one of the looks after 3 to 10 seeds."""
    values, failed = trainings(rng, "normal", (reports, traces, rules, 10))
    looks = [claims(values[..., :seeds], failed[..., :seeds]).differs for seeds in range(3, 11)]
    return np.any(looks, axis=(0, 2, 3))


def seeing(rng: np.random.Generator, better: float, rules: int, traces: int, seeds: int, reports: int) -> np.ndarray:
    """Return which reports see that a given rule is better, by so many standard deviations, under the first trace."""
    values, failed = trainings(rng, "normal", (reports, traces, rules, seeds))
    values[:, :, 1] -= better
    return claims(values, failed).differs[:, 0, 1] < 0


def main(reports: int) -> None:
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
    keep(LOOKS, "4 rules, 2 traces", float(looking(np.random.default_rng(0), 4, 2, reports).mean()), "normal", "")
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
    main(**vars(parser.parse_args()))
