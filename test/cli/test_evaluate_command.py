"""`vbs evaluate` trains what has no record, and writes nothing before its arguments are checked."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from helpers.console import error_of, run_main
from variable_batch_size.lab.evaluation import Plan, read_records

TASKS = "helpers.evaluation_tasks:"
TINY = f"{TASKS}Tiny"
BOTH = ["--rule", "constant", "--rule", "linear"]


def test_trains_each_cell_once(tmp_path: Path) -> None:
    (tmp_path / "nodes.csv").write_text("seconds,nodes\n0,1\n20,3\n600,3\n")
    arguments = ["evaluate", TINY, "--trace", "0:8 10:32", "--trace", f"per-device:4@{tmp_path / 'nodes.csv'}", *BOTH]
    arguments += ["--seeds", 1, "--samples-per-second", 10, "--price", 2, "--folder", tmp_path / "records"]
    status, out, _ = run_main(*arguments, "--dry-run")
    assert (status, out) == (0, f"{tmp_path / 'records'}: 5 trainings, 5 to make, of 1,200 samples in all\n")
    assert not (tmp_path / "records").exists()
    status, out, err = run_main(*arguments)
    assert status == 0, err
    assert out.startswith(f"{tmp_path / 'records'}: 5 trainings, 0 of which failed\n")
    assert "5/5" in err
    records = read_records(tmp_path / "records")
    assert {record.cell["rule"] for record in records} == {"constant", "linear"}
    assert all(record.curve["seconds"] and record.curve["cost"] for record in records)
    assert Plan.read(tmp_path / "records").keys == {record.key for record in records}
    assert Plan.read(tmp_path / "records").command.startswith(f"vbs evaluate {TINY} --trace '0:8 10:32' --trace per")
    assert run_main(*arguments, "--dry-run")[1].endswith("5 trainings, 0 to make, of 0 samples in all\n")


@pytest.mark.slow("trains")
def test_traces_have_the_names_that_they_are_given(tmp_path: Path) -> None:
    arguments = ["evaluate", TINY, "--trace", 8, "--trace", "0:8 10:32", *BOTH, "--seeds", 1, "--folder", tmp_path]
    status, _, err = run_main(*arguments, "--name", "small", "--name", "growing")
    assert status == 0, err
    assert {record.cell["trace"] for record in read_records(tmp_path)} == {"small", "growing", "the reference"}
    page = (tmp_path / "report.html").read_text()
    assert "<h3>growing</h3>" in page
    status, said = error_of(*arguments, "--name", "small")[:2]
    assert (status, said) == (2, "--name must be given once for each --trace, each another one, got 1: ['small']")


def test_a_dry_run_says_what_follows_the_tuning_and_what_can_be_seen(tmp_path: Path) -> None:
    arguments = ["evaluate", TINY, "--trace", "0:8 10:32", *BOTH, "--seeds", 5, "--folder", tmp_path, "--dry-run"]
    for factor in (0.5, 1, 2):
        arguments += ["--lr-factor", factor]
    lines = run_main(*arguments, "--tuning-seeds", 3)[1].splitlines()
    assert lines == [
        f"{tmp_path}: 27 trainings, 27 to make, of 6,480 samples in all",
        "then up to 30 trainings at the factors that these choose, to judge",
        "with 5 seeds and 1 comparisons, a difference of 2.4 standard deviations is claimed in 80 % of cases",
    ]


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (
            ["mnist-cn", "--trace", 8, *BOTH],
            1,
            "a task must be mnist-cnn, fashion-cnn, char-gpt, cifar10-resnet or package.module:name",
        ),
        ([TINY, "--trace", 8, "--rule", "lin"], 2, "a rule must be one of constant, linear,"),
        (
            [TINY, "--trace", 100, *BOTH],
            1,
            f"task {TINY}, trace 100, rule constant: every batch size of the trace must",
        ),
        ([TINY, "--trace", 8], 2, "Missing option '--rule'"),
        ([TINY, *BOTH], 2, "Missing option '--trace'"),
        ([TINY, "--trace", 8, *BOTH, "--lr", -1], 2, "--lr must be > 0 and finite, got -1.0"),
        ([TINY, "--trace", 8, *BOTH, "--address", "auto"], 1, "address must be None without Ray, got 'auto'; pass"),
        (["no_module:T", "--trace", 8, *BOTH], 1, "a task must be mnist-cnn, fashion-cnn, char-gpt, cifar10-resnet or"),
        ([f"{TASKS}NotThere", "--trace", 8, *BOTH], 1, f"the task {TASKS}NotThere must be in "),
        ([f"{TASKS}NoLoss", "--trace", 8, *BOTH], 1, f"the task {TASKS}NoLoss must have model, dataset, loss"),
        ([TINY, "--trace", "per-device:4@nodes.csv", *BOTH], 1, "trace per-device:4@nodes.csv of the task"),
        ([TINY, "--trace", "nothing.csv", *BOTH], 1, "trace nothing.csv of the task"),
        ([TINY, "--trace", 8, "--rule", "power"], 2, "the rule power needs its exponent, got none; pass power:NUMBER"),
    ],
)
def test_a_wrong_argument_is_one_line(arguments: list[object], status: int, message: str, tmp_path: Path) -> None:
    found = error_of("evaluate", *arguments, "--folder", tmp_path / "records")
    assert found[0] == status
    assert found[1].startswith(message), found[1]
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:1", "address must be that of a running Ray, got '127.0.0.1:1' (Connection refused); start it"),
        ("ray://[::1]:1", "address must be that of a running Ray, got 'ray://[::1]:1' ("),
        ("cluster", "address must be auto, HOST:PORT or ray://HOST:PORT, got 'cluster'; pass one of these"),
    ],
)
def test_an_address_where_no_ray_runs_is_one_line(address: str, message: str, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    options = ["--trace", 8, *BOTH, "--folder", tmp_path, "--engine", "ray"]
    status, out, err = run_main("evaluate", TINY, *options, "--address", address)
    assert (status, out) == (1, "")
    assert err.splitlines()[-1].startswith(f"vbs: error: {message}"), err  # after the progress bar


def test_a_missing_ray_is_named_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    _, _, err = run_main("evaluate", TINY, "--trace", 8, *BOTH, "--folder", tmp_path, "--engine", "ray")
    message = "this needs ray, which is not installed; run: pip install 'variable_batch_size[ray]'"
    assert err.splitlines()[-1] == f"vbs: error: {message}"


@pytest.mark.parametrize(
    ("task", "beginning"),
    [
        ("NotCreated", "the task {task} cannot be created: KeyError: 'an error of the task'"),
        ("NoData", "task {task}, trace 8, rule constant: RuntimeError: an error of the task"),
    ],
)
def test_an_error_of_the_code_of_a_task_names_it(task: str, beginning: str, tmp_path: Path) -> None:
    status, message = error_of("evaluate", f"{TASKS}{task}", "--trace", 8, *BOTH, "--folder", tmp_path)
    remedy = "; mend it and run the command again, or set VBS_TRACEBACK=1 to see where"
    assert (status, message) == (1, beginning.format(task=f"{TASKS}{task}") + remedy)


def test_a_training_that_fails_is_named(tmp_path: Path) -> None:
    status, out, err = run_main("evaluate", f"{TASKS}Failing", "--trace", 8, *BOTH, "--folder", tmp_path)
    last = err.splitlines()[-1]
    assert (status, out) == (1, "")
    assert re.match(
        r"vbs: error: the training [0-9a-f]{16} \(helpers\..*, seed 0\) failed: ZeroDivisionError: an e", last
    )
    assert last.endswith("; mend it and run the command again, or set VBS_TRACEBACK=1 to see where")


@pytest.mark.parametrize(
    ("content", "beginning"),
    [
        ("import no_such_module", "the task faulty:Task imports no_such_module, which is neither installed nor in /"),
        ("def (:", "the task faulty:Task cannot be imported: SyntaxError: invalid syntax"),
    ],
)
def test_a_task_that_cannot_be_imported(
    content: str, beginning: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "faulty.py").write_text(content)
    monkeypatch.chdir(tmp_path)
    status, message = error_of("evaluate", "faulty:Task", "--trace", 8, *BOTH)
    assert status == 1
    assert message.startswith(beginning)


def test_a_trace_that_ends_too_early(tmp_path: Path) -> None:
    trace = tmp_path / "short.csv"
    trace.write_text("step,batchsize\n0,8\n1,8\n")
    _, message = error_of("evaluate", TINY, "--trace", trace, *BOTH, "--folder", tmp_path / "records")
    assert message.startswith(f"task {TINY}, trace {trace}, rule constant: the trace must last until the training ends")
    assert message.endswith('or pass on_end="stop", "hold" or "cycle"')
    log = tmp_path / "nodes.csv"
    log.write_text("seconds,nodes\n0,1\n20,3\n")
    under = ["--trace", f"per-device:4@{log}", "--samples-per-second", 1, "--folder", tmp_path / "records"]
    _, message = error_of("evaluate", TINY, *under, *BOTH)
    assert "the capacity trace must last for the 240 samples of the training, got 20 until second 20; " in message
    assert not list(tmp_path.rglob("*.json"))


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "records"):
        _, message = error_of("evaluate", TINY, "--trace", 8, *BOTH, "--folder", folder)
        assert message.startswith(f"folder must be one that can be created, got '{folder}': ")
        assert message.endswith("; choose another one")


@pytest.mark.nightly("trains")
def test_trainings_that_cannot_be_compared_lie_in_one_folder(tmp_path: Path) -> None:
    """Each is a task of its own in the report: other samples, another learning rate of the reference."""
    arguments = ["evaluate", TINY, "--trace", 8, *BOTH, "--seeds", 1, "--folder", tmp_path]
    for others in ([], ["--samples", 100], ["--lr", 0.1]):
        status, _, err = run_main(*arguments, *others)
        assert status == 0, err
    page = (tmp_path / "report.html").read_text()
    found = re.findall(r"<h2>helpers.evaluation_tasks:Tiny, (.*)</h2>", page)
    assert found == [
        f"samples {kind}" for kind in ("100, learning rate 0.05", "240, learning rate 0.05", "240, learning rate 0.1")
    ]
