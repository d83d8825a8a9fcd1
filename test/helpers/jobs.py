"""Starting the jobs of examples/clusters/, with real processes, and looking at what they say."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.commands import TIMEOUT, environment
from helpers.kills import send
from helpers.pages import ROOT

STOPPED = 143
TRAIN = "examples/clusters/train.py --checkpoint checkpoints/a"
SHORT = "--epochs 1"  # ends at once after a restore


# Starts a process per task, as srun does, and exits with the highest exit code; a process id per line in `tasks-JOB`.
SRUN = r"""#!/bin/bash
while [ "$1" != bash ]; do shift; done
export SLURM_PROCID SLURM_LOCALID=0
for ((SLURM_PROCID = 0; SLURM_PROCID < SLURM_NTASKS; SLURM_PROCID++)); do "$@" & pids+=($!); done
printf '%s\n' "${pids[@]}" > "tasks-$SLURM_JOB_ID"
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
    (update,) = re.findall(r"Checkpoint update-(\S+) saved .* s after SIG\w+; exiting with 143\.$", output, re.M)
    assert f"Checkpoint update-{update} restored" in output


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def slurm(
    place: Path, flags: str, job: int, *, srun: str = SRUN, state: str = "RUNNING", tasks: int = 2, **variables: str
) -> subprocess.Popen[bytes]:
    """Run train.slurm with these arguments, as the job with this number."""
    (place / "bin").mkdir(exist_ok=True)
    for name, text in {"srun": srun, "scontrol": SCONTROL, "squeue": f"#!/bin/bash\necho {state}\n"}.items():
        (place / "bin" / name).write_text(text)
        (place / "bin" / name).chmod(0o755)
    settings = {"SLURM_JOB_ID": str(job), "SLURM_JOB_NODELIST": "n[0-1]", "SLURM_NTASKS": str(tasks)}
    command = ["bash", "examples/clusters/train.slurm", *flags.split()]
    return start(command, place, f"log-{job}", SLURM_CPUS_PER_TASK="1", **settings, **variables)


def signal_step(place: Path, job: int) -> None:
    """Signal the processes of a job, as Slurm does."""
    send(signal.SIGTERM, [int(task) for task in (place / f"tasks-{job}").read_text().split()])
