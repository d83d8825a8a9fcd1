"""Train what has no line yet, in processes of joblib or on a cluster of Ray: what is done stays done.

One process, the driver, hands out the cells and writes their lines. A process that trains may be killed at any time:
its cell goes on from its last checkpoint, and if that kills a process again, it is written down as killed.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import warnings
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from tqdm import tqdm

from variable_batch_size._extras import import_extra
from variable_batch_size._log import stacklevel_of_user
from variable_batch_size._validation import check_choice, check_int, check_interval, value_error
from variable_batch_size.lab.evaluation.cell import Cell
from variable_batch_size.lab.evaluation.experiment import Experiment, check_cells
from variable_batch_size.lab.evaluation.provenance import environment, task_facts
from variable_batch_size.lab.evaluation.records import Evaluation, Journal, check_traces, json_of, read
from variable_batch_size.lab.evaluation.training import SAVE_EVERY, train

EngineName: TypeAlias = Literal["joblib", "ray"]
Line: TypeAlias = dict[str, Any]
Lines: TypeAlias = Iterator[Line]
PATIENCE = 10.0  # seconds to wait for a connection, and for the end of canceled tasks
START = "start it there (ray start --head), or leave the address out to use this machine"


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
    baseline: str | None = None,
) -> Evaluation:
    """Make the training runs of an experiment that are not in a folder yet, and return all that are in it then.

    Before the first one begins, each combination of task, trace and rule is created once, so that errors are raised
    early. A training run that is interrupted continues from its last checkpoint when you start the evaluation again. An
    exception in a training run ends the evaluation. If the process of a training run is killed, the run is repeated; if
    that happens twice, its status is "killed".

    With Ray, each training is a task that needs `threads` CPUs, on any machine of the cluster where this package, the
    task's module and its files are. It resumes from its last checkpoint if `folder` is at the same path of all
    machines. If `ray.init()` has been called, that cluster is used, and stays.

    Args:
        cells: an experiment, or cells.
        folder: folder of the evaluation, which is created if needed.
        jobs: maximum number of training runs at the same time, each in its own process. Default: with Ray, as many as
            it has CPUs for; with joblib 1, in this process.
        threads: number of threads of a training run. With more than one, results differ slightly if you repeat a run.
        engine: what distributes the training runs: "joblib" on this machine, or "ray".
        address: of a running cluster of Ray, "HOST:PORT", "ray://HOST:PORT" or "auto"; by default what `ray.init()`
            finds, or a new one on this machine.
        save_every: interval between the checkpoints of a training run: a time, or a number of updates.
        progress: whether to show a progress bar over the cells, with the time left.
        command: what was typed, for the plan.
        baseline: rule against which reports judge the others; by default, the rule of the experiment, or "constant".

    Raises:
        ModuleNotFoundError: if joblib is not installed, or Ray is not.
        OSError: if a file cannot be read or written, another process trains in the folder, or nothing listens at
            `address`.
        TypeError, ValueError: if cells cannot train, or no machine of Ray has so many CPUs as `threads`.
        RuntimeError: if a training run fails; the message names it.
    """
    check_choice(engine, "engine", get_args(EngineName))
    if address is not None and engine != "ray":
        raise value_error("address must be None without Ray", repr(address), 'pass engine="ray", too')
    jobs = None if jobs is None else check_int(jobs, "jobs", 1)
    threads = check_int(threads, "threads", 1)
    check_interval(save_every, "save_every", "pass a positive one")
    place = Path(folder)
    if isinstance(cells, Experiment):
        baseline, cells = baseline or cells.baseline, cells.cells()
    planned = {cell.key: cell for cell in cells}
    left = cells_without_line(planned.values(), place)
    check_cells(left.values())  # before there is a folder
    with Journal(place) as journal:
        lines = {line["key"]: line for line in journal.lines if "key" in line}
        left = {key: cell for key, cell in left.items() if key not in lines}  # another driver may just have ended
        _check_tasks(planned.values(), lines.values())
        check_traces([*(line["cell"] for line in lines.values()), *(cell.as_json() for cell in planned.values())])
        journal.append_plan(command, planned, baseline)
        _remove_checkpoints(place, lines)
        groups = _group_by_training(left.values())
        first = [group[0] for group in groups.values()]  # one cell of each group is trained, for all of it
        options = {"folder": place.absolute(), "threads": threads, "save_every": save_every}
        if engine == "ray" and first:  # nothing starts for nothing
            trained = _run_on_ray(first, options, jobs, address)
        else:
            trained = _run_here(first, options, jobs or 1)
        bar = tqdm(total=len(planned), initial=len(planned) - len(left), unit="run", disable=not progress, smoothing=0)
        with bar, closing(trained):  # type: ignore[type-var]
            for line in trained:
                for cell in groups[left[line["key"]].training]:
                    facts = {"environment": line["environment"] | _facts_of_task(cell)}
                    journal.append(line | facts | {"key": cell.key, "cell": cell.as_json()})
                    bar.update()
                shutil.rmtree(_checkpoint_folder(place, line["key"]), ignore_errors=True)
    return read(place)


def _remove_checkpoints(folder: Path, keys: Container[str]) -> None:
    """Remove the checkpoints of training runs that have ended, if an evaluation was killed before it removed them.

    Args:
        folder: folder of the evaluation.
        keys: names of the runs whose results are in its file.
    """
    for path in folder.glob("checkpoints/*"):
        if path.name in keys:
            shutil.rmtree(path, ignore_errors=True)


def _group_by_training(cells: Iterable[Cell]) -> dict[str, list[Cell]]:
    """Group the cells that differ only in the name of their trace, so that each training run is made once."""
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(cell.training, []).append(cell)
    return groups


def cells_without_line(cells: Iterable[Cell], folder: Path) -> dict[str, Cell]:
    """Return the training runs (cells) that a folder has no results of, by their keys.

    Args:
        cells: the planned runs.
        folder: folder of the evaluation, which may not exist yet.
    """
    try:
        keys = set(read(folder).trainings["key"])
    except (FileNotFoundError, NotADirectoryError):
        keys = set()
    return {cell.key: cell for cell in cells if cell.key not in keys}


def _facts_of_task(cell: Cell) -> dict[str, Any]:
    """Return the size and the hashes of the dataset and source file of a cell's task, see `task_facts`."""
    return task_facts(cell.task, json.dumps(dict(cell.task_arguments)), cell.data_dir)


def _checkpoint_folder(folder: Path, key: str) -> Path:
    return folder / "checkpoints" / key


def _train_cell(cell: Cell, folder: Path, threads: int, save_every: timedelta | int, driver: int | None = None) -> Line:
    """Make a training run, and return its results; it is called in the process, or on the machine, that trains.

    Without the folder of the evaluation on this machine, as may be with Ray, it saves no checkpoints.

    Args:
        cell: the settings of the run.
        folder: folder of the evaluation.
        threads: number of threads of torch.
        save_every: interval of the checkpoints: time, or a number of updates.
        driver: number of the process that waits for the results, with whose end the run ends; None: no such process.
    """
    checkpoints = _checkpoint_folder(folder, cell.key) if folder.is_dir() else None
    return train(cell, checkpoints, threads, save_every, driver)


def _killed_line(cell: Cell) -> Line:
    """Return what is recorded of a training run whose process was killed twice, for example for lack of memory."""
    facts: Line = {"status": "killed", "untrained": None, "wall_seconds": None, "curve": {}}
    return {"key": cell.key, "cell": cell.as_json(), **facts, "environment": environment()}


def _check_tasks(cells: Iterable[Cell], lines: Iterable[Line]) -> None:
    """Raise ValueError if the dataset of a task has changed since one of its runs. Warn if its source file has.

    Args:
        cells: the planned runs.
        lines: the results of earlier ones.
    """
    tasks = {(cell.task, json_of(cell.task_arguments), cell.task_version): cell for cell in cells}  # one of each task
    for line in lines:
        task = (line["cell"]["task"], json_of(line["cell"]["task_arguments"]), line["cell"]["task_version"])
        cell = tasks.get(task)
        if cell is None or line["status"] == "killed":
            continue
        for name, value in _facts_of_task(cell).items():
            earlier_value = line["environment"].get(name)
            if None in (value, earlier_value) or value == earlier_value:  # unknown, or the same
                continue
            remedy = "give the task another version, or choose another folder"
            if name == "source of the task":
                found = f"the source of the task {cell.task} has changed since the training {line['key']}"
                message = f"{found}; if this changes the runs, {remedy}"
                warnings.warn(message, UserWarning, stacklevel=stacklevel_of_user())
                del tasks[task]  # warned once for each task
                break
            requirement = f"the dataset of the task {cell.task} must be that of its training {line['key']}"
            raise value_error(requirement, f"{name} {value} instead of {earlier_value}", remedy)


def _run_here(cells: Sequence[Cell], options: Mapping[str, Any], jobs: int) -> Iterator[Line]:
    """Make training runs on this machine, and yield their results as soon as each has ended.

    They are made in this process or, with more than one of `jobs`, in so many processes of joblib.

    When a process is killed, joblib ends all of them, and does not tell which cell the killed one trained. The cells
    that were being trained are then repeated one at a time, so that it is known which cell kills a process again.
    """
    waiting = iter(cells)
    if min(jobs, len(cells)) <= 1:
        yield from (_train_cell(cell, **options) for cell in waiting)
        return
    joblib = import_extra("joblib", "evaluation")
    process_killed = import_extra("joblib.externals.loky.process_executor", "evaluation").TerminatedWorkerError
    in_turn = {"batch_size": 1, "pre_dispatch": "n_jobs", "return_as": "generator_unordered"}
    running: dict[str, Cell] = {}  # by their keys
    to_repeat = list[Cell]()  # one at a time

    def hand_out(cells_to_train: Iterable[Cell]) -> Iterator[Any]:
        """Yield the calls that joblib is to make, and note which runs are under way."""
        for cell in cells_to_train:
            running[cell.key] = cell
            yield joblib.delayed(_train_cell)(cell, **options, driver=os.getpid())

    with joblib.parallel_config(backend="loky", inner_max_num_threads=options["threads"]):
        while True:
            repeated = to_repeat.pop() if to_repeat else None
            lines = joblib.Parallel(jobs, **in_turn)(hand_out(waiting if repeated is None else [repeated]))
            try:
                with closing(lines):
                    for line in lines:
                        del running[line["key"]]
                        yield line
            except process_killed:
                if repeated is not None:
                    yield _killed_line(repeated)
                else:
                    to_repeat += running.values()
                running.clear()
            else:
                if not to_repeat and repeated is None:  # `waiting` has no more cells
                    return


def _run_on_ray(cells: Sequence[Cell], options: Mapping[str, Any], jobs: int | None, address: str | None) -> Lines:
    """Make training runs on a cluster of Ray, and yield their results as soon as each has ended.

    It uses tasks of Ray and not joblib's backend for Ray, which returns nothing before all runs have ended, and stops
    when the first process dies.
    """
    ray = import_extra("ray", "ray")
    threads = options["threads"]
    with _ray_connection(ray, address):
        _check_ray_machines(ray, threads)
        task = ray.remote(num_cpus=threads, max_retries=1, retry_exceptions=False)(_train_cell)
        waiting = iter(cells)
        running = dict[Any, Cell]()
        # By default twice as many tasks as run at the same time, so that the next ones wait at Ray when one ends.
        limit = jobs or 2 * max(1, int(ray.cluster_resources().get("CPU", 0)) // threads)
        try:
            while True:
                running |= {task.remote(cell, **options): cell for cell in islice(waiting, limit - len(running))}
                if not running:
                    return
                (ended,), _ = ray.wait(list(running), num_returns=1)
                cell = running.pop(ended)
                try:
                    yield ray.get(ended)
                except ray.exceptions.RayTaskError as error:
                    raise error.cause from error
                except ray.exceptions.RayError:
                    yield _killed_line(cell)
        finally:
            for handle in running:  # the folders of their checkpoints are locked until they end
                ray.cancel(handle, force=True)
            ray.wait(list(running), num_returns=len(running), timeout=PATIENCE) if running else None


def _check_ray_machines(ray: Any, threads: int) -> None:
    """Raise ValueError if no machine of Ray has as many CPUs as a run has threads: the runs would wait forever."""
    most_cpus = max((int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]), default=0)
    if 0 < most_cpus < threads:  # a cluster without any CPUs may still start machines
        requirement = f"threads must be at most the {most_cpus} CPUs of the largest machine of Ray"
        raise value_error(requirement, threads, "pass less")


@contextmanager
def _ray_connection(ray: Any, address: str | None) -> Iterator[None]:
    """Connect to a cluster of Ray within a block. If the caller has called `ray.init()`, use that connection."""
    if ray.is_initialized():
        if address is not None:
            raise value_error("address must be None after ray.init()", repr(address), "leave it out")
        yield
        return
    _check_address(address or os.environ.get("RAY_ADDRESS"))
    ray.init(address=address)
    try:
        yield
    finally:
        ray.shutdown()


def _check_address(address: str | None) -> None:
    """Raise ConnectionError if nothing listens at an address, as Ray would try for minutes and end the process."""
    scheme, _, place = (address or "auto").rpartition("://")
    if place in ("auto", "local") or scheme not in ("", "ray"):  # the others are of libraries that extend Ray
        return
    host, _, port = place.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), PATIENCE).close()
    except (OSError, ValueError) as error:
        requirement = "address must be auto, or HOST:PORT or ray://HOST:PORT of a running Ray"
        raise ConnectionError(f"{requirement}, got {address!r} ({error}); {START}") from error
