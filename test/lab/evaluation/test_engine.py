"""An evaluation brings the same, whatever stops it and wherever it trains; what is done is not trained again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from helpers.commands import environment
from helpers.evaluation_tasks import brought, experiment
from helpers.pages import ROOT
from variable_batch_size.lab.evaluation import Experiment, read, run
from variable_batch_size.lab.evaluation.provenance import content_hash, task_facts
from variable_batch_size.lab.evaluation.records import NAME, REFERENCE

pytestmark = pytest.mark.filterwarnings("ignore:trace .*the batch size is")
TINY = "helpers.evaluation_tasks:Tiny"
TRACES = ["0:8 10:32", "noise-scale:1"]


def trained(cells, folder, **options):
    return run(cells, folder, progress=False, **options)


def test_a_second_run_trains_nothing_and_an_extended_one_only_what_is_new(tmp_path):
    order = tmp_path / "order"
    own = {"task": "Ordered", "arguments": {"file": str(order)}, "baseline": "linear"}
    first = trained(experiment(**own), tmp_path / "runs", command="first")
    assert len(first.trainings) == 1 + 3
    written, seeds = (tmp_path / "runs" / NAME).read_bytes(), order.read_text()
    assert brought(trained(experiment(**own), tmp_path / "runs", command="again")) == brought(first)
    assert (tmp_path / "runs" / NAME).read_bytes() == written
    more = trained(experiment(**own | {"seeds": 2}), tmp_path / "runs", command="more")
    assert set(order.read_text()[len(seeds) :]) == {"1"}
    assert brought(more).items() > brought(first).items()
    assert [plan.command for plan in more.plans] == ["first", "more"]
    assert more.trainings["plan"].tolist() == [0] * 4 + [1] * 4


def test_arguments_of_a_task_are_compared_by_their_json(tmp_path):
    """A tuple is a list in the file, and names may come in any order."""
    arguments = {"shift": 0.5, "sizes": (4, 6)}
    first = trained(experiment("Sized", arguments=arguments), tmp_path)
    again = experiment("Sized", arguments=dict(reversed(arguments.items())))
    assert brought(trained(again, tmp_path)) == brought(first)


def test_runs_with_another_interval_between_evaluations_need_another_folder(tmp_path):
    """They are the same runs, which a report would count twice."""
    trained(experiment(), tmp_path)
    with pytest.raises(ValueError, match="must have one interval between evaluations for each name of a trace, got se"):
        trained(experiment(between=32), tmp_path)


def test_the_same_training_under_two_names_is_made_once(tmp_path):
    order = tmp_path / "order"
    cells = experiment("Ordered", arguments={"file": str(order)}, rules=["constant"])
    rows = trained(cells, tmp_path / "runs").trainings
    same = rows[rows["lr_factor"] == 1]
    assert sorted(same["trace"]) == ["8", REFERENCE]
    assert same["key"].nunique() == 2
    assert same["curve"].iloc[0] == same["curve"].iloc[1]
    assert order.read_text() == "0" * 3 * 5  # trainings, with evaluations


def test_a_line_says_where_it_comes_from(tmp_path):
    rows = trained(experiment(seeds=[3]), tmp_path).trainings
    for facts in rows["environment"]:
        assert facts["torch"] == torch.__version__
        assert facts["samples in the dataset"] == 96
        assert (facts["threads"], facts["minibatch_size"]) == (1, 4)
        assert len(facts["source of the task"]) == len(facts["hash of the dataset"]) == 16


@pytest.mark.parametrize("name", ["samples in the dataset", "hash of the dataset"])
def test_another_dataset_is_refused_beside_what_was_trained(name, tmp_path):
    trained(experiment(), tmp_path)
    lines = [json.loads(line) for line in (tmp_path / NAME).read_text().splitlines()]
    for line in lines[1:]:
        line["environment"][name] = 90
    (tmp_path / NAME).write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(
        ValueError, match=rf"the dataset of the task .* must be that of its training .*, got {name} .* in"
    ):
        trained(experiment(seeds=2), tmp_path)
    assert len(read(tmp_path).trainings) == 5


def test_another_source_of_the_task_is_told(tmp_path):
    trained(experiment(), tmp_path)
    path = tmp_path / NAME
    source = task_facts(TINY, "{}", None)["source of the task"]
    path.write_text(path.read_text().replace(source, "0" * 16))
    with pytest.warns(UserWarning, match=r"the source of the task .* has changed since the training .*; if this"):
        trained(experiment(), tmp_path)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"a": torch.ones(2, dtype=torch.bfloat16)}, {"a": torch.ones(2)}),
        ([np.arange(3), "a", None], [np.arange(4), "a", None]),
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.tensor(0.0), torch.tensor(-0.0)),
    ],
)
def test_a_hash_is_that_of_the_content(first, second):
    digits = content_hash(first)
    assert content_hash(first) == digits != content_hash(second)
    assert len(digits) == 16


@pytest.mark.slow("starts processes")
def test_processes_bring_the_same(tmp_path):
    cells = experiment(traces=TRACES, rules=["linear", "adascale"], seeds=2)
    here, there = (trained(cells, tmp_path / str(jobs), jobs=jobs) for jobs in (1, 2))
    assert brought(there) == brought(here)
    assert there.trainings["key"].tolist() == here.trainings["key"].tolist()


@pytest.mark.slow("starts processes")
def test_a_killed_process_is_replaced_and_its_training_goes_on(tmp_path):
    (tmp_path / "processes").mkdir()
    cells = experiment("KilledLater", arguments={"folder": str(tmp_path / "processes")}, rules=["constant"])
    found = trained(cells, tmp_path / "runs", jobs=2, save_every=2)
    expected = trained(experiment(rules=["constant"]), tmp_path / "expected")
    assert found.trainings["curve"].tolist() == expected.trainings["curve"].tolist()
    assert not list((tmp_path / "runs" / "checkpoints").iterdir())


@pytest.mark.slow("starts processes")
def test_a_training_that_kills_two_processes_is_killed_and_the_others_are_trained(tmp_path):
    wanted = experiment("KilledAlways", arguments={"seed": 1}, seeds=4, baseline="linear").cells()
    cells = [cell for cell in wanted if cell.rule == "linear"]
    found = run(cells, tmp_path, jobs=2, progress=False)
    assert found.trainings["status"].tolist() == ["finished", "killed", "finished", "finished"]
    assert brought(run(cells, tmp_path, progress=False)) == brought(found)


@pytest.mark.nightly("kills an evaluation several times")
@pytest.mark.parametrize("jobs", [1, 2])
def test_trainings_killed_at_any_time_bring_the_same(jobs, tmp_path):
    arguments = {"tasks": [TINY], "traces": TRACES, "rules": ["linear", "adascale"], "seeds": 2}
    expected = trained(Experiment(**arguments), tmp_path / "expected")
    command = [sys.executable, "-m", "helpers.killed_evaluation", tmp_path / "killed", json.dumps(arguments)]
    variables = environment(PYTHONPATH=f"{ROOT}:{ROOT / 'test'}", OMP_NUM_THREADS="1")
    command += ["--kills", "12" if jobs == 1 else "4", "--jobs", str(jobs)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 3
    assert "restored" in done.stderr
    assert brought(read(tmp_path / "killed")) == brought(expected)
    assert not list((tmp_path / "killed" / "checkpoints").iterdir())


@pytest.mark.slow("starts a process")
@pytest.mark.parametrize("jobs", [1, 2])
def test_ctrl_c_says_how_to_go_on(jobs, tmp_path):
    rest = ["--rule", "linear", "--seeds", "40", "--folder", str(tmp_path / "runs"), "--jobs", str(jobs)]
    command = ["evaluate", TINY, "--trace", "0:8 10:32", *rest]
    process = subprocess.Popen(
        [sys.executable, "-m", "variable_batch_size", *command],
        env=environment(PYTHONPATH=f"{ROOT}:{ROOT / 'test'}", OMP_NUM_THREADS="1"),
        stderr=subprocess.PIPE,
        text=True,
    )
    while not (tmp_path / "runs" / NAME).exists() or (tmp_path / "runs" / NAME).read_bytes().count(b"\n") < 4:
        time.sleep(0.05)
        assert process.poll() is None
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    interrupted, how = err.splitlines()[-2:]
    assert interrupted.startswith("vbs: interrupted after ")
    assert interrupted.endswith(" of 200 runs")
    assert how.startswith("to continue: vbs evaluate")
    assert "Traceback" not in err
    assert 3 <= len(read(tmp_path / "runs").trainings) < 200


def test_an_error_of_a_training_keeps_what_is_done(tmp_path):
    cells = [*experiment().cells(), *experiment("Failing").cells()]
    with pytest.raises(
        RuntimeError, match=r"the training [0-9a-f]{16} \(helpers.*Failing, trace 8.* failed: ZeroDivis"
    ):
        run(cells, tmp_path, progress=False)
    assert set(read(tmp_path).trainings["task"]) == {TINY}


def test_a_progress_bar_shows_cells_and_the_time_left(tmp_path, capsys):
    run(experiment(), tmp_path)
    assert "5/5" in capsys.readouterr().err.rstrip().rpartition("\r")[2]
    run(experiment(seeds=2), tmp_path)
    first = capsys.readouterr().err.partition("\n")[0].split("\r")[1]
    assert "5/10" in first
    assert "<" in first  # elapsed < left
