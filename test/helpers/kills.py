"""Kills a training at random instants, lets it go on in another world, and proves that nothing was lost or done twice.

The processes are real ones: `torchrun` with its workers, or the process that holds the cores of an XLA device with the
one that launched it. An attempt trains until it is ended, so that no kill comes too late; the last one is let finish.
What was committed in it all is told by the journals of killed_training.py: of each attempt the updates that come after
the one it went on from, up to the one that the next attempt goes on from.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

import variable_batch_size as vbs
from helpers.killed_training import Attempt, Run, journal
from helpers.reference import assert_equal
from variable_batch_size.checkpoint.folder import CheckpointFolder, whole
from variable_batch_size.preemption import EXIT_CODE

PATIENCE = 300.0  # seconds, after which what is waited for hangs
FORCED = "Unable to shutdown process"  # what torchrun says of a worker that a SIGTERM does not end in 30 s
MARK = "KILLED_TRAINING"  # in the environment of every process of an attempt, also of those that nobody has told us of


class Job:
    """The processes of one attempt. None of them is left behind."""

    def __init__(self, command: list[str], folder: Path, attempt: int) -> None:
        self._folder, self._attempt = folder, attempt
        mark = f"{folder}:{attempt}"
        self._mark = f"{MARK}={mark}".encode()
        self.log = folder / f"log-{attempt}"
        path = os.pathsep.join([str(Path(__file__).parents[1]), str(Path(vbs.__file__).parent.parent)])
        settings = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PJRT_DEVICE": "CPU", MARK: mark}
        self.began = time.time()
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,  # which closes whatever ends this process: the attempt has no end of its own
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | settings,
                start_new_session=True,
            )

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()
        self.process.communicate()

    def members(self) -> list[int]:
        """All processes of the attempt that live; torchrun's workers are in sessions of their own."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):  # it has ended, or is somebody else's
                if self._mark in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
        return found

    def kill(self) -> None:
        """End all at once, also those that are being born."""
        while members := self.members():
            send(signal.SIGKILL, members)

    def notes(self) -> Notes:
        return Notes.read(self._folder, self._attempt)

    def wait(self, condition: Callable[[], bool], what: str, alive: bool = True) -> None:
        """Until it is so, with the processes `alive` or on their way to their end.

        Raises:
            AssertionError: when they end before, or it takes too long; with what they wrote, and where they stand.
        """
        end = time.monotonic() + PATIENCE
        while not condition():
            if alive and self.process.poll() is not None:
                raise AssertionError(f"an attempt ended by itself before {what}:\n{self.log.read_text()}")
            if time.monotonic() > end:
                send(signal.SIGABRT, self.members())
                time.sleep(2)
                raise AssertionError(f"an attempt hangs before {what}:\n{self.log.read_text()}")
            time.sleep(0.01)

    def ended(self) -> bool:
        return self.process.poll() is not None and not self.members()


def send(number: int, processes: list[int]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)


# ------------------------------------------------------------------------------------------------- what is killed when


@dataclass(frozen=True)
class Ending:
    """How an attempt is brought to its end, and what has to be seen then."""

    code: int  # the exit code of the process that was started first
    deliver: Callable[[Job, random.Random], None]
    asked: bool = False  # the training was, so it saves what it has done


def to_launcher(number: signal.Signals) -> Callable[[Job, random.Random], None]:
    return lambda job, rng: send(number, [job.process.pid])


def to_a_worker(number: signal.Signals) -> Callable[[Job, random.Random], None]:
    """The others have to end without our help."""
    return lambda job, rng: send(number, [rng.choice(job.notes().pids)])


def to_all(number: signal.Signals) -> Callable[[Job, random.Random], None]:
    """As a system asks that is shut down; a worker then hears it from its launcher too."""
    return lambda job, rng: send(number, job.members())


ALL_AT_ONCE = Ending(-signal.SIGKILL, lambda job, rng: job.kill())
ENDINGS = {
    "torchrun": {  # which exits with 1 when a worker fails, and when it is asked to end
        "all": ALL_AT_ONCE,
        "a worker": Ending(1, to_a_worker(signal.SIGKILL)),
        "torchrun": Ending(-signal.SIGKILL, to_launcher(signal.SIGKILL)),  # with the store that its workers ask
        "SIGTERM": Ending(1, to_launcher(signal.SIGTERM), asked=True),
        "SIGTERM to all": Ending(1, to_all(signal.SIGTERM), asked=True),
        "SIGTERM to a worker": Ending(1, to_a_worker(signal.SIGTERM), asked=True),
        "SIGUSR1 to a worker": Ending(1, to_a_worker(signal.SIGUSR1), asked=True),
    },
    "cores": {
        "all": ALL_AT_ONCE,
        "a worker": Ending(1, to_a_worker(signal.SIGKILL)),
        "the launcher": Ending(-signal.SIGKILL, to_launcher(signal.SIGKILL)),
        "SIGTERM": Ending(EXIT_CODE, to_launcher(signal.SIGTERM), asked=True),
    },
}

# From when on, as the journals tell, and up to how many seconds later.
PHASES: dict[str, tuple[Callable[[Notes, Run], bool], float]] = {
    "start": (lambda notes, run: True, 5.0),
    "restore": (lambda notes, run: bool(notes.pids), 1.5),
    "training": (lambda notes, run: bool(notes.updates), 0.6),
    "saved": (lambda notes, run: len(notes.updates) > 2 * run.every, 0.6),  # there is something new to go on from
}


@dataclass(frozen=True)
class Kill:
    """A kill that was done."""

    world: int
    ending: str
    at: int  # the update that was under way, or had just been made; 0 before the first one
    saving: bool
    goes_on: int  # the update that is restored next
    notice: float | None = None  # seconds from the signal until the checkpoint was whole, of one that was asked to stop

    def __str__(self) -> str:
        if self.notice is not None:
            return (
                f"{self.ending}, world of {self.world}, stops after update {self.at}, saved {self.notice:.2f} s later"
            )
        where = f"at update {self.at}" if self.at else "before any update"
        again = f", {self.at - self.goes_on} updates again" if self.at else ""
        return (
            f"{self.ending}, world of {self.world}, {where}{' during a save' if self.saving else ''}, "
            f"goes on from {self.goes_on}{again}"
        )


# -------------------------------------------------------------------------------------------------- what was journalled


@dataclass
class Notes:
    """The journals of all ranks of one attempt."""

    pids: list[int] = field(default_factory=list)
    restored: set[int] = field(default_factory=set)  # the update that the ranks went on from
    updates: dict[int, list[tuple[int, list[int]]]] = field(default_factory=dict)  # epoch and samples, by microbatch

    @staticmethod
    def read(folder: Path, attempt: int) -> Notes:
        notes = Notes()
        for path in sorted(folder.glob(journal(folder, attempt, "*").name)):
            for line in path.read_text().splitlines(keepends=True):
                if line.endswith("\n"):  # else it was cut off
                    notes._add(json.loads(line))
        return notes

    def _add(self, fact: dict[str, Any]) -> None:
        if "pid" in fact:
            self.pids.append(fact["pid"])
        elif "restored" in fact:
            self.restored.add(fact["restored"])
        else:
            self.updates.setdefault(fact["update"], []).append((fact["epoch"], fact["samples"]))


def assert_exact(attempts: Sequence[Notes], dataset_size: int) -> int:
    """Every update was committed once, and in each epoch every sample counted once; returns the last update."""
    assert all(len(notes.restored) == 1 for notes in attempts if notes.updates), "ranks went on from different updates"
    begun = [(min(notes.restored), notes.updates) for notes in attempts if notes.restored]
    last = max(begun[-1][1])
    ends = [*(restored for restored, _ in begun[1:]), last]
    committed = [
        (update, counted)
        for (restored, updates), end in zip(begun, ends, strict=True)
        for update, counted in sorted(updates.items())
        if restored < update <= end
    ]
    assert [update for update, _ in committed] == list(range(1, last + 1))
    samples: dict[int, Counter[int]] = {}
    for _, counted in committed:
        for epoch, microbatch in counted:
            samples.setdefault(epoch, Counter()).update(microbatch)
    assert list(samples) == list(range(len(samples)))
    for epoch, of_epoch in samples.items():
        assert of_epoch == Counter(range(dataset_size)), epoch
    return last


class Campaign:
    """A training that is ended and goes on, again and again.

    Args:
        run: the training.
        folder: for its checkpoints and journals; empty.
        seed: of all that is drawn.
        by: what starts the processes, "torchrun" or "cores".
        minibatch_sizes: each attempt takes one of them.
    """

    def __init__(
        self, run: Run, folder: Path, seed: int, by: str = "torchrun", minibatch_sizes: tuple[int, ...] = (4,)
    ) -> None:
        self.run, self.folder, self.by, self.minibatch_sizes = run, folder, by, minibatch_sizes
        self._rng = random.Random(seed)
        self.attempts, self.kills = 0, list[Kill]()

    def kill(self, world: int, ending: str, phase: str = "training") -> Kill:
        """Let an attempt begin, and end it."""
        rng = random.Random(self._rng.random())  # what is drawn next time does not depend on what is found here
        end, (begun, longest) = ENDINGS[self.by][ending], PHASES[phase]
        delay = rng.uniform(0, longest)
        with self._start(world, rng, finish=False) as job:
            job.wait(lambda: begun(job.notes(), self.run), phase)
            time.sleep(delay)
            if not job.notes().pids:  # nobody yet who could hear anything
                ending, end = "all", ALL_AT_ONCE
            assert job.process.poll() is None, job.log.read_text()
            end.deliver(job, rng)
            job.wait(job.ended, "all its processes have ended", alive=False)
            assert job.process.returncode == end.code, (job.process.returncode, job.log.read_text())
            assert FORCED not in job.log.read_text(), job.log.read_text()
            notice = self._notice(job) if end.asked else None
            at = max(job.notes().updates, default=0)
            done = Kill(world, ending, at, self._saving(job.began), self._newest(), notice)
        if done.at:  # the save before the one that is being written is whole
            assert 0 <= done.at - done.goes_on <= (0 if end.asked else 2 * self.run.every), done
        self.kills.append(done)
        return done

    def finish(self, world: int) -> None:
        """Let an attempt go to its end, and check all that was done since the first one."""
        with self._start(world, random.Random(self._rng.random()), finish=True) as job:
            job.wait(job.ended, "it has finished", alive=False)
            assert job.process.returncode == 0, job.log.read_text()
        attempts = [Notes.read(self.folder, attempt) for attempt in range(self.attempts)]
        for kill, following in zip(self.kills, attempts[1:], strict=True):
            assert following.restored <= {kill.goes_on}, (kill, following.restored)
        unbroken = self.run.start(self.minibatch_sizes[0]).run(assert_exact(attempts, self.run.dataset_size))
        for rank in range(world):
            updates, progress, weights = torch.load(self.folder / f"end{rank}.pt")
            assert updates == unbroken.optimizer.updates
            assert_equal([np.array(progress)], [np.array(unbroken.optimizer.progress)], 1e-9)
            for found, expected in zip(weights, unbroken.weights(), strict=True):
                assert_equal([found.numpy()], [expected], 1e-9)

    def _start(self, world: int, rng: random.Random, finish: bool) -> Job:
        cores = world if self.by == "cores" else 0
        attempt = Attempt(self.attempts, rng.choice(self.minibatch_sizes), finish, cores)
        self.attempts += 1
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
        script = Path(__file__).with_name("killed_training.py")
        told = [str(self.folder), json.dumps(asdict(self.run)), json.dumps(asdict(attempt))]
        command = [sys.executable, *([] if cores else torchrun), str(script), *told]
        return Job(command, self.folder, attempt.number)

    def _notice(self, job: Job) -> float:
        """As rank 0 has told it; a worker that has left by itself has done so with 143."""
        log = job.log.read_text()
        (said,) = re.findall(r"^stops: update-\d+ was whole (\d+\.\d\d) s after SIG", log, re.MULTILINE)
        assert set(re.findall(r"exitcode +: (\d+)", log)) <= {str(EXIT_CODE)}, log
        return float(said)

    def _saving(self, began: float) -> bool:
        """Whether a checkpoint was cut off since then; one that was cut off earlier goes with the next save."""
        return any(path.stat().st_mtime >= began for path in self.folder.glob("checkpoints/.update-*.part"))

    def _newest(self) -> int:
        """The update of the newest checkpoint; all that are called one have to be one."""
        entries = CheckpointFolder(self.folder / "checkpoints").entries()
        assert all(whole(entry.path) is not None for entry in entries), entries
        return entries[0].update if entries else 0
