"""benchmarks/evaluation_large.py cuts the window that it says, and its trainings fit into it."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.pages import ROOT
from variable_batch_size.lab.cluster import CapacityTrace
from variable_batch_size.lab.evaluation import read
from variable_batch_size.lab.evaluation.timed_trace import TraceOptions, Training, timed_trace


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> Any:
    """benchmarks/evaluation_large.py."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("evaluation_large")


def log(folder: Path) -> None:
    """Write ten hours of a log of nodes, in which most changes come in hours 3 to 5, and as many in hours 4 to 6."""
    seconds = [0, 3600 * 3 + 60, 3600 * 4 + 10, 3600 * 4 + 20, 3600 * 5 + 40, 36_000]
    nodes = np.array([4, 3, 2, 5, 8, 8])
    CapacityTrace(seconds, nodes).to_csv(folder / "log.csv")


def test_the_window_is_the_first_with_the_most_changes(large: Any, tmp_path: Path) -> None:
    log(tmp_path)
    begin, found = large.window(CapacityTrace.from_csv(tmp_path / "log.csv"), 2)
    assert (begin, found.seconds.tolist(), found.nodes.tolist()) == (3, [0, 60, 3610, 3620], [4, 3, 2, 5])
    assert found.end == 7200


@pytest.mark.parametrize("samples", [5000, 80_000])
def test_a_training_takes_nine_tenths_of_the_window(large: Any, tmp_path: Path, samples: int) -> None:
    log(tmp_path)
    name, source = large.under(large.Log("a cloud", "log.csv", 2), tmp_path, 16, samples)
    assert name == "a cloud, hours 3 to 5"
    timed = timed_trace(source, Training(60_000, samples, 32, 16), TraceOptions())
    assert timed.time.end[-1] <= 7200
    _, capacity = large.window(CapacityTrace.from_csv(tmp_path / "log.csv"), 2)
    until = timed.time.end[-1]
    used = sum(
        nodes * max(0.0, min(until, end) - begin)
        for nodes, begin, end in zip(
            capacity.nodes, capacity.seconds, [*capacity.seconds[1:], capacity.end], strict=True
        )
    )
    assert used / (capacity.mean * capacity.end) == pytest.approx(0.9, abs=0.05)


@pytest.mark.parametrize(
    ("file", "tasks"),
    [
        ("evaluation_large", {"fashion-cnn"}),
        ("evaluation_gpt", {"char-gpt"}),
        ("evaluation_adam", {"evaluation_adam:WithAdamW", "evaluation_adam:WithMuon"}),
    ],
)
def test_the_trainings_are_those_of_their_names(file: str, tasks: set[str]) -> None:
    assert set(read(ROOT / "benchmarks" / f"{file}.csv.gz").trainings["task"]) == tasks
