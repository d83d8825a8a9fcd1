"""Run work in one child process that ends with this process, with one thread per rank; independent of torch_xla.

A launch proceeds as follows. The parent sets the environment, spawns the child, restores the environment and waits.
It forwards SIGTERM to the child and, within a `Preemption`, each of that Preemption's signals, for which the child
then enters a `Preemption` too. The child runs the work in its main thread, the only one where Python runs signal
handlers, and the work starts one thread per rank. An exception in any thread ends the child immediately: after a
rank's, the other ranks may wait in a collective that never completes; after one in the thread of a device loader, its
rank would end the epoch early. The parent then exits as the child did.
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

from variable_batch_size.preemption import EXIT_CODE, Preemption, active_preemption

FAILED = 1  # exit code of Python after an uncaught exception
_WAKE_SECONDS = 1.0

_first_failure = threading.Lock()


def run_child(work: Callable[..., int], args: Sequence[Any], environment: Mapping[str, str]) -> None:
    """Call `work(*args)` in a new process, and exit as that process does.

    Args:
        work: picklable function; its result is the exit code of the process after a normal interpreter shutdown. An
            exception ends the process without a shutdown.

    Raises:
        SystemExit: with the exit code of the child if it is not 0; with 143 if a signal asked it to stop.
    """
    preemption = active_preemption()
    signals = preemption.signals if preemption else ()
    child = multiprocessing.get_context("spawn").Process(target=_child_main, args=(signals, work, *args))
    forwarded: signal.Signals | None = None

    def forward(signum: int, frame: FrameType | None = None) -> None:
        """Send a signal that this process has received to the child, too."""
        nonlocal forwarded
        forwarded = signal.Signals(signum)
        if child.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(child.pid, signum)

    with preemption.forwarding_to(forward) if preemption else _on_sigterm(forward), _stop_on_exit(child):
        with environment_with(environment):
            _start_child(child)
        if forwarded or (preemption and preemption.requested):  # a signal came before the child had a pid
            child.terminate()
        _join_interruptibly(child)
    code = child.exitcode or 0
    if forwarded and code == -forwarded:  # the signal ended the child before it had installed its handlers
        code = -signal.SIGTERM
    _exit_as(code)


def run_by(launcher: Callable[..., object], work: Callable[..., object], args: Sequence[Any]) -> None:
    """Call `launcher(work, args=args)`; within a `Preemption`, the processes that it starts handle its signals.

    Args:
        launcher: starts processes that call `work(*args)`, such as `torch_xla.launch`.
        work: picklable function.
        args: its arguments.

    Raises:
        SystemExit: with code 143 if a signal came before the processes had handlers for it.
    """
    preemption = active_preemption()
    if preemption is None:
        launcher(work, args=tuple(args))
        return

    def forward(signum: signal.Signals) -> None:
        """Send a signal to all processes that the launcher has started."""
        for child in multiprocessing.active_children():
            if child.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(child.pid, signum)

    with preemption.forwarding_to(forward):
        if preemption.requested:
            raise SystemExit(EXIT_CODE)
        try:
            launcher(_WithPreemption(work, preemption.signals), args=tuple(args))
        except BrokenProcessPool:
            if preemption.requested:  # the signal ended processes that had installed no handlers yet
                raise SystemExit(EXIT_CODE) from None
            raise


@final
class _WithPreemption:
    """A function that enters a `Preemption` when it is unpickled, in the main thread of another process."""

    def __init__(self, work: Callable[..., object], signals: Sequence[signal.Signals]) -> None:
        self.work, self.signals = work, signals

    def __call__(self, *args: Any) -> object:
        return self.work(*args)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        Preemption(self.signals).__enter__()


@contextmanager
def environment_with(variables: Mapping[str, str]) -> Iterator[None]:
    """Set these environment variables for the block, and restore the previous values after it."""
    values_before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in values_before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def run_threads(jobs: Sequence[Callable[[], object]]) -> None:
    """Run each job in a thread that is named after its rank, and return when all are done."""
    threads = [threading.Thread(target=job, name=f"rank {rank}", daemon=True) for rank, job in enumerate(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        _join_interruptibly(thread)


@final
class Rendezvous:
    """Barrier on the host for the ranks of one process, without a timeout.

    If a rank has returned, the others raise an error instead of waiting for it.

    Args:
        size: number of ranks.

    Attributes:
        left: whether a rank has returned.
    """

    def __init__(self, size: int) -> None:
        self._size, self._arrived, self._barriers, self.left = size, 0, 0, False
        self._change = threading.Condition()

    def wait(self) -> None:
        """Return when all ranks have called it: a barrier for ranks that are threads of this process.

        Raises:
            RuntimeError: if a rank has returned instead of coming here.
        """
        with self._change:
            barriers_before = self._barriers  # how many barriers all ranks have passed
            self._arrived += 1
            if self._arrived == self._size:  # the last rank releases the others
                self._arrived, self._barriers = 0, self._barriers + 1
                self._change.notify_all()
            self._change.wait_for(lambda: self._barriers != barriers_before or self.left)
            if self._barriers == barriers_before:  # a rank has returned instead of coming here
                raise RuntimeError(
                    f"every rank must take part in each update, but {threading.current_thread().name} waits for a rank "
                    f"that has returned; give all ranks the same number of updates"
                )

    def leave(self) -> None:
        """Release the ranks that wait, now or later, with an error: this rank has returned."""
        with self._change:
            self.left = True
            self._change.notify_all()


def _join_interruptibly(worker: threading.Thread | BaseProcess) -> None:
    """Wait for a thread or a process, and wake up every second, because Python runs signal handlers only then.

    A signal does not wake the main thread if another thread receives it, or before the main thread waits.
    """
    while worker.is_alive():
        worker.join(_WAKE_SECONDS)


@contextmanager
def _on_sigterm(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Install a handler of SIGTERM for the block if this is the main thread, where Python allows it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler_before = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler_before or signal.SIG_DFL)  # None: not installed by Python


def _start_child(child: BaseProcess) -> None:
    """Start a process; raise TypeError if its function or arguments cannot be pickled."""
    try:
        child.start()
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise TypeError(
            f"a launched function and its arguments must be picklable, but {error}; define the function at the top of "
            f"a module and pass plain data"
        ) from error


@contextmanager
def _stop_on_exit(child: BaseProcess) -> Iterator[None]:
    """End the child with the block: a Ctrl-C terminates it and waits for it, a second one kills it."""
    try:
        yield
    except KeyboardInterrupt:
        if child.pid is not None:
            child.terminate()
            _join_interruptibly(child)
        raise
    finally:
        if child.is_alive():
            child.kill()


def _exit_as(code: int) -> None:
    """Raise the exception that corresponds to a child's exit code; return if it is 0."""
    if code == FAILED:
        raise RuntimeError(
            "the launched ranks did not finish: an exception ended one; see its traceback above (stderr)"
        )
    if code == -signal.SIGTERM:
        raise SystemExit(128 + signal.SIGTERM)
    if code < 0:
        raise RuntimeError(
            f"the launched ranks did not finish: {signal.Signals(-code).name} ended their process; see its output "
            f"above (stderr), or the system log after SIGKILL (out of memory)"
        )
    if code > 0:
        raise SystemExit(code)


def _child_main(signals: Sequence[signal.Signals], work: Callable[..., int], *args: Any) -> None:
    """Run the work in the child process, as the module describes it, and exit with its code."""
    _terminate_with_parent()
    threading.excepthook = _exit_after_thread
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C reaches the parent too, which then ends the child
    try:
        with Preemption(signals) if signals else nullcontext():
            code = work(*args)
    except BaseException as error:  # also one that a user's signal handler raises
        _exit_immediately(_print_failure(error))
    sys.exit(code)


def _terminate_with_parent() -> None:
    """Send this process a SIGTERM when its parent ends, for whatever reason."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        """Wait in a thread until the parent process has ended."""
        if parent is not None:
            parent.join()
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()


def _exit_after_thread(failure: threading.ExceptHookArgs) -> None:
    """End the process after the first exception in a thread; it is installed as `threading.excepthook`.

    The other ranks, which are threads, may wait in a collective that never completes.
    """
    with _first_failure:  # later failures block here while the process exits, so that only the first is printed
        code = _print_failure(failure.exc_value)
        if code:  # a SystemExit of code 0 is no failure
            _exit_immediately(code)


def _print_failure(error: BaseException | None) -> int:
    """Print what ended this thread, as the interpreter does for a process, and return the exit code."""
    if not isinstance(error, SystemExit):
        lines = "".join(traceback.format_exception(error))
        print(f"{threading.current_thread().name} failed:\n{lines}", end="", file=sys.stderr)
        return FAILED
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    print(error.code, file=sys.stderr)
    return FAILED


def _exit_immediately(code: int) -> NoReturn:
    """End this process without a shutdown of the interpreter, which would wait for threads."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
