"""Intervals of few values: means over seeds, paired differences, regret, rates, and how much a target takes.

Pure functions of arrays; all values are finite, and who calls leaves out, and counts, what is missing. How often the
intervals of 95% contain the truth is measured by `benchmarks/intervals.py`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from variable_batch_size._extras import import_extra
from variable_batch_size._validation import FloatArray

CONFIDENCE = 0.95


class Interval(NamedTuple):
    """An estimate with its interval; the bounds are nan where there is none."""

    value: float
    low: float
    high: float
    n: int

    @property
    def decided(self) -> bool:
        """Whether the interval does not contain 0."""
        return self.low > 0 or self.high < 0


class ToTarget(NamedTuple):
    """How much it took to reach a target.

    Attributes:
        reached: trainings that reached it.
        n: all trainings.
        value: mean over all of them; if some have not reached it, a lower bound of it, for which these count with what
            they used; nan if none has.
        low: lower bound of the interval of the mean, nan unless all have reached it.
        high: upper bound.
    """

    reached: int
    n: int
    value: float
    low: float
    high: float


def difference_interval(differences: FloatArray, confidence: float = CONFIDENCE) -> Interval:
    """Return the mean of independent paired differences, (n,), with Student's t interval.

    mean +- t s / sqrt(n). If both parts of a difference have the same noise, its distribution is symmetric, whatever
    that of the parts is: then the interval holds what it promises from 3 values on.
    """
    n = len(differences)
    mean = float(differences.mean()) if n else math.nan
    if n < 2:
        return Interval(mean, math.nan, math.nan, n)
    half = _quantile(n, confidence) * float(differences.std(ddof=1)) / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, n)


def detectable(n: int, comparisons: int, power: float = 0.8) -> float:
    """Return the mean difference, in its standard deviations, that n seeds see with a probability of `power`.

    By Student's t test at the level of the first step of Holm's method, 0.05 / comparisons.

    >>> round(detectable(5, 1), 2), round(detectable(5, 12), 2)
    (1.68, 3.31)
    """
    stats, optimize = import_extra("scipy.stats", "evaluation"), import_extra("scipy.optimize", "evaluation")
    critical = stats.t.isf((1 - CONFIDENCE) / comparisons / 2, n - 1)
    return float(optimize.brentq(lambda d: stats.nct.sf(critical, n - 1, d * math.sqrt(n)) - power, 0, 1e3))


def mean_interval(
    values: FloatArray, confidence: float = CONFIDENCE, least: float = -math.inf, most: float = math.inf
) -> Interval:
    """Return the mean of independent values, (n,), with an interval for noise that may be skewed.

    The interval contains those of Student's t and of Hall's transformation, which removes the skewness g of the values:
    with T = sqrt(n) (mean - truth) / s and a = g / 3, the distribution of
    T / sqrt(n) + a T^2 / n + a^2 T^3 / (3 n^1.5) + g / (6 n) is nearly symmetric. Either alone contains the truth too
    seldom for few or skewed values, as does a percentile bootstrap.

    Args:
        values: independent values, (n,).
        confidence: probability that the interval contains the mean.
        least: least possible value, below which the interval does not go.
        most: largest possible value.

    Source: Hall 1992, On the Removal of Skewness by Transformation; here with quantiles of t.
    """
    mean, low, high, n = difference_interval(values, confidence)
    deviation = float(values.std(ddof=1)) if n > 1 else 0.0
    if n < 3 or deviation <= 1e-12 * abs(mean):
        return Interval(mean, max(low, least), min(high, most), n) if n > 1 else Interval(mean, low, high, n)
    skewness = float(((values - mean) ** 3).mean()) * n * n / ((n - 1) * (n - 2)) / deviation**3
    half = _quantile(n, confidence) / math.sqrt(n)
    bounds = (mean - deviation * _inverse(sign * half, skewness, n) for sign in (1, -1))
    return Interval(mean, max(least, min(low, next(bounds))), min(most, max(high, next(bounds))), n)


def regret_interval(rule: FloatArray, grid: FloatArray, confidence: float = CONFIDENCE) -> Interval:
    """Return by how much a rule is worse than a learning rate tuned at that trace, with an interval.

    The learning rate with the least mean over the seeds is best by chance, too: that of the estimate is selected for
    each seed by the other seeds. The lower bound is the least one of the t intervals of the differences to these and to
    the one that all seeds select; the upper bound is the largest one of the t intervals for each learning rate, because
    the regret is at least the difference to any of them.

    Args:
        rule: metric of each seed, less is better, (seeds,).
        grid: the same of the constant rule at each learning rate, (learning rates, seeds), in the same order of seeds.
        confidence: probability that the interval contains the regret.
    """
    n = len(rule)
    if not n or not len(grid):
        return Interval(math.nan, math.nan, math.nan, n)
    each = [difference_interval(rule - tuned, confidence) for tuned in grid]
    chosen = each[int(grid.mean(axis=1).argmin())]
    if n < 2:
        return chosen
    others = (grid.sum(axis=1, keepdims=True) - grid).argmin(axis=0)  # (seeds,)
    value, low, _, _ = difference_interval(rule - grid[others, np.arange(n)], confidence)
    return Interval(value, min(low, chosen.low), max(value, *(interval.high for interval in each)), n)


def rate_interval(count: int, n: int, confidence: float = CONFIDENCE) -> Interval:
    """Return the rate count / n with the interval of Clopper and Pearson (1934), which holds for every n."""
    if not n:
        return Interval(math.nan, 0.0, 1.0, 0)
    bounds = import_extra("scipy.stats", "evaluation").binomtest(count, n).proportion_ci(confidence)
    return Interval(count / n, float(bounds.low), float(bounds.high), n)


def first_reached(metric: FloatArray, target: float, lower: bool) -> int | None:
    """Return the first evaluation, of (evaluations,), whose metric is at least as good as the target; or None."""
    with np.errstate(invalid="ignore"):
        rows = np.flatnonzero(metric <= target if lower else metric >= target)
    return int(rows[0]) if len(rows) else None


def to_target(used: FloatArray, reached: np.ndarray, confidence: float = CONFIDENCE) -> ToTarget:
    """Return how much reaching a target took.

    Args:
        used: samples, seconds or cost up to the target or, without it, to the end of the training, (n,).
        reached: whether it was reached, bool, (n,).
    """
    found, n = int(reached.sum()), len(used)
    if not found:
        return ToTarget(0, n, math.nan, math.nan, math.nan)
    interval = mean_interval(used, confidence, least=0.0)
    low, high = (interval.low, interval.high) if found == n else (math.nan, math.nan)
    return ToTarget(found, n, interval.value, low, high)


def _quantile(n: int, confidence: float) -> float:
    """Return the quantile of t that both bounds of an interval of n values need."""
    return float(import_extra("scipy.special", "evaluation").stdtrit(n - 1, (1 + confidence) / 2))


def _inverse(place: float, skewness: float, n: int) -> float:
    """Return T / sqrt(n) at which Hall's transformation has the value `place`."""
    a, b = skewness / 3, skewness / (6 * n)
    if abs(a) < 1e-6:
        return place - b
    return float((np.cbrt(1 + 3 * a * (place - b)) - 1) / a)
