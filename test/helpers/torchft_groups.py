"""Replica groups under a lighthouse, of which some are killed, frozen and started again, and what they have done.

`python -m helpers.torchft_groups EVENTS SEED [PROCESSES]` runs one random script of events and checks it.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

import variable_batch_size as vbs
from helpers.commands import free_port
from helpers.processes import Forked
from helpers.torchft_training import SAMPLES, Settings, loader_of, loss_of, make, start_forked

TRAINING = Path(__file__).with_name("torchft_training.py")
PATIENCE = 120.0  # seconds for anything, after which it hangs
Event = dict[str, Any]


class Groups:
    """A lighthouse and replica groups by number, all of which end with the context.

    The groups are forked with their imports done, unless they are `programs`.
    """

    def __init__(
        self,
        folder: Path,
        settings: Settings,
        least: int = 1,
        *,
        join_ms: int = 1000,
        heartbeat_ms: int = 500,
        programs: bool = False,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.settings, self.least, self.port = folder, settings | {"least": least}, least, free_port()
        self.options = ["--join_timeout_ms", str(join_ms), "--heartbeat_timeout_ms", str(heartbeat_ms)]
        self.programs, self.running = programs, dict[int, subprocess.Popen[bytes] | Forked]()
        self.frozen: set[int] = set()
        self._began: dict[int, float] = {}  # when each was started

    def __enter__(self) -> Groups:
        self.start_lighthouse()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process in self.running.values():
            _send(process, signal.SIGKILL)
        for process in (*self.running.values(), self.lighthouse):
            process.kill()
            process.wait()

    def start_lighthouse(self) -> None:
        """Start the lighthouse, at the same address each time."""
        program = Path(sys.executable).parent / "torchft_lighthouse"
        command = [str(program), "--min_replicas", str(self.least), "--bind", f"[::]:{self.port}"]
        command += ["--quorum_tick_ms", "20"]
        with (self.folder / "lighthouse.log").open("a") as log:
            self.lighthouse = subprocess.Popen([*command, *self.options], stdout=log, stderr=log)

    def kill_lighthouse(self) -> None:
        """Kill the lighthouse."""
        self.lighthouse.kill()
        self.lighthouse.wait()

    def restart_lighthouse(self, pause: float = 0.0) -> None:
        """Kill the lighthouse, and start it again after these seconds."""
        self.kill_lighthouse()
        time.sleep(pause)
        self.start_lighthouse()

    def start(self, *numbers: int) -> None:
        """Start groups."""
        for number in numbers:
            self._start(number)

    def _start(self, number: int) -> None:
        self._began[number] = time.time()
        address = f"http://localhost:{self.port}"
        if not self.programs:
            self.running[number] = Forked(start_forked, self.folder, number, self.settings, address)
            return
        path = os.pathsep.join([str(Path(__file__).parents[1]), str(Path(vbs.__file__).parent.parent)])
        own = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TORCHFT_LIGHTHOUSE": address}
        command = [sys.executable, "-W", "ignore", str(TRAINING), str(self.folder), str(number)]
        with (self.folder / f"log-{number}").open("a") as log:
            self.running[number] = subprocess.Popen(
                [*command, json.dumps(self.settings)],
                stdout=log,
                stderr=log,
                env=os.environ | own,
                start_new_session=True,
            )

    def kill(self, number: int, rank: int | None = None) -> None:
        """Kill a group with SIGKILL, or one of its processes, so that the others end."""
        if rank is not None:
            ups = [event for event in self.events() if event["event"] == "up"]
            os.kill([event["pid"] for event in ups if (event["group"], event["rank"]) == (number, rank)][-1], 9)
            return
        process = self.running.pop(number)
        _send(process, signal.SIGKILL)
        process.wait()
        self.frozen.discard(number)

    def ended(self, number: int) -> int:
        """Wait until a group has ended by itself; return its exit code."""
        try:
            code = self.running[number].wait(PATIENCE)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"group {number} has not ended\n{self.logs()}") from error
        del self.running[number]  # not before: what runs ends with the context
        return code

    def logs(self) -> str:
        """Return the ends of the logs of all groups."""
        return "\n".join(path.read_text()[-3000:] for path in sorted(self.folder.glob("log-*")))

    def freeze(self, number: int) -> None:
        """Stop a group until `thaw`."""
        _send(self.running[number], signal.SIGSTOP)
        self.frozen.add(number)

    def thaw(self, number: int) -> None:
        """Let a frozen group go on."""
        _send(self.running[number], signal.SIGCONT)
        self.frozen.discard(number)

    def events(self) -> list[Event]:
        """Return what all groups have written, in the order of time."""
        lines = [line for path in self.folder.glob("*.jsonl") for line in path.read_text().splitlines(keepends=True)]
        return sorted((json.loads(line) for line in lines if line.endswith("\n")), key=lambda event: event["time"])

    @property
    def holders(self) -> list[int]:
        """The groups that have committed an update since they were started: they hold the model."""
        last = {event["group"]: event["time"] for event in self.events() if event["event"] == "commit"}
        return [number for number in self.running if last.get(number, 0.0) > self._began[number]]

    def reached(self, number: int | None = None, what: str = "commit") -> int:
        """Return the last committed update, of any group or of one; -1 before the first."""
        found = (e["step"] for e in self.events() if e["event"] == what and number in (None, e["group"]))
        return max(found, default=-1)

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until something is true."""
        began = time.monotonic()
        while not condition():
            ended = {number: code for number, one in self.running.items() if (code := one.poll()) is not None}
            if time.monotonic() - began > PATIENCE or ended:
                raise TimeoutError(f"{what}: not yet; ended {ended}, reached {self.reached()}\n{self.logs()}")
            time.sleep(0.02)

    def wait_for(self, updates: int) -> None:
        """Wait until this many further updates are committed."""
        goal = self.reached() + updates
        self.wait(lambda: self.reached() >= goal, f"update {goal}")

    def finish(self, updates: int = 15) -> list[Event]:
        """Let all running groups make some updates together, and end; return what all have written."""
        for number in [*self.frozen]:
            self.thaw(number)
        began = time.time()

        def together() -> bool:
            sizes = {e["group"]: e["world"][1] for e in self.events() if e["event"] == "commit" and e["time"] > began}
            processes = self.settings.get("processes", 1)
            return set(sizes.values()) == {len(self.running) * processes} and sizes.keys() == self.running.keys()

        self.wait(together, "an update of all groups")
        (self.folder / "end.part").write_text(str(self.reached() + updates))
        (self.folder / "end.part").rename(self.folder / "end")
        for number in [*self.running]:
            assert self.ended(number) == 0, self.logs()
        return self.events()


def _send(process: subprocess.Popen[bytes] | Forked, number: int) -> None:
    """Send a signal to all processes of a group; a test may have started one without a session of its own."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        process.send_signal(number)


def run_script(groups: Groups, number: int, events: int, drawn: random.Random) -> None:
    """Let random events happen to this number of groups, of which any `least` have one that holds the model.

    The settings need `retries`, since the lighthouse is among those that are started again.
    """
    groups.start(*range(number))
    groups.wait_for(5)
    for _ in range(events):
        holders = groups.holders
        spare = len(holders) > number - groups.least + 1  # then the others are too few for a quorum
        possible: list[tuple[Callable[[Any], None], Sequence[Any]]] = [
            (groups.restart_lighthouse, [0.0, 1.0, 2.0]),
            (groups.thaw, [*groups.frozen]),
            (groups.start, [group for group in range(number) if group not in groups.running]),
            (groups.kill, [group for group in groups.running if spare or group not in holders]),
            (groups.freeze, [group for group in holders if group not in groups.frozen]),
        ]
        if open := [pair for pair in possible if pair[1]]:
            do, of = drawn.choice(open)
            do(drawn.choice(of))
        if drawn.random() < 0.3 or len({*groups.holders} - groups.frozen) < groups.least:
            time.sleep(drawn.uniform(0, 1))
        else:
            groups.wait_for(drawn.randint(1, 25))
    for group in range(number):
        if len(groups.running) < groups.least and group not in groups.running:  # a quorum needs it
            groups.start(group)


def check(events: Sequence[Event], settings: Settings) -> dict[str, int]:
    """Check the laws: each committed update has exactly its samples, and all groups have the same weights after it."""
    deals: dict[tuple[int, int], dict[int, Event]] = defaultdict(dict)  # (update, quorum) -> rank -> its last attempt
    commits: dict[tuple[int, int], list[Event]] = defaultdict(list)  # those of groups that then ended are made again
    for event in events:
        if event["event"] == "deal":
            deals[event["step"], event["quorum"]][event["world"][0]] = event
        elif event["event"] == "commit":
            commits[event["step"], event["quorum"]].append(event)
    ends = [event for event in events if event["event"] == "end"]
    updates = ends[0]["updates"]
    assert {event["updates"] for event in ends} == {updates}
    assert {step for step, _ in commits} == {*range(updates)}
    first_step, sizes = ends[0]["runs"]
    trace = vbs.BatchTrace(np.array(first_step), np.array(sizes), None)
    planned = samples_of_updates(trace, updates)
    for (step, quorum), found in commits.items():
        assert len({event["weights"] for event in found}) == 1, f"update {step} has different weights: {found}"
        (world,) = {event["world"][1] for event in found}
        used = [index for deal in deals[step, quorum].values() for index in deal["used"]]
        assert len(deals[step, quorum]) == world
        assert sorted(used) == sorted(planned[step]), f"samples of update {step}"
    begun = commits[max(key for key in commits if key[0] == 0)]
    (first,) = (event["group"] for event in begun if event["world"][0] == 0)  # from which the others begin
    undisturbed = train_alone(settings, trace, updates, first if settings.get("processes", 1) == 1 else 0)
    for event in ends:
        for own, expected in zip(event["weights"], undisturbed, strict=True):
            np.testing.assert_allclose(own, expected, rtol=1e-12, atol=1e-12)
    counted = {name: sum(event["event"] == name for event in events) for name in ("up", "commit", "broken")}
    return counted | {"updates": updates, "worlds": len({event["quorum"] for event in events if "quorum" in event})}


def samples_of_updates(trace: vbs.BatchTrace, updates: int) -> list[list[int]]:
    """Return the indices of each update, as a single process has them."""
    sampler = vbs.CustomSampler(SAMPLES, trace, 1, 0, 10**6)
    found: list[list[int]] = []
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        found += sampler
        if len(found) >= updates:
            break
    return found[:updates]


def train_alone(settings: Settings, trace: vbs.BatchTrace, updates: int, group: int) -> list[Any]:
    """Return the weights of an undisturbed training of a trace in one process, from the weights of a group."""
    model, optimizer = make(settings, trace, group)
    while optimizer.updates < updates:
        for update in vbs.updates(loader_of(optimizer), optimizer):
            for _, x, y in update:
                optimizer.backward(loss_of(model, x, y))
                optimizer.step()
            if optimizer.updates == updates:
                break
    return [parameter.tolist() for parameter in model.parameters()]


def main(events: int, seed: int, processes: int = 1) -> None:
    """Run a random script and check it."""
    drawn = random.Random(seed)
    settings: Settings = {
        "trace": drawn.choice(["fixed", "per-device", "noise"]),
        "rule": drawn.choice(["linear", "adascale", "root"]),
        "retries": 60,
        "quorum_timeout": 600,  # the script may kill a newcomer again and again
    }
    number = drawn.randint(2, 5)
    least = number // 2 + 1
    if processes > 1:
        settings["processes"] = processes
    print(f"seed {seed}: {number} groups, {settings}")
    torch.set_num_threads(1)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, Groups(Path(folder), settings, least) as groups:
        run_script(groups, number, events, drawn)
        print(check(groups.finish(), settings), f"{time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
