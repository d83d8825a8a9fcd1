"""`vbs evaluate` trains what has no record, and writes nothing before its arguments are checked."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from helpers.console import error_of, run_main
from variable_batch_size.evaluation import read_records

TINY = "helpers.evaluation_tasks:Tiny"
BOTH = ["--rule", "constant", "--rule", "linear"]


def test_trains_each_cell_once(tmp_path: Path) -> None:
    (tmp_path / "nodes.csv").write_text("seconds,nodes\n0,1\n20,3\n600,3\n")
    arguments = ["evaluate", TINY, "--trace", "0:8 10:32", "--trace", f"per-device:4@{tmp_path / 'nodes.csv'}", *BOTH]
    arguments += ["--seeds", 1, "--samples-per-second", 10, "--price", 2, "--folder", tmp_path / "records"]
    status, out, _ = run_main(*arguments, "--dry-run")
    assert (status, out) == (0, f"{tmp_path / 'records'}: 4 trainings, 4 to make, of 960 samples in all\n")
    assert not (tmp_path / "records").exists()
    status, out, err = run_main(*arguments)
    assert status == 0, err
    assert out.startswith(f"{tmp_path / 'records'}: 4 trainings, 0 of which diverged\n")
    assert "4/4" in err
    records = read_records(tmp_path / "records")
    assert {record.cell["rule"] for record in records} == {"constant", "linear"}
    assert all(record.curve["seconds"] and record.curve["cost"] for record in records)
    assert run_main(*arguments, "--dry-run")[1].endswith("4 trainings, 0 to make, of 0 samples in all\n")


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (
            ["mnist-cn", "--trace", 8, *BOTH],
            1,
            "a task must be mnist-cnn, fashion-cnn, char-gpt, cifar10-resnet or package.module:name",
        ),
        ([TINY, "--trace", 8, "--rule", "lin"], 1, "a rule must be one of constant, linear,"),
        (
            [TINY, "--trace", 100, *BOTH],
            1,
            f"task {TINY}, trace 100, rule constant: every batch size of the trace must",
        ),
        ([TINY, "--trace", 8], 2, "Missing option '--rule'"),
        ([TINY, *BOTH], 2, "Missing option '--trace'"),
        ([TINY, "--trace", 8, *BOTH, "--lr", -1], 1, "--lr must be a finite number >= 0, got -1"),
        ([TINY, "--trace", 8, *BOTH, "--address", "auto"], 1, "--address must be None without Ray, got 'auto'; pass"),
    ],
)
def test_a_wrong_argument_is_one_line(arguments: list[object], status: int, message: str, tmp_path: Path) -> None:
    found = error_of("evaluate", *arguments, "--folder", tmp_path / "records")
    assert found[0] == status
    assert found[1].startswith(message), found[1]
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:1", "--address must be that of a running Ray, got '127.0.0.1:1' (Connection refused); start it"),
        ("ray://[::1]:1", "--address must be that of a running Ray, got 'ray://[::1]:1' ("),
        ("cluster", "--address must be auto, HOST:PORT or ray://HOST:PORT, got 'cluster'; pass one of these"),
    ],
)
def test_an_address_where_no_ray_runs_is_one_line(address: str, message: str, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    options = ["--trace", 8, *BOTH, "--folder", tmp_path, "--engine", "ray"]
    status, out, err = run_main("evaluate", TINY, *options, "--address", address)
    assert (status, out) == (1, "")
    assert err.splitlines()[-1].startswith(f"vbs: error: {message}"), err  # after the progress bar


def test_a_missing_ray_is_named_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    _, _, err = run_main("evaluate", TINY, "--trace", 8, *BOTH, "--folder", tmp_path, "--engine", "ray")
    message = "this needs ray, which is not installed; run: pip install 'variable_batch_size[ray]'"
    assert err.splitlines()[-1] == f"vbs: error: {message}"
