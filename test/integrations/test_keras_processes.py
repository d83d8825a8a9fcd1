"""Keras with a trace on two gloo processes, without keras.distribution, and resumed in another world."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import keras_jobs as jobs
from helpers.yardstick import MAX_GRAD_NORM, STOPS, in_processes


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jobs.float64():
        yield


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    in_processes(jobs.ranks_train, 2, folder)
    return folder


def read(folder: Path, name: str) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{name}-{rank}.pt") for rank in (0, 1)]


@pytest.mark.parametrize("name", jobs.OPTIMIZERS)
@pytest.mark.parametrize("rule", ["root", "adascale"])
def test_two_ranks_make_the_updates_of_whole_batches(name: str, rule: str, found: Path) -> None:
    first, second = read(found, f"{name}-{rule}")
    expected = jobs.expected(name, rule=rule, max_grad_norm=MAX_GRAD_NORM)
    assert torch.equal(first["weights"], second["weights"])
    assert float((first["weights"] - expected).abs().max() / expected.abs().max()) < 1e-12


def test_the_logs_of_all_ranks_are_those_of_one(found: Path) -> None:
    first, second = (rank["history"] for rank in read(found, "SGD-root"))
    model = jobs.variable(jobs.OPTIMIZERS["SGD"][0](), optimizer_options={"max_grad_norm": MAX_GRAD_NORM})
    alone = jobs.fit(model).history
    for name in alone.keys() - {"accuracy"}:  # which is that of the rank's own samples
        assert first[name] == second[name], name
        assert first[name] == pytest.approx(alone[name], rel=1e-6), name


@pytest.mark.parametrize("stop", STOPS)
def test_a_resume_changes_nothing(stop: int, found: Path) -> None:
    assert [rank["found"] for rank in read(found, f"resumed-{stop}")] == [(0.0, 0.0)] * 2


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_it_resumes_in_another_world(before: int, after: int, tmp_path: Path) -> None:
    in_processes(jobs.stopped, before, tmp_path, 14)
    in_processes(jobs.resumed, after, tmp_path, "weights")
    expected, got = jobs.expected("AdamW"), torch.load(tmp_path / "weights-0.pt")["weights"]
    assert float((got - expected).abs().max() / expected.abs().max()) < 1e-12
