"""A cell ends with the same record whatever stops it; what has one is not trained again; divergence is a result."""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
import sys
from html import unescape
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from helpers.commands import environment as variables
from helpers.evaluation_tasks import Tiny, without_times
from helpers.pages import ROOT
from variable_batch_size.adaptive import Throughput
from variable_batch_size.lab.cluster import CapacityTrace
from variable_batch_size.lab.evaluation import Experiment, ModelTime, UnderCapacity, judge, read, read_records, run
from variable_batch_size.lab.evaluation.curve import Curve
from variable_batch_size.lab.evaluation.engines import local
from variable_batch_size.lab.evaluation.provenance import data_hash
from variable_batch_size.lab.evaluation.report import render

TINY = "helpers.evaluation_tasks:Tiny"
TRACES = ["0:8 10:32", "noise-scale:1"]
MODEL = Throughput.simple(samples_per_second=10)


def experiment(**other: Any) -> Experiment:
    arguments: dict[str, Any] = {"tasks": [TINY], "traces": TRACES, "rules": ["linear", "adascale"], "seeds": 2}
    return Experiment(**arguments | other)


@pytest.mark.nightly("kills an evaluation several times")
@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_trainings_killed_at_any_time_end_with_the_records_of_others(tmp_path: Path) -> None:
    expected = run(experiment(), tmp_path / "expected", progress=False)
    arguments = {"tasks": [TINY], "traces": TRACES, "rules": ["linear", "adascale"], "seeds": 2}
    command = [sys.executable, "-m", "helpers.killed_evaluation", tmp_path / "killed", json.dumps(arguments)]
    path = f"{ROOT}:{ROOT / 'test'}"
    done = subprocess.run(
        [*command, "--kills", "12"],
        env=variables(PYTHONPATH=path, OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 3
    assert "restored" in done.stderr
    found = {record.key: record for record in read_records(tmp_path / "killed")}
    assert without_times([found[record.key] for record in expected]) == without_times(expected)
    assert not list((tmp_path / "killed" / "checkpoints").iterdir())


def test_a_second_run_trains_nothing_and_an_extended_one_only_what_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = []
    original = local.train
    monkeypatch.setattr(local, "train", lambda cell, *others: trained.append(cell.key) or original(cell, *others))
    first = run(experiment(seeds=1), tmp_path, progress=False)
    assert sorted(trained) == sorted(record.key for record in first)
    files = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.json") if path.name != "plan.json"}
    assert run(experiment(seeds=1), tmp_path, progress=False) == first
    extended = run(experiment(rules=["linear", "adascale", "root"]), tmp_path, progress=False)
    assert len(trained) == len(set(trained)) == len(extended) == 14  # with the reference, of 2 seeds
    assert {path: path.stat().st_mtime_ns for path in files} == files
    assert read_records(tmp_path) == sorted(extended, key=lambda record: record.key)


def test_a_dataset_that_has_grown_is_not_that_of_its_records(tmp_path: Path) -> None:
    for record in run(experiment(traces=["8"], rules=["linear"], seeds=1), tmp_path, progress=False):
        assert record.environment["samples in the dataset"] == 96
        path = tmp_path / f"{record.key}.json"
        path.write_text(path.read_text().replace('"samples in the dataset": 96', '"samples in the dataset": 90'))
    message = (
        r"the dataset of the task .*:Tiny must be that of its record .*, got samples in the dataset 96 instead of 90;"
    )
    with pytest.raises(ValueError, match=message):
        run(experiment(traces=["8"], seeds=2), tmp_path, progress=False)


def test_a_dataset_with_other_numbers_is_not_that_of_its_records(tmp_path: Path) -> None:
    for record in run(experiment(traces=["8"], rules=["linear"], seeds=1), tmp_path, progress=False):
        known = record.environment["hash of the dataset"]
        path = tmp_path / f"{record.key}.json"
        path.write_text(path.read_text().replace(known, "0" * 16))
    with pytest.raises(ValueError, match=r"got hash of the dataset .* instead of 0000"):
        run(experiment(traces=["8"], seeds=2), tmp_path, progress=False)


def test_a_record_says_what_else_determines_it(tmp_path: Path) -> None:
    record, _ = run(experiment(traces=["8"], rules=["linear"], seeds=[3]), tmp_path, progress=False)
    facts = record.environment
    assert facts["optimizer"].startswith("SGD(momentum=0.9, ")
    assert facts["seed of the model"] == facts["seed of the order"] == 3
    path = Path(sys.modules["helpers.evaluation_tasks"].__file__ or "")
    assert facts["source of the task"] == hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    page = unescape(render(read(tmp_path), judge(read(tmp_path))))
    assert "reference batch size 8, learning rate 0.05, 240 samples, seeds 3" in page
    assert facts["hash of the dataset"] in page


class Crops(list[int]):
    def __getitem__(self, index: Any) -> Any:
        return torch.rand(2), index


@pytest.mark.parametrize(
    ("samples", "known"),
    [
        ([(np.arange(3), "a", {"b": 1.0}), (torch.ones(2, dtype=torch.bfloat16), None, b"c")], True),
        ([object(), 1], False),
        (Crops([1, 2]), False),
    ],
)
def test_the_hash_of_a_dataset_is_that_of_its_samples(samples: Any, known: bool) -> None:
    hashes = [data_hash(SimpleNamespace(dataset=lambda own=own: own)) for own in (samples, samples[:])]  # type: ignore[arg-type, misc]
    assert (hashes[0] is not None) == known
    assert not known or hashes[0] == hashes[1] != data_hash(SimpleNamespace(dataset=lambda: samples[:1]))  # type: ignore[arg-type]


@pytest.mark.slow("starts processes")
def test_processes_make_the_same_records(tmp_path: Path) -> None:
    pytest.importorskip("joblib")
    here, there = (run(experiment(), tmp_path / str(jobs), jobs=jobs, progress=False) for jobs in (1, 2))
    assert without_times(there) == without_times(here)


@pytest.mark.slow("starts processes")
def test_a_killed_process_ends_the_evaluation_which_continues_when_it_is_run_again(tmp_path: Path) -> None:
    pytest.importorskip("joblib")
    killed = {"helpers.evaluation_tasks:Killed": {"folder": str(tmp_path)}}
    with pytest.raises(RuntimeError, match=r"the process of one was killed.*; run the evaluation again to continue"):
        run(experiment(tasks=killed), tmp_path / "records", jobs=2, progress=False)
    found = run(experiment(tasks=killed), tmp_path / "records", jobs=2, progress=False)
    expected = run(experiment(), tmp_path / "expected", progress=False)
    assert [record.curve for record in found] == [record.curve for record in expected]


def test_the_curve_is_that_of_a_plain_loop(tmp_path: Path) -> None:
    """With the reference batch size, a training is that of plain PyTorch on the samples of the sampler."""
    record, reference = run(experiment(traces=["8"], rules=["linear"], seeds=[4]), tmp_path, progress=False)
    curve: Any = record.curve
    assert curve["samples"] == [0, 64, 128, 192, 240]
    assert curve["updates"] == curve["progress"] == [0, 8, 16, 24, 30]
    assert curve["batch_size"] == curve["batch_least"] == curve["batch_most"] == [None, 8, 8, 8, 8]
    rates = [0.05 * (1 - 0.9 * (8 * update) / 240) for update in range(30)]
    means = [sum(rates[a:b]) / (b - a) for a, b in pairwise(curve["updates"])]
    assert curve["lr"][1:] == pytest.approx(means)
    assert curve["loss"][0] == pytest.approx(untrained(4))
    assert curve["loss"][-1] < curve["loss"][0]
    assert (curve["seconds"], curve["cost"]) == (None, None)
    assert record.status == "finished"
    assert reference.curve == record.curve
    assert record.environment["torch"] == torch.__version__


def untrained(seed: int) -> float:
    task = Tiny()
    return task.evaluate(task.model(seed).eval())["loss"]


def test_time_and_cost_are_those_of_the_simulation(tmp_path: Path) -> None:
    capacity = CapacityTrace([0, 3.05, 7], [1, 4, 2], end=1000, prices=[2.0, 2.0, 2.0])
    traces = {"nodes": UnderCapacity(capacity, "per-device:4", MODEL), "one": 8}
    time = ModelTime(MODEL, devices=2, price=1.0)
    records = run(experiment(traces=traces, rules=["linear"], seeds=1, time=time), tmp_path, progress=False)
    nodes, one = (dict(record.curve) for record in records[:2])
    assert one["seconds"] == pytest.approx([0, 3.2, 6.4, 9.6, 12.0])  # 20 samples a second
    assert one["cost"] == pytest.approx([2 * seconds / 3600 for seconds in one["seconds"] or ()])
    # 4 samples in 0.4 s on each node: 8 updates of 4, 15 of 16 and so on, with 96 samples an epoch
    clock, samples, ends, left = 0.0, 0, [], 96
    while samples < 240:
        size = min(left, 240 - samples, 4 * int(capacity.at(clock)))
        rounds = math.ceil(size / 4 / int(capacity.at(clock)))
        full = min(left, 4 * int(capacity.at(clock)))  # the simulation shortens updates at the end of an epoch only
        clock += MODEL.seconds(full, int(capacity.at(clock)), 4)
        assert rounds == 1
        samples, left = samples + size, left - size or 96
        ends.append((samples, clock))
    rows = [ends[update - 1] for update in (nodes["updates"] or ())[1:]]
    assert [row[0] for row in rows] == (nodes["samples"] or ())[1:]
    assert [row[1] for row in rows] == pytest.approx((nodes["seconds"] or ())[1:])
    assert (nodes["cost"] or [0])[-1] == pytest.approx((3.05 * 1 + 3.95 * 4 + (clock - 7) * 2) * 2 / 3600)


def test_divergence_is_a_result(tmp_path: Path) -> None:
    records = run(experiment(lr_factors=[1, 1e3, 1e30], traces=["8"], seeds=1), tmp_path, progress=False)
    states = {(record.cell["rule"], record.cell["lr_factor"]): record for record in records}
    for rule in ("linear", "adascale"):
        assert states[rule, 1.0].status == "finished"
        for factor in (1e3, 1e30):
            record: Any = states[rule, factor]
            assert record.status == "diverged"
            assert record.curve["samples"][-1] < 240
            assert all(
                value is None or math.isfinite(value) for column in record.curve.values() for value in column or ()
            )
    assert run(experiment(lr_factors=[1e30], traces=["8"], seeds=1), tmp_path, progress=False) == [
        states[rule, 1e30] for rule in ("linear", "adascale", "constant")
    ]


@pytest.mark.parametrize(
    ("losses", "diverged"),
    [([5.0, 50.0], False), ([5.0, 50.1], True), ([5.0, math.nan], True), ([5.0, math.inf], True), ([-5.0, 900], False)],
)
def test_a_loss_diverges_above_ten_times_that_of_the_untrained_model(losses: list[float], diverged: bool) -> None:
    by_evaluation, by_update = Curve(None, 4), Curve(None, 4)
    for number, loss in enumerate(losses):
        by_evaluation.evaluation(number, number, number, {"loss": loss})
    by_update.evaluation(0, 0, 0, {"loss": losses[0]})
    for number, loss in enumerate(losses):
        if by_update.microbatch(loss, 4):
            by_update.update(number, 0.1)
            assert by_update.large == (diverged and number == 1)
            by_update.evaluation(number, 4, number, {"loss": losses[0]})
    assert by_evaluation.diverged == by_update.diverged == diverged


def test_an_error_of_a_training_names_it_and_keeps_what_is_done(tmp_path: Path) -> None:
    failing = "helpers.evaluation_tasks:Failing"
    message = r"the training [0-9a-f]{16} \(helpers.*Failing, trace 8, rule linear, lr 0.05, seed 0\) failed: ZeroDiv"
    with pytest.raises(RuntimeError, match=message):
        run(experiment(tasks=[TINY, failing], traces=["8"], rules=["linear"], seeds=1), tmp_path, progress=False)
    assert [record.cell["task"] for record in read_records(tmp_path)] == [TINY, TINY]


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("VectorLoss", r"loss\(\) must return the mean loss of a batch, .*, got one of shape \(4, 1\); return loss"),
        (
            "OtherTarget",
            r"the target of the task .* must be a metric that its evaluate\(\) returns, got 'bleu'; correct",
        ),
    ],
)
def test_a_mistake_in_a_task_is_said_before_anything_is_trained(task: str, message: str, tmp_path: Path) -> None:
    wrong = experiment(tasks=[f"helpers.evaluation_tasks:{task}"], traces=["8"], rules=["linear"], seeds=1)
    with pytest.raises(RuntimeError, match=message):
        run(wrong, tmp_path, progress=False)
    assert not list(tmp_path.rglob(f"{'[0-9a-f]' * 16}.json"))


def test_a_progress_bar_shows_cells_and_the_time_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(experiment(traces=["8"], seeds=1), tmp_path)
    last = capsys.readouterr().err.rstrip().rpartition("\r")[2]
    assert "3/3" in last
    assert "cell" in last
    run(experiment(traces=["8"], seeds=2), tmp_path)
    first = capsys.readouterr().err.partition("\n")[0].split("\r")[1]
    assert "3/6" in first
    assert "<" in first  # elapsed < left


def test_a_file_that_is_no_record_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "notes.json").write_text("{}")
    assert read_records(tmp_path) == []
    for text in ("{", "{}", "[]", '{"format": 2}', '{"format": 1, "key": "a"}'):
        (tmp_path / f"{'a' * 16}.json").write_text(text)
        with pytest.raises(ValueError, match=r"a\.json must be a record.*; delete it, and run the evaluation again"):
            read_records(tmp_path)
