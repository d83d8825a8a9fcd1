"""Train what has no record yet, by an engine: what is done stays done, whatever kills the evaluation."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterable, Sequence
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from tqdm import tqdm

from variable_batch_size._log import stacklevel_of_user
from variable_batch_size._validation import check_choice, check_int, check_interval, type_error, value_error
from variable_batch_size.lab.evaluation.cell import Cell
from variable_batch_size.lab.evaluation.engines.local import on_this_machine
from variable_batch_size.lab.evaluation.engines.on_ray import on_ray
from variable_batch_size.lab.evaluation.engines.work import Work
from variable_batch_size.lab.evaluation.experiment import Experiment, check
from variable_batch_size.lab.evaluation.plan import extend_plan
from variable_batch_size.lab.evaluation.provenance import data_hash, source_hash
from variable_batch_size.lab.evaluation.record import Record, keys_in, path_of, read_records
from variable_batch_size.lab.evaluation.task import dataset_of, load_task
from variable_batch_size.lab.evaluation.training import DATA, DATASET_SIZE, SAVE_EVERY, SOURCE, checkpoints_of

EngineName: TypeAlias = Literal["joblib", "ray"]


def run(
    cells: Experiment | Sequence[Cell],
    folder: str | os.PathLike[str],
    *,
    jobs: int | None = None,
    threads: int = 1,
    engine: EngineName = "joblib",
    address: str | None = None,
    save_every: timedelta | int = SAVE_EVERY,
    progress: bool = True,
    command: str = "",
) -> list[Record]:
    """Train the cells that have no record in a folder, and return the records of all.

    Of an experiment with tuning seeds, `cells` are trained, and then `judged`.

    Before the first one begins, each combination of task, trace and rule is created once, so that errors come early. A
    training that is killed continues from its last checkpoint when the evaluation is run again; one that raises ends
    the evaluation. Run one evaluation in a folder at a time.

    With Ray, each training is a task that needs `threads` CPUs, on any machine of the cluster where this package, the
    task's module and its files are. This process writes the records. A training whose process is killed is repeated, up
    to 10 times. It resumes from its last checkpoint if `folder` is at the same path of all machines, and begins anew on
    a machine without it; on one that has another folder at this path, its checkpoints remain. If `ray.init()` has been
    called, that cluster is used, and stays.

    Args:
        cells: an experiment, or cells.
        folder: folder of the records, which is created if needed.
        jobs: maximum number of trainings at the same time, each in a process of its own. By default as many as Ray has
            CPUs for; with joblib 1, which is this process.
        threads: number of threads of a training. With more than one, numbers differ a little from run to run.
        engine: what distributes the trainings: "joblib" on this machine, or "ray".
        address: of a running cluster of Ray, "HOST:PORT", "ray://HOST:PORT" or "auto"; by default what `ray.init()`
            finds, or a new one on this machine.
        save_every: interval of the checkpoints of a training: time, or a number of updates.
        progress: whether to show a progress bar over the cells, with the time left.
        command: what was typed. It is written to `folder`/plan.json, with the keys of the cells, see `Plan`.

    Raises:
        ModuleNotFoundError: if `jobs` > 1 and joblib is not installed, or Ray is not.
        OSError: if a file cannot be read or written, or nothing listens at `address`.
        TypeError, ValueError: if cells cannot train, or no machine of Ray has so many CPUs as `threads`.
        RuntimeError: if a training fails, whose name is in the message, or its process is killed, with Ray too often.
    """
    check_choice(engine, "engine", get_args(EngineName))
    if address is not None and engine != "ray":
        raise value_error("address must be None without Ray", repr(address), 'pass engine="ray", too')
    jobs = None if jobs is None else check_int(jobs, "jobs", 1)
    threads = check_int(threads, "threads", 1)
    check_interval(save_every, "save_every", "pass a positive one")
    given = folder, jobs, threads, engine, address, save_every, progress, command
    if isinstance(cells, Experiment):
        wanted = cells.cells()
        trained = _train(wanted, *given, tuning=bool(cells.tuning_seeds))
        judged = cells.judged(trained)
        return _train([*wanted, *judged], *given) if judged else trained
    return _train(list(cells), *given)


def _train(
    wanted: Sequence[Cell],
    folder: str | os.PathLike[str],
    jobs: int | None,
    threads: int,
    engine: EngineName,
    address: str | None,
    save_every: timedelta | int,
    progress: bool,
    command: str,
    tuning: bool = False,
) -> list[Record]:
    """Train cells, see `run`; after those of the tuning seeds the command will ask for more."""
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
    _check_datasets([cell for cell in wanted if cell.key not in todo], place)
    _check_sources(todo.values(), place)
    extend_plan(place, keys, command, tuning)
    for key in set(keys) - todo.keys():  # of a training that was killed after its record was written
        shutil.rmtree(checkpoints_of(place, key), ignore_errors=True)
    work = Work(list(todo.values()), place, threads, save_every)
    ray = engine == "ray" and todo  # nothing starts for nothing
    trainings = on_ray(work, jobs, address) if ray else on_this_machine(work, jobs or 1)
    bar = tqdm(total=len(keys), initial=len(keys) - len(todo), unit="cell", disable=not progress, smoothing=0)
    with bar, closing(trainings):  # type: ignore[type-var]
        for _ in trainings:
            bar.update()
    return [Record.read(path_of(place, key)) for key in keys]


def _check_datasets(cells: Iterable[Cell], folder: Path) -> None:
    """Raise ValueError if the dataset of a task has changed since one of its trainings, as its hash tells."""
    for cell in {(cell.task, str(cell.task_arguments)): cell for cell in cells}.values():
        task = load_task(cell.task, cell.task_arguments, cell.data_dir)
        size: Any = dataset_of(task)
        found = {DATASET_SIZE: len(size), DATA: data_hash(task)}
        known = Record.read(path_of(folder, cell.key)).environment
        for name, value in found.items():
            if value is not None and known.get(name) not in (None, value):
                requirement = f"the dataset of the task {cell.task} must be that of its record {cell.key}"
                remedy = "give the task another version, or choose another folder"
                raise value_error(requirement, f"{name} {value} instead of {known[name]}", remedy)


def _check_sources(todo: Iterable[Cell], folder: Path) -> None:
    """Warn if the source of a task that is to be trained is not that of one of its records."""
    tasks = {(cell.task, cell.task_version): cell for cell in todo}
    for record in read_records(folder) if tasks else ():
        cell = tasks.get((record.cell["task"], record.cell.get("task_version", "")))
        if cell is None or (known := record.environment.get(SOURCE)) is None:
            continue
        if source_hash(load_task(cell.task, cell.task_arguments, cell.data_dir)) not in (None, known):
            found = f"the source of the task {cell.task} has changed since its record {record.key}"
            remedy = "if trainings differ by that, give the task another version, or choose another folder"
            warnings.warn(f"{found}; {remedy}", UserWarning, stacklevel=stacklevel_of_user())
            del tasks[cell.task, cell.task_version]


def without_record(cells: Iterable[Cell], folder: Path) -> dict[str, Cell]:
    """Return the cells that have no record in a folder, by their keys."""
    done = keys_in(folder)
    keys = ((cell.key, cell) for cell in cells)
    return {key: cell for key, cell in keys if key not in done}
