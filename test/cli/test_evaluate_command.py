"""`vbs evaluate` trains what has no record, and writes nothing before its arguments are checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.console import error_of, run_main
from variable_batch_size.evaluation import Plan, read_records

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
    assert Plan.read(tmp_path / "records").keys == {record.key for record in records}
    assert Plan.read(tmp_path / "records").command.startswith(f"vbs evaluate {TINY} --trace '0:8 10:32' --trace per")
    assert run_main(*arguments, "--dry-run")[1].endswith("4 trainings, 0 to make, of 0 samples in all\n")


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (
            ["mnist-cn", "--trace", 8, *BOTH],
            1,
            "a task must be mnist-cnn, fashion-cnn, char-gpt or package.module:name",
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
    ],
)
def test_a_wrong_argument_is_one_line(arguments: list[object], status: int, message: str, tmp_path: Path) -> None:
    found = error_of("evaluate", *arguments, "--folder", tmp_path / "records")
    assert found[0] == status
    assert found[1].startswith(message), found[1]
    assert not list(tmp_path.rglob("*.json"))
