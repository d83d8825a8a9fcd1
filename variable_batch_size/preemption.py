"""The signals by which machines are taken back, noticed at once and whatever the main thread is doing.

Python runs signal handlers in the main thread, between two of its instructions: never, while it stands in a collective
that nobody completes. But the interpreter also writes each signal's number into a socket when it arrives, and here a
thread reads that.
"""

from __future__ import annotations

import functools
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any, final

EXIT_CODE = 128 + signal.SIGTERM  # 143

_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))
_SAME = 1.0  # seconds; where a whole job is asked to stop, a process hears it from the system and from its launcher
_END = b"\0"  # no signal has this number

_active: Preemption | None = None


@final
class Preemption:
    """Lets a training that is asked to stop do so after the next update, with a checkpoint.

    A context for the main thread of each rank's own process, or of the one that calls
    `variable_batch_size.backend.xla.launch`, which passes signals on to its ranks. When one has come to any rank, the
    next `Checkpoint.step()` saves, on all ranks at the same update, and raises `SystemExit(143)`; who launched XLA's
    cores ends with 143 too. A second signal, a second or more after the first, ends the process at once. (As AdaptDL
    stops: Qiao et al. 2021.)

    Args:
        signals: which ones to take; by default those of clouds and of Slurm, SIGTERM and SIGUSR1.

    Raises:
        RuntimeError: on entering it outside of the main thread, or in another one.
    """

    def __init__(self, signals: Sequence[signal.Signals] = _SIGNALS) -> None:
        self.signals = tuple(map(signal.Signals, signals))
        self._first: tuple[signal.Signals, float] | None = None
        self._relay: Callable[[signal.Signals], None] | None = None
        self._handlers: dict[signal.Signals, Any] = {}
        self._wakeup = -1

    @property
    def requested(self) -> bool:
        """Whether a signal has come."""
        return self._first is not None

    @contextmanager
    def relayed(self, relay: Callable[[signal.Signals], None]) -> Iterator[None]:
        """Pass what comes on to `relay`, for as long as the block runs."""
        self._relay = relay
        try:
            yield
        finally:
            self._relay = None

    @staticmethod
    def shield(worker: int = 0) -> None:
        """Heed SIGTERM and SIGUSR1 of the parent only: a loader's `worker_init_fn`, where all processes get them."""
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        if hasattr(signal, "sigwaitinfo"):  # not on macOS
            threading.Thread(target=_end_with_parent, name="shield", daemon=True).start()

    def __enter__(self) -> Preemption:
        global _active
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                f"a process takes signals in its main thread, but Preemption was entered in "
                f"{threading.current_thread().name}; enter it before the ranks are launched"
            )
        if _active is not None:
            raise RuntimeError(
                "a process has one Preemption, but this one was entered in another; leave one of them out"
            )
        _mind_forks()
        self._first, self._handlers = None, {}
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._thread = threading.Thread(target=self._listen, name="preemption", daemon=True)
        self._thread.start()
        self._wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        _active = self
        try:
            for signum in self.signals:
                self._handlers[signum] = signal.signal(signum, self._hear)
        except BaseException:  # one that nobody can take
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if _active is not self:  # a forked child, which shares the socket
            return
        self._restore()
        self._writer.send(_END)
        self._thread.join()
        self._reader.close()
        self._writer.close()

    def _restore(self) -> None:
        global _active
        _active = None
        for signum, handler in self._handlers.items():
            signal.signal(signum, handler or signal.SIG_DFL)  # None: not installed by Python
        signal.set_wakeup_fd(self._wakeup)

    def _listen(self) -> None:
        while (came := self._reader.recv(1)) not in (_END, b""):
            if self._wakeup != -1:  # somebody else listened before
                with suppress(OSError):
                    os.write(self._wakeup, came)
            if came[0] in self.signals:
                self._take(signal.Signals(came[0]))

    def _hear(self, signum: int, frame: FrameType | None = None) -> tuple[signal.Signals, float]:
        """What came first, and when; also the handler, for when somebody else has taken the socket's place."""
        self._first = self._first or (signal.Signals(signum), time.monotonic())
        return self._first

    def _take(self, signum: signal.Signals) -> None:
        _, when = self._hear(signum)
        if self._relay is not None:
            self._relay(signum)
        if time.monotonic() - when >= _SAME:
            os._exit(EXIT_CODE)


def current() -> Preemption | None:
    """The one that is entered in this process."""
    return _active


def notice() -> str:
    """Which signal has come to this process, and how long ago: "0.42 s after SIGTERM"; empty before."""
    if _active is None or _active._first is None:
        return ""
    signum, when = _active._first
    return f"{time.monotonic() - when:.2f} s after {signum.name}"


def _end_with_parent() -> None:
    while signal.sigwaitinfo(_SIGNALS).si_pid != os.getppid():
        pass
    os._exit(0)  # as torch's own handler does in a loader's worker


@functools.cache
def _mind_forks() -> None:
    """A forked child has the socket too, but its signals are its own."""

    def forget() -> None:
        if _active is not None:
            _active._restore()

    os.register_at_fork(after_in_child=forget)
