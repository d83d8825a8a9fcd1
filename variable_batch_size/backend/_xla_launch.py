"""One child process that lives and dies with this one, and one thread a rank in it; knows nothing of torch_xla.

The life of a launch. The parent sets the environment, spawns the child, takes the environment back and waits;
SIGTERM goes on to the child, and under a `Preemption` each of its signals, which the child then takes in one too. The
child does its work in its main thread, the only one where Python runs signal handlers, and the work starts a thread a
rank. An exception in any thread ends the child at once: after a rank's, the others may stand in a collective that
nobody will complete; after one in a device loader's thread, its rank would take the epoch for finished. The parent then
ends as the child did.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext, suppress
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, NoReturn, final

from variable_batch_size.preemption import EXIT_CODE, Preemption, current

FAILED = 1  # what Python itself exits with after an uncaught exception

_first_to_end = threading.Lock()


def run_child(work: Callable[..., int], args: Sequence[Any], environment: Mapping[str, str]) -> None:
    """Call `work(*args)` in a fresh process whose environment has `environment` too, and end as it ends.

    What `work` returns is the process's exit code, when it has closed what is open; no exception takes time for that.

    Raises:
        TypeError: when `work` or `args` cannot be pickled.
        SystemExit: with the exit code that the child chose, or 143 when it was asked to stop by SIGTERM.
        RuntimeError: when an exception or another signal ended the child.
    """
    preemption = current()
    signals = preemption.signals if preemption else ()
    child = multiprocessing.get_context("spawn").Process(target=_child_main, args=(signals, work, *args))
    asked_by: signal.Signals | None = None

    def relay(signum: int, frame: FrameType | None = None) -> None:
        nonlocal asked_by
        asked_by = signal.Signals(signum)
        if child.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(child.pid, signum)

    with preemption.relayed(relay) if preemption else _on_sigterm(relay), _outlived(child):
        with environment_with(environment):
            _start(child)
        if asked_by or (preemption and preemption.requested):  # before the child was born
            child.terminate()
        child.join()
    code = child.exitcode or 0
    _end_as(-signal.SIGTERM if asked_by and code == -asked_by else code)  # before the child took signals


def run_by(launcher: Callable[..., object], work: Callable[..., object], args: Sequence[Any]) -> None:
    """Let `launcher(work, args=args)` start the processes; under a `Preemption` they take its signals as well."""
    preemption = current()
    if preemption is None:
        launcher(work, args=tuple(args))
        return

    def relay(signum: signal.Signals) -> None:
        for child in multiprocessing.active_children():
            if child.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(child.pid, signum)

    with preemption.relayed(relay):
        if preemption.requested:
            raise SystemExit(EXIT_CODE)
        try:
            launcher(_TakesSignals(work, preemption.signals), args=tuple(args))
        except BrokenProcessPool:
            if preemption.requested:  # before its processes took signals themselves
                raise SystemExit(EXIT_CODE) from None
            raise


@final
class _TakesSignals:
    """A function that enters a `Preemption` where it is unpickled: in the main thread of another process."""

    def __init__(self, work: Callable[..., object], signals: Sequence[signal.Signals]) -> None:
        self.work, self.signals = work, signals

    def __call__(self, *args: Any) -> object:
        return self.work(*args)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        Preemption(self.signals).__enter__()


@contextmanager
def environment_with(settings: Mapping[str, str]) -> Iterator[None]:
    """Set these environment variables, for as long as the block runs."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def run_threads(jobs: Sequence[Callable[[], object]]) -> None:
    """Run each job in a thread of its own, called after its rank, until all are done."""
    threads = [threading.Thread(target=job, name=f"rank {rank}", daemon=True) for rank, job in enumerate(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@final
class Meeting:
    """Where the ranks of a process wait for one another, for as long as it takes, unless one has left for good."""

    def __init__(self, size: int) -> None:
        self._size, self._here, self._round, self._left = size, 0, 0, False
        self._change = threading.Condition()
        self._said = [b""] * size

    def wait(self) -> None:
        """Return when all ranks have come.

        Raises:
            RuntimeError: when a rank has left, or leaves now.
        """
        with self._change:
            this_round = self._round
            self._here += 1
            if self._here == self._size:
                self._here, self._round = 0, self._round + 1
                self._change.notify_all()
            self._change.wait_for(lambda: self._round != this_round or self._left)
            if self._round == this_round:
                raise RuntimeError(
                    f"every rank must take part in each update, but {threading.current_thread().name} waits for one "
                    f"that has returned; give all ranks the same number of updates"
                )

    def exchange(self, rank: int, message: bytes) -> list[bytes]:
        """What each rank has to say, by rank."""
        self._said[rank] = message
        self.wait()
        said = list(self._said)
        self.wait()  # nobody says the next thing before all have heard this one
        return said

    def leave(self) -> None:
        """Say that this rank will not come again."""
        with self._change:
            self._left = True
            self._change.notify_all()


@contextmanager
def _on_sigterm(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Install the handler for the block, where that is possible: in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)  # None: not installed by Python


def _start(child: BaseProcess) -> None:
    try:
        child.start()
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise TypeError(
            f"a launched function and its arguments travel to another process by pickle, but {error}; "
            f"define the function at the top of a module and pass plain data"
        ) from error


@contextmanager
def _outlived(child: BaseProcess) -> Iterator[None]:
    """See the child's end: a Ctrl-C in the block asks it to stop, a second one kills it."""
    try:
        yield
    except KeyboardInterrupt:
        if child.pid is not None:
            child.terminate()
            child.join()
        raise
    finally:
        if child.is_alive():
            child.kill()


def _end_as(code: int) -> None:
    if code == FAILED:
        raise RuntimeError(
            "the launched ranks must finish, but an exception ended one: see its traceback above (stderr)"
        )
    if code == -signal.SIGTERM:
        raise SystemExit(128 + signal.SIGTERM)
    if code < 0:
        raise RuntimeError(
            f"the launched process must live until its ranks finish, but {signal.Signals(-code).name} ended it: see "
            f"its last words above (stderr), or the system's log when it was SIGKILL (out of memory)"
        )
    if code > 0:
        raise SystemExit(code)


def _child_main(signals: Sequence[signal.Signals], work: Callable[..., int], *args: Any) -> None:
    _follow_parent()
    threading.excepthook = _end_after_thread
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches the parent too, which decides
    try:
        with Preemption(signals) if signals else nullcontext():
            code = work(*args)
    except BaseException as error:  # also what a user's signal handler raises
        _end(_last_words(error))
    sys.exit(code)


def _follow_parent() -> None:
    """Take the parent's death, whatever its cause, as SIGTERM."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()


def _end_after_thread(failure: threading.ExceptHookArgs) -> None:
    with _first_to_end:  # for ever, unless with code 0: the traceback of the first to fail is the one to read
        code = _last_words(failure.exc_value)
        if code:
            _end(code)


def _last_words(error: BaseException | None) -> int:
    """Print what ended this thread, as the interpreter does for a process; returns the exit code."""
    if not isinstance(error, SystemExit):
        lines = "".join(traceback.format_exception(error))
        print(f"{threading.current_thread().name} failed:\n{lines}", end="", file=sys.stderr)
        return FAILED
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    print(error.code, file=sys.stderr)
    return FAILED


def _end(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
