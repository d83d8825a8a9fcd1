"""Many trainings on one machine: one after another in this process, or at the same time in processes of joblib."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

from variable_batch_size._extras import import_extra
from variable_batch_size.lab.evaluation.cell import Cell
from variable_batch_size.lab.evaluation.engines.work import Work, named
from variable_batch_size.lab.evaluation.record import path_of
from variable_batch_size.lab.evaluation.training import train


def on_this_machine(work: Work, jobs: int) -> Iterator[None]:
    """Train, and yield after each training."""
    if min(jobs, len(work.cells)) > 1:
        yield from _in_processes(work, jobs)
        return
    for cell in work.cells:
        _train(cell, *work[1:])
        yield


def _train(cell: Cell, folder: Path, threads: int, save_every: timedelta | int) -> None:
    if path_of(folder, cell.key).exists():  # by a process that has outlived a killed evaluation
        return
    with named(cell):
        train(cell, folder, threads, save_every)


def _in_processes(work: Work, jobs: int) -> Iterator[None]:
    """Train in processes of joblib, each with so many threads; yield in the order of completion."""
    joblib = import_extra("joblib", "evaluation")
    killed = import_extra("joblib.externals.loky.process_executor", "evaluation").TerminatedWorkerError
    with joblib.parallel_config(backend="loky", inner_max_num_threads=work.threads):
        parallel = joblib.Parallel(n_jobs=jobs, return_as="generator_unordered", batch_size=1, pre_dispatch="2*n_jobs")
        try:
            yield from parallel(joblib.delayed(_train)(cell, *work[1:]) for cell in work.cells)
        except killed as error:
            raise RuntimeError(
                "each training must end, but the process of one was killed, perhaps because there was not enough "
                "memory; run the evaluation again to continue, with fewer jobs if it is the memory"
            ) from error
