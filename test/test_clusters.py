"""The jobs in examples/clusters: their validators accept them, and what they run stops after a signal and resumes.

No scheduler runs here. `srun`, `scontrol` and `squeue` are stubs; the processes, the signals, the exit codes and the
checkpoints are real.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from helpers.commands import TIMEOUT, environment, free_port, run, saved, wait_for
from helpers.kills import send
from helpers.pages import DOCS, ROOT, commands

CLUSTERS = ROOT / "examples" / "clusters"
STOPPED = 143
SHORT = "--epochs 1"  # ends at once after a restore
SERVICE, JOB = yaml.safe_load_all((CLUSTERS / "kubernetes.yaml").read_text())
(CONTAINER,) = JOB["spec"]["template"]["spec"]["containers"]
SKYPILOT = yaml.safe_load((CLUSTERS / "skypilot.yaml").read_text())

# Starts a process per task, as srun does, and exits with the highest exit code; a process id per line in `tasks`.
SRUN = r"""#!/bin/bash
while [ "$1" != bash ]; do shift; done
export SLURM_PROCID SLURM_LOCALID=0
for ((SLURM_PROCID = 0; SLURM_PROCID < SLURM_NTASKS; SLURM_PROCID++)); do "$@" & pids+=($!); done
printf '%s\n' "${pids[@]}" > tasks
for pid in "${pids[@]}"; do wait "$pid"; code=$?; [ $code -gt "${highest:=0}" ] && highest=$code; done
exit "$highest"
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then echo localhost; else echo "$@" >> requests; fi
"""


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Leaders of process groups, which end with the test."""
    leaders: list[subprocess.Popen[bytes]] = []
    yield leaders
    for leader in leaders:
        if leader.poll() is None:  # torchrun then ends its workers
            leader.terminate()
        leader.wait(TIMEOUT)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A working directory with the examples in it."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


def start(command: list[str], place: Path, log: str, **variables: str) -> subprocess.Popen[bytes]:
    """Start a command in `place`, whose folder `bin` comes first on PATH."""
    settings = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    with (place / log).open("ab") as file:
        return subprocess.Popen(
            command, cwd=place, env=environment(place / "bin", **settings), stdout=file, stderr=subprocess.STDOUT
        )


def logs(place: Path) -> str:
    return "\n".join(path.read_text(errors="replace") for path in sorted(place.glob("log*")))


def assert_saved_and_resumed(place: Path) -> None:
    """Check that all ranks stopped after a save, and that a later run began with it."""
    output = logs(place)
    (update,) = re.findall(r"Checkpoint update-(\d+) saved .* s after SIG\w+; exiting with 143\.$", output, re.M)
    assert f"Checkpoint update-{update} restored" in output


# ------------------------------------------------------------------------------------------------------- the validators


def shell_scripts() -> dict[str, str]:
    return {
        "train.slurm": (CLUSTERS / "train.slurm").read_text(),
        "kubernetes.yaml": f"#!/bin/bash\n{CONTAINER['command'][-1]}",
        "skypilot.yaml, setup": f"#!/bin/bash\n{SKYPILOT['setup']}",
        "skypilot.yaml, run": f"#!/bin/bash\n{SKYPILOT['run']}",
    }


@pytest.mark.parametrize("name", shell_scripts())
def test_shellcheck_accepts(name: str, tmp_path: Path) -> None:
    script = tmp_path / "script.sh"
    script.write_text(shell_scripts()[name])
    done = run("shellcheck", str(script))
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("version", ["1.31", "1.37"])  # podFailurePolicy is stable since 1.31
@pytest.mark.parametrize("resource", [SERVICE, JOB], ids=lambda resource: resource["kind"])
def test_kubernetes_schema_accepts(resource: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(resource, version, strict=True)


def test_kubernetes_names_agree() -> None:
    name = JOB["metadata"]["name"]
    pod = JOB["spec"]["template"]["spec"]
    assert SERVICE["spec"]["selector"] == {"job-name": name}
    assert pod["subdomain"] == SERVICE["metadata"]["name"]
    assert CONTAINER["env"] == [{"name": "MASTER_ADDR", "value": f"{name}-0.{pod['subdomain']}"}]
    assert JOB["spec"]["podFailurePolicy"]["rules"][1]["onExitCodes"] == {
        "containerName": CONTAINER["name"],
        "operator": "In",
        "values": [STOPPED],
    }
    assert f"--nnodes={JOB['spec']['completions']} " in CONTAINER["command"][-1]
    assert f"--nproc-per-node={CONTAINER['resources']['limits']['nvidia.com/gpu']} " in CONTAINER["command"][-1]


# --------------------------------------------------------------------------------------------------------- no scheduler


def test_the_script_alone_stops_after_a_signal_and_resumes(place: Path, started: list[subprocess.Popen[bytes]]) -> None:
    command = [sys.executable, "examples/clusters/train.py", "--checkpoint", "checkpoints/a"]
    running = start(command, place, "log-0")
    started.append(running)
    wait_for(lambda: saved(place / "checkpoints/a"), lambda: logs(place))
    running.terminate()
    assert running.wait(TIMEOUT) == STOPPED, logs(place)
    assert start([*command, *SHORT.split()], place, "log-1").wait(TIMEOUT) == 0, logs(place)
    assert_saved_and_resumed(place)


# ---------------------------------------------------------------------------------------------------------------- Slurm


def slurm(place: Path, flags: str, job: int, *, srun: str = SRUN, state: str = "RUNNING") -> subprocess.Popen[bytes]:
    """Run the script as the job with this number, in a world of two tasks."""
    (place / "bin").mkdir(exist_ok=True)
    for name, text in {"srun": srun, "scontrol": SCONTROL, "squeue": f"#!/bin/bash\necho {state}\n"}.items():
        (place / "bin" / name).write_text(text)
        (place / "bin" / name).chmod(0o755)
    (place / "tasks").unlink(missing_ok=True)
    settings = {"SLURM_JOB_ID": str(job), "SLURM_JOB_NODELIST": "n[0-1]", "SLURM_NTASKS": "2"}
    command = ["bash", "examples/clusters/train.slurm", "examples/clusters/train.py", *flags.split()]
    return start([*command, "--checkpoint", "checkpoints/a"], place, f"log-{job}", SLURM_CPUS_PER_TASK="1", **settings)


@pytest.mark.slow("restarts jobs")
@pytest.mark.torch
def test_slurm_queues_a_stopped_job_again_and_it_resumes(place: Path, started: list[subprocess.Popen[bytes]]) -> None:
    job = free_port() - 20000  # so that the script computes a free port
    running = slurm(place, "", job)
    started.append(running)
    wait_for(lambda: saved(place / "checkpoints/a"), lambda: logs(place))
    send(signal.SIGTERM, [int(task) for task in (place / "tasks").read_text().split()])  # as Slurm signals a step
    assert running.wait(TIMEOUT) == STOPPED, logs(place)
    assert (place / "requests").read_text() == f"requeue {job}\n"
    again = slurm(place, SHORT, job)
    started.append(again)
    assert again.wait(TIMEOUT) == 0, logs(place)
    assert (place / "requests").read_text() == f"requeue {job}\n"
    assert_saved_and_resumed(place)


@pytest.mark.parametrize(("state", "code"), [("COMPLETING", STOPPED), ("RUNNING", 1), ("RUNNING", 137)])
def test_slurm_queues_neither_a_cancelled_nor_a_failed_job_again(place: Path, state: str, code: int) -> None:
    job = slurm(place, "", 1, srun=f"#!/bin/bash\nexit {code}\n", state=state)
    assert job.wait(TIMEOUT) == code, logs(place)
    assert not (place / "requests").exists()


# --------------------------------------------------------------------------------------------- Kubernetes and SkyPilot


def pods(place: Path, flags: str = "") -> list[subprocess.Popen[bytes]]:
    """Start the container's command once for each index, with one process instead of eight."""
    *shell, script = CONTAINER["command"]
    script = script.replace("--nproc-per-node=8", "--nproc-per-node=1").replace("29500", str(free_port()))
    script = f"{script} {flags}".replace("/checkpoints", "checkpoints")
    return [
        start([*shell, script], place, f"log-{index}", MASTER_ADDR="localhost", JOB_COMPLETION_INDEX=str(index))
        for index in range(JOB["spec"]["completions"])
    ]


def machines(place: Path) -> list[subprocess.Popen[bytes]]:
    """Start what SkyPilot runs on each machine."""
    script = SKYPILOT["run"].rstrip().replace("29500", str(free_port())).replace("/checkpoints", "checkpoints")
    script = f"{script}\nexit $?"  # SkyPilot appends lines, too
    settings = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "1", "SKYPILOT_NODE_IPS": "localhost\nother"}
    return [
        start(["bash", "-c", script], place, f"log-{rank}", SKYPILOT_NODE_RANK=str(rank), **settings)
        for rank in range(SKYPILOT["num_nodes"])
    ]


@pytest.mark.slow("restarts jobs")
@pytest.mark.torch
def test_all_pods_exit_with_143_if_one_is_evicted_and_resume(
    place: Path, started: list[subprocess.Popen[bytes]]
) -> None:
    first = pods(place)
    started += first
    wait_for(lambda: saved(place / "checkpoints/a"), lambda: logs(place))
    first[1].terminate()  # Kubernetes signals the first process of the container
    assert [pod.wait(TIMEOUT) for pod in first] == [STOPPED, STOPPED], logs(place)
    second = pods(place, SHORT)
    started += second
    assert [pod.wait(TIMEOUT) for pod in second] == [0, 0], logs(place)
    assert_saved_and_resumed(place)


@pytest.mark.slow("restarts jobs")
@pytest.mark.torch
def test_all_machines_exit_with_143_if_one_shuts_down(place: Path, started: list[subprocess.Popen[bytes]]) -> None:
    first = machines(place)
    started += first
    wait_for(lambda: saved(place / "checkpoints/a"), lambda: logs(place))
    (launcher,) = children(first[0].pid)
    send(signal.SIGTERM, [first[0].pid, launcher, *children(launcher)])  # a machine that shuts down signals all
    assert [machine.wait(TIMEOUT) for machine in first] == [STOPPED, STOPPED], logs(place)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


# -------------------------------------------------------------------------------------------------------- torchrun_143


def torchrun(place: Path, script: str, *flags: str) -> subprocess.Popen[bytes]:
    (place / "script.py").write_text(script)
    command = [sys.executable, "examples/clusters/torchrun_143.py", *(flags or ["--standalone"]), "script.py"]
    return start(command, place, "log")


@pytest.mark.torch
def test_torchrun_exits_at_once_while_it_waits_for_another_host(
    place: Path, started: list[subprocess.Popen[bytes]]
) -> None:
    port = free_port()
    running = torchrun(place, "", "--nnodes=2", "--node-rank=0", "--master-addr=localhost", f"--master-port={port}")
    started.append(running)
    listens = f":{port:04X} "  # then its main thread waits in C++ for the other host, for minutes
    wait_for(lambda: listens in "".join(map(Path.read_text, Path("/proc/net").glob("tcp*"))), lambda: logs(place))
    running.terminate()
    assert running.wait(10) == STOPPED, logs(place)


@pytest.mark.slow("restarts jobs")
@pytest.mark.torch
def test_torchrun_exits_with_143_after_sigusr1(place: Path, started: list[subprocess.Popen[bytes]]) -> None:
    running = torchrun(place, "import time; print('ready', flush=True); time.sleep(100)")
    started.append(running)
    wait_for(lambda: "ready" in logs(place), lambda: logs(place))
    running.send_signal(signal.SIGUSR1)
    assert running.wait(TIMEOUT) == STOPPED, logs(place)


@pytest.mark.slow("restarts jobs")
@pytest.mark.torch
def test_the_shell_loop_of_the_page_resumes(place: Path, started: list[subprocess.Popen[bytes]]) -> None:
    (line,) = (line for line in commands(DOCS / "checkpoints.md") if "torchrun_143" in line)
    line = line.replace("--nproc-per-node=8", "--standalone --nproc-per-node=2")
    flags = place / "flags"
    flags.touch()
    running = start(["bash", "-c", line.replace("runs/a", "checkpoints/a $(cat flags)")], place, "log")
    started.append(running)
    wait_for(lambda: saved(place / "checkpoints/a"), lambda: logs(place))
    flags.write_text(SHORT)
    send(signal.SIGTERM, children(running.pid))
    assert running.wait(TIMEOUT) == 0, logs(place)
    assert_saved_and_resumed(place)


@pytest.mark.parametrize(("code", "expected"), [(STOPPED, STOPPED), (21, 1)])
def test_torchrun_exits_with_143_only_if_its_workers_do(place: Path, code: int, expected: int) -> None:
    assert torchrun(place, f"import sys; sys.exit({code})").wait(TIMEOUT) == expected, logs(place)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_torchrun_handles_a_signal_while_it_is_imported(place: Path, number: signal.Signals) -> None:
    (place / "torch.py").write_text(f"import os\nos.kill(os.getpid(), {int(number)})\n")
    running = start([sys.executable, "examples/clusters/torchrun_143.py"], place, "log", PYTHONPATH=str(place))
    assert running.wait(TIMEOUT) == STOPPED, logs(place)
