"""The live instances of a class."""

from __future__ import annotations

import gc
import sys
import threading

import torch

from variable_batch_size.optim.instances import instances


def test_threads_look_for_instances_at_the_same_time() -> None:
    gc.freeze()  # else each look visits all objects of the test run
    own, counts = torch.optim.SGD([torch.zeros(1)], lr=0.1), []
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [
            threading.Thread(target=lambda: counts.extend(own in instances(torch.optim.Optimizer) for _ in range(300)))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(switch)
        gc.unfreeze()
    assert counts == 4 * 300 * [True]
