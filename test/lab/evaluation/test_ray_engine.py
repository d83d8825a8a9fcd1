"""Trainings on a real local cluster of Ray: the records of joblib, also if a process is killed in the middle."""

from __future__ import annotations

import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from variable_batch_size.lab.evaluation.engines import on_ray

from helpers.commands import environment
from helpers.evaluation_tasks import without_times
from helpers.pages import ROOT
from variable_batch_size.lab.evaluation import Experiment, Record, read_records, run

pytestmark = pytest.mark.nightly("starts a Ray cluster")

ray = pytest.importorskip("ray")

TASKS = "helpers.evaluation_tasks"
OWN = """
from helpers.evaluation_tasks import Tiny

class Task(Tiny):
    def __init__(self, data_dir):
        super().__init__(shift=float(open(data_dir + "/shift").read()))
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A cluster of this machine with 2 CPUs; its address."""
    token = tmp_path_factory.mktemp("ray") / "token"
    token.write_text(secrets.token_hex(32))  # Ray would write one into the home folder; it is used where there is one
    with on_ray.kept_handler(), pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_AUTH_MODE", raising=False)
        patch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'test'}")  # of the tasks
        try:
            yield ray.init(num_cpus=2, include_dashboard=False).address_info["gcs_address"]
        finally:
            ray.shutdown()


def experiment(task: str = "Tiny", **other: Any) -> Experiment:
    name, *arguments = task, *([other.pop("arguments")] if "arguments" in other else [])
    tasks: Any = {f"{TASKS}:{name}": arguments[0]} if arguments else [f"{TASKS}:{name}"]
    return Experiment(**{"tasks": tasks, "traces": ["8"], "rules": ["constant"], "seeds": 1} | other)


def on_cluster(cells: Experiment, folder: Path, **options: Any) -> list[Record]:
    return run(cells, folder, engine="ray", progress=False, **options)


def test_records_are_those_of_joblib_and_divergence_is_one_of_them(cluster: str, tmp_path: Path) -> None:
    more: dict[str, Any] = {"traces": ["0:8 10:32", "noise-scale:1"], "rules": ["linear", "adascale"]}
    cells = experiment(**more, lr_factors=[1, 1e30])
    found = on_cluster(cells, tmp_path / "ray")
    assert without_times(found) == without_times(run(cells, tmp_path / "here", progress=False))
    assert {record.status for record in found} == {"finished", "diverged"}
    assert ray.is_initialized()
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "ray").glob("*.json") if path.name != "plan.json"}
    assert len(on_cluster(experiment(**more, lr_factors=[1, 1e30], seeds=2), tmp_path / "ray")) == 20  # 4 more
    assert {path: path.stat().st_mtime_ns for path in times} == times


def test_a_training_whose_process_is_killed_is_repeated_and_resumes_from_its_checkpoint(
    cluster: str, tmp_path: Path
) -> None:
    (tmp_path / "processes").mkdir()
    killed = experiment("KilledLater", arguments={"folder": str(tmp_path / "processes")})
    (found,) = on_cluster(killed, tmp_path / "records", save_every=2)
    (expected,) = run(experiment(), tmp_path / "expected", progress=False)
    assert found.curve == expected.curve
    first, second = sorted(path.stat().st_size for path in (tmp_path / "processes").iterdir())
    total = 30 * 2  # microbatches
    assert {first, second} >= {40}
    assert total < first + second <= total + 2 * (2 + 2)  # two updates since the last save, and two while it is written
    assert not list((tmp_path / "records" / "checkpoints").iterdir())


def test_a_machine_without_the_folder_trains_and_saves_nothing(cluster: str, tmp_path: Path) -> None:
    (cell,) = experiment().cells()
    found = ray.get(ray.remote(on_ray._record).remote(cell, tmp_path / "records", 1, 2))
    (expected,) = run([cell], tmp_path / "expected", progress=False)
    assert without_times([found]) == without_times([expected])
    assert not (tmp_path / "records").exists()


def test_a_training_that_is_killed_too_often_says_which_and_what_to_do(
    cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_ray, "RETRIES", 0)
    killed = experiment("Killed", arguments={"folder": str(tmp_path)})
    message = r"each training must end, but [0-9a-f]{16} \(.*Killed, trace 8.*\) was killed more than 0 times"
    with pytest.raises(RuntimeError, match=message + ".*; run the evaluation again to continue"):
        on_cluster(killed, tmp_path / "records")
    assert len(on_cluster(killed, tmp_path / "records")) == 1


@pytest.mark.parametrize("task", ["Failing", "Unpicklable"])
def test_an_error_of_a_training_names_it_and_is_not_repeated(task: str, cluster: str, tmp_path: Path) -> None:
    message = (
        rf"the training [0-9a-f]{{16}} \(helpers.*{task}, trace 8, rule constant, .*\) failed: ZeroDivisionError: an"
    )
    with pytest.raises(RuntimeError, match=message):
        on_cluster(experiment(task, seeds=3), tmp_path)
    assert read_records(tmp_path) == []


def test_jobs_are_the_most_trainings_at_the_same_time(cluster: str, tmp_path: Path) -> None:
    cells = experiment("Ordered", arguments={"file": str(tmp_path / "order")}, seeds=4)
    on_cluster(cells, tmp_path / "records", jobs=1)
    assert [(seed, len(list(own))) for seed, own in groupby((tmp_path / "order").read_text())] == [
        (str(seed), 5) for seed in range(4)
    ]


def test_arguments_that_do_not_fit_the_cluster_are_refused(cluster: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="threads must be at most the 2 CPUs of the largest machine of Ray, got 3"):
        on_cluster(experiment(), tmp_path, threads=3)
    with pytest.raises(ValueError, match=r"address must be None after ray.init\(\), got 'auto'; leave it out"):
        on_cluster(experiment(), tmp_path, address="auto")


def test_the_command_trains_a_task_of_its_working_directory_at_an_address(cluster: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "shift").write_text("0.5")
    command = "evaluate own:Task --trace 8 --rule constant --seeds 2 --engine ray --data-dir data --folder records"
    done = subprocess.run(
        [sys.executable, "-m", "variable_batch_size", *command.split(), "--address", cluster],
        cwd=tmp_path,
        env=environment(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("records: 2 trainings, 0 of which failed\n")
    expected = run(experiment(arguments={"shift": 0.5}, seeds=2), tmp_path / "expected", progress=False)
    found = {record.cell["seed"]: record.curve for record in read_records(tmp_path / "records")}
    assert found == {record.cell["seed"]: record.curve for record in expected}


def test_the_handler_of_a_signal_that_ray_replaces_is_restored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with on_ray.kept_handler():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGTERM) is before
