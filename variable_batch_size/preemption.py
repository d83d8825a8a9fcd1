"""Handle the signals that precede the loss of a machine immediately, whatever the main thread does.

Python runs signal handlers in the main thread, between two bytecode instructions: never while that thread waits in a
collective that no other rank completes. The interpreter also writes the number of each signal to a socket when the
signal arrives (`signal.set_wakeup_fd`), and a thread here reads that socket. Three promises need it while a rank waits
in a collective: the line that is logged, signals that reach the ranks of a launch, and the end at a second signal.
`Preemption.requested` alone would need no more than a handler.
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
from typing import Any, ClassVar, final

from variable_batch_size._log import log

EXIT_CODE = 128 + signal.SIGTERM  # 143

_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))
_DUPLICATE_SECONDS = 1.0  # a process of a job can get the same request twice, from the system and from its launcher
_STOP = b"\0"  # ends the thread that reads the socket; no signal has this number

_active: Preemption | None = None


@final
class Preemption:
    """Context manager that saves a checkpoint and exits after the next update when a signal arrives.

    Enter it in the main thread of each rank's process, or of the process that calls
    `variable_batch_size.backend.xla.launch`, which passes signals on to its ranks. After a signal to any rank, the next
    `Checkpoint.step()` saves after the same update on all ranks and raises `SystemExit(143)`; a process that launched
    XLA cores also exits with 143. A second signal, one second or more after the first, ends the process immediately.
    AdaptDL stops training in the same way (Qiao et al. 2021).

    Args:
        signals: signals to handle; by default SIGTERM and SIGUSR1, which clouds and Slurm send.

    Raises:
        RuntimeError: on entry, if this is not the main thread, or the process has already entered a `Preemption`.
    """

    def __init__(self, signals: Sequence[signal.Signals] = _SIGNALS) -> None:
        self.signals = tuple(map(signal.Signals, signals))
        self._first: tuple[signal.Signals, float] | None = None  # first signal, and time.monotonic() at its arrival
        self._announced = False  # whether it was logged
        self._forward: Callable[[signal.Signals], None] | None = None
        self._previous_handlers: dict[signal.Signals, Any] = {}
        self._previous_wakeup_fd = -1

    @property
    def requested(self) -> bool:
        """Whether a signal has arrived."""
        return self._first is not None

    @contextmanager
    def forwarding_to(self, forward: Callable[[signal.Signals], None]) -> Iterator[None]:
        """Call `forward` with each signal that arrives during the block, such as to send it to ranks of a launch."""
        self._forward = forward
        try:
            yield
        finally:
            self._forward = None

    def _add_signal(self, signum: signal.Signals) -> None:
        """Let one more signal ask the training to save and exit, until the context ends."""
        if signum not in self.signals:
            self._previous_handlers[signum] = signal.signal(signum, self._record_first)
            self.signals += (signum,)

    @staticmethod
    def shield(worker: int = 0) -> None:
        """Make a `DataLoader` worker ignore Ctrl-C, and SIGTERM and SIGUSR1 unless its parent sends them.

        Pass it as `worker_init_fn` if signals are sent to every process of a job, as a terminal sends Ctrl-C, with
        `persistent_workers=True`, because a worker is not shielded while it starts.

        Args:
            worker: id of the worker, which `DataLoader` passes; unused.
        """
        signal.pthread_sigmask(signal.SIG_BLOCK, (*_SIGNALS, signal.SIGINT))
        if hasattr(signal, "sigwaitinfo"):  # not on macOS
            threading.Thread(target=_exit_on_signal_from_parent, name="shield", daemon=True).start()

    def __enter__(self) -> Preemption:
        global _active
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                f"Preemption must be entered in the main thread, got thread {threading.current_thread().name!r}; enter "
                f"it before the ranks are launched"
            )
        if _active is not None:
            raise RuntimeError(
                "a process can enter one Preemption at a time, got a second one inside the first; remove one of them"
            )
        _reset_after_fork()  # once a process: forked children get their own handlers back
        self._first, self._announced, self._previous_handlers = None, False, {}
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._thread = threading.Thread(target=self._read_wakeup_socket, name="preemption", daemon=True)
        self._thread.start()
        self._previous_wakeup_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        _active = self
        try:
            for signum in self.signals:
                self._previous_handlers[signum] = signal.signal(signum, self._record_first)
        except BaseException:  # for example, SIGKILL has no handlers
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if _active is not self:  # a forked child, which shares the socket with its parent
            return
        self._restore_handlers()
        self._writer.send(_STOP)
        self._thread.join()
        self._reader.close()
        self._writer.close()

    def _restore_handlers(self) -> None:
        """Give signals back to the handlers that they had before this context."""
        global _active
        _active = None
        for signum, handler in self._previous_handlers.items():
            signal.signal(signum, handler or signal.SIG_DFL)  # None: not installed by Python
        signal.set_wakeup_fd(self._previous_wakeup_fd)

    def _read_wakeup_socket(self) -> None:
        """Handle each signal when it arrives, in a thread, until the context ends.

        The interpreter writes the number of a signal as one byte. It is passed on to an earlier wakeup file descriptor.
        """
        while (received := self._reader.recv(1)) not in (_STOP, b""):
            if self._previous_wakeup_fd != -1:
                with suppress(OSError):
                    os.write(self._previous_wakeup_fd, received)
            if received[0] in self.signals:
                self._handle_signal(signal.Signals(received[0]))

    def _record_first(self, signum: int, frame: FrameType | None = None) -> tuple[signal.Signals, float]:
        """Record the first signal, and return it with its time.

        It is also the signal handler, so that a signal is recorded even if other code has replaced the wakeup socket.
        """
        self._first = self._first or (signal.Signals(signum), time.monotonic())
        return self._first

    def _handle_signal(self, signum: signal.Signals) -> None:
        """Log the first signal, forward each, and end the process at a second one, in the thread that reads signals."""
        _, first_time = self._record_first(signum)
        if not self._announced:  # not in `_record_first`, which waits for the main thread: it may be in a collective
            self._announced = True
            log(f"{signum.name}: Checkpoint.step() saves after this update, and exits.")
        if self._forward is not None:
            self._forward(signum)
        if time.monotonic() - first_time >= _DUPLICATE_SECONDS:  # a second request, which does not wait for a save
            os._exit(EXIT_CODE)


@final
class Interrupts:
    """Handles Ctrl-C as a further signal that asks a training to save and exit, until `end()`.

    Within a `Preemption`, which then handles it, until the end of the `Preemption`.

    Raises:
        RuntimeError: if this is not the main thread.
    """

    _last: ClassVar[Interrupts | None] = None

    def __init__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                f'on_interrupt="save" must be passed in the main thread, got thread '
                f"{threading.current_thread().name!r}; enter vbs.Preemption(signals=(signal.SIGINT,)) there, before "
                f"the ranks are launched"
            )
        if Interrupts._last is not None:  # as when a notebook's cell runs again
            Interrupts._last.end()
        self._preemption = Preemption((signal.SIGINT,)) if _active is None else None  # None: the user has entered one
        Interrupts._last = self
        if self._preemption is not None:
            self._preemption.__enter__()
        elif _active is not None:
            _active._add_signal(signal.SIGINT)

    def end(self) -> None:
        """Give Ctrl-C back to the handler that it had before, unless a `Preemption` of the user handles it."""
        preemption, self._preemption = self._preemption, None
        if preemption is not None:
            preemption.__exit__(None, None, None)
        if Interrupts._last is self:
            Interrupts._last = None


def active_preemption() -> Preemption | None:
    """Return the `Preemption` that this process has entered, or None."""
    return _active


def signal_notice() -> str:
    """Return how long ago the first signal arrived, such as "0.42 s after SIGTERM"; empty if none has."""
    if _active is None or _active._first is None:
        return ""
    signum, first_time = _active._first
    return f"{time.monotonic() - first_time:.2f} s after {signum.name}"


def _exit_on_signal_from_parent() -> None:
    """Wait for signals that are blocked in this process, and exit at the first one that its parent has sent."""
    while signal.sigwaitinfo(_SIGNALS).si_pid != os.getppid():
        pass
    os._exit(0)  # as torch's own handler does in a worker of a DataLoader


@functools.cache
def _reset_after_fork() -> None:
    """Restore the previous handlers in forked children: they share the socket, but their signals are their own."""

    def restore() -> None:
        if _active is not None:
            _active._restore_handlers()

    os.register_at_fork(after_in_child=restore)
