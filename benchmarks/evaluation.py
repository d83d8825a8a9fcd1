"""What does an evaluation cost beside its trainings? Of cells with one update of one weight.

    OMP_NUM_THREADS=1 PYTHONPATH=test python benchmarks/evaluation.py

The time of a cell is that of the whole evaluation, divided by the number of cells: the objects of a training, its
update, its two evaluations and its record. Beside the training is what is left without the seconds that the records say
(divided by the number of processes, which train at the same time). Processes have imported everything before.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from typing import Any

import ray

from helpers.pages import ROOT
from records import spread
from results import record
from variable_batch_size.lab.evaluation import Experiment, run

QUESTION = "time of an empty cell"
ENGINES: dict[str, tuple[int, dict[str, Any]]] = {  # name -> processes, arguments of run
    "this process": (1, {"jobs": 1}),
    "joblib, 2 processes": (2, {"jobs": 2}),
    "Ray, 2 workers": (2, {"engine": "ray"}),
}


def measure(cells: int, processes: int, arguments: dict[str, Any]) -> tuple[float, float]:
    """Return the milliseconds of a cell, and those beside its training."""
    wanted = Experiment(["helpers.evaluation_tasks:Empty"], ["1"], ["constant"], seeds=cells).cells()
    experiment = [cell for cell in wanted if cell.trace == "1"]
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        trainings = run(experiment, folder, progress=False, **arguments).trainings
        whole = time.perf_counter() - begin
    training, made = trainings["wall_seconds"].sum() / processes, len(trainings)
    return 1e3 * whole / made, 1e3 * (whole - training) / made


def main(flags: argparse.Namespace) -> None:
    ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": f"{ROOT}:{ROOT / 'test'}"}})
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ENGINES}
    for repeat in range(flags.repeats + 1):
        for name, (processes, arguments) in ENGINES.items():
            found = measure(flags.cells if repeat else 20, processes, arguments)  # the first one starts processes
            times[name] += [found] if repeat else []
    ray.shutdown()
    for name, found in times.items():
        for case, values in zip(("all", "beside the training"), zip(*found, strict=True), strict=True):
            record(QUESTION, name, spread(values), "ms", on=f"{flags.cells} cells", where="CPU", case=case)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    main(parser.parse_args())
