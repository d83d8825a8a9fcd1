"""`vbs report` tells of the trainings that are there, also while others train, or none does any more."""

from __future__ import annotations

import gzip
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.commands import environment, wait_for
from helpers.console import error_of, run_main
from helpers.pages import ROOT
from variable_batch_size.lab.evaluation import read
from variable_batch_size.lab.evaluation.records import NAME

pytestmark = pytest.mark.filterwarnings("ignore:trace .*the batch size is")
TINY = "helpers.evaluation_tasks:Tiny"
BOTH = ["--rule", "constant", "--rule", "linear"]
SMALL = [TINY, "--trace", "8", "--trace", "0:8 10:32", *BOTH, "--seeds", "2"]  # 14 trainings of a tenth of a second


def lines(folder):
    """Return the number of trainings that have ended."""
    return max(0, (folder / NAME).read_bytes().count(b"\n") - 1) if (folder / NAME).exists() else 0


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """The folder of a complete evaluation."""
    folder = tmp_path_factory.mktemp("evaluation") / "records"
    status, _, err = run_main("evaluate", *SMALL, "--folder", folder)
    assert status == 0, err
    return folder


@pytest.mark.nightly("kills an evaluation")
def test_a_killed_evaluation_has_a_report_and_continues(tmp_path):
    arguments = ["evaluate", *SMALL, "--samples", "2400", "--folder", tmp_path]
    variables = environment(PYTHONPATH=f"{ROOT}:{ROOT / 'test'}", OMP_NUM_THREADS="1")
    command = [sys.executable, "-m", "variable_batch_size", *map(str, arguments)]
    with subprocess.Popen(command, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as evaluation:
        wait_for(lambda: lines(tmp_path) >= 2 or evaluation.poll() is not None, lambda: "nothing was written")
        assert evaluation.poll() is None
        evaluation.send_signal(signal.SIGKILL)
    there = lines(tmp_path)
    assert 2 <= there < 14
    status, out, err = run_main("report", tmp_path)
    assert (status, out.splitlines()[0]) == (0, f"report: {tmp_path / 'report.html'} ({there} of 14 runs)"), err
    page = (tmp_path / "report.html").read_text()
    assert f"{14 - there} runs of the plan have not ended: nothing is claimed yet." in page
    assert f"<code>vbs evaluate {TINY} --trace 8" in page
    status, out, err = run_main(*arguments)
    assert status == 0, err
    assert f"{there}/14" in err  # where the bar begins
    assert f"report: {tmp_path / 'report.html'} (14 of 14 runs)\n" in out
    assert "nothing is claimed yet" not in (tmp_path / "report.html").read_text()
    assert len(read(tmp_path).plans) == 1


def test_which_rule_to_use_is_printed(tmp_path, done, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    _, out, _ = run_main("report", done, "--output", tmp_path)
    first, empty, task, *lines = out.splitlines()
    assert (first, empty, task) == (f"report: {tmp_path / 'report.html'} (14 of 14 runs)", "", TINY)
    assert max(map(len, lines)) <= 60
    text = " ".join(" ".join(lines).split())
    assert text.startswith("Whether the reference is tuned is not decided: at batch size 8 and learning rate 0.05,")
    assert "= the batch size is constant: a rule is a learning rate here" in text
    assert (tmp_path / "report.csv").exists()


def test_the_report_of_a_file_is_that_of_its_folder(tmp_path, done):
    (tmp_path / "kept.jsonl.gz").write_bytes(gzip.compress((done / NAME).read_bytes()))
    _, out, _ = run_main("report", tmp_path / "kept.jsonl.gz")
    assert out == run_main("report", done)[1].replace(str(done), str(tmp_path / "kept"))
    assert (tmp_path / "kept" / "report.csv").read_bytes() == (done / "report.csv").read_bytes()


def test_a_wrong_argument_is_one_line(tmp_path, done):
    for name in (".", "a", "a.csv.gz"):
        nothing = f"an evaluation must be a folder with {NAME}, got '{tmp_path / name}'"
        assert error_of("report", tmp_path / name) == (1, f"{nothing}; pass the --folder of vbs evaluate, or its file")
    (tmp_path / "a.csv.gz").touch()
    assert error_of("report", tmp_path / "a.csv.gz")[1].startswith(f"{tmp_path / 'a.csv.gz'} must be a table of runs")
    (tmp_path / NAME).touch()
    assert error_of("report", tmp_path)[1].startswith(f"{tmp_path} must hold a run that has ended, got none; run")
    used = f"{tmp_path / 'a.csv.gz'}: File exists; pass a path that can be used"
    assert error_of("report", done, "--output", tmp_path / "a.csv.gz") == (1, used)
    assert error_of("report", done, "--metric", "los")[1].startswith('metric must be "loss" or "accuracy", got')
    assert error_of("report", done, "--baseline", "lin")[1].startswith("baseline must be constant or linear, got")


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a folder that not even root may write to")
def test_a_folder_where_nothing_may_be_written(done):
    assert "/proc/report.html" in error_of("report", done, "--output", "/proc")[1]


def test_a_command_shows_what_a_wider_one_says_whose_trainings_it_asks_for(tmp_path, done):
    shutil.copytree(done, tmp_path, dirs_exist_ok=True)
    status, out, err = run_main("evaluate", TINY, "--trace", "8", *BOTH, "--seeds", "1", "--folder", tmp_path)
    assert status == 0, err
    assert out.splitlines()[0] == f"report: {tmp_path / 'report.html'} (14 of 14 runs)"
