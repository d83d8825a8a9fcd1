"""The simulator against a twin that goes update by update."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.properties import examples
from helpers.slow_simulation import SlowSimulation
from variable_batch_size.adaptive import ConstantBatch, PerDevice, Throughput
from variable_batch_size.lab.cluster import CapacityTrace
from variable_batch_size.lab.simulation import NoiseCurve, Overheads, simulate
from variable_batch_size.rules.selection import rules_for_groups
from variable_batch_size.trace import BatchTrace

STATES = ("productive", "redone", "restarting", "saving", "idle")


@dataclass(frozen=True)
class Wild:
    """A controller whose answer depends on everything that it gets."""

    salt: int

    def __call__(self, input):
        noise = 0 if input.noise is None else int(input.noise.sigma2) + (input.noise.gain > 1.01)
        known = (input.batch_size or 0, input.updates, input.samples, int(input.progress), noise, self.salt)
        return 1 + (7 * input.devices + sum((k + 3) * value for k, value in enumerate(known))) % 24


def restart(nodes, cause):
    return nodes / 2 + {"start": 1.0, "preemption": 3.0, "growth": 2.5}[cause]


def numbers(grid, low, high):
    """Multiples of 1/4, whose sums are exact, or numbers whose sums are neither equal nor nearly so by chance."""
    if grid:
        return st.integers(math.ceil(4 * low), int(4 * high)).map(lambda quarters: quarters / 4)
    return st.integers(1, 10**6).map(lambda number: low + (high - low) * math.sin(number) ** 2)


@st.composite
def cases(draw, grid):
    some = lambda strategy: draw(st.none() | strategy)  # noqa: E731
    times = draw(st.lists(numbers(grid, 0, 100), min_size=1, max_size=10).map(sorted))
    nodes = draw(st.lists(st.integers(0, 4), min_size=len(times), max_size=len(times)))
    policy = draw(
        st.one_of(
            st.integers(1, 6).map(PerDevice),
            st.integers(1, 40).map(ConstantBatch),
            st.integers(0, 99).map(Wild),
            st.lists(st.integers(1, 30), min_size=1, max_size=9).map(
                lambda sizes: BatchTrace.from_sizes(sizes, on_end=draw(st.sampled_from(["stop", "hold", "cycle"])))
            ),
        )
    )
    free = not isinstance(policy, BatchTrace)
    overheads = some(
        st.builds(
            Overheads,
            restart=numbers(grid, 0, 9) | st.just(restart),
            save_every=st.none() | numbers(grid, 0.25, 20),
            save=numbers(grid, 0, 4),
            blocking=st.booleans(),
            notice=st.just(0.0) | numbers(grid, 0, 12),
            least_nodes=st.integers(1, 2),
            grow_every=st.just(0.0) | numbers(grid, 0, 30),
        )
    )
    ref = draw(st.sampled_from([4, 16]))
    noisy = draw(st.booleans())
    noise = None
    if noisy:
        knots = [0, *sorted(set(draw(st.lists(numbers(grid, 0.5, 60), max_size=3))))]
        # On the grid the gain is k or 1, so that sums of progress are exact.
        sizes = st.sampled_from([(1.0, 0.0), (0.0, 1.0)]) if grid else st.tuples(st.floats(1, 99), st.floats(0.1, 2))
        rows = draw(st.lists(sizes, min_size=len(knots), max_size=len(knots)))
        noise = NoiseCurve(knots, *map(list, zip(*rows, strict=True)))
    by = draw(st.sampled_from(["progress", "samples", "updates", "seconds"]))
    until = some(numbers(grid, 1, 120)) if by in ("progress", "seconds") else some(st.integers(1, 300))
    bounds = some(st.tuples(st.integers(1, 9), st.integers(9, 40))) if free else None
    return {
        "capacity": CapacityTrace(times, nodes, times[-1] + draw(numbers(grid, 0.25, 40))),
        "controller": policy,
        "throughput": Throughput(0.25 * draw(st.integers(0, 2)), 0.25)
        if grid
        else Throughput(0.1234567, 0.0712345, 0.0312345, 0.0112345, 2.3),
        "rule": draw(st.sampled_from(["linear", "constant", *(["adascale"] if noise else [])])),
        "ref_batchsize": ref,
        "noise": noise,
        "start": draw(st.none() | st.integers(9, 9)) if free else None,
        "bounds": bounds,
        "every": some(st.integers(1, 12)) if free else None,
        "delay": draw(st.integers(0, 9)) if free else 0,
        "minibatch_size": some(st.integers(1, 8)),
        "dataset_size": some(st.integers(80, 200)),
        "devices_per_node": draw(st.integers(1, 3)),
        "overheads": overheads,
        "until": until,
        "by": by,
    }


def check(case, exact):
    run = simulate(**case)
    named = {**case, "rule": rules_for_groups(case["rule"], 1)[0], "bounds": case["bounds"] or (1, 2**53)}
    slow = SlowSimulation(**named).run()
    expected = {
        "elapsed": slow.now,
        **slow.seconds,
        "updates": slow.updates,
        "samples": slow.samples,
        "progress": slow.progress,
        "preemptions": slow.preemptions,
        "restarts": slow.restarts,
    }
    found = {name: run.summary[name] for name in expected}
    floats = {name: float(value) for name, value in expected.items()}
    assert found == floats if exact else found == pytest.approx(floats, rel=1e-9, abs=1e-9)
    if slow.kept:
        assert run.trace == BatchTrace.from_sizes([done.size for done in slow.kept])
    check_conservation(run)


def check_conservation(run):
    assert math.fsum(run.summary[state] for state in STATES) == pytest.approx(run.summary["elapsed"], rel=1e-9)
    table = run.timeline
    assert table["begin"].tolist() == [0.0, *table["end"][:-1]]
    assert table["end"].iloc[-1] == run.summary["elapsed"]
    lengths = (table["end"] - table["begin"]).groupby(table["state"]).sum()
    productive = table[table["state"] == "productive"]
    for state in STATES:
        assert lengths.get(state, 0.0) == pytest.approx(run.summary[state], rel=1e-9, abs=1e-9)
    for total in ("updates", "samples", "progress"):
        assert productive[total].sum() == pytest.approx(run.summary[total], rel=1e-9)


@pytest.mark.slow("simulates many trainings")
@examples(500)
@given(cases(grid=True))
def test_the_twin_agrees_where_times_coincide(case):
    check(case, exact=True)


@examples(250)
@given(cases(grid=False))
def test_the_twin_agrees_with_other_numbers(case):
    check(case, exact=False)


def in_other_units(case, unit):
    """The case with all seconds times `unit`, by which their sums are rounded."""
    model, costs = case["throughput"], case["overheads"]
    if costs is not None:
        names = ("save_every", "save", "notice", "grow_every")
        values = {name: getattr(costs, name) for name in names}
        seconds = {name: None if value is None else value * unit for name, value in values.items()}
        costs = replace(costs, **seconds, restart=lambda nodes, cause: unit * restart_of(case, nodes, cause))
    until = case["until"]
    return case | {
        "capacity": case["capacity"].scaled(unit),
        "throughput": Throughput(model.accum_base * unit, model.accum_row * unit),
        "overheads": costs,
        "until": until * unit if case["by"] == "seconds" and until is not None else until,
    }


def restart_of(case, nodes, cause):
    costs = case["overheads"]
    return costs.restart_seconds(nodes, cause)


@pytest.mark.slow("simulates many trainings")
@examples(400)
@given(cases(grid=True), st.sampled_from([0.1, 1 / 3, 1e-3, 0.7, 86400 / 7]))
def test_rounding_changes_no_event(case, unit):
    run, other = simulate(**case), simulate(**in_other_units(case, unit))
    for count in ("updates", "samples", "progress", "preemptions", "restarts"):
        assert other.summary[count] == run.summary[count]
    for state in STATES:
        assert other.summary[state] == pytest.approx(run.summary[state] * unit, rel=1e-9, abs=1e-9)
