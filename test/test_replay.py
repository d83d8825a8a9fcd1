"""A real elastic training under a capacity trace, and one process under the simulated batch trace."""

from __future__ import annotations

import importlib
import itertools
from pathlib import Path
from typing import Any

import pytest

from helpers.elastic_cluster import Cause, Start, assert_replayed, replay
from helpers.pages import ROOT
from variable_batch_size.adaptive import ConstantBatch, Throughput
from variable_batch_size.lab.cluster import CapacityTrace
from variable_batch_size.lab.simulation import Overheads, simulate

BATCH_SIZE = 8000  # seven updates and a half of an epoch
FLAGS = ["--microbatch=1000", "--width=4", "--save-every=0.01"]


@pytest.mark.nightly("restarts torchrun several times")
@pytest.mark.torch
@pytest.mark.parametrize("notice", [25])
def test_one_process_makes_the_updates_of_an_elastic_training_under_the_simulated_trace(
    tmp_path: Path, notice: int
) -> None:
    """The clock of the capacity trace is the number of rows in the journals, so that no time matters.

    A notice is 25 updates long, some seconds: ranks look for a request to stop every half a second.
    """
    capacity = CapacityTrace(seconds=[0, 4, 40], nodes=[1, 2, 1], end=46)

    def rows() -> int:
        return sum(len(path.read_text().splitlines()) for path in elastic.glob("journal-*"))

    elastic = tmp_path / "elastic"
    elastic.mkdir()
    starts = replay(capacity, elastic, [*FLAGS, f"--trace=0:{BATCH_SIZE}"], notice=notice, clock=rows)
    assert [(start.cause, start.nodes) for start in starts] == [("start", 1), ("growth", 2), ("preemption", 1)]
    assert [start.killed is not None for start in starts] == [False, not notice, False]
    for before, after in itertools.pairwise(starts):
        lost = before.updates[-1] - after.updates[0]
        assert lost == 0 if before.killed is None else lost >= 0
    made = max(start.updates[-1] for start in starts)
    run = simulate(
        capacity.scaled(100),
        ConstantBatch(BATCH_SIZE),
        throughput=Throughput.simple(BATCH_SIZE),
        ref_batchsize=BATCH_SIZE,
        dataset_size=60_000,
        overheads=Overheads(restart=1, save_every=1, notice=notice),
        until=made,
        by="updates",
    )
    updates, difference = assert_replayed(run.trace, elastic, tmp_path / "alone", FLAGS)
    assert updates > starts[1].updates[0]  # the checkpoint is of a start with two processes, or of a later one
    assert difference < 1e-12


def start_of(cause: Cause, nodes: int, begun: float, restart: float, second: float, benchmark: Any) -> Start:
    """A start with five updates, of which the fourth one is that of the end of an epoch, and a save after two."""
    full = benchmark.BATCH_SIZE
    samples = list(itertools.accumulate([0, full, full, full, full // 2, full]))
    seconds = [restart, second, second, second, second / 2, second]
    ends = list(itertools.accumulate(seconds, initial=begun))[1:]
    return Start(cause, nodes, begun, None, ends, list(range(6)), samples, [2, 4])


def test_the_seconds_of_a_training_take_the_place_of_those_of_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it has some: else updates are slower as the others are, and restarts are those of the other one."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    benchmark = importlib.import_module("replay")
    computed, communication = 6.4, 0.2
    constant = ConstantBatch(benchmark.BATCH_SIZE)

    def second(nodes: int) -> float:
        return computed * -(-benchmark.BATCH_SIZE // nodes) / benchmark.BATCH_SIZE + communication * (nodes > 1)

    def close(expected: Any) -> Any:
        return pytest.approx(expected, rel=0.005)  # a fit knows whole rows only: 22 microbatches of 249 for 5,462 rows

    before = [start_of("growth", nodes, 100.0, nodes, second(nodes), benchmark) for nodes in (1, 2, 3, 4)]
    model = benchmark.Model.fit([*before, start_of("start", 1, 0.0, 9.0, second(1), benchmark)], constant)
    assert model.restarts == close({**{("growth", nodes): nodes for nodes in (1, 2, 3, 4)}, ("start", 1): 9})
    assert model.save_every == pytest.approx(2.875 * second(2), rel=1)
    own, ratio = model.with_own_seconds(
        [start_of("growth", nodes, 0.0, 7.0, 1.5 * second(nodes), benchmark) for nodes in (2, 4)]
    )
    assert ratio == close(1.5)
    expected = {("growth", 1): 1, ("growth", 2): 7, ("growth", 3): 3, ("growth", 4): 7, ("start", 1): 9}
    assert own.restarts == close(expected)
    for nodes in (1, 2, 3, 4):
        for fitted, factor in ((model, 1.0), (own, 1.5)):
            assert fitted.seconds(benchmark.BATCH_SIZE, nodes) == close(factor * second(nodes))
            run = fitted.simulate(CapacityTrace([0], [nodes], 1000), notice=0, until=3)
            assert run.summary["productive"] == close(3 * factor * second(nodes))
    assert own.save_every == model.save_every


def test_what_is_recorded_of_simulations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    benchmark = importlib.import_module("replay")
    rows: list[Any] = []
    monkeypatch.setattr(benchmark, "record", lambda question, **row: rows.append((question, row)))
    found = [benchmark.Comparison(1.1, 0.9, [(3, 2), (9, 0)], 1.25), benchmark.Comparison(1.0, 1.0, [(4, 4)], 0.5)]
    for own_seconds in (False, True):
        benchmark.report(found, "SIGKILL", own_seconds)
    cases = [(row["case"], round(row["measured"].value, 3), row["note"]) for _, row in rows]
    drift = "; seconds of an update 0.50 to 1.25 times those of the separate run"
    assert cases == [
        ("updates", 1.05, "1.000 to 1.100"),
        ("time", 0.95, "0.900 to 1.000"),
        ("", 9, "2 of 3 within one update"),
        ("updates, own seconds", 1.05, "1.000 to 1.100" + drift),
        ("time, own seconds", 0.95, "0.900 to 1.000" + drift),
        ("own seconds", 9, "2 of 3 within one update"),
    ]
