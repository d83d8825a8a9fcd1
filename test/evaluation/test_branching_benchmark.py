"""benchmarks/branching.py: its tables say what records.csv and the page say, and it writes and reads such tables."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from helpers.pages import ROOT

BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def branching(monkeypatch: pytest.MonkeyPatch) -> Any:
    """benchmarks/branching.py."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("branching")


def test_the_committed_tables_have_the_recorded_figures(branching: Any) -> None:
    records = importlib.import_module("records")
    newest = {(row.question, row.what, row.on): row for row in records.newest(records.read())}
    found = list(branching.figures(branching.Runs.read(BENCHMARKS)))
    assert len(found) == 66
    for question, what, measured, on, note in found:
        row = newest[question, what, on]
        assert (row.note, row.n) == (note, measured.n)
        assert (row.low is None) == (measured.low is None)
        expected = [value for value in measured[:3] if value is not None]
        shown = [value for value in (row.value, row.low, row.high) if value is not None]
        assert shown == pytest.approx(expected, rel=1e-3, abs=1e-12)  # of four digits


def test_tables_have_what_was_trained(branching: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    candidates = ("constant", "linear", "linear*0.0625", "root*2", "root*0.5")
    kind = branching.Kind(branching.TEACHER, {}, 2**13, 32, (4,), candidates)
    monkeypatch.setattr(branching, "KINDS", {"tiny": kind, "other": kind})
    trained = branching.train(["tiny", "other"], tmp_path / "runs", None)
    trained.write(tmp_path)
    read = branching.Runs.read(tmp_path)
    assert read.candidates("tiny", 4) == ["constant = root*0.5", "linear = root*2", "linear*0.0625"]
    assert len(read.trainings) == 2 * 3 * branching.SEEDS
    figures = list(branching.figures(read))
    assert figures == list(branching.figures(trained))
    values = {what: measured.value for question, what, measured, *_ in figures if question == branching.RANK}
    assert values[branching.OTHERS] == pytest.approx(1)  # the two tasks are the same
    again = branching.train(["tiny", "other"], tmp_path / "runs", None)  # which trains nothing
    assert (again.trainings, again.branches) == (trained.trainings, trained.branches)


def test_the_rates_that_sort_candidates_are_those_of_the_rules(branching: Any) -> None:
    expected = {"constant": 1, "power:0.25": 2, "root*2": 8, "linear*0.5": 8, "adascale": 4, "adamscale": 2}
    assert {one: branching.rate(one, 16) for one in expected} == pytest.approx(expected)
