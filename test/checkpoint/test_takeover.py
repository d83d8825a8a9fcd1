"""A writer that is stopped at any operation on files, and goes on after others have taken its folder over."""

from __future__ import annotations

import errno
import fcntl
import itertools
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from helpers.checkpoints import as_another_process, checkpoint
from helpers.reference import SIZES, assert_equal, training
from variable_batch_size.checkpoint.folder import Folder, update_of

WEIGHTS = [training().run(updates).weights() for updates in range(len(SIZES) + 1)]
_OPERATIONS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir"}  # audit events
_stop: tuple[str, int, Callable[[], None]] | None = None  # a folder, operations until the stop, what others do then


def _count(event: str, arguments: tuple[object, ...]) -> None:
    global _stop
    if _stop is not None and event in _OPERATIONS and str(arguments[0]).startswith(_stop[0]):
        folder, left, others = _stop
        _stop = (folder, left - 1, others) if left else None
        if not left:
            others()


sys.addaudithook(_count)


@contextmanager
def stopped_at(folder: str, operation: int, others: Callable[[], None]) -> Iterator[None]:
    """Call `others` before an operation on a folder within the block, if there are so many."""
    global _stop
    _stop = folder, operation, others
    try:
        yield
    finally:
        _stop = None


def take_over(folder, saves, *, best=False, keep=2):
    """Go on from the folder as another process of the job, and return the update of the last of these saves."""
    as_another_process()
    run = training()
    writer = checkpoint(folder, run, run="job", best="min:loss", keep=keep)
    writer.restore(best=best)
    assert_equal(run.weights(), WEIGHTS[run.optimizer.updates], 0)
    for _ in range(saves):
        run.run(1)
        writer.save()
    writer._folder.writer._stop()  # as the end of a process does
    return run.optimizer.updates if saves else 0


OTHERS = {
    "nothing": lambda folder: take_over(folder, 0),
    "a save": lambda folder: take_over(folder, 1),
    "saves that delete": lambda folder: take_over(folder, 3, keep=1),
    "a save from the best": lambda folder: take_over(folder, 1, best=True),
    "a third writer": lambda folder: max(take_over(folder, 1), take_over(folder, 1)),
    "a third writer without a save": lambda folder: max(take_over(folder, 1), take_over(folder, 0)),
}


def attempt(folder, operation, others):
    """Stop a writer at an operation of its save, check what is there, and return whether there was one."""
    run, confirmed, saved = training(), 0, list[int]()
    writer = checkpoint(folder, run, run="job", best="min:loss")
    for loss in (0.5, 1.0):
        run.run(1)
        writer.report(loss=loss)
        writer.save()
    run.run(1)
    with stopped_at(str(folder), operation, lambda: saved.append(others(folder))):
        for call in (writer.save, writer.close):
            with suppress(RuntimeError):
                call()
                confirmed = max(confirmed, 3 if call == writer.save else 2)
    place = Folder(folder)
    for name in place.names():
        assert place.is_intact(name) or name.startswith("update-00000003-0001-"), name  # was not confirmed
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


@pytest.mark.parametrize(
    "name", [name if name == "a save" else pytest.param(name, marks=pytest.mark.slow("saves often")) for name in OTHERS]
)
def test_what_the_last_writer_saved_is_the_newest_and_nothing_that_was_confirmed_is_lost(name, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(fcntl, "lockf", refuse)  # else the second process is refused
    for operation in itertools.count():
        as_another_process()
        if not attempt(tmp_path / str(operation), operation, OTHERS[name]):
            break
    print(operation, "takeovers")
    assert operation > 20
