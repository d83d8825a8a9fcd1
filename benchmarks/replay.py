"""Does a real elastic training take the time, and lose the updates, that its simulation says?

A training of MNIST under torchrun and gloo follows a capacity trace with 1 to 4 processes: those that leave are killed
with SIGKILL or, with --notice, the training gets SIGTERM before. Its simulation knows what a separate run before it has
measured, in which the processes become one more and one fewer in turn: the seconds of updates and of restarts. Because
the speed of a machine drifts, another simulation has the seconds of the training itself: what remains is the error of
the simulator. With --replay, one process then trains under the simulated batch trace, and must make the same updates.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest import mock

from helpers.elastic_cluster import Cause, Start, assert_replayed, replay
from records import Measured
from results import LOST, OWN, SIMULATED, record
from variable_batch_size.adaptive import ConstantBatch, ControlInput, Controller, PerDevice, Throughput
from variable_batch_size.lab import cluster
from variable_batch_size.lab.simulation import Overheads, Run, simulate

BATCH_SIZE, MICROBATCH, WIDTH = 16384, 256, 512  # what a core computes at once fits its cache
DATASET_SIZE = 60_000
NODES = 4
SAVE_EVERY = 5.0  # seconds
GROW_EVERY = 10.0  # seconds
SECONDS = Throughput.seconds  # without the factors of `Model`
FLAGS = [f"--microbatch={MICROBATCH}", f"--width={WIDTH}", f"--save-every={SAVE_EVERY}"]


def update_seconds(starts: Sequence[Start], controller: Controller) -> dict[int, float]:
    """Return the median seconds of a full update by the number of nodes."""
    seconds: dict[int, list[float]] = defaultdict(list)
    for start in starts:
        seconds[start.nodes] += start.seconds_of(controller(ControlInput(start.nodes)))
    return {nodes: statistics.median(values) for nodes, values in seconds.items() if values}


@dataclass(frozen=True)
class Model:
    """What a simulation has to know of a training.

    Attributes:
        throughput: the seconds of an update.
        restarts: the seconds of a restart by its cause and the number of nodes.
        save_every: the seconds from one save to the next: the interval, and what the ranks take to agree.
        controller: chooses the batch size.
        factors: by the number of nodes, what the seconds of `throughput` are multiplied with; 1 without a row.
    """

    throughput: Throughput
    restarts: Mapping[tuple[Cause, int], float]
    save_every: float
    controller: Controller
    factors: Mapping[int, float] = field(default_factory=dict)

    @classmethod
    def fit(cls, starts: Sequence[Start], controller: Controller) -> Model:
        """Return the model of the starts of a training."""
        updates = update_seconds(starts, controller)
        sizes = {nodes: controller(ControlInput(nodes)) for nodes in updates}
        rounds = {nodes: -(-sizes[nodes] // (MICROBATCH * nodes)) for nodes in updates}
        most = {nodes: -(-sizes[nodes] // (rounds[nodes] * nodes)) for nodes in updates}  # rows of a microbatch
        rows = [(nodes, most[nodes], rounds[nodes], value) for nodes, value in updates.items()]
        throughput = Throughput.fit(rows)
        print(f"updates: {rows}, error of the fit {throughput.error(rows):.1%}")
        between = [value for start in starts for value in start.seconds_between_saves]
        print(f"between saves: {between}")
        model = cls(throughput, {}, statistics.mean(between), controller)
        return replace(model, restarts=model.restarts_of(starts))

    def with_own_seconds(self, starts: Sequence[Start]) -> tuple[Model, float]:
        """Return the model with the seconds of these starts where they have some, and their ratio for updates.

        With a number of nodes with which they made none, updates are slower by the median ratio of the others.
        """
        found = update_seconds(starts, self.controller)
        sizes = {nodes: self.controller(ControlInput(nodes)) for nodes in found}
        own = {nodes: value / self.seconds(sizes[nodes], nodes) for nodes, value in found.items()}
        ratio = statistics.median(own.values())
        print(f"updates, relative to the measurements: {own}")
        model = replace(self, factors={nodes: own.get(nodes, ratio) for nodes in range(1, NODES + 1)})
        return replace(model, restarts={**self.restarts, **model.restarts_of(starts)}), ratio

    def seconds(self, samples: int, nodes: int, minibatch_size: int | None = MICROBATCH) -> float:
        """Return the seconds of an update."""
        return SECONDS(self.throughput, samples, nodes, minibatch_size) * self.factors.get(nodes, 1.0)

    def restarts_of(self, starts: Sequence[Start]) -> dict[tuple[Cause, int], float]:
        """Return the mean seconds of a restart by its cause and the number of nodes.

        The first update is not a part of it, but what it takes longer than others is.
        """
        seconds: dict[tuple[Cause, int], list[float]] = defaultdict(list)
        for start in starts:
            if len(start.ends) > 1:
                first = self.seconds(start.samples[1] - start.samples[0], start.nodes)
                seconds[start.cause, start.nodes].append(start.ends[1] - first - start.begun)
        print("restarts: " + ", ".join(f"{cause} {nodes}: {values}" for (cause, nodes), values in seconds.items()))
        return {key: statistics.mean(values) for key, values in seconds.items()}

    def restart(self, nodes: int, cause: Cause) -> float:
        """Return the seconds of a restart; those with the nearest number of nodes if there was none with this one."""
        known = [key for key in self.restarts if key[0] == cause] or list(self.restarts)
        return self.restarts[min(known, key=lambda key: abs(key[1] - nodes))]

    def simulate(self, capacity: cluster.CapacityTrace, notice: float, until: int | None = None) -> Run:
        """Simulate the training, up to a number of updates.

        A save takes no time of its own: a thread writes it, and before a stop its time is that of the restart.
        """
        with mock.patch.object(
            Throughput, "seconds", lambda _, *update, **_how: self.seconds(*update)
        ):  # with the factors
            return simulate(
                capacity,
                self.controller,
                throughput=self.throughput,
                ref_batchsize=BATCH_SIZE,
                minibatch_size=MICROBATCH,
                dataset_size=DATASET_SIZE,
                overheads=Overheads(
                    self.restart, self.save_every, blocking=False, notice=notice, grow_every=GROW_EVERY
                ),
                until=until,
                by="updates",
            )


def stairs(seconds: float) -> cluster.CapacityTrace:
    """Return the capacity of the measurements: 1 to 4 nodes and back, each for so many seconds."""
    nodes = [*range(1, NODES), *range(NODES, 0, -1)]
    return cluster.CapacityTrace([number * seconds for number in range(len(nodes))], nodes, end=len(nodes) * seconds)


def train(capacity: cluster.CapacityTrace, folder: Path, controller: Controller, notice: float) -> list[Start]:
    folder.mkdir()
    own = f"--per-device={controller.samples}" if isinstance(controller, PerDevice) else f"--trace=0:{BATCH_SIZE}"
    return replay(capacity, folder, [*FLAGS, own], notice=notice, grow_every=GROW_EVERY)


def lost_updates(starts: Sequence[Start]) -> list[tuple[float, int]]:
    """Return when the training was killed, and how many updates were lost."""
    found = []
    for index, start in enumerate(starts):
        if start.killed is not None:
            later = next((other.updates[0] for other in starts[index + 1 :] if other.updates), None)
            before = [update for other in starts[: index + 1] for update in other.updates[-1:]]
            if later is not None and start.updates:
                found.append((start.killed, before[-1] - later))
    return found


def lost_in(run: Run, time: float) -> int:
    """Return how many updates a kill at this time loses in a simulation."""
    rows = [row for row in run.timeline.itertuples() if row.end <= time + 1e-6]
    lost = 0
    while rows and rows[-1].state == "redone":
        lost += rows.pop().updates
    return lost


def elapsed(starts: Sequence[Start], updates: int) -> float:
    """Return when so many updates were made for good."""
    return max(
        end
        for start in starts
        for end, number in zip(start.ends[1:], start.updates[1:], strict=True)
        if number == updates
    )


@dataclass(frozen=True)
class Comparison:
    """A simulation relative to the training.

    Attributes:
        updates: ratio of the updates at the end of the capacity trace.
        time: ratio of the times at which 95 % of them are made.
        lost: updates that each kill has lost, in the training and in the simulation.
        ratio: seconds of an update in the training, relative to those of the measurements before it.
    """

    updates: float
    time: float
    lost: list[tuple[int, int]]
    ratio: float


def compare(
    capacity: cluster.CapacityTrace, notice: float, starts: Sequence[Start], model: Model, ratio: float
) -> tuple[Comparison, Run]:
    """Return a comparison of a training with its simulation, and the simulation."""
    run = model.simulate(capacity, notice)
    made = next(start.updates[-1] for start in reversed(starts) if start.updates)
    goal = int(0.95 * min(made, run.summary["updates"]))
    seconds = model.simulate(capacity, notice, goal).summary["elapsed"], elapsed(starts, goal)
    lost = [(number, lost_in(run, time)) for time, number in lost_updates(starts)]
    print(
        f"{run.summary['updates']} simulated updates, {made} real ones; {goal} of them after {seconds} s; lost {lost}"
    )
    return Comparison(run.summary["updates"] / made, seconds[0] / seconds[1], lost, ratio), run


def capacity_of(seed: int, seconds: float) -> cluster.CapacityTrace:
    """Return a random capacity trace, in which a process stays for 180 s and comes back after 90 s in the mean."""
    return cluster.synthetic(nodes=NODES, mean_up=180, mean_down=90, duration=seconds, seed=seed)


def report(found: Sequence[Comparison], ending: str, own_seconds: bool) -> None:
    """Record what simulations with the seconds of the measurements, or of the trainings themselves, have found."""
    own = {"what": "an elastic training", "on": ending}
    drift = [comparison.ratio for comparison in found]
    slower = f"; seconds of an update {min(drift):.2f} to {max(drift):.2f} times those of the separate run"
    for case in ("updates", "time"):
        ratios = [getattr(comparison, case) for comparison in found]
        note = f"{min(ratios):.3f} to {max(ratios):.3f}" + slower * own_seconds
        name = case + f", {OWN}" * own_seconds
        record(SIMULATED, measured=Measured(statistics.median(ratios), n=len(ratios)), case=name, note=note, **own)
    differences = [abs(real - simulated) for comparison in found for real, simulated in comparison.lost]
    if differences:
        note = f"{sum(number <= 1 for number in differences)} of {len(differences)} within one update"
        measured, name = Measured(max(differences), n=len(differences)), OWN * own_seconds
        record(LOST, measured=measured, unit="updates", case=name, note=note, **own)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--notice", type=float, default=0.0, help="seconds between SIGTERM and the loss of processes")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the capacity traces")
    parser.add_argument("--seconds", type=float, default=240.0, help="length of a capacity trace")
    parser.add_argument("--replay", action="store_true", help="train in one process, too, under the simulated traces")
    parser.add_argument(
        "--per-device", type=int, help="samples of each process in an update; else the batch is constant"
    )
    options = parser.parse_args()
    separate, own = [], []
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        controller = ConstantBatch(BATCH_SIZE) if options.per_device is None else PerDevice(options.per_device)
        model = Model.fit(train(stairs(25), place / "measurements", controller, options.notice), controller)
        for seed in options.seeds:
            folder, capacity = place / f"training-{seed}", capacity_of(seed, options.seconds)
            starts = train(capacity, folder, controller, options.notice)
            print(f"starts: {[(start.cause, start.nodes, round(start.begun, 2)) for start in starts]}")
            model_of_its_own, ratio = model.with_own_seconds(starts)
            comparison, run = compare(capacity, options.notice, starts, model, ratio)
            separate.append(comparison)
            own.append(compare(capacity, options.notice, starts, model_of_its_own, ratio)[0])
            if options.replay:
                updates, difference = assert_replayed(run.trace, folder, place / f"alone-{seed}", FLAGS)
                print(f"one process: the same {updates} updates; parameters differ by at most {difference:.1e}")
                assert difference < 1e-6
    ending = ("SIGTERM" if options.notice else "SIGKILL") + ", PerDevice" * (options.per_device is not None)
    report(separate, ending, own_seconds=False)
    report(own, ending, own_seconds=True)
