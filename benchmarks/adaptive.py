"""What do controllers bring? Updates, samples and simulated time to a target loss, and how well a simulation predicts.

    PYTHONPATH=test python benchmarks/adaptive.py --fashion-dir DIR

A run trains one of the tasks of benchmarks/adaptive_tasks.py on one core until its validation loss, evaluated every
`Task.between` samples, is at most `Task.target`, or `Task.samples` are used. The batch size is constant: the least, the
largest, or three times the least; or that of a controller with these bounds, which is asked every 20 updates. All of a
task follow the same rule: AdaScale around SGD, at a constant learning rate of the reference; the root rule around
AdamW, with a warm-up and a cosine in samples. These trainings go on to the end of the schedule, where their losses can
be compared, too.

Time is simulated: `Throughput.seconds`, summed over the updates up to the target, once by a model of this core, which
is fitted to measured updates; and once by a model of 64 devices, each as fast as this core, whose communication takes
`NET_BASE` and `NET_DEVICE` seconds: a sum over 64 devices takes 16 ms.

`Goodput` measures the throughput itself, in a training of one core, for which it begins with larger batches; "Goodput
(64)" chooses for the 64 devices of the model.

The prediction: `simulate` gets the controller, the fitted throughput, and the noise curve of a training with the least
batch size and another seed. It is compared with the training by samples: "doublings" are the median of
|log2(simulated / real batch size)| at 200 equally spaced numbers of samples.

A run that is done is a file in `--folder` and is not repeated. The last step writes adaptive.csv (a row for each run)
and adaptive_sizes.csv (the batch sizes of the first seed), from which docs/figures/adaptive.py draws, and records.
"""

from __future__ import annotations

import argparse
import csv
import functools
import json
import statistics
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

import variable_batch_size as vbs
from adaptive_tasks import TASKS, Images, Task, Training
from records import Measured, spread
from results import record
from rules import load
from variable_batch_size.adaptive import (
    ControlInput,
    Controller,
    Goodput,
    NoiseScale,
    NormTest,
    Seesaw,
    Throughput,
)
from variable_batch_size.lab.cluster import CapacityTrace
from variable_batch_size.lab.simulation import NoiseCurve, simulate

FOLDER = Path(__file__).parent
RUNS, SIZES = FOLDER / "adaptive.csv", FOLDER / "adaptive_sizes.csv"
SMALL, MIDDLE, LARGE = "smallest", "middle", "largest"
DEVICES, NET_BASE, NET_DEVICE = 64, 0.01, 0.0001
EVERY, DELAY = 20, 8  # updates
MEASURED = (
    4,
    8,
    16,
    32,
    64,
    128,
    256,
)  # batch sizes of the updates whose time is measured: the shortest, because other processes share the cores
QUESTION, PREDICTED = "to the target / with the smallest batches", "batch sizes of a simulation"
SCHEDULED = "at the end of the schedule"
UNITS = {"updates": "updates", "samples": "samples", "core": "s", "devices": "s"}


# The controllers. -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Elsewhere:
    """A controller that chooses for other devices than those that train."""

    controller: Controller
    devices: int
    throughput: Throughput

    needs_noise: ClassVar[bool] = True

    def __call__(self, input: ControlInput) -> int:
        """Return the batch size for the other devices."""
        return self.controller(replace(input, devices=self.devices, throughput=self.throughput))


def after(samples: int, first: int, then: Controller) -> Controller:
    """Return a controller with the batch size `first` for so many samples, and that of `then` from there on."""
    return lambda input: first if input.samples < samples else then(input)


def cluster_of(core: Throughput) -> Throughput:
    """Return the model of 64 devices, each as fast as a core."""
    return replace(core, net_base=NET_BASE, net_device=NET_DEVICE)


def traces(task: Task, core: Throughput) -> dict[str, int | vbs.AdaptiveTrace]:
    """Return the batch sizes that are compared, by name."""
    bounds = task.small, task.large
    controllers: dict[str, Controller] = {
        "NoiseScale": NoiseScale(),
        "NormTest": NormTest(0.5),
        "Goodput": Goodput(bounds),
        f"Goodput ({DEVICES})": Elsewhere(Goodput(bounds), DEVICES, cluster_of(core)),
    }
    if task.scheduled:
        warm_up = task.samples // 10
        seesaw = Seesaw(lambda samples: task.schedule(samples // task.small), *bounds)
        controllers["Seesaw"] = after(warm_up, task.small, seesaw)
    adaptive = {
        name: vbs.AdaptiveTrace(controller, task.small, bounds, task.microbatch, EVERY, DELAY)
        for name, controller in controllers.items()
    }
    return {SMALL: task.small, MIDDLE: 3 * task.small, LARGE: task.large, **adaptive}


# A run, in a process of its own. --------------------------------------------------------------------------------------


class Cell(NamedTuple):
    """What is trained, under which batch sizes."""

    task: str
    trace: str
    seed: int

    def file(self, folder: Path) -> Path:
        """Return the file of the result."""
        return folder / "-".join([self.task, self.trace.replace(" ", ""), f"{self.seed}.json"])


@dataclass
class Result:
    """What a run has measured.

    Attributes:
        evaluations: updates, samples, progress and validation loss of each.
        sizes: batch size and number of updates of each run of equal updates.
        reached: the row of `evaluations` with the target loss; None if no one has it.
        seconds: what training took, without the evaluations.
    """

    evaluations: list[tuple[int, int, float, float]]
    sizes: list[tuple[int, int]]
    reached: int | None
    seconds: float

    @property
    def end(self) -> tuple[int, int, float, float]:
        """The evaluation at the target, or the last one."""
        return self.evaluations[-1 if self.reached is None else self.reached]

    def time(self, model: Throughput, devices: int, microbatch: int) -> float:
        """Return the seconds of the updates up to the end, by a model."""
        each = np.repeat(*np.array(self.sizes).T)[: self.end[0]]  # (updates,)
        sizes, counts = np.unique(each, return_counts=True)
        return float(counts @ [model.seconds(int(size), devices, microbatch) for size in sizes])


def images(folder: str | None, name: str, train: bool) -> Images:
    return tuple(load("MNIST" if name == "MNIST" else "Fashion", folder if name != "MNIST" else None, train))


def train(cell: Cell, core: Throughput, flags: argparse.Namespace) -> None:
    """Train, and write the result."""
    torch.set_num_threads(1)
    task = TASKS[cell.task]
    training = Training(task, functools.partial(images, flags.fashion_dir), cell.seed)
    trace = traces(task, core)[cell.trace]
    sampler = vbs.CustomSampler(
        len(training.data[0]), trace, 1, 0, task.microbatch, cell.seed, max_samples=task.samples
    )
    logdir = cell.file(flags.folder).with_suffix("")
    with vbs.Tracker(logdir, progress=False) as tracker:
        result = run(training, sampler, *training.optimizer(sampler, tracker=tracker), 1 + (cell.trace == SMALL))
    cell.file(flags.folder).write_text(json.dumps(asdict(result)))
    print(cell, result.end, f"{result.seconds:.0f} s", flush=True)


def run(training: Training, sampler: vbs.CustomSampler, optimizer: Any, schedule: Any, longer: int = 1) -> Result:
    """Train until the target, or `longer` times as long, for a noise curve that ends later than other runs.

    A training with a schedule ends with it.
    """
    task, result, made = training.task, Result([], [], None, 0.0), [0]
    begin = time.perf_counter()
    for _ in vbs.remaining_epochs(sampler, optimizer):
        for indices in sampler:
            training.loss(indices).backward()
            if not optimizer.step():
                continue
            schedule.step()
            made.append(optimizer.samples)
            if made[-1] // task.between > made[-2] // task.between:
                result.seconds += time.perf_counter() - begin
                loss = training.validation_loss()
                if result.reached is None and loss <= task.target:
                    result.reached = len(result.evaluations)
                result.evaluations.append((optimizer.updates, optimizer.samples, optimizer.progress, loss))
                begin = time.perf_counter()
            if result.reached is not None and made[-1] >= result.end[1] * longer and not task.scheduled:
                break
        else:
            continue
        break
    result.sizes = [(int(size), len(list(same))) for size, same in groupby(np.diff(made))]
    return result


def measure(task: Task, flags: argparse.Namespace) -> Throughput:
    """Return the throughput of this core: fitted to the shortest of 20 updates of each size, in turns."""
    file = flags.folder / f"{task.name}-throughput.json"
    if not file.exists():
        torch.set_num_threads(1)
        training = Training(task, functools.partial(images, flags.fashion_dir), 0)
        sizes = list(MEASURED) * 21
        sampler = vbs.CustomSampler(len(training.data[0]), sizes, 1, 0, task.microbatch, on_end="stop")
        optimizer, _ = training.optimizer(sampler)
        ends = []
        for indices in sampler:
            training.loss(indices).backward()
            if optimizer.step():
                ends.append(time.perf_counter())
        seconds = np.diff(ends, prepend=ends[0]).reshape(21, len(MEASURED))[1:]  # without the first of each size
        rows = [
            (1, min(size, task.microbatch), -(-size // task.microbatch), float(least))
            for size, least in zip(MEASURED, seconds.min(axis=0), strict=True)
        ]
        model = Throughput.fit(rows)
        print(task.name, model, f"error {model.error(rows):.1%}", rows)
        file.write_text(json.dumps(asdict(model)))
    return Throughput(**json.loads(file.read_text()))


# The prediction, and the report. --------------------------------------------------------------------------------------


def predict(cell: Cell, samples: int, core: Throughput, flags: argparse.Namespace) -> vbs.BatchTrace:
    """Return the batch sizes of a simulation with the noise of a constant run with another seed."""
    task = TASKS[cell.task]
    other = cell._replace(trace=SMALL, seed=(cell.seed + 1) % flags.seeds)
    return simulate(
        CapacityTrace([0], [1], end=1e9),
        traces(task, core)[cell.trace],
        throughput=core,
        ref_batchsize=task.small,
        rule=task.rule,
        noise=NoiseCurve.from_csv(other.file(flags.folder).with_suffix("") / "scalars.csv"),
        minibatch_size=task.microbatch,
        dataset_size=task.dataset_size,
        until=samples,
        by="samples",
    ).trace


def at_samples(sizes: Iterable[tuple[int, int]], places: Sequence[float], dataset_size: int) -> Any:
    """Return the batch sizes after so many samples, of runs of equal updates: (batch size, updates).

    An update that the end of an epoch has shortened counts as the next one.
    """
    size, updates = np.array(list(sizes)).T  # (runs,), (runs,)
    ends = np.cumsum(size * updates)
    whole = (updates > 1) | (ends % dataset_size > 0)
    whole[-1] = True
    rows = np.searchsorted(ends[whole], places, side="right")
    return size[whole][np.minimum(rows, whole.sum() - 1)]


def runs_of(trace: vbs.BatchTrace) -> list[tuple[int, int]]:
    """Return the batch size and the number of updates of each run of a trace."""
    first_step, size = trace.runs
    return list(zip(size.tolist(), np.diff(first_step, append=len(trace)).tolist(), strict=True))


def report(cells: Sequence[Cell], models: dict[str, Throughput], flags: argparse.Namespace) -> None:
    """Write both tables, and record."""
    rows, sizes = [], []
    for cell in cells:
        content = json.loads(cell.file(flags.folder).read_text())
        result, core, microbatch = Result(**content), models[cell.task], TASKS[cell.task].microbatch
        row: dict[str, Any] = cell._asdict() | {"reached": int(result.reached is not None)}
        row |= dict(zip(("updates", "samples", "progress", "loss"), result.end, strict=True))
        row["core"] = result.time(core, 1, microbatch)
        row["devices"] = result.time(cluster_of(core), DEVICES, microbatch)
        last = result.evaluations[-1] if TASKS[cell.task].scheduled else result.end
        row |= {"last_updates": last[0], "last_loss": last[3]}
        places = np.linspace(0, last[1], 200, endpoint=False)
        real = at_samples(result.sizes, places, TASKS[cell.task].dataset_size)
        row["from_smallest"] = float(np.median(np.log2(real / TASKS[cell.task].small)))
        courses = {"training": real}
        if cell.trace not in (SMALL, MIDDLE, LARGE):
            trace = predict(cell, last[1], core, flags)
            courses["simulation"] = at_samples(runs_of(trace), places, TASKS[cell.task].dataset_size)
            row["doublings"] = float(np.median(np.abs(np.log2(courses["simulation"] / real))))
            row["predicted_updates"] = len(trace) / last[0]
        rows.append({name: float(f"{value:.5g}") if isinstance(value, float) else value for name, value in row.items()})
        for course, found in courses.items():
            if cell.seed == 0:
                changes = np.flatnonzero(np.diff(found, prepend=0))
                sizes += [(*cell[:2], course, round(places[place]), found[place]) for place in changes]
                sizes.append((*cell[:2], course, last[1], found[-1]))
    names = list(dict.fromkeys(name for row in rows for name in row))
    write(RUNS, names, ([row.get(name, "") for name in names] for row in rows))
    write(SIZES, ["task", "trace", "course", "samples", "batch_size"], sizes)
    if not flags.quick:
        record_all(rows)


def write(path: Path, names: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([names, *rows])


def record_all(rows: Sequence[dict[str, Any]]) -> None:
    """Record ratios to the run with the smallest batches and the same seed, and what simulations predict."""
    for (name, trace), same in groupby(rows, lambda row: (row["task"], row["trace"])):
        found = list(same)
        reached = [row for row in found if row["reached"]]
        small = {row["seed"]: row for row in rows if (row["task"], row["trace"]) == (name, SMALL)}
        own = {"what": trace, "on": f"{name}, {TASKS[name].rule}"}
        for case, unit in UNITS.items():
            if trace == SMALL:
                record("to the target", measured=spread([row[case] for row in reached]), unit=unit, case=case, **own)
            elif reached:
                note = "" if len(reached) == len(found) else f"{len(reached)} of {len(found)} reached it"
                ratios = [row[case] / small[row["seed"]][case] for row in reached]
                record(QUESTION, measured=spread(ratios), case=case, note=note, **own)
        if not reached:
            record(QUESTION, measured=Measured(0, n=len(found)), unit="runs that reached it", **own)
        if TASKS[name].scheduled:
            for case, unit in (("updates", "updates"), ("loss", "nats per byte")):
                record(SCHEDULED, measured=spread([row[f"last_{case}"] for row in found]), unit=unit, case=case, **own)
        if "doublings" in found[0]:
            doublings = [row["doublings"] for row in found]
            away = statistics.median(row["from_smallest"] for row in found)
            note = f"those of the training were {away:.1f} doublings above the smallest"
            record(PREDICTED, measured=spread(doublings), unit="doublings", case="difference", note=note, **own)
            record(PREDICTED, measured=spread([row["predicted_updates"] for row in found]), case="updates", **own)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--fashion-dir", help="folder with the idx files of Fashion-MNIST; by default it is omitted")
    add("--folder", type=Path, default=Path("build/adaptive"), help="folder of the runs")
    add("--tasks", nargs="+", choices=list(TASKS), help="by default all")
    add("--seeds", type=int, default=3, help="runs of each kind")
    add("--processes", type=int, default=2, help="parallel runs, of one thread each")
    add("--quick", action="store_true", help="write the tables of the runs that are done, and record nothing")
    flags = parser.parse_args()
    flags.tasks = flags.tasks or [name for name in TASKS if name != "Fashion-MNIST" or flags.fashion_dir]
    flags.folder.mkdir(parents=True, exist_ok=True)
    return flags


def main(flags: argparse.Namespace) -> None:
    models = {name: measure(TASKS[name], flags) for name in flags.tasks}
    cells = [
        Cell(name, trace, seed)
        for name in flags.tasks
        for trace in traces(TASKS[name], models[name])
        for seed in range(flags.seeds)
    ]
    missing = [cell for cell in cells if not cell.file(flags.folder).exists()]
    if not flags.quick:
        with ProcessPoolExecutor(flags.processes, get_context("spawn")) as pool:
            for future in [pool.submit(train, cell, models[cell.task], flags) for cell in missing]:
                future.result()
    report([cell for cell in cells if not flags.quick or cell not in missing], models, flags)


if __name__ == "__main__":
    main(parse())
