"""Trainings on a real local cluster of Ray bring the same, also if a process is killed in the middle."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from itertools import groupby

import pytest

from helpers import evaluation_tasks
from helpers.commands import environment
from helpers.evaluation_tasks import brought
from helpers.ray_cluster import ray_environment
from variable_batch_size.lab.evaluation import read, run

pytestmark = [
    pytest.mark.nightly("starts a Ray cluster"),
    pytest.mark.filterwarnings("ignore:trace .*the batch size is"),
]

ray = pytest.importorskip("ray")

experiment = partial(evaluation_tasks.experiment, rules=["constant"])

OWN = """
from helpers.evaluation_tasks import Tiny

class Task(Tiny):
    def __init__(self, data_dir):
        super().__init__(shift=float(open(data_dir + "/shift").read()))
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A cluster of this machine with 2 CPUs; its address."""
    with ray_environment(tmp_path_factory.mktemp("ray")):
        try:
            yield ray.init(num_cpus=2, include_dashboard=False).address_info["gcs_address"]
        finally:
            ray.shutdown()


def on_cluster(cells, folder, **options):
    return run(cells, folder, engine="ray", progress=False, **options)


def test_what_is_brought_is_that_of_joblib_and_divergence_is_a_part_of_it(cluster, tmp_path):
    cells = experiment(traces=["0:8 10:32", "noise-scale:1"], rules=["linear", "adascale"], lr_factors=[1, 1e30])
    found = on_cluster(cells, tmp_path / "ray")
    assert brought(found) == brought(run(cells, tmp_path / "here", progress=False))
    assert set(found.trainings["status"]) == {"finished", "diverged"}
    assert ray.is_initialized()


def test_a_training_whose_process_is_killed_is_repeated_and_goes_on(cluster, tmp_path):
    (tmp_path / "processes").mkdir()
    wanted = experiment("KilledLater", arguments={"folder": str(tmp_path / "processes")}).cells()
    found = run(wanted[:1], tmp_path / "runs", engine="ray", progress=False, save_every=2)
    expected = run(experiment().cells()[:1], tmp_path / "expected", progress=False)
    assert found.trainings["curve"][0] == expected.trainings["curve"][0]
    first, second = sorted(path.stat().st_size for path in (tmp_path / "processes").iterdir())
    total = 30 * 2  # microbatches
    assert {first, second} >= {40}
    assert total < first + second <= total + 2 * (2 + 2)  # two updates since the last save, and two while it is written


def test_a_training_that_kills_two_processes_is_killed_and_the_others_are_trained(cluster, tmp_path):
    wanted = experiment("KilledAlways", arguments={"seed": 1}, seeds=3).cells()
    cells = [cell for cell in wanted if cell.trace == "8"]
    found = run(cells, tmp_path, engine="ray", progress=False)
    assert found.trainings["status"].tolist() == ["finished", "killed", "finished"]


@pytest.mark.parametrize("task", ["Failing", "Unpicklable"])
def test_an_error_of_a_training_names_it(task, cluster, tmp_path):
    message = rf"the training [0-9a-f]{{16}} \(helpers.*{task}, trace .*, .*\) failed: ZeroDivisionError: an"
    with pytest.raises(RuntimeError, match=message):
        on_cluster(experiment(task, seeds=3), tmp_path)
    assert read(tmp_path).trainings.empty


def test_jobs_are_the_most_trainings_at_the_same_time(cluster, tmp_path):
    cells = experiment("Ordered", arguments={"file": str(tmp_path / "order")}, seeds=4)
    on_cluster(cells, tmp_path / "runs", jobs=1)
    assert [(seed, len(list(own))) for seed, own in groupby((tmp_path / "order").read_text())] == [
        (str(seed), 15) for seed in range(4)
    ]


def test_arguments_that_do_not_fit_the_cluster_are_refused(cluster, tmp_path):
    with pytest.raises(ValueError, match="threads must be at most the 2 CPUs of the largest machine of Ray, got 3"):
        on_cluster(experiment(), tmp_path, threads=3)
    with pytest.raises(ValueError, match=r"address must be None after ray.init\(\), got 'auto'; leave it out"):
        on_cluster(experiment(), tmp_path, address="auto")


def test_the_command_trains_a_task_of_its_working_directory_at_an_address(cluster, tmp_path):
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
    expected = run(experiment(arguments={"shift": 0.5}, seeds=2), tmp_path / "expected", progress=False)
    assert read(tmp_path / "records").trainings["curve"].tolist() == expected.trainings["curve"].tolist()
