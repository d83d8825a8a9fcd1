"""The live instances of a class."""

from __future__ import annotations

import sys
import threading

import torch

from variable_batch_size.optim.instances import instances


def test_threads_look_for_instances_at_the_same_time() -> None:
    own, counts = torch.optim.SGD([torch.zeros(1)], lr=0.1), []
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [
            threading.Thread(target=lambda: counts.extend(own in instances(torch.optim.Optimizer) for _ in range(20)))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(switch)
    assert counts == 80 * [True]
