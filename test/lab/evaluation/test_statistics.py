"""Few seeds: tests agree with scipy, and reports of equal rules seldom claim anything."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats

from variable_batch_size.lab.evaluation.statistics import (
    claims,
    compare,
    detectable_difference,
    fisher,
    holm,
    mean_interval,
    smallest_step,
)

samples = st.integers(2, 8).flatmap(lambda n: arrays(float, n, elements=st.integers(-100, 100), unique=True))
rates = arrays(float, st.integers(1, 12), elements=st.sampled_from([0.0, 0.001, 0.004, 0.01, 0.2, np.nan]))


@given(samples, samples)
def test_means_are_compared_as_by_scipy(first, second):
    own, theirs = compare(first, second), stats.ttest_ind(first, second, equal_var=False)
    quiet, noisy = sorted((first, second), key=lambda sample: sample.var(ddof=1))
    freedom = float(theirs.df)
    if noisy.var(ddof=1) > min(len(first), len(second)) / 2 * quiet.var(ddof=1):
        freedom = min(freedom, len(noisy) - 1)
    assert own.p == pytest.approx(2 * stats.t.sf(abs(theirs.statistic), freedom), rel=1e-6)
    half = stats.t.isf(0.05, freedom) * own.error
    assert own.interval(0.9)[1:] == pytest.approx((own.value - half, own.value + half), rel=1e-6, abs=1e-9)
    theirs = stats.t.interval(0.95, len(first) - 1, first.mean(), stats.sem(first))
    assert mean_interval(first)[1:] == pytest.approx(theirs, rel=1e-6, abs=1e-9)


def test_many_comparisons_are_each_one_alone():
    rng = np.random.default_rng(0)
    values = rng.standard_normal((3, 4, 5))
    values[0, 1, 2:] = np.nan
    whole = compare(values, values[:, :1], smallest_step(values)[:, None])
    assert whole.p[0, 1] == pytest.approx(float(compare(values[0, 1, :2], values[0, 0]).p), rel=0.1)
    assert whole.p[2, 3] == pytest.approx(float(compare(values[2, 3], values[2, 0]).p), rel=0.01)


def test_values_in_steps_have_the_variance_of_their_rounding():
    """Four accuracies of 1,000 test samples that are all equal prove little."""
    first, second = np.full(2, 0.97), np.full(2, 0.96)
    assert smallest_step(np.stack([first, second])) == pytest.approx(0.01)
    error = 0.01 * np.sqrt(1 / 12)
    assert compare(first, second, 0.01).error == pytest.approx(error)
    assert compare(first, second, 0.01).p == pytest.approx(2 * stats.t.sf(0.01 / error, 2))


@given(rates, st.sampled_from([0.01, 0.03, 0.5]))
def test_holm_goes_down_step_by_step(p, level):
    expected, left = np.zeros(len(p), bool), int((~np.isnan(p)).sum())
    for number in np.argsort(p, kind="stable")[:left]:
        if p[number] > level / left:
            break
        expected[number], left = True, left - 1
    assert holm(p, level).sum() == expected.sum()
    assert (p[holm(p, level)] <= level).all()
    assert (holm(np.stack([p, p[::-1]]), level).sum(-1) == expected.sum()).all()


def test_failures_are_compared_by_fisher():
    counts = np.array([[5, 5, 0, 5], [2, 5, 0, 5], [0, 0, 1, 5]])
    p = fisher(counts)
    assert p[:2].tolist() == pytest.approx([1 / 126, stats.fisher_exact([[2, 3], [0, 5]])[1]])
    assert np.isnan(p[2])


@pytest.mark.parametrize(("seeds", "ratio"), [(6, 1.0), (5, 5.0), (14, 1.0)])
def test_the_difference_that_is_seen_is_seen_in_four_of_five(seeds, ratio):
    rng, level = np.random.default_rng(0), 0.03 / 6
    difference = float(detectable_difference(1.0, ratio**2, np.array(float(seeds)), level))
    first = rng.standard_normal((4000, seeds))
    second = ratio * rng.standard_normal((4000, seeds)) + difference
    assert 0.78 < (compare(first, second).p <= level).mean() < 0.92


@pytest.mark.parametrize(("rules", "traces", "seeds", "failing"), [(4, 2, 5, 0.0), (8, 1, 10, 0.1), (4, 4, 3, 0.2)])
def test_reports_of_equal_rules_seldom_claim_anything(rules, traces, seeds, failing):
    rng = np.random.default_rng(0)
    values = rng.standard_normal((1000, traces, rules, seeds))
    failed = rng.random(values.shape) < failing
    values[failed] = np.nan
    found = claims(values, failed)
    wrong = (found.differs != 0).any((-1, -2)) | (found.fails != 0).any(-1)
    assert wrong.mean() < 0.04 + 3 * np.sqrt(0.04 * 0.96 / 1000)


@pytest.mark.parametrize(("ends", "seeds", "failing"), [(2, 8, 0.3), (4, 8, 0.3), (4, 5, 0.3), (4, 8, 0.1)])
def test_failures_that_a_seed_has_under_every_trace_are_one(ends, seeds, failing):
    """As of runs that fail before their traces, or their ends, differ: counted for each, 40 of 100 reports claimed."""
    rng = np.random.default_rng(0)
    failed = np.repeat(rng.random((1000, 1, 4, seeds)) < failing, ends, axis=1)
    values = np.where(failed, np.nan, rng.standard_normal(failed.shape))
    found = claims(values, failed)
    wrong = (found.differs != 0).any((-1, -2)) | (found.fails != 0).any(-1)
    assert wrong.mean() < 0.04 + 3 * np.sqrt(0.04 * 0.96 / 1000)
    assert found.failures[..., 1].max() == ends * seeds


@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1), st.floats(-5, 5), st.floats(0.1, 10))
def test_claims_do_not_depend_on_the_unit_of_the_metric(seed, shift, scale):
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((2, 3, 5)) + 3 * rng.standard_normal((2, 3, 1))
    none = np.zeros(values.shape, bool)
    assert (claims(values, none).differs == claims(scale * (values + shift), none).differs).all()


def test_a_rule_that_fails_more_often_is_never_better():
    values = np.arange(10.0)[None, None, :] / 10 + np.array([[[10.0], [0.0], [20.0]]])
    failed = np.zeros(values.shape, bool)
    assert claims(values, failed).differs.tolist() == [[0, -1, 1]]
    failed[0, 1:, 0] = True
    values[failed] = np.nan
    found = claims(values, failed)
    assert found.differs.tolist() == [[0, 0, 1]]
    assert found.failures.tolist() == [[0, 0, 0, 0], [1, 10, 0, 10], [1, 10, 0, 10]]
    assert (found.fails == 0).all()


def test_trainings_that_are_the_same_are_no_test():
    rng = np.random.default_rng(1)
    values = rng.standard_normal((1, 8, 5))
    values[:, 1] += 5
    values[:, 2:] = values[:, :1]
    same = np.array([[False, False, True, True, True, True, True, True]])
    found = claims(values, np.zeros(values.shape, bool), same)
    assert found.tested.sum() == 1
    assert found.differs[0, 1] == 1
