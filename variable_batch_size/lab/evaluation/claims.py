"""What a report may claim: which rule was better than which, so that at most 5 % of reports claim what is not so.

Two families are corrected, together at 5 %: the differences of all pairs of rules, under all traces and of all tasks of
a report, for one metric; and the differences of how often they fail. How many reports of equal rules claim anything is
measured by `benchmarks/null_reports.py`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from itertools import combinations
from typing import Literal, NamedTuple, TypeVar

import numpy as np

from variable_batch_size._extras import import_extra
from variable_batch_size._validation import FloatArray

G = TypeVar("G", bound=Hashable)
LEVEL = 0.05
FAILED = math.inf  # the value of a training that failed, which is worse than every other
EXACT = 2**12  # permutations: all of up to 12 seeds, as many random ones of more


class Claim(NamedTuple):
    """One rule was better than another.

    Attributes:
        better: the better rule.
        worse: the other one.
        by: what was compared: the "means" of paired values, their "ranks" where a training failed, or the "failures".
        p: probability of so large a difference between equal rules, before the correction.
    """

    better: str
    worse: str
    by: Literal["means", "ranks", "failures"]
    p: float


class _Test(NamedTuple):
    """The result of a test, and the least p that it could have had."""

    p: float
    least: float
    sign: float  # of first - second: positive if the second is better


def claims_of(groups: Mapping[G, Mapping[str, FloatArray]], level: float = LEVEL) -> dict[G, list[Claim]]:
    """Return what may be claimed of each group, a trace of a task, so that a claim is wrong in at most 5 % of reports.

    A pair of rules is compared by Student's t test of its paired differences; if a training of it failed, by the signed
    ranks, of which all signs are permuted (Wilcoxon 1945); and by Fisher's exact test of how often they failed. Each of
    the families, of differences and of failures, is corrected by Holm's method (1979), without the tests that cannot
    reach its level whatever the outcome, as of few seeds (Tarone 1990). If a training failed, each has half of `level`.

    Args:
        groups: rule -> the metric by seed, less is better, (seeds,), for each group: `FAILED` if the training failed,
            nan if there is none. The seeds of all rules of a group are in the same order.
        level: how many reports of equal rules may claim anything.
    """
    pairs = [(group, *pair) for group, rules in groups.items() for pair in combinations(rules, 2)]
    steps = {group: _step(np.concatenate([*rules.values()])) for group, rules in groups.items() if rules}
    means = [_difference(groups[group][first], groups[group][second], steps[group]) for group, first, second in pairs]
    failures = [_failures(groups[group][first], groups[group][second]) for group, first, second in pairs]
    found: dict[G, list[Claim]] = {group: [] for group in groups}
    any_failed = any(np.isinf(values).any() for rules in groups.values() for values in rules.values())
    for tests in means, failures:
        for number in _rejected(tests, level / 2 if any_failed else level):
            (group, *rules), test = pairs[number], tests[number]
            better, worse = (rules[1], rules[0]) if test.sign > 0 else rules
            failed = any(np.isinf(groups[group][rule]).any() for rule in rules)
            by: Literal["means", "ranks", "failures"] = (
                "failures" if tests is failures else "ranks" if failed else "means"
            )
            found[group].append(Claim(better, worse, by, test.p))
    return found


def _step(values: FloatArray) -> float:
    """Return the step between two values of a metric, which may be a count of test samples, or digits of a float32."""
    known = np.unique(values[np.isfinite(values)])
    return float(max(np.diff(known).min(initial=np.inf), 1e-6 * np.abs(known).max())) if len(known) > 1 else 0.0


def _difference(first: FloatArray, second: FloatArray, step: float) -> _Test:
    """Compare the values of two rules by seed: by t, or by the signed ranks if a training failed.

    Values in steps may be equal by chance. The variance of a difference has that of two roundings to a `step` added
    (step^2 / 12 each, Sheppard 1898), so that no claim rests on differences that are equal by them.
    """
    stats = import_extra("scipy.stats", "evaluation")
    both = ~(np.isnan(first) | np.isnan(second))
    first, second = first[both], second[both]
    with np.errstate(invalid="ignore"):
        differences = np.nan_to_num(first - second, nan=0.0, posinf=FAILED, neginf=-FAILED)  # inf - inf is nan
    if len(differences) < 2 or not differences.any():
        return _Test(1.0, 1.0, 0.0)
    if np.isfinite(first).all() and np.isfinite(second).all():
        mean, variance = float(differences.mean()), float(differences.var(ddof=1)) + step**2 / 6
        t = abs(mean) / math.sqrt(variance / len(differences))
        return _Test(2 * float(stats.t.sf(t, len(differences) - 1)), 0.0, mean)
    ranks = np.sign(differences) * stats.rankdata(np.abs(differences))
    ranks = ranks[differences != 0]
    if len(ranks) < 2:
        return _Test(1.0, 1.0, 0.0)
    p = _permuted(tuple(sorted(ranks.tolist(), key=abs)))
    return _Test(p, 2.0 ** (1 - len(ranks)), float(ranks.sum()))


@lru_cache(maxsize=2**12)
def _permuted(ranks: tuple[float, ...]) -> float:
    """Return the probability of so large a sum of ranks, whose signs are drawn."""
    test = import_extra("scipy.stats", "evaluation").permutation_test
    one = np.array(ranks)
    rng = np.random.default_rng(0)
    return float(test((one,), np.sum, permutation_type="samples", n_resamples=EXACT, rng=rng).pvalue)


def _failures(first: FloatArray, second: FloatArray) -> _Test:
    """Compare how many trainings of two rules failed, by Fisher's exact test."""
    fisher = import_extra("scipy.stats", "evaluation").fisher_exact
    trained = [int((~np.isnan(values)).sum()) for values in (first, second)]
    failed = [int(np.isinf(values).sum()) for values in (first, second)]
    total = sum(failed)
    if not total or total == sum(trained) or 0 in trained:
        return _Test(1.0, 1.0, 0.0)

    def p_of(number: int) -> float:
        rest = total - number
        return float(fisher([[number, trained[0] - number], [rest, trained[1] - rest]])[1])

    extremes = max(0, total - trained[1]), min(total, trained[0])
    return _Test(p_of(failed[0]), min(map(p_of, extremes)), failed[0] / trained[0] - failed[1] / trained[1])


def _rejected(tests: Sequence[_Test], level: float) -> list[int]:
    """Return the numbers of the tests whose hypothesis of equal rules is rejected, by Tarone's and Holm's methods."""
    size = next(
        (k for k in range(1, len(tests) + 1) if sum(test.least <= level / k for test in tests) <= k), len(tests)
    )
    possible = [number for number, test in enumerate(tests) if test.least <= level / size]
    found: list[int] = []
    for place, number in enumerate(sorted(possible, key=lambda number: tests[number].p)):
        if tests[number].p > level / (size - place):
            break
        found.append(number)
    return sorted(found)
