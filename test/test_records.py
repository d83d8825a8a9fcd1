"""The measurements: each row can be repeated, and RESULTS.md and the pages show what the rows say."""

from __future__ import annotations

import ast
import importlib
import math
import os
import re
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

import pytest

import variable_batch_size as vbs
from helpers.pages import DOCS, ROOT, commands

BENCHMARKS = ROOT / "benchmarks"
SCRIPTS = {path.name for path in BENCHMARKS.glob("*.py") if "__main__" in path.read_text()} - {"results.py"}


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Any:
    """benchmarks/records.py and results.py."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("records"), importlib.import_module("results")


def test_each_row_can_be_repeated(modules: Any) -> None:
    records, _ = modules
    rows = records.read()
    for number, row in enumerate(rows, 2):
        where = f"records.csv:{number}"
        assert date.fromisoformat(row.date) <= date.today(), where
        script = re.search(r"python benchmarks/(\w+\.py)", row.command)
        assert script is not None, where
        assert script[1] in SCRIPTS, where
        assert re.match(r"[0-9a-f]{7,40}( with changes)?$", row.commit), where
        assert math.isfinite(row.value), where
        assert row.question, where
        assert row.unit, where
        assert row.versions, where
        assert (row.low is None) == (row.high is None), where
        assert row.low is None or row.low <= row.value <= row.high, where
        assert not any("|" in value for value in vars(row).values() if isinstance(value, str)), where
    assert [row.date for row in rows] == sorted(row.date for row in rows)


def test_each_script_has_a_row(modules: Any) -> None:
    records, _ = modules
    measured = {re.search(r"benchmarks/(\w+\.py)", row.command)[1] for row in records.newest(records.read())}
    assert measured | {"gpu.py"} == SCRIPTS  # no GPU has measured yet


def test_the_results_are_generated_from_the_records_and_fit_one_screen(modules: Any) -> None:
    records, results = modules
    text = results.RESULTS.read_text()
    assert text == results.results(records.read()), "run: python benchmarks/results.py"
    assert len(text.splitlines()) <= 70


def test_a_record_is_appended_and_shown(
    modules: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    records, results = modules
    monkeypatch.setattr(records, "RECORDS", tmp_path / "records.csv")
    monkeypatch.setattr(results, "RESULTS", tmp_path / "RESULTS.md")
    monkeypatch.setattr(sys, "argv", ["step.py", "--pairs", "3"])
    own = {"on": "small CNN", "where": "CPU, 1 process"}
    for ratios, case in (([9.0], "x1"), ([1.2, 1.0, 1.1], "x1"), ([0.9, 1.0, 1.1], "x4")):
        results.record("time of an update", "one / other", records.spread(ratios), case=case, **own)
    assert capsys.readouterr().out.splitlines()[1] == (
        "time of an update, one / other, small CNN, CPU, 1 process, x1: 1.10 (1.05 to 1.15)"
    )
    old, row, _ = records.read()
    assert (row.value, row.low, row.high, row.n, row.unit) == (1.1, 1.05, 1.15, 3, "ratio")
    assert row.command == "PYTHONPATH=test python benchmarks/step.py --pairs 3"  # this test imports helpers
    assert old not in records.newest(records.read())
    line = next(line for line in results.RESULTS.read_text().splitlines() if "one / other" in line)
    assert line.startswith("| CPU, 1 process, one / other | 1.10, (1.00) | step.py ")
    results.record("time of an update", "one / other", 1.0, case="x1", note=records.RETIRED, **own)
    assert "1.10" not in results.RESULTS.read_text()
    results.record("time of an update", "one / other", 7.77, case=f"x4, {results.OWN}", **own)
    assert records.newest(records.read())[-1].value == 7.77
    assert "7.77" not in results.RESULTS.read_text()  # only the pages have it


def test_a_table_sorts_sizes_as_numbers_and_lists_cases(modules: Any) -> None:
    records, results = modules
    blank = dict.fromkeys(("low", "high", "deviation", "n"))

    def row(on: str, case: str, value: float, unit: str, **more: Any) -> Any:
        own = {**blank, "question": "q", "what": "w", "where": "", "date": "", "versions": "", "note": "", **more}
        return records.Record(on=on, case=case, value=value, unit=unit, command="benchmarks/a.py", commit="c", **own)

    rows = [
        row("10M parameters", "first", 1234.0, "ms"),
        row("1M parameters", "first", 0.5, "ratio", low=0.25, high=0.75),
        row("1M parameters", "last", 98.765, "%", deviation=0.126, note="of 2"),
    ]
    assert results.table(rows, "t", ["what"], ["on"], cases="lines").splitlines() == [
        "| t | 1M parameters | 10M parameters | from |",
        "| --- | --- | --- | --- |",
        "| w (first, last) | 0.50; 98.8 (of 2) % | 1,234 ms | a.py c |",
    ]
    assert results.table(rows, "t", ["on"], ["case"], full=True).splitlines()[2:] == [
        "| 1M parameters | 0.50 (0.25 to 0.75) | 98.77 ± 0.13 (of 2) % |",
        "| 10M parameters | 1,234 ms |  |",
    ]


def test_the_page_of_rules_shows_what_the_records_say(modules: Any) -> None:
    """With the number of seeds that ended at chance beside each mean without them, and the samples of longer runs."""
    records, _ = modules
    text = (DOCS / "rules.md").read_text()
    table = text.split("| rule | 1x | 4x | 16x | 64x |\n")[1].split("\n\n")[0].replace("*", "")
    names = {rule.replace("-", ""): rule for rule in vbs.rules.RULES}
    rows = {row.key(): row for row in records.newest(records.read()) if row.on.startswith("MNIST, ")}
    for line in table.splitlines()[1:]:
        (kind, rule), *cells = line.split("|")[1].strip().split(", "), *map(str.strip, line.split("|")[2:-1])
        for times, cell in zip(("1x", "4x", "16x", "64x"), cells, strict=True):
            by_question = {
                row.question: row
                for key, row in rows.items()
                if (key[1], key[2].split()[1], key[4]) == (names[rule.lower()], kind, times)
            }
            row, more = by_question["test accuracy"], by_question.get("samples of a run")
            if row.unit == "runs rejected":
                assert cell == "raises"
            elif row.unit == "runs at chance":
                assert cell == f"at chance {row.value:.0f} of {row.n}"
            else:
                notes = [row.note] if row.note else [f"{more.value}x the samples"] if more else []
                assert cell == " ".join([f"{row.value:.1f}", *(f"({note})" for note in notes)]), line


def test_the_variables_of_the_tips_keep_memory(modules: Any) -> None:
    """They are those of `step.py --keep-memory`, and a gradient that is allocated anew causes no page faults."""
    (line,) = [line for line in commands(DOCS / "tips.md") if "MALLOC" in line]
    variables = dict(pair.split("=") for pair in line.split()[1:])
    (found,) = re.findall(r"^KEEP_MEMORY = (\{.*?\})", (BENCHMARKS / "step.py").read_text(), re.MULTILINE)
    assert ast.literal_eval(found) == variables
    script = """
import numpy as np, resource
np.ones(1 << 23)  # 64 MiB
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(8):
    np.ones(1 << 23)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    plain, kept = (
        int(subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, check=True).stdout)
        for env in (dict(os.environ), {**os.environ, **variables})
    )
    assert kept < plain / 4
