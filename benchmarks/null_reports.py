"""How many reports claim a difference between rules that are all alike? At most 5 % should.

A report has 4 rules under 2 traces, or 9 under 3. The noise of a training is normal, heavy-tailed (Student's t with 3
degrees of freedom), exponential, or normal and three times as large with one rule; what trainings with the same seed
have in common makes pairs correlate by 0.17, as in benchmarks/evaluation_large.csv.gz. Trainings fail by chance.

"Rates chosen by the same seeds": each rule is judged at the best of three learning rates, which are alike, too; "by
tuning seeds": it was chosen by three seeds that do not judge. "That differ": the second and the third learning rate are
worse by one and two standard deviations of the noise, for all rules alike. A claim names the learning rates, so
that the one at the better of two is better, is true then, and only other claims are counted.

"Tukey after a check" is what was not built: Tukey's range with the pooled error of rules and seeds, where the test of
Brown and Forsythe sees no difference of variances at 30 %, and Holm's method otherwise. With so few seeds that test
sees too little.
"""

from __future__ import annotations

import argparse
import zlib
from functools import lru_cache
from itertools import product

import numpy as np
from scipy import stats

from results import record
from variable_batch_size.lab.evaluation.claims import FAILED, claims_of
from variable_batch_size.lab.evaluation.tuning import best_factor

QUESTION = "reports of equal rules that claim a difference"
NOISES = "normal", "heavy-tailed", "exponential", "unequal"
CHOSEN = "Holm, rates chosen by the same seeds"
TUNED = "Holm, rates chosen by tuning seeds"
DIFFERENT = "Holm, rates that differ chosen by tuning seeds"
TUNING_SEEDS = 3
COMMON = 0.45  # standard deviation of what equal seeds have in common, beside 1


def values(rng: np.random.Generator, noise: str, traces: int, rules: int, seeds: int) -> np.ndarray:
    """Return final losses, (traces, rules, seeds)."""
    shape = traces, rules, seeds
    if noise == "heavy-tailed":
        own = rng.standard_t(3, shape)
    elif noise == "exponential":
        own = rng.exponential(size=shape)
    else:
        own = rng.standard_normal(shape)
        own[:, 0] *= 3 if noise == "unequal" else 1
    return own + COMMON * rng.standard_normal((traces, 1, seeds))


def chosen(rng: np.random.Generator, noise: str, traces: int, rules: int, seeds: int) -> np.ndarray:
    """Return final losses, (traces, rules, seeds), at the best of three learning rates by the mean over the seeds."""
    found = np.stack([values(rng, noise, traces, rules, seeds) for _ in range(3)])  # (rates, traces, rules, seeds)
    best = found.mean(axis=-1).argmin(axis=0)
    return np.take_along_axis(found, best[None, ..., None], axis=0)[0]


def tuned(
    rng: np.random.Generator, noise: str, traces: int, rules: int, seeds: int, failing: float, apart: float
) -> bool:
    """Return whether a report claims anything false of rules at learning rates that other seeds have chosen.

    Args:
        rng: random numbers.
        noise: one of NOISES.
        traces: number of traces.
        rules: of rules.
        seeds: of seeds that judge.
        failing: probability that a training fails.
        apart: by how much each of three learning rates is worse than the one before it.
    """
    found = np.stack(
        [values(rng, noise, traces, rules, TUNING_SEEDS + seeds) + apart * rate for rate in range(3)]
    )  # (rates, traces, rules, all seeds)
    found[rng.random(found.shape) < failing] = FAILED
    factors = (1.0, 0.5, 2.0)
    judged, rates = np.empty((traces, rules, seeds)), {}
    for trace, rule in product(range(traces), range(rules)):
        ways = {factor: found[rate, trace, rule, :TUNING_SEEDS].tolist() for rate, factor in enumerate(factors)}
        rates[trace, str(rule)] = rate = factors.index(best_factor(ways))
        judged[trace, rule] = found[rate, trace, rule, TUNING_SEEDS:]
    return any(
        not apart or rates[trace, claim.better] >= rates[trace, claim.worse]
        for trace, own in claims_of(_groups(judged)).items()
        for claim in own
    )


def _groups(found: np.ndarray) -> dict[int, dict[str, np.ndarray]]:
    return {trace: {str(rule): own for rule, own in enumerate(rules)} for trace, rules in enumerate(found)}


def claims(found: np.ndarray) -> bool:
    """Return whether a report claims anything."""
    return any(claims_of(_groups(found)).values())


@lru_cache
def critical(traces: int, rules: int, freedom: int) -> float:
    """Return the quantile of the studentized range with which those of all traces hold together."""
    return float(stats.studentized_range.isf(0.05 / traces, rules, freedom))


def claims_by_range(found: np.ndarray) -> bool:
    """Return whether it would by Tukey's range, after a check of the variances."""
    traces, rules, seeds = found.shape
    holm = claims_of(_groups(found))
    freedom = (rules - 1) * (seeds - 1)
    for trace, own in enumerate(found):
        rest = own - own.mean(axis=1, keepdims=True) - own.mean(axis=0) + own.mean()
        means = own.mean(axis=1)
        q = (means.max() - means.min()) / np.sqrt((rest**2).sum() / freedom / seeds)
        alike = stats.levene(*rest, center="median").pvalue > 0.3
        if q > critical(traces, rules, freedom) if alike else holm[trace]:
            return True
    return False


def main(repeats: int, only_tuning: bool) -> None:
    """Measure all, or only what tuning seeds choose, in the smallest reports."""
    sizes, numbers = (((4, 2),), (5,)) if only_tuning else (((4, 2), (9, 3)), (5, 10))
    for (rules, traces), seeds, noise, failing in product(sizes, numbers, NOISES, (0.0, 0.1)):
        case = f"{rules} rules, {traces} traces, {seeds} seeds"
        rng = np.random.default_rng(zlib.crc32(f"{case} {noise} {failing}".encode()))
        methods = {} if only_tuning else {"Holm": claims}
        methods |= {} if failing or only_tuning else {"Tukey after a check": claims_by_range}
        same = [] if failing or only_tuning else [CHOSEN]
        apart = {TUNED: 0.0, DIFFERENT: 1.0}
        counts = dict.fromkeys([*methods, *same, *apart], 0)
        for _ in range(repeats):
            found = values(rng, noise, traces, rules, seeds)
            found[rng.random(found.shape) < failing] = FAILED
            for name, method in methods.items():
                counts[name] += method(found)
            if same:
                counts[CHOSEN] += claims(chosen(rng, noise, traces, rules, seeds))
            for name, by in apart.items():
                counts[name] += tuned(rng, noise, traces, rules, seeds, failing, by)
        on = f"{noise} noise, {failing:.0%} fail"
        for name, count in counts.items():
            record(QUESTION, name, round(100 * count / repeats, 1), "%", on=on, case=case)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=1000, help="reports of each kind")
    parser.add_argument("--only-tuning", action="store_true", help="only rates that tuning seeds choose, few kinds")
    main(**vars(parser.parse_args()))
