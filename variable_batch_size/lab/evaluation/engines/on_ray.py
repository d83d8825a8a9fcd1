"""Many trainings on a cluster of Ray: one task each, which Ray repeats if its process or its machine dies."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

from variable_batch_size._extras import import_extra
from variable_batch_size._validation import value_error
from variable_batch_size.lab.evaluation.cell import Cell
from variable_batch_size.lab.evaluation.engines.work import Work, named
from variable_batch_size.lab.evaluation.record import Record
from variable_batch_size.lab.evaluation.training import checkpoints_of, publish, record_of

RETRIES = 10  # of a training whose process dies; Ray does not count those that it ends for lack of memory
PATIENCE = 10.0  # seconds, for a connection and for the end of canceled tasks
START = "start it there (ray start --head), or leave the address out to use this machine"


def on_ray(work: Work, jobs: int | None, address: str | None) -> Iterator[None]:
    """Train, and yield after each training, whose record this process has written.

    A task returns its record, so that the machines need no common folder. If `folder` is there on the machine of a
    task, its checkpoints are in it, and a task that Ray repeats resumes if the folder is shared, or on that machine.
    """
    ray = import_extra("ray", "ray")
    with _connected(ray, address):
        _check_threads(ray, work.threads)
        options = {"num_cpus": work.threads, "max_retries": RETRIES, "retry_exceptions": False}
        task = ray.remote(**options)(_record)
        cells, running = iter(work.cells), dict[Any, Cell]()
        try:
            while True:
                free = (jobs or _most(ray, work.threads)) - len(running)
                for cell in islice(cells, max(0, free)):
                    running[task.remote(_with_absolute_path(cell), work.folder.absolute(), *work[2:])] = cell
                if not running:
                    return
                (ended,), _ = ray.wait(list(running), num_returns=1)
                publish(_result(ray, ended, running.pop(ended)), work.folder)
                yield
        finally:
            _cancel(ray, list(running))


def _record(cell: Cell, folder: Path, threads: int, save_every: timedelta | int) -> Record:
    """Train a cell in a process of Ray."""
    with named(cell):
        return record_of(cell, checkpoints_of(folder, cell.key) if folder.is_dir() else None, threads, save_every)


def _result(ray: ModuleType, ended: Any, cell: Cell) -> Record:
    try:
        record: Record = ray.get(ended)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, RuntimeError):  # of `named`
            raise error.cause from error
        with named(cell):
            raise error.cause from error
    except ray.exceptions.RayError as error:
        raise RuntimeError(
            f"each training must end, but {cell.key} ({cell}) was killed more than {RETRIES} times, perhaps because "
            f"there was not enough memory, or a part of Ray was ({type(error).__name__}); run the evaluation again to "
            f"continue"
        ) from error
    return record


def _cancel(ray: ModuleType, running: list[Any]) -> None:
    """End tasks, and wait for it: the folders of their checkpoints are locked until then."""
    for one in running:
        ray.cancel(one, force=True)
    if running:
        ray.wait(running, num_returns=len(running), timeout=PATIENCE)


def _most(ray: ModuleType, threads: int) -> int:
    """Return how many tasks Ray gets: as many as it can run now, and as many that wait, for which it may grow."""
    return 2 * max(1, int(ray.cluster_resources().get("CPU", 0)) // threads)


def _check_threads(ray: ModuleType, threads: int) -> None:
    """Raise an error if no machine has the CPUs of a training, which would then wait forever.

    A cluster without any CPU may be one that grows.
    """
    most = max((int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]), default=0)
    if 0 < most < threads:
        raise value_error(
            f"threads must be at most the {most} CPUs of the largest machine of Ray", threads, "pass less"
        )


def _with_absolute_path(cell: Cell) -> Cell:
    """Return a cell whose files are found from the working directory of another process."""
    return cell if cell.data_dir is None else replace(cell, data_dir=str(Path(cell.data_dir).absolute()))


@contextmanager
def _connected(ray: ModuleType, address: str | None) -> Iterator[None]:
    """Connect to Ray, unless the caller has."""
    if ray.is_initialized():
        if address is not None:
            raise value_error("address must be None after ray.init()", repr(address), "leave it out")
        yield
        return
    _check_address(address or os.environ.get("RAY_ADDRESS"))
    with kept_handler():
        try:
            ray.init(address=address)
        except ConnectionError as error:
            raise ConnectionError(f"address must be that of a running Ray, got {address!r}; {START}") from error
        try:
            yield
        finally:
            ray.shutdown()


@contextmanager
def kept_handler() -> Iterator[None]:
    """Restore the handler of SIGTERM afterwards: `ray.init()` sets one that remains after `ray.shutdown()`."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _check_address(address: str | None) -> None:
    """Raise an error if nothing listens at an address: Ray would try for minutes, and end the process."""
    if address in (None, "auto", "local"):
        return
    scheme, _, place = address.rpartition("://")
    if scheme not in ("", "ray"):  # of a library that extends Ray
        return
    try:
        parts = urlsplit(f"//{place}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port:
        raise value_error("address must be auto, HOST:PORT or ray://HOST:PORT", repr(address), "pass one of these")
    try:
        socket.create_connection((host, port), PATIENCE).close()
    except OSError as error:
        found = f"{address!r} ({error.strerror or error})"
        raise ConnectionError(f"address must be that of a running Ray, got {found}; {START}") from error
