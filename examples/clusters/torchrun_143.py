"""torchrun, except that it exits with 143 after a signal: at once while it waits for other hosts, or after its workers.

    python examples/clusters/torchrun_143.py --nproc-per-node=8 examples/clusters/train.py --checkpoint runs/a

torchrun itself exits with 1 if its workers saved and exited with 143, as after an error, so that a scheduler cannot
tell one from the other. It has no handler for SIGUSR1, and none for SIGTERM until its workers start: as the first
process of a container it would ignore it. Arguments and everything else are torchrun's.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from types import FrameType

STOPPED = 128 + signal.SIGTERM  # 143, as the workers


def exit_stopped(signum: int = 0, frame: FrameType | None = None) -> None:
    """Exit at once: a thread of torchrun's store may abort an interpreter that shuts down."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(STOPPED)


def stop_workers(signum: int, frame: FrameType | None) -> None:
    """Let torchrun do what it does after a SIGTERM: forward it to the workers and wait for them, at most 30 s."""
    os.kill(os.getpid(), signal.SIGTERM)


def exit_without_workers(signals: socket.socket) -> None:
    """Exit when a signal arrives and there are no workers.

    The main thread may then wait for other hosts in C++, for up to 15 minutes, where Python calls no handler.
    """
    while received := signals.recv(1):  # empty after `main`
        if received[0] in (signal.SIGTERM, signal.SIGUSR1):
            try:
                os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                os._exit(STOPPED)


def main() -> None:
    """Run torchrun with the arguments of this program."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    threading.Thread(target=exit_without_workers, args=(reader,), daemon=True).start()
    signal.set_wakeup_fd(writer.fileno())
    signal.signal(signal.SIGTERM, exit_stopped)
    signal.signal(signal.SIGUSR1, stop_workers)
    # After the handlers are installed: the imports take seconds.
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        run.main()
    except SignalException as error:  # this node got the signal
        if error.sigval in (signal.SIGTERM, signal.SIGUSR1):
            exit_stopped()
        raise
    except ChildFailedError as error:  # a worker got it, or a worker of another node: all of them stop together
        if error.get_first_failure()[1].exitcode == STOPPED:
            exit_stopped()
        raise


if __name__ == "__main__":
    main()
