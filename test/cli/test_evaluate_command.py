"""`vbs evaluate` trains what has no record, and writes nothing before its arguments are checked."""

from __future__ import annotations

import itertools
import re
import sys

import pytest

import variable_batch_size as vbs
from helpers.console import error_of, run_main
from helpers.evaluation_tasks import Tiny
from variable_batch_size.lab.evaluation import read
from variable_batch_size.lab.evaluation.records import NAME, REFERENCE

pytestmark = pytest.mark.filterwarnings("ignore:trace .*the batch size is")
TASKS = "helpers.evaluation_tasks:"
TINY = f"{TASKS}Tiny"
BOTH = ["--rule", "constant", "--rule", "linear"]


@pytest.mark.slow("trains")
def test_trains_each_cell_once(tmp_path):
    (tmp_path / "nodes.csv").write_text("seconds,nodes\n0,1\n5,3\n600,3\n")
    arguments = ["evaluate", TINY, "--trace", "0:8 10:32", "--trace", f"per-device:4@{tmp_path / 'nodes.csv'}"]
    arguments += ["--rule", "linear", "--samples-per-second", 10, "--price", 2, "--folder", tmp_path / "runs"]
    arguments += ["--name", "growing", "--name", "a cloud", "--seeds", 2, "--lr-factor", 2, "--baseline", "root"]
    status, out, _ = run_main(*arguments, "--dry-run")
    assert (status, out) == (0, f"{tmp_path / 'runs'}: 22 runs, 22 to make, of 5,280 samples in all\n")
    assert not (tmp_path / "runs").exists()
    status, out, err = run_main(*arguments)
    assert status == 0, err
    assert "22/22" in err
    found = read(tmp_path / "runs")
    rows = found.trainings
    assert set(zip(rows["trace"], rows["rule"], strict=True)) == {
        (REFERENCE, "constant"), *itertools.product(["growing", "a cloud"], ["root", "linear"])
    }  # fmt: skip
    assert all(curve["seconds"] and curve["cost"] for curve in rows["curve"])
    assert [plan.keys for plan in found.plans] == [tuple(rows["key"])]
    assert found.plans[0].command.startswith(f"vbs evaluate {TINY} --trace '0:8 10:32' --trace per")
    assert run_main(*arguments, "--dry-run")[1].endswith("22 runs, 0 to make, of 0 samples in all\n")
    written = (tmp_path / "runs" / NAME).read_bytes()
    assert run_main(*arguments)[0] == 0
    assert (tmp_path / "runs" / NAME).read_bytes() == written


def test_traces_have_a_name_each(tmp_path):
    arguments = ["evaluate", TINY, "--trace", 8, "--trace", "0:8 10:32", *BOTH, "--name", "small"]
    said = "--name must be given once for each --trace, each another one, got 1: ['small']"
    assert error_of(*arguments) == (2, said)


def test_goes_on_from_a_checkpoint(tmp_path):
    task = Tiny()
    model = task.model(0)
    sampler = vbs.CustomSampler(task.dataset(), 8, 1, 0, 4, fixed_shape=False)
    optimizer = vbs.CustomOptimizer(task.optimizer(model, 0.05), sampler, 8, rule="linear")
    with vbs.Checkpoint(tmp_path / "start", model=model, optimizer=optimizer) as checkpoint:
        checkpoint.save()
    rest = ["--trace", "0:8 9:16", *BOTH, "--from", tmp_path / "start"]
    found = error_of("evaluate", TINY, *rest)
    assert found[0] == 1
    assert found[1].startswith("runs can continue from a checkpoint with model, optimizer, scheduler, a Progress")
    done = run_main("evaluate", f"{TASKS}NoSchedule", *rest, "--dry-run")
    assert done[1] == "evaluation: 25 runs, 25 to make, of 6,000 samples in all\n", done


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["mnist-cn", "--trace", 8, *BOTH], 1, "a task must be mnist-cnn, char-gpt or package.module:name"),
        ([TINY, "--trace", 8, "--rule", "lin"], 2, "rule must be one of constant, linear,"),
        (
            [TINY, "--trace", 100, *BOTH],
            1,
            f"task {TINY}, trace 100, rule constant: every batch size of the trace must",
        ),
        ([TINY, "--trace", 8], 2, "Missing option '--rule'"),
        ([TINY, "--trace", 8, *BOTH, "--lr", -1], 2, "--lr must be > 0 and finite, got -1.0"),
        ([TINY, "--trace", 8, *BOTH, "--address", "auto"], 1, "address must be None without Ray, got 'auto'; pass"),
        ([TINY, "--trace", "per-device:4@nodes.csv", *BOTH], 1, "trace per-device:4@nodes.csv of the task"),
    ],
)
def test_a_wrong_argument_is_one_line(arguments, status, message, tmp_path):
    found = error_of("evaluate", *arguments, "--folder", tmp_path / "records")
    assert found[0] == status
    assert found[1].startswith(message), found[1]
    assert not (tmp_path / "records").exists()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://[::1]:1", "cluster"])
def test_an_address_where_no_ray_runs_is_one_line(address, tmp_path):
    pytest.importorskip("ray")
    message = "address must be auto, or HOST:PORT or ray://HOST:PORT of a running Ray"
    options = ["--trace", 8, *BOTH, "--folder", tmp_path, "--engine", "ray"]
    status, out, err = run_main("evaluate", TINY, *options, "--address", address)
    assert (status, out) == (1, "")
    assert err.splitlines()[-1].startswith(f"vbs: error: {message}, got {address!r} ("), err  # after the progress bar


def test_a_missing_ray_is_named_with_the_command_that_installs_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    _, _, err = run_main("evaluate", TINY, "--trace", 8, *BOTH, "--folder", tmp_path, "--engine", "ray")
    message = "this needs ray, which is not installed; run: pip install 'variable_batch_size[ray]'"
    assert err.splitlines()[-1] == f"vbs: error: {message}"


@pytest.mark.parametrize("option", [[], ["--dry-run"]])
def test_what_the_report_needs_is_missed_before_anything_is_trained(option, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    status, out, err = run_main("evaluate", TINY, "--trace", 8, *BOTH, "--folder", tmp_path / "records", *option)
    assert (status, out) == (1, "")
    assert "matplotlib" in err.splitlines()[-1]
    assert not (tmp_path / "records").exists()


@pytest.mark.parametrize(
    ("task", "beginning"),
    [
        ("NotCreated", "the task {task} cannot be created: KeyError: 'an error of the task'"),
        ("NoData", "task {task}, trace 8, rule constant: RuntimeError: an error of the task"),
    ],
)
def test_an_error_of_the_code_of_a_task_names_it(task, beginning, tmp_path):
    status, message = error_of("evaluate", f"{TASKS}{task}", "--trace", 8, *BOTH, "--folder", tmp_path)
    remedy = "; mend it and run the command again, or set VBS_TRACEBACK=1 to see where"
    assert (status, message) == (1, beginning.format(task=f"{TASKS}{task}") + remedy)


def test_a_training_that_fails_is_named(tmp_path):
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
def test_a_task_that_cannot_be_imported(content, beginning, tmp_path, monkeypatch):
    (tmp_path / "faulty.py").write_text(content)
    monkeypatch.chdir(tmp_path)
    status, message = error_of("evaluate", "faulty:Task", "--trace", 8, *BOTH)
    assert status == 1
    assert message.startswith(beginning)


def test_a_folder_that_is_a_file(tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "records"):
        _, message = error_of("evaluate", TINY, "--trace", 8, *BOTH, "--folder", folder)
        assert message.startswith(f"folder must be one that can be created, got '{folder}': ")
        assert message.endswith("; choose another one")
