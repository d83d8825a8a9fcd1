"""The policies under real traces in benchmarks/NOTEBOOK.md: their command prints the table, also of other logs."""

from __future__ import annotations

import shutil

import pytest

from helpers.capacity_files import COLLECTION
from helpers.commands import run
from helpers.console import run_json
from helpers.pages import ROOT, commands
from variable_batch_size.lab import cluster

NOTEBOOK = ROOT / "benchmarks" / "NOTEBOOK.md"
(COMMAND,) = commands(NOTEBOOK)
SECTION = NOTEBOOK.read_text().split("## Policies under real capacity traces\n")[1].split("\n## ")[0]


def rows(text):
    return [line for line in text.splitlines() if line.startswith("|")]


def printed(folder):
    done = run("bash", "-c", f"shopt -s nullglob; {COMMAND}", CAPACITY_TRACES=str(folder))
    assert done.returncode == 0, done.stderr
    return rows(done.stdout)


def test_the_table_is_printed_by_the_command(tmp_path):
    names = [line.split("`")[1] for line in rows(SECTION) if "`per-device:64`" in line]
    if missing := [name for name in names if not (COLLECTION / name).exists()]:
        pytest.skip(f"{COLLECTION} has no {missing[0]}")
    for name in names:
        shutil.copy(COLLECTION / name, tmp_path)
    assert printed(tmp_path) == rows(SECTION)


@pytest.mark.slow("simulates many trainings")
def test_a_row_has_the_numbers_of_the_sweep(tmp_path):
    log, short = tmp_path / "b.json", tmp_path / "a.csv"
    shutil.copy(ROOT / "traces" / "spot_example.json", log)
    cluster.CapacityTrace([0], [2], 60, prices=[1.0]).to_csv(short)  # ends before the first update
    heading, _, *found = printed(tmp_path)
    assert heading.startswith("| log | hours | nodes, mean | policy | productive |")
    assert [row.split("|")[1].strip() for row in found] == ["`a.csv`", "", "", "`b.json`", "", ""]
    assert found[0] == "| `a.csv` | 0 | 2 to 2, 2.0 | `per-device:64` | 0.0% | 0.0% | 0 | - | 0 | 0 | - |"
    words = COMMAND.split(" --json")[0].split()[3:]
    run_of = run_json("simulate", log, *words)["constant:1024"]
    share, goodput = run_of["productive"] / run_of["elapsed"], 3600 * run_of["goodput"]
    assert found[4].startswith(f"|  |  |  | `constant:1024` | {share:.1%} |")
    assert f"| {run_of['preemptions']} | {run_of['efficiency']:.2f} | {goodput:,.0f} |" in found[4]
