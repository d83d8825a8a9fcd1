"""The commands of docs/evaluation.md run, with few samples and a small task in the place of MNIST."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from helpers.console import run_main
from helpers.pages import DOCS, ROOT, blocks, commands
from variable_batch_size.lab.evaluation import read_records, write_records

PAGE = DOCS / "evaluation.md"
LINES = [line for line in commands(PAGE) if line.startswith("vbs ")]


def small(words: list[str]) -> list[str]:
    """Return the arguments of a command that trains for a moment."""
    words = ["helpers.evaluation_tasks:Tiny" if word == "mnist-cnn" else word for word in words]
    words = [
        "8"
        if word == "256"
        else word.replace("0:32 128:128 192:512", "0:8 4:32").replace("per-device:64", "per-device:4")
        for word in words
    ]
    return [*words, "--samples", "128", "--between", "64"] if words[0] == "evaluate" else words


@pytest.mark.nightly("trains for its page")
@pytest.mark.filterwarnings("ignore:trace .* the batch size is .* for all 128 samples")  # those of the page have more
def test_the_commands_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "traces").symlink_to(ROOT / "traces")
    (task,) = blocks(PAGE, "python")
    (tmp_path / "ball.py").write_text(task)
    monkeypatch.chdir(tmp_path)
    outputs = []
    (tmp_path / "benchmarks").mkdir()
    for line in LINES:
        if found := re.search(r"benchmarks/\w+\.csv\.gz", line):  # a smaller one
            write_records(read_records("runs/small"), found[0])
        status, out, err = run_main(*small(shlex.split(line)[1:]))
        assert status == 0, err
        outputs.append(out)
    assert outputs[0].startswith("runs/small: 48 trainings")
    assert all("lost beside the reference: " in out for out in (outputs[0], outputs[4]))
    for name in (
        "large/report.html",
        "small/report.html",
        "small/report.csv",
        "ball/report-ball-Ball.png",
        "ends/report.csv",
        "machines/plan.json",
    ):
        assert (tmp_path / "runs" / name).exists()


def test_the_task_of_the_page_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (task,) = blocks(PAGE, "python")
    assert len(task.splitlines()) <= 27
    (tmp_path / "learned_ball.py").write_text(task)
    monkeypatch.chdir(tmp_path)
    arguments = ["evaluate", "learned_ball:Ball", "--trace", "16", "--rule", "constant", "--seeds", "1"]
    assert run_main(*arguments)[0] == 0
    (record,) = read_records("evaluation")
    losses = record.curve["loss"]
    assert losses is not None
    assert losses[-1] < 0.5 * losses[0]
