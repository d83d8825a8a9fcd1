"""`vbs branch` says its cost, ranks candidates or batch sizes, and refuses what does not fit in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.console import error_of, run_main

QUADRATIC = "helpers.branching_tasks:Quadratic"
TWO = ["--candidate", "root", "--candidate", "linear"]


def test_a_dry_run_says_the_cost_and_trains_nothing(tmp_path: Path) -> None:
    arguments = ["branch", QUADRATIC, "--batch-size", 128, *TWO, "--updates", 30, "--out", tmp_path / "found.json"]
    status, out, err = run_main(*arguments, "--dry-run")
    assert (status, err) == (0, "")
    assert out == (
        "cost: 2 branches of at most 3,840 samples, 7,680 in all, 23.4 % of a full training, and 3 evaluations\n"
    )
    assert not list(tmp_path.iterdir())


def test_ranks_candidates(tmp_path: Path) -> None:
    file = tmp_path / "sub" / "found.json"
    status, out, err = run_main(
        "branch", QUADRATIC, "--batch-size", 128, *TWO, "--updates", 30, "--seed", 0,
        "--out", file,
    )  # fmt: skip
    assert status == 0, err
    cost, head, *rows = out.splitlines()
    assert cost.startswith("cost: 2 branches")
    assert head.split()[:2] == ["candidate", "rank"]
    assert rows[0].split()[:2] == ["root", "1"]
    assert rows[1].split()[:3] == ["linear", "2", "diverged"]
    assert rows[-1] == "root is better than all others."
    found = json.loads(file.read_text())
    assert found["best"] == ["root"]
    assert found["cost"]["samples"] == 7680
    assert [trial["status"] for trial in found["trials"]] == ["finished", "diverged"]
    status, out, err = run_main("branch", QUADRATIC, "--batch-size", 128, *TWO, "--updates", 30, "--seed", 0, "--json")
    assert (status, json.loads(out)) == (0, found)
    assert err.startswith("cost: 2 branches")


def test_finds_the_critical_batch_size() -> None:
    sizes = [word for size in (8, 32, 128) for word in ("--batch-size", size)]
    arguments = ["branch", QUADRATIC, "--critical", *sizes, "--samples", 4096, "--rule", "linear", "--tolerance", 2]
    assert run_main(*arguments, "--dry-run")[1].startswith("cost: 3 branches of at most 4,096 samples, 12,288 in all")
    status, out, err = run_main(*arguments)
    assert status == 0, err
    assert out.splitlines()[-1] == "The critical batch size is 32, of those that were tried."


def test_the_help_has_the_asterisks_of_factors() -> None:
    status, out, _ = run_main("branch", "--help")
    assert status == 0
    assert "root*0.5" in out
    assert "power:0.75*2" in out


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--batch-size", 8, *TWO], 2, "--candidate and --updates must be given for branches, got no --updates"),
        (
            ["--batch-size", 8, "--updates", 9],
            2,
            "--candidate and --updates must be given for branches, got no --candidate",
        ),
        (["--batch-size", 8, "--batch-size", 16, *TWO, "--updates", 9], 2, "--batch-size must be given once, got 2"),
        (["--batch-size", 8, *TWO, "--updates", 9, "--samples", 9], 2, "--samples needs --critical, got 9 without"),
        (["--batch-size", 8, "--critical", "--samples", 99, *TWO], 2, "--critical compares batch sizes of one rule"),
        (["--batch-size", 8, "--critical"], 2, "--critical needs --samples, got none"),
        (["--batch-size", 8, "--critical", "--samples", 99], 2, "--batch-size must be two or more, the smallest first"),
        (["--batch-size", 8, "--candidate", "rot", "--updates", 9], 2, "a rule must be one of constant, linear,"),
        (["--batch-size", 9999, *TWO, "--updates", 9], 1, "candidate root: every batch size of the trace must"),
        (["--batch-size", 8, *TWO, "--updates", 9, "--checkpoint", "none"], 1, "--checkpoint must be the folder of"),
        ([*TWO, "--updates", 9], 2, "Missing option '--batch-size'"),
    ],
)
def test_a_wrong_argument_is_one_line(arguments: list[object], status: int, message: str) -> None:
    found = error_of("branch", QUADRATIC, *arguments)
    assert found[0] == status
    assert found[1].startswith(message), found[1]
