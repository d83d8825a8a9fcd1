"""A writer that is stopped at any operation on files, and goes on after others have taken its folder over."""

from __future__ import annotations

import errno
import fcntl
import itertools
import math
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any
from uuid import uuid4

import pytest
from fsspec import register_implementation
from fsspec.implementations.memory import MemoryFileSystem

from helpers.checkpoints import as_another_process, checkpoint
from helpers.reference import assert_equal, training
from variable_batch_size.checkpoint.folder import Folder, update_of

WEIGHTS = [training().run(updates).weights() for updates in range(10)]
_OPERATIONS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir"}  # audit events
_stop: tuple[str, int, Callable[[], None]] | None = None  # a folder, operations until the stop, what others do then


def _count(path: str) -> None:
    global _stop
    if _stop is not None and path.startswith(_stop[0]):
        folder, left, others = _stop
        _stop = (folder, left - 1, others) if left else None
        if not left:
            others()


sys.addaudithook(lambda event, arguments: _count(str(arguments[0])) if event in _OPERATIONS else None)


class Counted(MemoryFileSystem):
    """A store of objects in memory, whose requests count."""

    protocol = "counted"
    store: dict[str, object] = {}

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in ("open", "pipe_file", "cat_file", "ls", "find", "rm_file"):
            return found

        def request(path: str, *arguments: Any, **options: Any) -> Any:
            _count(path)
            return found(path, *arguments, **options)

        return request


register_implementation("counted", Counted)


@contextmanager
def stopped_at(folder: str, operation: int, others: Callable[[], None]) -> Iterator[None]:
    """Call `others` before an operation on a folder within the block, if there are so many."""
    global _stop
    _stop = folder, operation, others
    try:
        yield
    finally:
        _stop = None


_under_way = list[Callable[[], None]]()  # the last file of a save, which is written when the first writer has gone on


def take_over(folder, saves, *, best=False, keep=2, under_way=False):
    """Go on from the folder as another process of the job, and return the update of the last of these saves."""
    as_another_process()
    run = training()
    writer = checkpoint(folder, run, run="job", best="min:loss", keep=keep)
    writer.restore(best=best)
    assert_equal(run.weights(), WEIGHTS[run.optimizer.updates], 0)
    if under_way:
        storage, put = writer._folder.storage, writer._folder.storage.put

        def put_later(text, *names, **options):
            json = names[-1] == "rank-0.json"
            _under_way.append(partial(put, text, *names, **options)) if json else put(text, *names, **options)

        storage.put = put_later
    for _ in range(saves):
        run.run(1)
        writer.save()
    writer._folder.writer._stop()  # as the end of a process does
    return run.optimizer.updates if saves else 0


def begin_again(folder):
    """Delete the folder, and begin another training of this name in it, whose checkpoints have the same names."""
    place = Folder(folder)
    if place.storage.on_disk:
        shutil.rmtree(folder)
    else:
        Counted.store = {path: file for path, file in Counted.store.items() if folder.split("//")[1] not in path}
    return take_over(folder, 3)


OTHERS = {
    "nothing": lambda folder: take_over(folder, 0),
    "a save": lambda folder: take_over(folder, 1),
    "a save under way": lambda folder: take_over(folder, 1, under_way=True),
    "saves that delete": lambda folder: take_over(folder, 3, keep=1),
    "a save from the best": lambda folder: take_over(folder, 1, best=True),
    "a third writer": lambda folder: max(take_over(folder, 1), take_over(folder, 1)),
    "another training": begin_again,
    "a third writer without a save": lambda folder: max(take_over(folder, 1), take_over(folder, 0)),
}


def best_loss(folder):
    """Return the loss of the best checkpoint."""
    place = Folder(folder)
    best = place.best()
    assert best == next(iter(place.best_first()), None)  # no other one hides it
    return (place.reported(best) or {})["metrics"]["loss"] if best else math.inf


def attempt(folder, operation, call, others):
    """Stop a writer at an operation of its save or report, check what is there, and return whether there was one."""
    run, confirmed, saved, losses = training(), 0, list[int](), list[float]()
    writer = checkpoint(folder, run, run="job", best="min:loss")
    for loss in (0.5, 1.0):
        run.run(1)
        writer.report(loss=loss)
        writer.save()
    run.run(3)
    if call == "report":  # which marks the last save as the best one
        writer.save()
        confirmed = 5

    def stop():
        saved.append(others(folder))
        losses.append(best_loss(folder))

    with stopped_at(folder, operation, stop):
        with suppress(RuntimeError):
            writer.save() if call == "save" else writer.report(loss=0.1)
            confirmed = 5
        with suppress(RuntimeError):
            writer.close()
    while _under_way:
        _under_way.pop()()
    place = Folder(folder)
    for name in place.names():
        assert place.is_intact(name) or (name.startswith("update-00000005-0001-") and call == "save"), name
    if saved and saved[0]:
        assert best_loss(folder) <= losses[0]
    newest = place.newest()
    assert newest is not None
    if saved and saved[0]:
        assert update_of(newest) == saved[0]
    else:
        assert update_of(newest) >= confirmed
    again = training()
    with checkpoint(folder, again, run="job") as last, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of what was not confirmed
        assert last.restore()
    assert again.optimizer.updates == update_of(newest)
    assert_equal(again.weights(), WEIGHTS[again.optimizer.updates], 0)
    return bool(saved)


SLOW = pytest.mark.slow("saves often")


@pytest.mark.parametrize("place", ["disk", "store"])
@pytest.mark.parametrize("call", ["save", pytest.param("report", marks=pytest.mark.nightly("another call"))])
@pytest.mark.parametrize("name", [name if name == "a save" else pytest.param(name, marks=SLOW) for name in OTHERS])
def test_the_last_save_of_the_last_writer_is_the_newest_and_nothing_that_was_confirmed_is_lost(
    name, call, place, tmp_path, monkeypatch
):
    def refuse(*_):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(fcntl, "lockf", refuse)  # else the second process is refused
    folder = str(tmp_path) if place == "disk" else f"counted://{uuid4().hex}"
    for operation in itertools.count():
        as_another_process()
        if not attempt(f"{folder}/{operation}", operation, call, OTHERS[name]):
            break
    print(operation, "takeovers")
    assert operation > 10
