"""torchrun, except that it exits with 143 if a signal made its workers save and exit with 143.

    python examples/clusters/torchrun_143.py --nproc-per-node=8 examples/clusters/train.py --checkpoint runs/a

torchrun itself exits with 1 then, as after an error, so that a scheduler cannot tell one from the other. It also has no
handler for SIGUSR1, and none for SIGTERM until its workers start: as the first process of a container it would ignore
it. Arguments and everything else are torchrun's.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

STOPPED = 128 + signal.SIGTERM  # 143, as the workers


def stop(signum: int, frame: FrameType | None) -> None:
    """Exit; no worker has started yet."""
    sys.exit(STOPPED)


def stop_workers(signum: int, frame: FrameType | None) -> None:
    """Let torchrun do what it does after a SIGTERM: forward it to the workers and wait for them, at most 30 s."""
    os.kill(os.getpid(), signal.SIGTERM)


def exit_stopped() -> None:
    """Exit at once: a thread of torchrun's store may abort an interpreter that shuts down."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(STOPPED)


def main() -> None:
    """Run torchrun with the arguments of this program."""
    signal.signal(signal.SIGTERM, stop)
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
