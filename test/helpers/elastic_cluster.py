"""A cluster on this machine: nodes of one process, which come and go as a capacity trace says.

A training under torchrun follows them as `simulation.Overheads` describes: the processes of nodes that leave are killed
with SIGKILL or, if that is announced, the training gets SIGTERM, saves and exits; it starts again with the nodes that
are there. Its journals, see elastic_training.py, tell what it has done.
"""

from __future__ import annotations

import itertools
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from helpers.kills import send
from variable_batch_size import BatchTrace, read_checkpoint
from variable_batch_size.lab.cluster import CapacityTrace
from variable_batch_size.lab.simulation.nodes import staying_nodes
from variable_batch_size.preemption import EXIT_CODE

TORCHRUN = Path(__file__).parents[2] / "examples" / "clusters" / "torchrun_143.py"
TRAINING = Path(__file__).with_name("elastic_training.py")
POLL_SECONDS = 0.01
Cause = Literal["start", "preemption", "growth"]


@dataclass(frozen=True)
class Start:
    """One start of the training. All times are in seconds from the start of the cluster."""

    cause: Cause
    nodes: int
    begun: float  # at the kill before, or at the end of the last update before
    killed: float | None  # None if it saved and exited, or ran to the end
    ends: list[float]  # when it was restored, and when each update ended; empty if it was killed before
    updates: list[int]  # number of updates at these times
    samples: list[int]  # likewise
    saves: list[int]  # the updates after which it was saved at the interval

    def seconds_of(self, batch_size: int) -> list[float]:
        """Return the seconds of each update of so many samples, without the first one, in which a process does more."""
        rows = zip(itertools.pairwise(self.ends), itertools.pairwise(self.samples), strict=True)
        sizes = [(end - begin, after - before) for (begin, end), (before, after) in rows]
        return [seconds for seconds, samples in sizes[1:] if samples == batch_size]

    @property
    def seconds_between_saves(self) -> list[float]:
        """The seconds from one save at the interval to the next one."""
        times = dict(zip(self.updates, self.ends, strict=True))
        return [times[later] - times[earlier] for earlier, later in itertools.pairwise(self.saves)]


class Training:
    """The processes of one start; all of them end with `kill`."""

    def __init__(self, folder: Path, flags: Sequence[str], nodes: int, number: int, script: Path = TRAINING) -> None:
        self.nodes, self.journal = nodes, folder / f"journal-{number}.csv"
        launcher = [sys.executable, str(TORCHRUN), "--standalone", f"--nproc-per-node={nodes}"]
        settings = {"PYTHONPATH": str(TRAINING.parents[1]), "OMP_NUM_THREADS": "1"}
        with (folder / f"log-{number}").open("w") as log:
            self.process = subprocess.Popen(
                [*launcher, str(script), str(folder), f"--number={number}", *flags],
                env=os.environ | settings,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.log = folder / f"log-{number}"
        self.stopping = False

    def rows(self) -> list[str]:
        """Return the rows of the journal, `seconds,updates,samples`."""
        return self.journal.read_text().splitlines() if self.journal.exists() else []

    @property
    def restored(self) -> bool:
        return bool(self.rows())

    def workers(self) -> list[int]:
        """Return the processes of the ranks, in their order; the launcher has no other children."""
        return list(map(int, Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()))

    def stop(self) -> None:
        """Let it save and exit."""
        self.stopping = True
        self.process.terminate()

    def lose(self, nodes: int) -> None:
        """Kill the processes of this many nodes, and wait until the others have ended, too."""
        workers = self.workers()
        send(signal.SIGKILL, workers[len(workers) - nodes :])
        if len(workers) <= nodes or not self.restored:  # a start cannot be left half
            self.kill()
        self.process.wait()

    def kill(self) -> None:
        """Kill all processes."""
        if self.process.poll() is None:
            send(signal.SIGSTOP, [self.process.pid])  # it starts no further one
            send(signal.SIGKILL, [*self.workers(), self.process.pid])
        self.process.wait()


def replay(
    capacity: CapacityTrace,
    folder: Path,
    flags: Sequence[str],
    *,
    notice: float = 0.0,
    grow_every: float = 0.0,
    clock: Callable[[], float] | None = None,
    script: Path = TRAINING,
) -> list[Start]:
    """Run a training under a capacity trace, and return its starts.

    Args:
        capacity: seconds -> number of processes.
        folder: where checkpoints, journals and logs are written.
        flags: those of elastic_training.py.
        notice: seconds from the announcement of a preemption to the preemption; 0: processes are killed at once.
        grow_every: least seconds from a restore to a restart with more nodes.
        clock: the time of the trace; by default, the seconds since the call.
        script: the training, with the flags and the journal of elastic_training.py.
    """
    known, began = staying_nodes(capacity, notice), time.monotonic()
    clock = clock or (lambda: time.monotonic() - began)
    starts: list[Start] = []
    training: Training | None = None
    cause: Cause = "start"
    begun, restored_at = 0.0, math.inf
    idle = False

    def ended(running: Training, why: Cause, killed: float | None) -> None:
        """Read what a start has done, and prepare the next one."""
        nonlocal training, cause, begun
        rows = [row.split(",") for row in running.rows()]
        ends = [float(row[0]) - began for row in rows]
        updates, samples = [int(row[1]) for row in rows], [int(row[2]) for row in rows]
        own = updates[1 : -1 if running.stopping else None]
        saves = sorted(
            {int(path.parent.name[7:15]) for path in (folder / "checkpoints").glob("update-*/rank-0.json")} & set(own)
        )
        starts.append(Start(cause, running.nodes, begun, killed, ends, updates, samples, saves))
        saved = ends[-1] if ends else time.monotonic() - began
        training, cause, begun = None, why, saved if killed is None else killed

    while (now := clock()) < capacity.end:
        there, staying = capacity.at(now), known.at(now)
        if training is None:
            if staying:
                training, restored_at = Training(folder, flags, staying, len(starts), script), math.inf
                begun, idle = time.monotonic() - began if idle else begun, False
            else:
                idle = True
        elif (code := training.process.poll()) is not None:
            if code != EXIT_CODE or not training.stopping:
                raise RuntimeError(f"the training ended with {code}:\n{training.log.read_text()}")
            ended(training, "preemption" if staying < training.nodes else "growth", None)
        elif there < training.nodes:
            killed = time.monotonic() - began
            training.lose(training.nodes - there)
            ended(training, "preemption", killed)
        elif training.restored and not training.stopping:
            restored_at = min(restored_at, now)
            if staying < training.nodes or (staying > training.nodes and now >= restored_at + grow_every):
                training.stop()
        elif staying < training.nodes and not training.stopping:  # announced during the restart, which is aborted
            training.kill()
            ended(training, "preemption", None)
        time.sleep(POLL_SECONDS)
    if training is not None:
        training.kill()
        ended(training, "preemption", None)
    return starts


def assert_replayed(trace: BatchTrace, elastic: Path, folder: Path, flags: Sequence[str]) -> tuple[int, float]:
    """Train in one process under a batch trace, and check that it makes the updates of an elastic training.

    Return the number of updates, up to the newest checkpoint of the elastic training, in its folder, within the trace;
    and the largest difference between the parameters of both after them.
    """
    folder.mkdir()
    trace.to_csv(folder / "trace.csv")
    checkpoints = {
        int(path.parent.name[7:15]): path.parent for path in (elastic / "checkpoints").glob("update-*/rank-0.json")
    }
    updates = max(number for number in checkpoints if number <= trace.steps)
    own = [f"--trace={folder / 'trace.csv'}", f"--updates={updates}", f"--weights={folder / 'weights.pt'}"]
    environment = os.environ | {"PYTHONPATH": str(TRAINING.parents[1])}
    subprocess.run([sys.executable, str(TRAINING), str(folder), *flags, *own], env=environment, check=True)
    made: dict[str, str] = {}  # samples by updates; of an update that was made again, the later row
    for path in sorted(elastic.glob("journal-*.csv"), key=lambda path: int(path.stem[8:])):
        made |= (row.split(",")[1:] for row in path.read_text().splitlines())
    alone = dict(row.split(",")[1:] for row in (folder / "journal-0.csv").read_text().splitlines())
    assert alone == {update: made[update] for update in alone}
    assert list(map(int, alone)) == list(range(updates + 1))
    found = torch.load(folder / "weights.pt")
    expected = read_checkpoint(checkpoints[updates])["parts"]["model"]
    return updates, max(float((found[name] - expected[name]).abs().max()) for name in expected)
