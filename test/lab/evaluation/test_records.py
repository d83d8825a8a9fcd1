"""A folder keeps what was written, whatever ended its driver; it has one at a time; tables of before are read."""

from __future__ import annotations

import gzip
import math
import multiprocessing
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.pages import ROOT
from helpers.properties import examples
from variable_batch_size.lab.evaluation.records import NAME, EvaluationPlan, Journal, read, tidy

CELL = {"task": "t", "task_version": "", "trace": "8", "rule": "root", "lr": 0.1, "lr_factor": 1.0, "seed": 0}
CELL |= {"samples": 64, "ref_batchsize": 8, "minibatch_size": 4, "task_arguments": {}}


def line(key, **other):
    curve = {"updates": [0, 8], "samples": [0, 64], "lr": [None, 0.1], "loss": [2.0, 1.0 / 3], "seconds": None}
    own = {"key": key, "cell": CELL, "status": "finished", "untrained": 2.0, "wall_seconds": 0.1}
    return {**own, "curve": curve, "environment": {"torch": "2.9.0"}, **other}


def write(folder, *lines, plans=("a b",)):
    with Journal(folder) as journal:
        for number, keys in enumerate(plans):
            journal.append_plan(f"command {number}", keys.split())
        for one in lines:
            journal.append(one)
    return (folder / NAME).read_bytes()


def test_a_training_has_a_row_in_the_order_of_the_plans(tmp_path):
    write(
        tmp_path, line("c"), line("b"), line("x"), line("a", cell=CELL | {"end": "progress:3.0"}), plans=("a b", "b c")
    )
    found = read(tmp_path)
    assert found.plans == (EvaluationPlan("command 0", ("a", "b")), EvaluationPlan("command 1", ("b", "c")))
    rows = found.trainings
    assert list(zip(rows["key"], rows["plan"], rows["end"], strict=True)) == [
        ("a", 0, "progress:3.0"), ("b", 0, "samples"), ("c", 1, "samples"), ("x", 2, "samples"),
    ]  # fmt: skip
    assert (rows["start"] == "").all()
    assert rows["curve"][0]["loss"] == [2.0, 1.0 / 3]
    assert rows["environment"][0] == {"torch": "2.9.0", "minibatch_size": 4, "task_arguments": {}}
    curves = tidy(rows)
    assert len(curves) == 8
    assert curves["samples"].tolist() == [0, 64] * 4
    assert (curves["planned_samples"] == 64).all()
    assert math.isnan(curves["effective_lr"][0])


def test_a_plan_of_the_same_trainings_is_the_same_plan(tmp_path):
    write(tmp_path)
    write(tmp_path, plans=("b a", "a", "a b c"))
    assert [plan.command for plan in read(tmp_path).plans] == ["command 0", "command 1", "command 2"]
    assert read(tmp_path).trainings.empty


def test_a_killed_training_has_a_row_without_numbers(tmp_path):
    write(tmp_path, line("a", status="killed", untrained=None, wall_seconds=None, curve={}), line("b"))
    rows = read(tmp_path).trainings
    assert rows["status"].tolist() == ["killed", "finished"]
    assert math.isnan(rows["untrained"][0])
    assert set(tidy(rows)["key"]) == {"b"}


@examples(40)
@given(st.data())
def test_whatever_tears_the_last_line_all_others_stay(data):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        content = write(folder, line("a"), line("b"))
        torn = content[: data.draw(st.integers(0, len(content)))]
        (folder / NAME).write_bytes(torn)
        whole = torn.count(b"\n")
        assert len(read(folder).trainings) == max(0, whole - 1)
        write(folder, line("c"))  # which does not continue a torn line
        assert read(folder).trainings["key"].tolist() == [*"ab"[: max(0, whole - 1)], "c"]


def test_a_folder_has_one_driver(tmp_path):
    with Journal(tmp_path):
        with pytest.raises(BlockingIOError, match=r"one evaluation at a time, got .*; wait until it ends, or choose"):
            Journal(tmp_path)
        assert read(tmp_path).plans == ()  # which anybody may
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            assert "one evaluation at a time" in pool.apply(_open, (tmp_path,))
    Journal(tmp_path).__exit__(None, None, None)


def _open(folder):
    try:
        Journal(folder)
    except OSError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", r"jsonl:1 must be a line of an evaluation, got .*neither a plan.*; delete the line; its run is"),
        ('{"key": "a', r"jsonl:1 must be a line of an evaluation"),
        ("3", r"jsonl:1 must be a line of an evaluation"),
        ('{"format": 7, "command": "", "keys": []}', r"jsonl:1 must be of format 2, got .*format 7"),
    ],
)
def test_a_damaged_line_is_named(text, message, tmp_path):
    (tmp_path / NAME).write_text(f"{text}\n")
    for way in (read, Journal):
        with pytest.raises(ValueError, match=message):
            way(tmp_path)


def test_a_folder_without_an_evaluation_is_told(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"must be a folder with evaluation\.jsonl, got .*; pass the --folder"):
        read(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"folder must be one that can be created, got .*; choose another one"):
        Journal(tmp_path / "file" / "folder")


def test_a_file_is_read_alone_and_compressed(tmp_path):
    content = write(tmp_path / "runs.csv.gz", line("a"))
    (tmp_path / "kept.jsonl.gz").write_bytes(gzip.compress(content))
    for place in ("runs.csv.gz", f"runs.csv.gz/{NAME}", "kept.jsonl.gz"):
        assert read(tmp_path / place).trainings["key"].tolist() == ["a"]


@pytest.mark.parametrize("name", ["evaluation_large", "evaluation_adam", "late_switch"])
def test_tables_of_before_are_read(name):
    found = read(ROOT / "benchmarks" / f"{name}.csv.gz")
    rows = found.trainings
    assert found.plans == ()
    assert len(rows) >= 100
    assert rows["status"].isin(["finished", "diverged"]).all()
    assert (rows["untrained"] == [curve["loss"][0] for curve in rows["curve"]]).all()
    assert rows["ref_batchsize"].notna().all()
    assert tidy(rows)["loss"].notna().all()


@pytest.mark.parametrize("content", [b"", b"format,key\n1,2\n", gzip.compress(b"format,key\n1,key\n", mtime=0)])
def test_a_damaged_table_is_named(content, tmp_path):
    (tmp_path / "table.csv.gz").write_bytes(content)
    with pytest.raises(ValueError, match=r"table\.csv\.gz must be a table of runs, got .*; copy it again"):
        read(tmp_path / "table.csv.gz")
