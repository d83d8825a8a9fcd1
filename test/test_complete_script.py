"""The complete script: its output on the page, and that an interrupted run goes on in two processes."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys

import pytest

from helpers.commands import environment, run
from helpers.pages import DOCS, ROOT, blocks, commands

PAGE, SCRIPT = DOCS / "complete_script.md", ROOT / "examples" / "train.py"
LINE = re.compile(r"epoch (\d+): accuracy ([\d.]+)% after (\d+) updates")


def told(output):
    """Return accuracy and updates by epoch."""
    return {int(epoch): (float(accuracy), int(updates)) for epoch, accuracy, updates in LINE.findall(output)}


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(ROOT / "traces", tmp_path / "traces")
    return tmp_path


def test_the_script_is_short_and_the_page_runs_it():
    assert SCRIPT.read_text().count("\n") <= 60
    assert commands(PAGE) == ["python examples/train.py", "torchrun --nproc-per-node=2 examples/train.py"]


@pytest.mark.slow("trains in three processes")
@pytest.mark.torch
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_goes_on_in_two_processes(folder, sent):
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, str(SCRIPT)]
    with subprocess.Popen(
        command, cwd=folder, env=environment(**variables), stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout is not None
        begun = [first.stdout.readline() for _ in range(2)]
        first.send_signal(sent)
        rest = first.stdout.read()
    assert first.returncode == 143
    resumed = run("torchrun", "--standalone", "--nproc-per-node=2", str(SCRIPT), cwd=folder, **variables)
    assert resumed.returncode == 0, resumed.stderr
    epochs = told("".join(begun) + rest) | told(resumed.stdout)
    shown = told(blocks(PAGE, "text")[0])
    assert epochs.keys() == shown.keys()
    for epoch, (accuracy, updates) in epochs.items():
        assert updates == shown[epoch][1]
        assert accuracy == pytest.approx(shown[epoch][0], abs=1.0)
    rows = (folder / "runs" / "train" / "scalars.csv").read_text().splitlines()
    assert len(rows) == 1 + 1160 // 10 + len(epochs)  # one each 10 updates, and one for each evaluation
