"""Which rule loses least while clouds give and take machines?

    python benchmarks/evaluation_large.py --capacity-traces FOLDER --data-dir FOLDER --folder runs/large --jobs 2

The comparison of André, Strati and Klimovic (DistributedML '22), whose batch size follows the devices of a cloud, made
as they left it open: over seeds, with intervals. A small CNN on 16,384 images of Fashion-MNIST trains with SGD and a
gradual warm-up until the reference hardly improves any more, under

- six hours of spot machines on AWS, whose number changes by a few (Bamboo's g4dn, between 2 and 16 of them);
- twelve hours of spot machines on AWS that come and go all at once (SkyPilot's us-east-2b, between 0 and 16);
- a constant batch size, 8 times that of the reference.

Of a trace it is the window with the most changes of the number of machines, of all that begin on a full hour, and of
several the first: its hours are in the name. Each machine computes half of the reference's batch in an update, and so
many samples a second that the training takes nine tenths of the window. Every rule trains on the same samples in the
same batches, at the reference's learning rate, which rises over the first tenth of the samples, as Goyal et al. (2017)
prescribe it with `linear`.

What is asked was written down before the trainings: each rule against `constant` by the loss, and how often it fails,
in 8 seeds from 3000 on that nobody had looked at. evaluation_warmup.jsonl.gz beside this file has them;
evaluation_large.csv.gz has those of an earlier version, without a warm-up (`--warmup 0`), which chose the learning
rates of each rule on seeds of their own, from 1000 on.

Kill it at any time; the same command continues. `--time` trains a single one, and records the seconds.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from results import record
from variable_batch_size.adaptive import Throughput
from variable_batch_size.lab import cluster
from variable_batch_size.lab.cluster import CapacityTrace
from variable_batch_size.lab.evaluation import Cell, Experiment, UnderCapacity, run

TIMES = 8  # the constant batch size, in those of the reference
SHARE = 0.9  # of the window that a training takes


class Log(NamedTuple):
    """A file of a capacity trace: its name in the report, and the hours of the window."""

    name: str
    file: str
    hours: int


LOGS = (
    Log("Bamboo g4dn", "bamboo-events-g4dn.csv", 6),
    Log("SkyPilot us-east-2b", "skypilot-availability-16-node-us-east-2b_v100_1.json", 12),
)
TASK, ARGUMENTS = "fashion:FashionCnn", {"images": 2**14}
REF_BATCHSIZE, MINIBATCH_SIZE, LR, SAMPLES = 128, 64, 2**-4, 2**17
RULES = ("constant", "linear", "linear-momentum", "root", "adascale")
FIRST_SEED, SEEDS, WARMUP = 3000, 8, 0.1


def window(trace: CapacityTrace, hours: int) -> tuple[int, CapacityTrace]:
    """Return the hour at which the window with the most changes begins, and the window."""
    begins = range(int(trace.end / 3600) - hours + 1)
    windows = [(begin, trace.slice(3600 * begin, 3600 * (begin + hours))) for begin in begins]
    return max(windows, key=lambda found: found[1].changes)


def under(log: Log, folder: Path, devices: int, samples: int) -> tuple[str, UnderCapacity]:
    """Return the name of a trace, and the trace, in which a training of so many samples takes most of a window."""
    begin, capacity = window(cluster.read(folder / log.file), log.hours)
    rate = samples / (SHARE * capacity.mean * capacity.end)
    name = f"{log.name}, hours {begin} to {begin + log.hours}"
    return name, UnderCapacity(capacity, f"per-device:{devices}", Throughput.simple(rate))


def experiment(flags: argparse.Namespace) -> Experiment:
    """Return the trainings."""
    traces: dict[str, Any] = dict(under(log, flags.capacity_traces, REF_BATCHSIZE // 2, SAMPLES) for log in LOGS)
    traces[f"constant, {TIMES} times the reference"] = REF_BATCHSIZE * TIMES
    own = {"lr": LR, "ref_batchsize": REF_BATCHSIZE, "minibatch_size": MINIBATCH_SIZE}
    own["warmup"] = round(flags.warmup * SAMPLES)
    return Experiment({TASK: ARGUMENTS}, traces, RULES, **options(flags, SAMPLES), **own)


def options(flags: argparse.Namespace, samples: int) -> dict[str, Any]:
    """Return what experiments under these logs have in common."""
    seeds = range(FIRST_SEED, FIRST_SEED + flags.seeds)
    return {"seeds": seeds, "data_dir": flags.data_dir, "samples": samples, "between": samples // 8}


def train(cells: Sequence[Cell], flags: argparse.Namespace, slowest: str) -> None:
    """Train, for `vbs report`; with --time only one, with the rule that takes longest."""
    if not flags.time:
        run(cells, flags.folder, jobs=flags.jobs, command=f"python benchmarks/{Path(flags.program).name}")
        print(f"vbs report {flags.folder}")
        return
    cell = next(cell for cell in cells if cell.rule == slowest)
    with tempfile.TemporaryDirectory() as folder:
        seconds = run([cell], folder, progress=False).trainings["wall_seconds"][0]
    on = f"{cell.task}, {cell.samples:,} samples"
    record("time of a training of an evaluation", cell.rule, seconds, "s", on=on, where="CPU, 1 thread")


def arguments(description: str | None, program: str, folder: str, seeds: int = SEEDS) -> argparse.Namespace:
    """Return what is told to an evaluation under these logs."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    traces = os.environ.get("CAPACITY_TRACES")
    add("--capacity-traces", type=Path, default=traces, required=traces is None, help="by default $CAPACITY_TRACES")
    add("--data-dir", help="folder with the files of Fashion-MNIST; by default those of Debian's package")
    add("--folder", type=Path, default=Path(folder), help="folder of the evaluation")
    add("--seeds", type=int, default=seeds, help="number of seeds")
    add("--warmup", type=float, default=WARMUP, help="part of the samples of the CNN over which its rate rises")
    add("--jobs", type=int, default=1, help="trainings at the same time, of one thread each")
    add("--time", action="store_true", help="only record what a training takes")
    parser.set_defaults(program=program)
    return parser.parse_args()


if __name__ == "__main__":
    given = arguments(__doc__, __file__, "runs/large")
    train(experiment(given).cells(), given, RULES[-1])
