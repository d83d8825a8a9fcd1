"""The example for transformers, as it is; it resumes, too."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path

import pytest

from helpers.pages import ROOT

EXAMPLE = ROOT / "examples" / "trainers" / "transformers_classifier.py"


def test_the_example_learns_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: object) -> None:
    main = runpy.run_path(str(EXAMPLE))["main"]
    monkeypatch.setattr("sys.argv", ["example"])
    main(str(tmp_path))
    output = capsys.readouterr().out  # type: ignore[attr-defined]
    *_, last = sorted(tmp_path.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    updates = int(last.name.split("-")[1])
    assert f"accuracy after {updates} updates: 1.00" in output
    shutil.rmtree(last)
    monkeypatch.setattr("sys.argv", ["example", "--resume"])
    main(str(tmp_path))
    assert f"accuracy after {updates} updates: 1.00" in capsys.readouterr().out  # type: ignore[attr-defined]
