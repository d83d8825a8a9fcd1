"""The jobs in examples/clusters: their validators accept them, and what they run stops after a signal and resumes.

No scheduler runs here. `srun`, `scontrol` and `squeue` are stubs; the processes, the signals, the exit codes and the
checkpoints are real.
"""

from __future__ import annotations

import signal

import kubernetes_validate
import pytest
import yaml

from helpers.commands import TIMEOUT, free_job, free_port, run, saved, wait_for
from helpers.jobs import (
    SHORT,
    STOPPED,
    TRAIN,
    assert_saved_and_resumed,
    children,
    logs,
    place,
    signal_step,
    slurm,
    start,
    started,
)
from helpers.kills import send
from helpers.object_stores import s3
from helpers.pages import DOCS, ROOT, commands
from variable_batch_size.checkpoint.folder import Folder, update_of

__all__ = ["place", "started"]

CLUSTERS = ROOT / "examples" / "clusters"
SERVICE, JOB = yaml.safe_load_all((CLUSTERS / "kubernetes.yaml").read_text())
RENDEZVOUS, STORE, ELASTIC = yaml.safe_load_all((CLUSTERS / "kubernetes_elastic.yaml").read_text())
LIGHTHOUSE, TOWER, GROUPS = yaml.safe_load_all((CLUSTERS / "kubernetes_groups.yaml").read_text())
RESOURCES = [SERVICE, JOB, RENDEZVOUS, STORE, ELASTIC, LIGHTHOUSE, TOWER, GROUPS]
(CONTAINER,) = JOB["spec"]["template"]["spec"]["containers"]
(GROUP,) = GROUPS["spec"]["template"]["spec"]["containers"]
(ELASTIC_CONTAINER,) = ELASTIC["spec"]["template"]["spec"]["containers"]
SKYPILOT = yaml.safe_load((CLUSTERS / "skypilot.yaml").read_text())
_, TOWER_TASK, *GROUP_TASKS = yaml.safe_load_all((CLUSTERS / "skypilot_groups.yaml").read_text())

# ------------------------------------------------------------------------------------------------------- the validators


def shell_scripts():
    return {
        "train.slurm": (CLUSTERS / "train.slurm").read_text(),
        "kubernetes.yaml": f"#!/bin/bash\n{CONTAINER['command'][-1]}",
        "kubernetes_elastic.yaml": f"#!/bin/bash\n{ELASTIC_CONTAINER['command'][-1]}",
        "kubernetes_groups.yaml": f"#!/bin/bash\n{GROUP['command'][-1]}",
        "skypilot.yaml, setup": f"#!/bin/bash\n{SKYPILOT['setup']}",
        "skypilot.yaml, run": f"#!/bin/bash\n{SKYPILOT['run']}",
        **{f"skypilot_groups.yaml, {task['name']}": f"#!/bin/bash\n{task['run']}" for task in GROUP_TASKS},
    }


@pytest.mark.parametrize("name", shell_scripts())
def test_shellcheck_accepts(name, tmp_path):
    script = tmp_path / "script.sh"
    script.write_text(shell_scripts()[name])
    done = run("shellcheck", str(script))
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("version", ["1.31", "1.37"])  # podFailurePolicy is stable since 1.31
@pytest.mark.parametrize("resource", RESOURCES, ids=lambda it: f"{it['kind']}-{it['metadata']['name']}")
def test_kubernetes_schema_accepts(resource, version):
    kubernetes_validate.validate(resource, version, strict=True)


def test_kubernetes_names_agree():
    name = JOB["metadata"]["name"]
    pod = JOB["spec"]["template"]["spec"]
    assert SERVICE["spec"]["selector"] == {"job-name": name}
    assert pod["subdomain"] == SERVICE["metadata"]["name"]
    assert CONTAINER["env"][0] == {"name": "MASTER_ADDR", "value": f"{name}-0.{pod['subdomain']}"}
    assert JOB["spec"]["podFailurePolicy"]["rules"][1]["onExitCodes"] == {
        "containerName": CONTAINER["name"],
        "operator": "In",
        "values": [STOPPED],
    }
    assert f"--nnodes={JOB['spec']['completions']} " in CONTAINER["command"][-1]
    assert f"--nproc-per-node={CONTAINER['resources']['limits']['nvidia.com/gpu']} " in CONTAINER["command"][-1]


def test_names_of_the_elastic_job_agree():
    store, script = STORE["spec"]["template"], ELASTIC_CONTAINER["command"][-1]
    assert store["metadata"]["labels"] == STORE["spec"]["selector"]["matchLabels"] == RENDEZVOUS["spec"]["selector"]
    (port,) = RENDEZVOUS["spec"]["ports"]
    assert store["spec"]["containers"][0]["command"][-1] == str(port["port"])
    assert f"--rdzv-endpoint={RENDEZVOUS['metadata']['name']}:{port['port']} " in script
    assert ELASTIC["spec"]["podFailurePolicy"] == JOB["spec"]["podFailurePolicy"]
    assert f"--nnodes=1:{ELASTIC['spec']['completions']} " in script
    assert f"--nproc-per-node={ELASTIC_CONTAINER['resources']['limits']['nvidia.com/gpu']} " in script


def test_names_of_the_replica_groups_agree():
    """test/integrations/test_torchft.py starts the command of the pods."""
    tower = TOWER["spec"]["template"]
    assert tower["metadata"]["labels"] == TOWER["spec"]["selector"]["matchLabels"] == LIGHTHOUSE["spec"]["selector"]
    (port,), variables = LIGHTHOUSE["spec"]["ports"], {one["name"]: one.get("value") for one in GROUP["env"]}
    command = tower["spec"]["containers"][0]["command"]
    assert command[-1] == f"[::]:{port['port']}"
    assert int(command[2]) > GROUPS["spec"]["completions"] / 2
    assert variables["TORCHFT_LIGHTHOUSE"] == f"http://{LIGHTHOUSE['metadata']['name']}:{port['port']}"


def test_tasks_of_the_job_group_agree():
    """test/integrations/test_torchft.py starts one."""
    name = f"http://{TOWER_TASK['name']}-0.$SKYPILOT_JOBGROUP_NAME:"
    (port,) = {task["run"].partition(name)[2].partition('"')[0] for task in GROUP_TASKS}
    assert TOWER_TASK["run"].endswith(f"[::]:{port}")
    for number, task in enumerate(GROUP_TASKS):
        assert task["name"] == f"group-{number}"
        assert task["envs"]["REPLICA_GROUP_ID"] == number


# --------------------------------------------------------------------------------------------------------- no scheduler


# ---------------------------------------------------------------------------------------------------------------- Slurm


@pytest.mark.nightly("restarts jobs")
@pytest.mark.torch
def test_slurm_queues_a_stopped_job_again_and_it_resumes(place, started):
    job = free_job()
    running = slurm(place, TRAIN, job)
    started.append(running)
    wait_for(lambda: saved(place / "checkpoints/a"), lambda: logs(place))
    signal_step(place, job)
    assert running.wait(TIMEOUT) == STOPPED, logs(place)
    assert (place / "requests").read_text() == f"requeue {job}\n"
    again = slurm(place, f"{TRAIN} {SHORT}", job)
    started.append(again)
    assert again.wait(TIMEOUT) == 0, logs(place)
    assert (place / "requests").read_text() == f"requeue {job}\n"
    assert_saved_and_resumed(place)


@pytest.mark.parametrize(("state", "code"), [("COMPLETING", STOPPED), ("RUNNING", 1), ("RUNNING", 137)])
def test_slurm_queues_neither_a_cancelled_nor_a_failed_job_again(place, state, code):
    job = slurm(place, "", 1, srun=f"#!/bin/bash\nexit {code}\n", state=state)
    assert job.wait(TIMEOUT) == code, logs(place)
    assert not (place / "requests").exists()


# --------------------------------------------------------------------------------------------- Kubernetes and SkyPilot


def pods(place, flags=""):
    """Start the container's command once for each index, with one process instead of eight."""
    *shell, script = CONTAINER["command"]
    script = script.replace("--nproc-per-node=8", "--nproc-per-node=1").replace("29500", str(free_port()))
    script = f"{script} {flags}".replace("/checkpoints", "checkpoints")
    return [
        start(
            [*shell, script], place, f"log-{index}", MASTER_ADDR="localhost", RUN="a", JOB_COMPLETION_INDEX=str(index)
        )
        for index in range(JOB["spec"]["completions"])
    ]


def machines(place, bucket):
    """Start what SkyPilot runs on each machine."""
    script = SKYPILOT["run"].replace("29500", str(free_port())).replace("s3://my-training-checkpoints", bucket)
    settings = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "1", "SKYPILOT_NODE_IPS": "localhost\nother"}
    settings["SKYPILOT_TASK_ID"] = "a"
    return [
        start(["bash", "-c", script + "exit $?"], place, f"log-{rank}", SKYPILOT_NODE_RANK=str(rank), **settings)
        for rank in range(SKYPILOT["num_nodes"])
    ]


@pytest.mark.nightly("restarts jobs")
@pytest.mark.torch
def test_all_pods_exit_with_143_if_one_is_evicted_and_resume(place, started):
    first = pods(place)
    started += first
    wait_for(lambda: saved(place / "checkpoints/a"), lambda: logs(place))
    first[1].terminate()  # Kubernetes signals the first process of the container
    assert [pod.wait(TIMEOUT) for pod in first] == [STOPPED, STOPPED], logs(place)
    second = pods(place, SHORT)
    started += second
    assert [pod.wait(TIMEOUT) for pod in second] == [0, 0], logs(place)
    assert_saved_and_resumed(place)


@pytest.mark.nightly("restarts jobs")
@pytest.mark.torch
def test_all_machines_exit_with_143_if_one_shuts_down(place, started, monkeypatch):
    with s3(monkeypatch) as bucket:
        first = machines(place, bucket)
        started += first
        wait_for(Folder(f"{bucket}/a").names, lambda: logs(place))
        (launcher,) = children(first[0].pid)
        send(signal.SIGTERM, [first[0].pid, launcher, *children(launcher)])  # a machine that shuts down signals all
        assert [machine.wait(TIMEOUT) for machine in first] == [STOPPED, STOPPED], logs(place)


# --------------------------------------------------------------------------------------------------------- elastic jobs


@pytest.fixture
def port(place):
    """The port of a rendezvous."""
    python, script, _ = STORE["spec"]["template"]["spec"]["containers"][0]["command"]
    store = start([python, script, number := str(free_port())], place, "log-store")
    yield number
    store.terminate()
    assert store.wait(TIMEOUT) == 0, logs(place)


def elastic(script, replaced):
    """Return a command with one process instead of eight, shorter intervals, and other words."""
    intervals = "last_call_timeout=1,keep_alive_interval=1"
    for old, new in {"nproc-per-node=8": "nproc-per-node=1", "last_call_timeout=5": intervals, **replaced}.items():
        assert old in script
        script = script.replace(old, new)
    return script


def train_with_another(place, started, folder, member):
    """Let a second member of an elastic job join the first one, and return both when they have saved."""
    names = Folder(folder).names
    started.append(member(0))
    wait_for(names, lambda: logs(place))
    started.append(member(1))
    wait_for(lambda: "world 1 -> 2, batch size 32 -> 64" in logs(place), lambda: logs(place))
    joined = update_of(names()[0])
    wait_for(lambda: update_of(names()[0]) > joined, lambda: logs(place))
    return started


def wait_until_one_trains(place):
    wait_for(lambda: "world 2 -> 1, batch size 64 -> 32" in logs(place), lambda: logs(place))


@pytest.mark.nightly("restarts workers")
@pytest.mark.torch
def test_the_elastic_job_goes_on_if_the_first_pod_is_lost(place, started, monkeypatch, port):
    variables = {entry["name"]: entry["value"] for entry in ELASTIC_CONTAINER["env"] if "value" in entry}
    *shell, script = ELASTIC_CONTAINER["command"]

    with s3(monkeypatch) as bucket:
        script = elastic(
            script, {"train-rendezvous:29400": f"localhost:{port}", "s3://my-training-checkpoints": bucket}
        )

        def pod(number):
            return start([*shell, script], place, f"log-{number}", POD_IP="127.0.0.1", RUN="a", **variables)

        first, second = train_with_another(place, started, f"{bucket}/a", pod)
        send(signal.SIGKILL, [*children(first.pid), first.pid])
        wait_until_one_trains(place)
        second.terminate()
        assert second.wait(TIMEOUT) == STOPPED, logs(place)


@pytest.mark.nightly("restarts workers")
@pytest.mark.torch
def test_the_elastic_slurm_array_goes_on_if_the_first_job_is_preempted(place, started, port):
    (line,) = (line for line in commands(DOCS / "clusters.md") if "--array" in line)
    arguments = line.partition("train.slurm ")[2]
    arguments = elastic(arguments, {"service-node:29400": f"localhost:{port}", "/shared/runs": "checkpoints"})

    def job(number):
        variable, value = line.split()[0].split("=")
        return slurm(place, arguments, number, tasks=1, **{variable: value})

    first, second = train_with_another(place, started, str(place / "checkpoints/a"), job)
    signal_step(place, 0)
    assert first.wait(TIMEOUT) == STOPPED, logs(place)
    assert (place / "requests").read_text() == "requeue 0\n"
    wait_until_one_trains(place)
    signal_step(place, 1)
    assert second.wait(TIMEOUT) == STOPPED, logs(place)
