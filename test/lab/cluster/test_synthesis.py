"""Synthetic capacity traces: exact properties, and the statistics of the formulas.

A statistic has to be within 6 standard errors of what is expected; seeds are fixed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from variable_batch_size.lab.cluster import synthetic

HOUR = 3600.0


@dataclass(frozen=True)
class Process:
    """Nodes that go up and down, and bulk preemptions; the formulas are those of the docstring of `synthetic`."""

    nodes: int
    mean_up: float
    mean_down: float
    bulk_every: float | None = None
    bulk_fraction: float = 1.0

    @property
    def bulk_rate(self):
        return 0.0 if self.bulk_every is None else 1 / self.bulk_every

    @property
    def decay(self):
        """Rate at which the autocovariance decays, in 1/s."""
        return 1 / self.mean_up + self.bulk_fraction * self.bulk_rate + 1 / self.mean_down

    @property
    def up(self):
        return 1 / self.mean_down / self.decay

    @property
    def mean(self):
        return self.nodes * self.up

    @property
    def variance(self):
        shared = self.bulk_rate * self.bulk_fraction**2
        between = self.up**2 * shared / (2 * self.decay - shared)
        return self.nodes * self.up * (1 - self.up) + self.nodes * (self.nodes - 1) * between

    def covariance(self, lag):
        return self.variance * math.exp(-lag * self.decay)

    def arguments(self):
        """Return the arguments of `synthetic` but `duration` and `seed`."""
        fraction = None if self.bulk_every is None else self.bulk_fraction
        return {**vars(self), "bulk_fraction": fraction}


PROCESSES = {
    "independent": Process(nodes=8, mean_up=2 * HOUR, mean_down=HOUR),
    "one node": Process(nodes=1, mean_up=HOUR, mean_down=HOUR, bulk_every=HOUR, bulk_fraction=0.5),
    "bulk": Process(nodes=60, mean_up=4 * HOUR, mean_down=2 * HOUR, bulk_every=HOUR, bulk_fraction=0.4),
    "only bulk": Process(nodes=6, mean_up=1e12, mean_down=HOUR, bulk_every=2 * HOUR),
    "frequent bulk": Process(nodes=4, mean_up=HOUR, mean_down=HOUR / 4, bulk_every=HOUR / 8, bulk_fraction=0.1),
}
every_process = pytest.mark.parametrize("process", PROCESSES.values(), ids=PROCESSES)

lengths = st.floats(1e-3, 1e6)
processes = st.builds(
    Process,
    nodes=st.integers(1, 20),
    mean_up=lengths,
    mean_down=lengths,
    bulk_every=st.none() | lengths,
    bulk_fraction=st.floats(0, 1),
)


def near(values, expected):
    """Assert that the mean of independent values is as expected, up to 6 standard errors.

    The error counts as 1 / (their number) at least: that of an event which happened once.
    """
    values = np.asarray(values, np.float64)
    error = max(values.std(ddof=1) / np.sqrt(len(values)), 1 / len(values))
    assert abs(values.mean() - expected) < 6 * error


@given(processes, st.floats(1e-2, 1e3), st.integers(0, 2**70))
def test_a_trace_has_at_most_all_nodes_until_its_end_and_is_a_function_of_the_seed(process, cycles, seed):
    shortest = min(process.mean_up + process.mean_down, process.bulk_every or np.inf)
    arguments = {**process.arguments(), "duration": cycles * shortest, "seed": seed}
    trace = synthetic(**arguments)
    assert trace.nodes.min() >= 0
    assert trace.nodes.max() <= process.nodes
    assert trace.end == arguments["duration"]
    assert trace.prices is None
    assert trace == synthetic(**arguments)


@every_process
def test_mean_and_autocovariance_over_time_are_those_of_the_formulas(process):
    blocks, steps, step = 100, 2000, 0.25 / process.decay  # steps of a quarter of a decay time: 500 of them a block
    trace = synthetic(**process.arguments(), duration=blocks * steps * step, seed=0)
    nodes = trace.at(np.arange(blocks * steps) * step).reshape(blocks, steps)
    near(nodes.mean(axis=1), process.mean)
    spans = trace.lengths @ trace.nodes / trace.end  # exact over time, with the variance of a mean of correlated values
    assert abs(spans - process.mean) < 6 * np.sqrt(2 * process.variance / (process.decay * trace.end))
    returns = trace.seconds[1:][np.diff(trace.nodes) == 1]
    near(
        np.histogram(returns, blocks, (0, trace.end))[0],
        (process.nodes - process.mean) * steps * step / process.mean_down,
    )
    excess = nodes - process.mean
    for lag in (0, 1, 2, 4, 8, 16):
        products = excess[:, : steps - lag] * excess[:, lag:]
        near(products.mean(axis=1), process.covariance(lag * step))


@pytest.mark.slow("draws many traces")
@every_process
def test_a_trace_begins_in_the_stationary_state(process):
    lag = 0.5 / process.decay
    pairs = np.array([synthetic(**process.arguments(), duration=lag, seed=seed).at([0, lag]) for seed in range(3000)])
    first, last = (pairs - process.mean).T
    for values, expected in [(first, 0), (last, 0), (first**2, process.variance), (last**2, process.variance)]:
        near(values, expected)
    near(first * last, process.covariance(lag))


def test_a_time_down_that_is_shorter_than_rounding_makes_no_second_node():
    assert set(synthetic(1, 1.0, 1e-12, 1e5, seed=0).nodes.tolist()) <= {0, 1}


def test_a_chosen_fraction_may_be_as_small_as_floats_are():
    for fraction in (5e-324, 1e-17, 1e-9):
        trace = synthetic(9, 1e12, 1e-3, 1e4, 0, bulk_every=1.0, bulk_fraction=fraction)
        assert trace.nodes.tolist() == [9]
