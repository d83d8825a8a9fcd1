"""`vbs report` tells of the trainings that are there; `vbs evaluate` says, when it is stopped, how to continue."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from html import unescape
from pathlib import Path

import pytest

from helpers.commands import environment, wait_for
from helpers.console import error_of, run_main
from helpers.pages import ROOT
from variable_batch_size.lab.evaluation import Experiment, Plan, read_records, write_records, write_report
from variable_batch_size.lab.evaluation.record import Record, keys_in

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
    assert (status, out) == (0, f"report: {tmp_path / 'report.html'} ({there} of 8 trainings)\n"), err
    page = (tmp_path / "report.html").read_text()
    assert f"Trainings: {there} of 8, 0 of them failed" in page
    assert f"<code>vbs evaluate {TINY} --trace 8" in page
    status, out, err = run_main(*arguments)
    assert status == 0, err
    assert f"{there}/8" in err  # where the bar begins
    assert out.endswith(f"report: {tmp_path / 'report.html'} (8 of 8 trainings)\n")
    assert "Trainings: 8, 0 of them failed" in (tmp_path / "report.html").read_text()
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


@pytest.mark.nightly("trains")
def test_trainings_that_judge_are_still_to_come_while_learning_rates_are_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["evaluate", TINY, "--trace", "8", *BOTH, "--lr-factor", 0.5, "--lr-factor", 1, "--tuning-seeds", 1]
    arguments += ["--seeds", 2, "--folder", tmp_path]

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Experiment, "judged", interrupted)
        status, _, err = run_main(*arguments)
    assert status == 130
    assert "vbs: interrupted after 4 of at least 4 trainings" in err
    _, out, _ = run_main("report", tmp_path, "--recommend")
    assert out.startswith(f"report: {tmp_path / 'report.html'} (4 of at least 4 trainings)\n")
    assert "\nthose that judge at the learning rates that are chosen are still to come: all of this may change." in out
    page = (tmp_path / "report.html").read_text()
    assert "Trainings: 4 of at least 4 (those that judge are planned when the learning rates are chosen), 0 of" in page
    min(tmp_path.glob("????????????????.json")).unlink()
    _, out, _ = run_main("report", tmp_path, "--recommend")
    assert "\n1 trainings and then those that judge at the learning rates that are chosen are still to come" in out
    status, out, err = run_main(*arguments)
    assert status == 0, err
    number = len(keys_in(tmp_path))
    assert number > 4
    assert out.endswith(f"report: {tmp_path / 'report.html'} ({number} of {number} trainings)\n")
    assert f"Trainings: {number}, 0 of them failed" in (tmp_path / "report.html").read_text()


@pytest.mark.nightly("trains")
@pytest.mark.filterwarnings("always:the (records|source) of the task")
def test_records_of_two_versions_of_a_task_are_told(tmp_path: Path, done: Path) -> None:
    shutil.copytree(done, tmp_path, dirs_exist_ok=True)
    path = min(tmp_path.glob("????????????????.json"))
    source = Record.read(path).environment["source of the task"]
    path.write_text(path.read_text().replace(source, "0" * 16))
    remedy = "if trainings differ by that, give the task another version, or train in another folder\n"
    mixed = f"vbs: warning: the records of the task {TINY} are of 2 versions of its source; {remedy}"
    status, _, err = run_main("report", tmp_path)
    assert (status, err) == (0, mixed)
    assert run_main("report", done)[2] == ""
    status, _, err = run_main("evaluate", *SMALL[:-1], "3", "--folder", tmp_path)
    assert status == 0, err
    remedy = "if trainings differ by that, give the task another version, or choose another folder\n"
    assert f"warning: the source of the task {TINY} has changed since its record {path.stem}; {remedy}" in err
    assert err.endswith(mixed)


@pytest.mark.slow("trains")
def test_an_extended_evaluation_is_all_of_it(tmp_path: Path, done: Path) -> None:
    shutil.copytree(done, tmp_path, dirs_exist_ok=True)
    for record in list(tmp_path.glob("????????????????.json"))[:3]:
        record.unlink()
    before = Plan.read(done)
    before.extended(["f" * 16, "e" * 16], "vbs evaluate more").write(tmp_path)
    status, out, _ = run_main("report", tmp_path)
    assert (status, out) == (0, f"report: {tmp_path / 'report.html'} (5 of 10 trainings)\n")
    page = unescape((tmp_path / "report.html").read_text())
    assert f"{before.command}\nvbs evaluate more</code>" in page


def test_a_report_of_the_whole_folder(tmp_path: Path, done: Path) -> None:
    """The page of a folder is that of all records in it, whichever command writes it."""
    shutil.copytree(done, tmp_path, dirs_exist_ok=True)
    status, out, err = run_main("evaluate", TINY, "--trace", "8", *BOTH, "--seeds", "1", "--folder", tmp_path)
    assert status == 0, err
    assert out.splitlines() == [
        f"{tmp_path}: 2 trainings, 0 of which failed",
        f"report: {tmp_path / 'report.html'} (8 of 8 trainings)",
    ]


def test_a_plan_that_is_deleted_forgets_what_is_not_asked_for_again(tmp_path: Path, done: Path) -> None:
    shutil.copytree(done, tmp_path, dirs_exist_ok=True)
    (tmp_path / "plan.json").unlink()
    (tmp_path / "report-of-a-former-title.png").touch()
    status, out, err = run_main("evaluate", TINY, "--trace", "8", *BOTH, "--seeds", "1", "--folder", tmp_path)
    assert status == 0, err
    said = f"report: {tmp_path / 'report.html'} (2 of 2 trainings; 6 others in the folder are not in its plan.json)"
    assert out.splitlines()[1] == said
    assert [path.name for path in tmp_path.glob("*.png")] == ["report-helpers-evaluation-tasks-Tiny.png"]


@pytest.mark.slow("draws a report")
def test_recommendations_are_wrapped(done: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    _, out, _ = run_main("report", done, "--recommend")
    lines = out.splitlines()[1:]
    assert [line.split("   ")[0] for line in lines[1:4]] == ["trace", "0:8 10:32", "8"]
    assert max(map(len, lines[5:])) in range(50, 61)
    text = " ".join(" ".join(lines).split())
    assert f"For {TINY} under 8, use constant" in text
    assert run_main("evaluate", *SMALL, "--folder", done, "--recommend")[1].splitlines()[2:] == lines


@pytest.mark.slow("draws two reports")
def test_the_report_of_a_table_is_that_of_its_records(tmp_path: Path, done: Path) -> None:
    write_records(read_records(done), tmp_path / "table.csv.gz")
    status, out, err = run_main("report", tmp_path / "table.csv.gz")
    assert (status, out) == (0, f"report: {tmp_path / 'table' / 'report.html'} (8 of 8 trainings)\n"), err
    for name in ("report.csv", "report-table.csv"):
        assert (tmp_path / "table" / name).read_bytes() == (done / name).read_bytes()


@pytest.mark.nightly("trains")
def test_a_task_that_cannot_be_loaded_has_no_target(tmp_path: Path, done: Path) -> None:
    for record in read_records(done):
        vars(record)["cell"]["task"] = "no_such_module:Task"
        record.write(tmp_path)
    _, err = start("report", tmp_path).communicate()
    assert err.startswith("vbs: warning: the target of the task no_such_module:Task is not known: a task must be ")
    assert err.count("\n") == 1
    assert "The target is" not in (tmp_path / "report.html").read_text()
    assert run_main("report", done)[0] == 0
    assert "The target is loss 0.5" in (done / "report.html").read_text()


def test_a_wrong_argument_is_one_line(tmp_path: Path, done: Path) -> None:
    remedy = "pass --folder of vbs evaluate, or a table, *.csv.gz"
    for name, found in ((".", "none"), ("a", "no such folder"), ("a.csv.gz", "no such file")):
        nothing = f"{tmp_path / name} must hold the record of a training, got {found}; {remedy}"
        assert error_of("report", tmp_path / name) == (1, nothing)
    (tmp_path / "a.csv.gz").touch()
    assert error_of("report", tmp_path / "a.csv.gz")[1].startswith(f"{tmp_path / 'a.csv.gz'} must be a table with rows")
    used = f"{tmp_path / 'a.csv.gz'}: File exists; pass a path that can be used"
    assert error_of("report", done, "--output", tmp_path / "a.csv.gz") == (1, used)
    assert error_of("report", done, "--metric", "los")[1].startswith('metric must be "loss" or "accuracy", got')
    assert error_of("report", done, "--baseline", "lin")[1].startswith("baseline must be constant or linear, got")


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


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a folder that not even root may write to")
def test_a_folder_where_nothing_may_be_written(done: Path) -> None:
    with pytest.raises(
        OSError, match=r"/proc/report-.*\.png.* must be a file that can be written, got .*; choose another"
    ):
        write_report(read_records(done), "/proc")
