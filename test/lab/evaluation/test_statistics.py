"""The intervals of an evaluation contain the truth as often as they say, and know their limits."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from helpers.coverage import NOISES, coverage, regret_coverage
from variable_batch_size.lab.evaluation.statistics import (
    Interval,
    difference_interval,
    first_reached,
    mean_interval,
    rate_interval,
    regret_interval,
    to_target,
)

REPEATS = 1500  # the standard deviation of a coverage of 95% is 0.6%
values = st.lists(st.floats(-100, 100), min_size=2, max_size=8).map(np.array)


def bounds(interval: Callable[[np.ndarray], Interval]) -> Callable[[np.ndarray], tuple[float, float]]:
    return lambda sample: interval(sample)[1:3]


@pytest.mark.parametrize("n", [3, 5, 10, 20])
@pytest.mark.parametrize("noise", ["normal", "gamma", "log-normal"])
def test_the_interval_of_a_mean_holds_for_skewed_noise(noise: str, n: int) -> None:
    assert 0.93 <= coverage(bounds(mean_interval), NOISES[noise], n, REPEATS) <= 0.98


@pytest.mark.parametrize("n", [3, 5, 10, 20])
@pytest.mark.parametrize("noise", NOISES)
def test_the_interval_of_a_paired_difference_holds(noise: str, n: int) -> None:
    assert 0.93 <= coverage(bounds(difference_interval), NOISES[noise], n, REPEATS, pairs=True) <= 0.98


@pytest.mark.parametrize("rule", ["other", "second"])
@pytest.mark.parametrize(("n", "flat"), [(3, 0.0), (3, 0.5), (5, 0.1), (10, 0.1)])
def test_the_interval_of_the_regret_holds_although_the_best_is_selected(rule: str, n: int, flat: float) -> None:
    assert regret_coverage(NOISES["normal"], n, flat, rule, 1000) >= 0.93


def test_simpler_intervals_do_not_hold() -> None:
    """What the tests above would find if the skewness, the selection or the few seeds were ignored."""
    assert coverage(bounds(difference_interval), NOISES["log-normal"], 5, REPEATS) < 0.925
    percentile = stats.norm.ppf(0.975)  # as a percentile bootstrap of many values
    narrow = lambda sample: (sample.mean() - percentile * sample.std() / math.sqrt(3), math.inf)  # noqa: E731
    assert coverage(narrow, NOISES["normal"], 3, REPEATS) < 0.9


@given(values)
def test_a_difference_has_the_interval_of_scipy(sample: np.ndarray) -> None:
    found = difference_interval(sample, 0.9)
    spread = sample.std(ddof=1)
    if spread > 1e-6:
        expected = stats.t.interval(0.9, len(sample) - 1, sample.mean(), spread / math.sqrt(len(sample)))
        assert found[1:3] == pytest.approx(expected)
    assert found.n == len(sample)


@given(values, st.floats(-10, 10), st.floats(0.1, 10))
def test_the_interval_of_a_mean_moves_and_scales_with_the_values(sample: np.ndarray, move: float, scale: float) -> None:
    if sample.std() < 1e-3:
        return
    found, other = mean_interval(sample), mean_interval(scale * sample + move)
    assert other[:3] == pytest.approx([scale * bound + move for bound in found[:3]], rel=1e-6, abs=1e-6)
    mirrored = mean_interval(-sample)
    assert (mirrored.low, mirrored.high) == pytest.approx((-found.high, -found.low), rel=1e-6, abs=1e-6)
    student = difference_interval(sample)
    assert found.low <= student.low <= found.value <= student.high <= found.high


def test_one_value_has_no_interval_and_none_no_mean() -> None:
    for interval in (mean_interval, difference_interval):
        value, *found, n = interval(np.array([3.0]))
        assert (value, n, np.isnan(found).all()) == (3.0, 1, True)
        assert np.isnan(interval(np.array([]))[:3]).all()
    assert not difference_interval(np.array([3.0])).decided
    assert mean_interval(np.full(5, 0.1))[:3] == pytest.approx((0.1, 0.1, 0.1))


def test_an_interval_does_not_leave_what_is_possible() -> None:
    sample = np.array([0.1, 0.2, 0.9])
    found = mean_interval(sample, least=0.0, most=1.0)
    assert found[:3] == pytest.approx((0.4, 0.0, 1.0))
    assert mean_interval(sample).low < 0 < 1 < mean_interval(sample).high
    assert to_target(100 * sample, np.array([True] * 3)).low == 0
    assert math.isnan(mean_interval(sample[:1], least=0.0).low)


def test_regret_of_a_known_effect() -> None:
    rng = np.random.default_rng(0)
    seeds = rng.normal(size=4)
    grid = np.array([[0.3], [0.1], [0.2]]) + seeds
    found = regret_interval(0.25 + seeds, grid)
    assert found[:3] == pytest.approx((0.15, 0.15, 0.15))
    assert regret_interval(grid[1], grid)[:3] == pytest.approx((0, 0, 0))
    assert math.isnan(regret_interval(seeds, np.empty((0, 4))).value)
    assert regret_interval(np.array([1.0]), np.array([[0.4], [0.6]])).value == pytest.approx(0.6)


@given(st.integers(1, 12).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_a_rate_has_the_interval_of_scipy(case: tuple[int, int]) -> None:
    count, n = case
    expected = stats.binomtest(count, n).proportion_ci(0.95, "exact")
    assert rate_interval(count, n)[1:3] == pytest.approx((expected.low, expected.high))


def test_no_training_has_any_rate() -> None:
    assert rate_interval(0, 0)[1:] == (0.0, 1.0, 0)


def test_a_target_is_reached_at_the_first_evaluation_that_is_as_good() -> None:
    losses = np.array([2.0, 0.5, np.nan, 0.4, 0.5])
    assert first_reached(losses, 0.5, lower=True) == 1
    assert first_reached(losses, 0.45, lower=True) == 3
    assert first_reached(losses, 0.3, lower=True) is None
    assert first_reached(losses, 1.9, lower=False) == 0


def test_trainings_that_miss_a_target_are_not_dropped() -> None:
    used = np.array([100.0, 120.0, 500.0])
    every = to_target(used, np.array([True] * 3))
    assert (every.reached, every.n, every.value) == (3, 3, 240.0)
    assert every.low < 240 < every.high
    some = to_target(used, np.array([True, True, False]))
    assert (some.reached, some.n, some.value) == (2, 3, 240.0)  # a lower bound: the third one needs more than 500
    assert np.isnan([some.low, some.high]).all()
    none = to_target(used, np.array([False] * 3))
    assert none.reached == 0
    assert math.isnan(none.value)
