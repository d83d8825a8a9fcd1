"""Host the rendezvous of torchrun, on a machine that stays, so that a training may lose any of its own machines.

    python examples/clusters/rendezvous.py 29400

The machines of the training run torchrun with `--rdzv-backend=c10d --rdzv-endpoint=HOST:29400 --rdzv-conf=is_host=0`.
"""

import signal
import sys

from torch.distributed import TCPStore

signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit())  # the first process of a container has no default
store = TCPStore("localhost", int(sys.argv[1]), is_master=True, wait_for_workers=False)
signal.pause()
