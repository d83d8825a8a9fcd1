"""Tests and intervals for few seeds, over arrays with any leading axes: one report, or thousands of simulated ones.

A value that is nan is left out. Less is better. `benchmarks/null_reports.py` measures how many reports claim something
although all rules are equal.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from variable_batch_size._extras import import_extra
from variable_batch_size._validation import FloatArray, IntArray

BoolArray: TypeAlias = "np.ndarray[Any, np.dtype[np.bool_]]"
CONFIDENCE = 0.95  # of every interval that a report shows
# The shares of reports of equal rules that may wrongly claim a difference of means, one of failures, bad tuning.
DIFFERENCES, FAILURES, TUNING = 0.027, 0.01, 0.01
POWER = 0.8  # probability with which a test sees `detectable_difference`
SEEDS = 5  # least number of seeds of each of two rules for a claim that they differ


class ConfidenceInterval(NamedTuple):
    """An estimate and its interval; the bounds are nan where there are fewer than two values."""

    value: float
    low: float
    high: float


class Comparison(NamedTuple):
    """Differences of means, with their standard errors and degrees of freedom, all (...); see `compare`."""

    value: FloatArray
    error: FloatArray
    freedom: FloatArray

    @property
    def p(self) -> FloatArray:
        """The p value of each difference: probability of so large a one if the means are equal, (...).

        It is nan for samples of one value.
        """
        with np.errstate(divide="ignore", invalid="ignore"):
            p_values: FloatArray = 2 * _scipy_stats().t.sf(np.abs(self.value / self.error), self.freedom)
        return p_values

    def half_width(self, confidence: float = CONFIDENCE) -> FloatArray:
        """Return half the width of the confidence interval of each difference, (...)."""
        half_widths: FloatArray = self.error * _scipy_stats().t.isf((1 - confidence) / 2, self.freedom)
        return half_widths

    def interval(self, confidence: float = CONFIDENCE) -> ConfidenceInterval:
        """Return the confidence interval of a single difference."""
        value, half = float(self.value), float(self.half_width(confidence))
        return ConfidenceInterval(value, value - half, value + half)


class Claims(NamedTuple):
    """What a report may say of its rules, each compared with the baseline.

    Attributes:
        difference: rule - baseline, (..., traces, rules).
        tested: where a rule was compared with the baseline, (..., traces, rules).
        differs: -1 where the rule is claimed to be better, 1 to be worse, 0 otherwise, (..., traces, rules).
        failures: failed and trained of the rule, failed and trained of the baseline, over all traces, (..., rules, 4).
        fails: -1 where the rule is claimed to fail less often, 1 more often, 0 otherwise, (..., rules).
    """

    difference: Comparison
    tested: BoolArray
    differs: IntArray
    failures: IntArray
    fails: IntArray


def claims(values: FloatArray, failed: BoolArray, same: BoolArray | bool = False, parts: int = 1) -> Claims:
    """Test which rules differ from the baseline, so that at most 5 % of reports on equal rules claim something wrong.

    Means are compared by Welch's t test, corrected by Holm's method (1979) over rules and traces, at 2.7 %; the seeds
    that failed under any trace by Fisher's exact test, corrected over rules, at 1 %. The tuned check has the rest. A
    rule that failed more often than the baseline is not claimed to be better, nor one that failed less often to be
    worse, and of fewer than five trainings of each that did not fail nothing is.

    Args:
        values: metric, less is better, (..., traces, rules, seeds), of the baseline first; nan where a training failed
            or does not exist.
        failed: whether a training failed, of the same shape.
        same: where a rule has the trainings of the baseline, (..., traces, rules).
        parts: number of reports that share the levels, see `judge`.
    """
    difference = compare(values, values[..., :1, :], smallest_step(values)[..., None])
    exists = failed | ~np.isnan(values)
    trained, failures = exists.sum(-1), failed.sum(-1)  # (..., traces, rules)
    counts = np.stack(np.broadcast_arrays(failures, trained, failures[..., :1], trained[..., :1]), -1)  # as in `fisher`
    failures, trained, base_failures, base_trained = np.moveaxis(counts, -1, 0)
    tested = (trained > 0) & (base_trained > 0) & ~np.broadcast_to(same, trained.shape)
    tested[..., 0] = False  # the baseline is not compared with itself
    p = np.where(tested, np.nan_to_num(difference.p, nan=1.0), np.nan)
    significant = holm(_merge_last_axes(p), DIFFERENCES / parts).reshape(p.shape)
    differs = np.where(significant, np.sign(np.nan_to_num(difference.value)), 0).astype(int)
    differs[differs * _compare_rates(counts) < 0] = 0  # a better mean with more failures, or the other way round
    differs[np.minimum(trained - failures, base_trained - base_failures) < SEEDS] = 0
    pooled = np.where(tested[..., None], counts, 0).sum(-3)
    by_seed = _count_failing_seeds(failed, exists, tested)
    fails = np.where(holm(fisher(by_seed), FAILURES / parts), _compare_rates(by_seed), 0)
    return Claims(difference, tested, differs, pooled, fails)


def _count_failing_seeds(failed: BoolArray, trained: BoolArray, tested: BoolArray) -> IntArray:
    """Count the seeds that failed, and those that were trained, under any trace, of each rule and of the baseline.

    Fisher's test gets these instead of numbers of runs, because the runs of a seed are not independent: they may share
    their beginning, and fail together.

    The shapes are those of `claims`. The result has the counts of `fisher`, (..., rules, 4).
    """
    counts = []
    for of_rules in (slice(None), slice(1)):  # the rules, then the baseline
        for happened in (failed, trained):
            under_any_trace = (happened[..., of_rules, :] & tested[..., None]).any(-3)  # (..., rules, seeds)
            counts.append(under_any_trace.sum(-1))
    return np.stack(counts, -1)


def judge_tuning(values: FloatArray, failed: BoolArray, parts: int = 1) -> tuple[FloatArray, IntArray]:
    """Test whether a learning rate is tuned: return by how much each multiple of it is better, and the answer.

    A gain is positive if the factor is better, and has an interval of Welch; the intervals of all factors hold together
    at 99 %. There is none for a factor that failed more often than factor 1. The answer is 1, "not tuned", if the
    interval of a factor with five trainings beside five lies above 0; -1, "tuned", if factor 1 has five and no factor
    has a better mean of the trainings that did not fail; and 0 otherwise.

    Args:
        values: metric, less is better, (..., factors, seeds), of factor 1 first; nan where a training failed.
        failed: whether a training failed, of the same shape.
        parts: number of tasks in the report, which share the level.

    Returns:
        Gains with their bounds, (..., factors - 1, 3), and answers, (...).
    """
    gain = compare(values[..., :1, :], values, smallest_step(values)[..., None])  # (..., factors), as all below
    trained = (failed | ~np.isnan(values)).sum(-1)
    failures = failed.sum(-1)
    half_width = gain.half_width(1 - TUNING / parts / max(1, values.shape[-2] - 1))
    half_width[failures * trained[..., :1] > failures[..., :1] * trained] = np.nan  # it failed more often than factor 1
    value = np.where(np.isnan(half_width), np.nan, gain.value)
    gains = np.stack([value, value - half_width, value + half_width], -1)[..., 1:, :]  # (..., factors - 1, 3)
    succeeded = trained - failures
    has_enough_seeds = np.minimum(succeeded[..., 1:], succeeded[..., :1]) >= SEEDS
    is_claimed = (gains[..., 1] > 0) & has_enough_seeds
    has_better_mean = gain.value[..., 1:] > 0
    is_open = has_better_mean.any(-1) | (succeeded[..., 0] < SEEDS)
    answers = np.where(is_claimed.any(-1), 1, np.where(is_open, 0, -1))
    return gains, answers


def _merge_last_axes(values: FloatArray) -> FloatArray:
    """Merge the last two axes of an array into one, also if an axis has the size 0."""
    return values.reshape(*values.shape[:-2], values.shape[-2] * values.shape[-1])


def _compare_rates(counts: IntArray) -> IntArray:
    """Return 1 where the first of two failure rates is larger than the second, -1 where it is smaller, else 0, (...).

    Args:
        counts: failed and trained of the first, failed and trained of the second, (..., 4).
    """
    # a / b > c / d if a d > c b, which needs no division by 0.
    signs: IntArray = np.sign(counts[..., 0] * counts[..., 3] - counts[..., 2] * counts[..., 1])
    return signs


def compare(first: FloatArray, second: FloatArray, step: FloatArray | float = 0.0) -> Comparison:
    """Compare the means of two samples of independent values, first - second, by Welch's t test.

    A metric in steps, such as an accuracy, may be equal by chance. So the variance of a value has that of a rounding,
    step^2 / 12, added (Sheppard 1898). Where one variance is more than half the number of values times the other, the
    degrees of freedom are those of the noisier sample: Welch's, which are estimated, claim too easily there.

    Args:
        first: (..., seeds).
        second: (..., other seeds).
        step: of the values, (...).
    """
    n_1, mean_1, variance_1 = moments(first)
    n_2, mean_2, variance_2 = moments(second)
    with np.errstate(divide="ignore", invalid="ignore"):
        variance_1, variance_2 = variance_1 + step**2 / 12, variance_2 + step**2 / 12
        squared_error_1, squared_error_2 = variance_1 / n_1, variance_2 / n_2  # of the means
        squared_error = squared_error_1 + squared_error_2
        freedom = squared_error**2 / (squared_error_1**2 / (n_1 - 1) + squared_error_2**2 / (n_2 - 1))
        ratio = np.maximum(variance_1, variance_2) / np.minimum(variance_1, variance_2)
        noisier = np.where(variance_1 > variance_2, n_1, n_2) - 1
        freedom = np.where(ratio > np.minimum(n_1, n_2) / 2, np.minimum(freedom, noisier), freedom)
    return Comparison(mean_1 - mean_2, np.sqrt(squared_error), freedom)


def moments(values: FloatArray) -> tuple[IntArray, FloatArray, FloatArray]:
    """Return number, mean and sample variance of the values that are not nan, over the last axis, (...) each.

    The mean is nan without a value, and the variance with fewer than two.
    """
    is_known = ~np.isnan(values)
    num_values = is_known.sum(-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = np.where(is_known, values, 0.0).sum(-1) / num_values
        deviation = np.where(is_known, values - mean[..., None], 0.0)
        return num_values, mean, (deviation**2).sum(-1) / np.where(num_values > 1, num_values - 1, np.nan)


def mean_interval(values: FloatArray, confidence: float = CONFIDENCE) -> ConfidenceInterval:
    """Return the mean of independent values, (seeds,), with Student's t interval."""
    num_values, mean, variance = moments(values)
    error = np.sqrt(variance / np.maximum(num_values, 1))
    return Comparison(mean, error, np.maximum(num_values - 1, 1)).interval(confidence)


def smallest_step(values: FloatArray) -> FloatArray:
    """Return the step of a metric such as an accuracy: the smallest difference of two distinct values, (...).

    It is at least the rounding error of a float32.

    Args:
        values: values of the metric, (..., rules, seeds); nan is left out.
    """
    values = np.sort(_merge_last_axes(values), axis=-1)
    steps = np.diff(values, axis=-1)
    smallest = np.where(steps > 0, steps, np.inf).min(-1, initial=np.inf)  # infinite if all values are equal
    rounding: FloatArray = 1e-6 * np.where(np.isnan(values), 0.0, np.abs(values)).max(-1, initial=0.0)
    return np.where(np.isfinite(smallest), np.maximum(smallest, rounding), rounding)


def holm(p: FloatArray, level: float) -> BoolArray:
    """Return which of several tests are significant together, by Holm's method (1979), (..., tests).

    From the smallest p on, each is compared with the level divided by the number of tests that are not rejected yet.

    Args:
        p: p of each test, (..., tests); nan where there is none.
        level: probability that any hypothesis is rejected if all are true.
    """
    order = np.argsort(p, axis=-1)  # nan comes last
    num_remaining = (~np.isnan(p)).sum(-1, keepdims=True) - np.arange(p.shape[-1])
    with np.errstate(invalid="ignore"):
        is_small = np.take_along_axis(p, order, -1) <= level / np.maximum(num_remaining, 1)
    rejected = np.zeros(p.shape, bool)
    np.put_along_axis(rejected, order, np.logical_and.accumulate(is_small, axis=-1), -1)
    return rejected


def fisher(counts: IntArray) -> FloatArray:
    """Return the p value of Fisher's exact test of whether two failure rates are equal, (...), or nan without a run.

    Args:
        counts: failed and trained of the first, failed and trained of the second, (..., 4).
    """
    distinct, places = np.unique(counts.reshape(-1, 4), axis=0, return_inverse=True)  # each is computed once
    p_values = np.array([_fisher_p(*numbers) for numbers in distinct.tolist()])
    return p_values[places.ravel()].reshape(counts.shape[:-1])


def detectable_difference(variance: float, other_variance: float, seeds: FloatArray, level: float) -> FloatArray:
    """Return the smallest difference of means that Welch's test finds with a probability of 80 %, (numbers,).

    It is computed by the noncentral t distribution. Because variances are estimated, Welch's degrees of freedom are
    reduced by a share of 2 / seeds: with this, 79 to 85 % of simulations of 5 to 20 seeds see the difference.

    >>> detectable_difference(1.0, 1.0, np.array([5.0, 10.0]), 0.03).round(2).tolist()
    [2.56, 1.47]

    Args:
        variance, other_variance: of the values of both samples.
        seeds: several numbers of seeds of each sample, (numbers,).
        level: level of significance of the test.
    """
    total = variance + other_variance
    freedom = (seeds - 1) * (1 - 2 / seeds) * total**2 / max(variance**2 + other_variance**2, 1e-300)
    freedom = np.maximum(freedom, seeds - 1)
    noncentral = import_extra("scipy.special", "evaluation").nctdtrinc
    critical = _scipy_stats().t.isf(level / 2, freedom)
    differences: FloatArray = noncentral(freedom, 1 - POWER, critical) * np.sqrt(total / seeds)
    return differences


@lru_cache(maxsize=2**14)
def _fisher_p(failed: int, trained: int, other_failed: int, other_trained: int) -> float:
    """Return the p value of Fisher's exact test of two failure rates, or nan if one has no run."""
    if not trained or not other_trained:
        return float("nan")
    table = [[failed, trained - failed], [other_failed, other_trained - other_failed]]
    return float(_scipy_stats().fisher_exact(table)[1])


def _scipy_stats() -> Any:
    return import_extra("scipy.stats", "evaluation")
