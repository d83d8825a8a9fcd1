"""The commands of docs/capacity.md run, from a log to a training of MNIST, and those of docs/controllers.md."""

from __future__ import annotations

import shlex

import pytest

import variable_batch_size as vbs
from helpers.commands import run
from helpers.pages import DOCS, ROOT, TOUR, blocks, commands

TRACES = "replayed", "spot"
SHORT = ["--samples", "3000", "--epochs", "2", "--target", "0"]  # of the training


@pytest.mark.slow("simulates for a page")
def test_the_commands_of_the_page_of_controllers():
    for command in commands(DOCS / "controllers.md"):
        done = run(*shlex.split(command), cwd=ROOT)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.split()[:3] == ["constant:512", "noise-scale:1", "goodput:64-4096"]


def test_the_blocks_of_the_page_run_one_after_another(monkeypatch):
    monkeypatch.chdir(ROOT)
    names = {}
    for block in blocks(DOCS / "capacity.md", "python"):
        if "vbs.updates" not in block:  # trains with the objects of the quick start, as the page does when it is run
            exec(block, names)
    assert {"day", "own", "trace", "replayed", "measured"} <= set(names)
    spot, on_demand = names["run"].summary, names["same"].summary  # of the same progress, at the same speed
    assert on_demand["progress"] == pytest.approx(spot["progress"], rel=1e-3)
    assert on_demand["cost"] / spot["cost"] == pytest.approx(3 / 0.9, rel=0.1)  # the prices


@pytest.mark.nightly("trains")
def test_the_commands_lead_from_a_log_to_a_training(tmp_path):
    for folder in ("traces", "test"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    outputs = []
    for command in commands(DOCS / "capacity.md"):
        words = shlex.split(command)
        done = run(*words, *SHORT * (TOUR in words), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "vbs:" not in done.stderr
        outputs.append(done.stdout)
    assert "Paired differences to per-device:64" in "".join(outputs)
    assert (tmp_path / "runs" / "policies.png").stat().st_size > 10_000
    replayed, uninterrupted = (len(vbs.BatchTrace.from_csv(tmp_path / "runs" / f"{name}.csv")) for name in TRACES)
    assert replayed < uninterrupted
    assert "epochs       5, then 30.7% of epoch 5" in "".join(outputs)
    assert "epoch 1: accuracy" in "".join(outputs)
