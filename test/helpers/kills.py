"""Kill a training at random instants, resume it in other worlds, and check that no update is lost or repeated.

The processes are real: `torchrun` with its workers, or the process that runs XLA cores with the one that launched it.
An attempt trains until it is killed, so that no kill is too late; the last attempt finishes. The committed updates are
read from the journals of killed_training.py: of each attempt, the updates after the one from which it resumed, up to
the one from which the next attempt resumed.
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
from helpers.killed_training import Attempt, KilledTraining, journal_path
from helpers.reference import assert_equal
from variable_batch_size.checkpoint.folder import update_of
from variable_batch_size.preemption import EXIT_CODE

TIMEOUT = 300.0  # seconds, after which an attempt counts as hanging
FORCED = "Unable to shutdown process"  # what torchrun prints if a worker has not exited 30 s after a SIGTERM
SAVED = rf"Checkpoint update-\S+ saved (\d+\.\d\d) s after SIG\w+; exiting with {EXIT_CODE}\.$"
MARK = "KILLED_TRAINING"  # environment variable of every process of an attempt, also of processes without a journal


class Job:
    """The processes of one attempt, all of which end with the context."""

    def __init__(self, command: list[str], folder: Path, attempt: int) -> None:
        self._folder, self._attempt = folder, attempt
        mark = f"{folder}:{attempt}"
        self._mark = f"{MARK}={mark}".encode()
        self.log = folder / f"log-{attempt}"
        path = os.pathsep.join([str(Path(__file__).parents[1]), str(Path(vbs.__file__).parent.parent)])
        settings = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PJRT_DEVICE": "CPU", MARK: mark}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,  # the attempt exits when it closes, however this process ends
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
        """Return all live processes of the attempt; torchrun's workers are in sessions of their own."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):  # the process has ended, or belongs to another user
                if self._mark in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
        return found

    def kill(self) -> None:
        """Kill all processes, also those that are being started."""
        while members := self.members():
            send(signal.SIGKILL, members)

    def journals(self) -> Journals:
        return Journals.read(self._folder, self._attempt)

    def wait(self, condition: Callable[[], bool], what: str, alive: bool = True) -> None:
        """Wait until the condition is true; if `alive`, the processes must not end before.

        An error shows their output and, if they hang, their tracebacks.
        """
        deadline = time.monotonic() + TIMEOUT
        while not condition():
            if alive and self.process.poll() is not None:
                raise AssertionError(f"an attempt ended by itself before {what}:\n{self.log.read_text()}")
            if time.monotonic() > deadline:
                send(signal.SIGABRT, self.members())
                time.sleep(2)
                raise AssertionError(f"an attempt hangs before {what}:\n{self.log.read_text()}")
            time.sleep(0.01)

    def ended(self) -> bool:
        return self.process.poll() is not None and not self.members()


def send(number: int, processes: list[int]) -> None:
    """Send the signal to those of the processes that are alive."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)


# -------------------------------------------------------------------------------------------------- how an attempt ends


@dataclass(frozen=True)
class Ending:
    """A way to end an attempt, and what is expected then."""

    code: int  # exit code of the process that was started first
    deliver: Callable[[Job, random.Random], None]  # sends the signals
    graceful: bool = False  # whether the training can save first


def to_launcher(number: signal.Signals) -> Callable[[Job, random.Random], None]:
    return lambda job, rng: send(number, [job.process.pid])


def to_a_worker(number: signal.Signals) -> Callable[[Job, random.Random], None]:
    """Send the signal to one worker; the others have to end by themselves."""
    return lambda job, rng: send(number, [rng.choice(job.journals().pids)])


def to_all(number: signal.Signals) -> Callable[[Job, random.Random], None]:
    """Send the signal to all processes, as a system that shuts down; workers then get it from their launcher too."""
    return lambda job, rng: send(number, job.members())


KILL_ALL = Ending(-signal.SIGKILL, lambda job, rng: job.kill())
ENDINGS = {
    "torchrun": {  # it exits with 1 if a worker fails, and after a SIGTERM
        "all": KILL_ALL,
        "a worker": Ending(1, to_a_worker(signal.SIGKILL)),
        "torchrun": Ending(-signal.SIGKILL, to_launcher(signal.SIGKILL)),  # and with it the store that its workers use
        "SIGTERM": Ending(1, to_launcher(signal.SIGTERM), graceful=True),
        "SIGTERM to all": Ending(1, to_all(signal.SIGTERM), graceful=True),
        "SIGTERM to a worker": Ending(1, to_a_worker(signal.SIGTERM), graceful=True),
        "SIGUSR1 to a worker": Ending(1, to_a_worker(signal.SIGUSR1), graceful=True),
    },
    "cores": {
        "all": KILL_ALL,
        "a worker": Ending(1, to_a_worker(signal.SIGKILL)),
        "the launcher": Ending(-signal.SIGKILL, to_launcher(signal.SIGKILL)),
        "SIGTERM": Ending(EXIT_CODE, to_launcher(signal.SIGTERM), graceful=True),
    },
}

# By name: the condition that begins the phase, and the seconds after it within which an ending is drawn.
PHASES: dict[str, tuple[Callable[[Journals, KilledTraining], bool], float]] = {
    "start": (lambda journals, run: True, 5.0),
    "restore": (lambda journals, run: bool(journals.pids), 1.5),
    "training": (lambda journals, run: bool(journals.updates), 0.6),
    "saved": (lambda journals, run: len(journals.updates) > 2 * run.every, 0.6),  # a checkpoint has been published
}


@dataclass(frozen=True)
class Kill:
    """A kill that has been carried out."""

    world: int
    ending: str
    update: int  # the update in progress, or just made; 0 before the first one
    saving: bool
    resumes_from: int  # update of the newest checkpoint
    saved_after: float | None = None  # seconds from the signal to the checkpoint, if the training was asked to stop

    def __str__(self) -> str:
        if self.saved_after is not None:
            return (
                f"{self.ending}, world size {self.world}, stopped after update {self.update}, "
                f"saved {self.saved_after:.2f} s after the signal"
            )
        where = f"at update {self.update}" if self.update else "before any update"
        repeated = f", repeats {self.update - self.resumes_from} updates" if self.update else ""
        return (
            f"{self.ending}, world size {self.world}, {where}{' during a save' if self.saving else ''}, "
            f"resumes from update {self.resumes_from}{repeated}"
        )


# --------------------------------------------------------------------------------------------------------- the journals


@dataclass
class Journals:
    """The journals of all ranks of one attempt."""

    pids: list[int] = field(default_factory=list)
    restored: set[int] = field(default_factory=set)  # the update from which the ranks resumed
    updates: dict[int, list[tuple[int, list[int]]]] = field(default_factory=dict)  # epochs and samples of microbatches

    @staticmethod
    def read(folder: Path, attempt: int) -> Journals:
        journals = Journals()
        for path in sorted(folder.glob(journal_path(folder, attempt, "*").name)):
            for line in path.read_text().splitlines(keepends=True):
                if line.endswith("\n"):  # else the process was killed while it wrote the line
                    journals._add(json.loads(line))
        return journals

    def _add(self, fact: dict[str, Any]) -> None:
        if "pid" in fact:
            self.pids.append(fact["pid"])
        elif "restored" in fact:
            self.restored.add(fact["restored"])
        else:
            self.updates.setdefault(fact["update"], []).append((fact["epoch"], fact["samples"]))


def assert_exact(attempts: Sequence[Journals], dataset_size: int) -> int:
    """Check that every update was committed once and every sample used once an epoch, and return the last update."""
    assert all(len(journals.restored) == 1 for journals in attempts if journals.updates), (
        "ranks resumed from different updates"
    )
    resumed = [(min(journals.restored), journals.updates) for journals in attempts if journals.restored]
    last = max(resumed[-1][1])
    ends = [*(restored for restored, _ in resumed[1:]), last]
    committed = [
        (update, microbatches)
        for (restored, updates), end in zip(resumed, ends, strict=True)
        for update, microbatches in sorted(updates.items())
        if restored < update <= end
    ]
    assert [update for update, _ in committed] == list(range(1, last + 1))
    samples: dict[int, Counter[int]] = {}
    for _, microbatches in committed:
        for epoch, microbatch in microbatches:
            samples.setdefault(epoch, Counter()).update(microbatch)
    assert list(samples) == list(range(len(samples)))
    for epoch, of_epoch in samples.items():
        assert of_epoch == Counter(range(dataset_size)), epoch
    return last


class Campaign:
    """A training that is killed and resumed repeatedly; `by`: what starts the processes, "torchrun" or "cores".

    Each attempt draws a minibatch size, and what sums the gradients: "plain", "ddp" or "fsdp".
    """

    def __init__(
        self,
        run: KilledTraining,
        folder: Path,
        seed: int,
        by: str = "torchrun",
        minibatch_sizes: tuple[int, ...] = (4,),
        sums: tuple[str, ...] = ("plain",),
    ) -> None:
        self.run, self.folder, self.by, self.minibatch_sizes, self.sums = run, folder, by, minibatch_sizes, sums
        self._rng = random.Random(seed)
        self.attempts, self.kills = 0, list[Kill]()

    def kill(self, world: int, ending: str, phase: str = "training") -> Kill:
        """Start an attempt in a world of this size, and end it in this phase."""
        rng = random.Random(self._rng.random())  # so that timing does not affect the draws of later attempts
        expected, (has_begun, longest) = ENDINGS[self.by][ending], PHASES[phase]
        delay = rng.uniform(0, longest)
        with self._start(world, rng, finish=False) as job:
            job.wait(lambda: has_begun(job.journals(), self.run), phase)
            time.sleep(delay)
            alone = world == 1 and ending == "torchrun"  # one worker needs no store, and trains on without torchrun
            if alone or not job.journals().pids:  # no rank handles signals yet
                ending, expected = "all", KILL_ALL
            assert job.process.poll() is None, job.log.read_text()
            expected.deliver(job, rng)
            job.wait(job.ended, "all its processes have ended", alive=False)
            code, log = job.process.returncode, job.log.read_text()
            aborted = code == -signal.SIGABRT and "SignalException" in log  # torchrun's own end, after the signal
            assert code == expected.code or aborted, (code, log)
            assert FORCED not in job.log.read_text(), job.log.read_text()
            saved_after = self._saved_after(job) if expected.graceful else None
            update = max(job.journals().updates, default=0)
            done = Kill(world, ending, update, self._saving(), self._newest(), saved_after)
        if done.update:  # the save before the one in progress is complete
            assert 0 <= done.update - done.resumes_from <= (0 if expected.graceful else 2 * self.run.every), done
        self.kills.append(done)
        return done

    def finish(self, world: int) -> None:
        """Run an attempt to its end, and check the updates of all attempts."""
        with self._start(world, random.Random(self._rng.random()), finish=True) as job:
            job.wait(job.ended, "it has finished", alive=False)
            assert job.process.returncode == 0, job.log.read_text()
        attempts = [Journals.read(self.folder, attempt) for attempt in range(self.attempts)]
        for kill, following in zip(self.kills, attempts[1:], strict=True):
            assert following.restored <= {kill.resumes_from}, (kill, following.restored)
        uninterrupted = self.run.start(self.minibatch_sizes[0]).run(assert_exact(attempts, self.run.dataset_size))
        for rank in range(world):
            updates, progress, weights = torch.load(self.folder / f"end{rank}.pt")
            assert updates == uninterrupted.optimizer.updates
            assert_equal([np.array(progress)], [np.array(uninterrupted.optimizer.progress)], 1e-9)
            for found, expected in zip(weights, uninterrupted.weights(), strict=True):
                assert_equal([found.numpy()], [expected], 1e-9)

    def _start(self, world: int, rng: random.Random, finish: bool) -> Job:
        cores = world if self.by == "cores" else 0
        attempt = Attempt(self.attempts, rng.choice(self.minibatch_sizes), finish, cores, rng.choice(self.sums))
        self.attempts += 1
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
        script = Path(__file__).with_name("killed_training.py")
        arguments = [str(self.folder), json.dumps(asdict(self.run)), json.dumps(asdict(attempt))]
        command = [sys.executable, *([] if cores else torchrun), str(script), *arguments]
        return Job(command, self.folder, attempt.number)

    def _saved_after(self, job: Job) -> float:
        """Return the seconds that rank 0 printed, and check that workers that exited by themselves did so with 143."""
        log = job.log.read_text()
        (seconds,) = re.findall(SAVED, log, re.MULTILINE)
        assert set(re.findall(r"exitcode +: (\d+)", log)) <= {str(EXIT_CODE)}, log
        return float(seconds)

    def _saving(self) -> bool:
        """Return whether a save was interrupted; the next save deletes what is left of it."""
        folder = self.run.folder(self.folder)
        return any(name.startswith("update-") for name in folder.storage.listed().keys() - folder.names())

    def _newest(self) -> int:
        """Return the update of the newest checkpoint, and check that all checkpoints are intact."""
        folder = self.run.folder(self.folder)
        names = folder.names()
        assert all(map(folder.is_intact, names)), names
        return update_of(names[0]) if names else 0
