"""Many trainings, in the processes of one machine: what is done stays done, whatever kills the evaluation."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from tqdm import tqdm

from variable_batch_size._extras import import_extra
from variable_batch_size._validation import check_choice, check_int, type_error
from variable_batch_size.evaluation.cell import Cell
from variable_batch_size.evaluation.experiment import Experiment, check
from variable_batch_size.evaluation.plan import extend_plan
from variable_batch_size.evaluation.record import Record, keys_in, path_of
from variable_batch_size.evaluation.training import SAVE_EVERY, train

EngineName: TypeAlias = Literal["joblib"]
Train: TypeAlias = Callable[[Cell, Path, int, timedelta | int], Path]


def run(
    cells: Experiment | Sequence[Cell],
    folder: str | os.PathLike[str],
    *,
    jobs: int = 1,
    threads: int = 1,
    engine: EngineName = "joblib",
    save_every: timedelta | int = SAVE_EVERY,
    progress: bool = True,
    command: str = "",
) -> list[Record]:
    """Train the cells that have no record in a folder, and return the records of all.

    Before the first one begins, each combination of task, trace and rule is created once, so that errors come early. A
    training that is killed continues from its last checkpoint when the evaluation is run again; one that raises ends
    the evaluation. Run one evaluation in a folder at a time.

    Args:
        cells: an experiment, or cells.
        folder: folder of the records, which is created if needed.
        jobs: number of trainings at the same time, each in a process of its own; 1: all in this process.
        threads: number of threads of a training. With more than one, numbers differ a little from run to run.
        engine: what distributes the trainings.
        save_every: interval of the checkpoints of a training: time, or a number of updates.
        progress: whether to show a progress bar over the cells, with the time left.
        command: what was typed. It is written to `folder`/plan.json, with the keys of the cells, see `Plan`.

    Raises:
        ModuleNotFoundError: if `jobs` > 1 and joblib is not installed.
        OSError: if a file cannot be read or written.
        TypeError, ValueError: if cells cannot train.
        RuntimeError: if a training fails, whose name is in the message, or its process is killed.
    """
    check_choice(engine, "engine", get_args(EngineName))
    jobs, threads = check_int(jobs, "jobs", 1), check_int(threads, "threads", 1)
    wanted = cells.cells() if isinstance(cells, Experiment) else list(cells)
    for cell in wanted:
        if not isinstance(cell, Cell):
            raise type_error("cells must be an Experiment, or cells", cell, "pass experiment.cells()")
    place = Path(folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        found = f"{os.fspath(folder)!r}: {error.strerror}"
        raise type(error)(f"folder must be one that can be created, got {found}; choose another one") from None
    keys = list(dict.fromkeys(cell.key for cell in wanted))
    todo = without_record(wanted, place)
    check(todo.values())
    extend_plan(place, keys, command)
    for key in set(keys) - todo.keys():  # of a training that was killed after its record was written
        shutil.rmtree(place / "checkpoints" / key, ignore_errors=True)
    tasks = [(cell, place, threads, save_every) for cell in todo.values()]
    finished = _in_processes(tasks, jobs, threads) if min(jobs, len(tasks)) > 1 else _here(tasks)
    bar = tqdm(total=len(keys), initial=len(keys) - len(todo), unit="cell", disable=not progress, smoothing=0)
    with bar:
        for _ in finished:
            bar.update()
    return [Record.read(path_of(place, key)) for key in keys]


def without_record(cells: Iterable[Cell], folder: Path) -> dict[str, Cell]:
    """Return the cells that have no record in a folder, by their keys."""
    done = keys_in(folder)
    keys = ((cell.key, cell) for cell in cells)
    return {key: cell for key, cell in keys if key not in done}


def trained(cell: Cell, folder: Path, threads: int, save_every: timedelta | int) -> Path:
    """Train a cell; an error names it."""
    try:
        return train(cell, folder, threads, save_every)
    except Exception as error:
        raise RuntimeError(f"the training {cell.key} ({cell}) failed: {type(error).__name__}: {error}") from error


def _here(tasks: Iterable[tuple[Any, ...]]) -> Iterator[Path]:
    for arguments in tasks:
        yield trained(*arguments)


def _in_processes(tasks: Sequence[tuple[Any, ...]], jobs: int, threads: int) -> Iterator[Path]:
    """Train in processes of joblib, each with so many threads; yield in the order of completion."""
    joblib = import_extra("joblib", "evaluation")
    killed = import_extra("joblib.externals.loky.process_executor", "evaluation").TerminatedWorkerError
    with joblib.parallel_config(backend="loky", inner_max_num_threads=threads):
        parallel = joblib.Parallel(n_jobs=jobs, return_as="generator_unordered", batch_size=1, pre_dispatch="2*n_jobs")
        try:
            yield from parallel(joblib.delayed(trained)(*arguments) for arguments in tasks)
        except killed as error:
            raise RuntimeError(
                "each training must end, but the process of one was killed, perhaps because there was not enough "
                "memory; run the evaluation again to continue, with fewer jobs if it is the memory"
            ) from error
