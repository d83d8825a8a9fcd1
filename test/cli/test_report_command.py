"""`vbs report` tells of the trainings that are there; `vbs evaluate` says, when it is stopped, how to continue."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.commands import environment, wait_for
from helpers.console import error_of, run_main
from helpers.pages import ROOT
from variable_batch_size.lab.evaluation import read_records, write_records
from variable_batch_size.lab.evaluation.plan import Plan
from variable_batch_size.lab.evaluation.record import keys_in

TINY = "helpers.evaluation_tasks:Tiny"
BOTH = ["--rule", "constant", "--rule", "linear"]
SMALL = [TINY, "--trace", "8", "--trace", "0:8 10:32", *BOTH, "--seeds", "2"]  # eight trainings of a tenth of a second


def start(*arguments: object) -> subprocess.Popen[str]:
    """Start `vbs` in a process and a process group of its own, as a terminal does."""
    variables = environment(PYTHONPATH=f"{ROOT}:{ROOT / 'test'}", OMP_NUM_THREADS="1")
    command = [sys.executable, "-m", "variable_batch_size", *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=variables, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def stop(evaluation: subprocess.Popen[str], folder: Path, number: signal.Signals) -> tuple[str, str]:
    """Send a signal after two trainings are done, and return what the process printed."""
    with evaluation:
        wait_for(lambda: len(keys_in(folder)) >= 2 or evaluation.poll() is not None, lambda: "no record was written")
        assert evaluation.poll() is None
        evaluation.send_signal(number)
        return evaluation.communicate()


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a complete evaluation."""
    folder = tmp_path_factory.mktemp("evaluation") / "records"
    status, _, err = run_main("evaluate", *SMALL, "--folder", folder)
    assert status == 0, err
    return folder


@pytest.mark.nightly("kills an evaluation")
def test_a_killed_evaluation_has_a_report_and_continues(tmp_path: Path) -> None:
    arguments = ["evaluate", *SMALL, "--samples", "2400", "--folder", tmp_path]
    stop(start(*arguments), tmp_path, signal.SIGKILL)
    there = len(keys_in(tmp_path))
    assert 2 <= there < 8
    status, out, err = run_main("report", tmp_path)
    assert (status, out.splitlines()[0]) == (0, f"report: {tmp_path / 'report.html'} ({there} of 8 trainings)"), err
    page = (tmp_path / "report.html").read_text()
    assert f"{8 - there} trainings of the plan have not ended: nothing is claimed yet." in page
    assert f"<code>vbs evaluate {TINY} --trace 8" in page
    status, out, err = run_main(*arguments)
    assert status == 0, err
    assert f"{there}/8" in err  # where the bar begins
    assert f"report: {tmp_path / 'report.html'} (8 of 8 trainings)\n" in out
    assert "nothing is claimed yet" not in (tmp_path / "report.html").read_text()
    assert len(Plan.read(tmp_path).keys) == 8


@pytest.mark.nightly("starts a process")
@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.nightly("starts processes"))])
def test_ctrl_c_says_how_to_continue(jobs: int, tmp_path: Path) -> None:
    if jobs > 1:
        pytest.importorskip("joblib")
    arguments = ["evaluate", *SMALL, "--samples", "2400", "--folder", tmp_path, "--jobs", jobs]
    evaluation = start(*arguments)
    out, err = stop(evaluation, tmp_path, signal.SIGINT)
    assert (evaluation.returncode, out) == (130, "")
    assert "Traceback" not in err
    last = err.splitlines()[-3:]
    assert re.fullmatch(r"vbs: interrupted after [2-8] of 8 trainings", last[0]), err
    assert last[1].startswith(f"to continue: vbs evaluate {TINY} --trace 8 --trace '0:8 10:32'")
    assert last[2] == f"for a report: vbs report {tmp_path}"


def test_which_rule_to_use_is_printed(tmp_path: Path, done: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    _, out, _ = run_main("report", done, "--output", tmp_path)
    first, empty, task, *lines = out.splitlines()
    assert (first, empty, task) == (f"report: {tmp_path / 'report.html'} (8 of 8 trainings)", "", TINY)
    assert max(map(len, lines)) <= 60
    text = " ".join(" ".join(lines).split())
    assert text.startswith("Whether the reference is tuned is not known: at batch size 8 and learning rate 0.05")
    assert "8 = all rules have the same trainings, bit for bit: use constant" in text
    assert (tmp_path / "report.csv").exists()


def test_the_report_of_a_table_is_that_of_its_records(tmp_path: Path, done: Path) -> None:
    write_records(read_records(done), tmp_path / "table.csv.gz")
    _, out, _ = run_main("report", tmp_path / "table.csv.gz")
    assert out == run_main("report", done)[1].replace(str(done), str(tmp_path / "table"))
    assert (tmp_path / "table" / "report.csv").read_bytes() == (done / "report.csv").read_bytes()


def test_a_wrong_argument_is_one_line(tmp_path: Path, done: Path) -> None:
    remedy = "pass --folder of vbs evaluate, or a table, *.csv.gz"
    for name, found in ((".", "none"), ("a", "no such file or folder"), ("a.csv.gz", "no such file or folder")):
        nothing = f"{tmp_path / name} must hold a training that has ended, got {found}; {remedy}"
        assert error_of("report", tmp_path / name) == (1, nothing)
    (tmp_path / "a.csv.gz").touch()
    assert error_of("report", tmp_path / "a.csv.gz")[1].startswith(f"{tmp_path / 'a.csv.gz'} must be a table with rows")
    used = f"{tmp_path / 'a.csv.gz'}: File exists; pass a path that can be used"
    assert error_of("report", done, "--output", tmp_path / "a.csv.gz") == (1, used)
    assert error_of("report", done, "--metric", "los")[1].startswith('metric must be "loss" or "accuracy", got')
    assert error_of("report", done, "--baseline", "lin")[1].startswith("baseline must be constant or linear, got")


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a folder that not even root may write to")
def test_a_folder_where_nothing_may_be_written(done: Path) -> None:
    assert "/proc/report.html" in error_of("report", done, "--output", "/proc")[1]


def test_a_report_of_the_whole_folder(tmp_path: Path, done: Path) -> None:
    """The page of a folder is that of all records in it, whichever command writes it."""
    shutil.copytree(done, tmp_path, dirs_exist_ok=True)
    status, out, err = run_main("evaluate", TINY, "--trace", "8", *BOTH, "--seeds", "1", "--folder", tmp_path)
    assert status == 0, err
    assert out.splitlines()[:2] == [
        f"{tmp_path}: 2 trainings, 0 of which failed",
        f"report: {tmp_path / 'report.html'} (8 of 8 trainings)",
    ]


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda text: text[: len(text) // 2], "JSONDecodeError: "),
        (lambda text: text.replace('"task": ', '"tusk": '), "ValueError: no task in the cell"),
        (lambda text: text.replace('"finished"', '"done"'), "ValueError: status 'done'"),
        (lambda text: text.replace('"samples": [0, ', '"samples": ['), "ValueError: columns of different lengths"),
        (lambda text: text.replace('"format": 1', '"format": 2'), "format 2"),
    ],
)
def test_a_damaged_record_is_named(change: Callable[[str], str], found: str, tmp_path: Path, done: Path) -> None:
    shutil.copytree(done, tmp_path, dirs_exist_ok=True)
    path = tmp_path / f"{min(keys_in(done))}.json"
    path.write_text(change(path.read_text()))
    for command in (["report", tmp_path], ["evaluate", *SMALL, "--folder", tmp_path]):
        status, _, err = run_main(*command)
        message = err.splitlines()[-1]
        assert status == 1
        assert message.startswith(f"vbs: error: {path} must be a record")
        assert f", got {found}" in message
        assert message.endswith("; delete it, and run the evaluation again")


def test_a_record_has_the_name_of_its_file(tmp_path: Path, done: Path) -> None:
    shutil.copytree(done, tmp_path, dirs_exist_ok=True)
    key = min(keys_in(done))
    (tmp_path / f"{key}.json").rename(tmp_path / f"{'f' * 16}.json")
    message = (
        f"{tmp_path / ('f' * 16)}.json must be the record of its name, got that of {key}; rename or delete the file"
    )
    assert error_of("report", tmp_path) == (1, message)
