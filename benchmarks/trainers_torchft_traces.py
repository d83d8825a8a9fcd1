"""A capacity trace at 600 times its speed with up to 5 processes: a training under torchft and one under torchrun.

Processes of torchft are killed and started alone. torchrun starts all again: after a kill, and, asked to stop, when a
node has come. An update takes a tenth of a second on any number of processes, with a batch size for each. Simulations
with the measured seconds of restarts stand beside both.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from pathlib import Path

from helpers.elastic_cluster import replay
from helpers.torchft_groups import Groups
from results import record
from trainers_torchft import RESTARTED
from variable_batch_size.adaptive import PerDevice, Throughput
from variable_batch_size.lab import cluster
from variable_batch_size.lab.cluster import CapacityTrace
from variable_batch_size.lab.simulation import Overheads, simulate

SPEED, PAUSE, SAVE_EVERY, NODES, PER_DEVICE = 600, 0.1, 5.0, 5, 8


def under_torchft(capacity: CapacityTrace, folder: Path) -> tuple[int, int, float, float]:
    """Return the updates that are kept and those that were lost, the seconds of an update, and those after a change."""
    settings = {"trace": "per-device", "rule": "linear", "pause": PAUSE}
    with Groups(folder, settings, 1, join_ms=300, programs=True) as groups:
        for number in range(capacity.at(0)):
            groups.start(number)
        groups.wait(lambda: len(groups.holders) == capacity.at(0), "all groups")
        began, before = time.time(), groups.reached()
        changes = []
        while (now := time.time() - began) < capacity.end:
            there = capacity.at(now)
            for number in range(there, len(groups.running)):
                changes.append(time.time())
                groups.kill(number)
            for number in range(len(groups.running), there):
                groups.start(number)
            time.sleep(0.01)
        made = [event for event in groups.events() if event["event"] == "commit" and event["group"] == 0]
    times = [event["time"] for event in made if event["step"] > before and event["time"] < began + capacity.end]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    update = statistics.median(gaps)
    after = [next(t for t in times if t > change) - change for change in changes if change < times[-1]]
    return len(times), 0, update, statistics.mean(after) if after else 0.0


def under_torchrun(capacity: CapacityTrace, folder: Path) -> tuple[int, int, float, float]:
    """Return the same of a training that torchrun starts again."""
    flags = [f"--pause={PAUSE}", f"--save-every={SAVE_EVERY}"]
    starts = replay(capacity, folder, flags, grow_every=10.0, script=RESTARTED)
    gaps = [later - earlier for start in starts for earlier, later in itertools.pairwise(start.ends)]
    update = statistics.median(gaps)
    made = sum(max(0, len(start.ends) - 1) for start in starts)
    kept = next(start.updates[-1] for start in reversed(starts) if start.updates)  # the last one may still start
    waits = [start.ends[1] - update - start.begun for start in starts[1:] if len(start.ends) > 1]
    return kept, made - kept, update, statistics.mean(waits)


def compare(path: Path, hours: float) -> None:
    """Record both, and their simulations."""
    capacity = cluster.read(path).slice(0, hours * 3600).clip(1, NODES).scaled(1 / SPEED)
    print(f"{capacity.changes} changes, {capacity.mean:.2f} nodes, {capacity.end:.0f} s")
    sides = {"torchft": under_torchft, "torchrun": under_torchrun}
    for name, side in sides.items():
        with tempfile.TemporaryDirectory() as folder:
            kept, lost, update, wait = side(capacity, Path(folder))
        simulated = simulate(
            capacity,
            PerDevice(PER_DEVICE),
            throughput=Throughput(update, 0.0),
            ref_batchsize=PER_DEVICE,
            minibatch_size=PER_DEVICE,
            overheads=Overheads(
                lambda nodes, cause, name=name, wait=wait: 0.0 if (name, cause) == ("torchft", "growth") else wait,
                update if name == "torchft" else SAVE_EVERY,
                blocking=False,
                grow_every=10.0 if name == "torchrun" else 0.0,
            ),
        ).summary
        own = {"on": path.name, "where": f"{hours:g} hours at 1:{SPEED}, 1 to {NODES} processes"}
        record("productive share of the time", name, kept * update / capacity.end, "share", **own)
        record("productive share, simulated", name, simulated["productive"] / capacity.end, "share", **own)
        record("updates that are kept", name, kept, "updates", **own)
        record("updates that were lost", name, lost, "updates", **own)
        record("seconds that a change costs", name, wait, "s", **own)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path, help="a capacity trace")
    parser.add_argument("--hours", type=float, default=24.0, help="its first hours")
    flags = parser.parse_args()
    compare(flags.trace, flags.hours)
