"""The private names of Accelerate are in one file, and a promise breaks without each."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler

from helpers.accelerate_jobs import Loop
from helpers.private_names import private_names
from helpers.trainer_cases import Case
from helpers.yardstick import network

pytestmark = pytest.mark.usefixtures("new_state")


def test_private_names_are_in_one_file() -> None:
    loop = Loop(Case())
    plain = AcceleratedOptimizer(torch.optim.SGD([torch.zeros(1, requires_grad=True)]))
    theirs = [Accelerator, plain, AcceleratedScheduler, loop.accelerator, loop.accelerator.prepare(network())]
    found = private_names("accelerate", [type("Names", (), dict.fromkeys({n for one in theirs for n in dir(one)}))])
    assert found == {"optimizer.py": {"_is_accelerate_prepared", "_is_overflow"}}


def test_prepared_objects_are_registered_as_they_are() -> None:
    """By `_is_accelerate_prepared`; test_accelerate.py has a scheduler that `_is_overflow` stops."""
    loop = Loop(Case())
    assert loop.accelerator.prepare(loop.optimizer) is loop.optimizer
    loop.accelerator.free_memory()
    loop.optimizer._is_accelerate_prepared = False
    assert loop.accelerator.prepare(loop.optimizer) is not loop.optimizer
