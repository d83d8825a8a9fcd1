"""What is said of processes without a process group, and of launches that PyTorch/XLA cannot make."""

from __future__ import annotations

import sys

import pytest
import torch

import variable_batch_size as vbs
from helpers.mistakes import Mistake, check
from variable_batch_size.backend.xla import XlaBackend, launch

UNCONNECTED = (
    r"^\w+ is 2, but torch.distributed is not initialized: each process would train a copy of its own; call "
    r"torch.distributed.init_process_group\(\) first, or pass num_replicas and rank"
)
NOT_INSTALLED = r"^XLA devices need PyTorch/XLA, but torch_xla is not installed; run: pip install '.*\[xla\]'"


def of_two(call, *names):
    """Call as a process that a launcher has started beside another one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, "torch_xla", raising=False)
        for name in names or ["WORLD_SIZE"]:
            patch.setenv(name, "2")
        call()


def without_xla(call):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torch_xla", None)
        call()


def launch_on(device, cores, function=print):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PJRT_DEVICE", device)
        launch(function, cores=cores)


MISTAKES = [
    Mistake(lambda: of_two(lambda: vbs.CustomSampler(8, 4)), RuntimeError, UNCONNECTED),
    Mistake(lambda: of_two(lambda: vbs.CustomSampler(8, 4), "OMPI_COMM_WORLD_SIZE"), RuntimeError, UNCONNECTED),
    Mistake(lambda: of_two(lambda: vbs.CustomSampler(8, 4), "PMI_SIZE"), RuntimeError, UNCONNECTED),
    Mistake(
        lambda: of_two(lambda: vbs.CustomSampler(8, 4), "SLURM_NTASKS", "SLURM_STEP_ID"), RuntimeError, UNCONNECTED
    ),
    Mistake(lambda: of_two(lambda: vbs.broadcast_parameters(torch.nn.Linear(2, 1))), RuntimeError, UNCONNECTED),
    Mistake(lambda: without_xla(XlaBackend), ModuleNotFoundError, NOT_INSTALLED),
    Mistake(lambda: without_xla(lambda: launch(print)), ModuleNotFoundError, NOT_INSTALLED),
]
OF_LAUNCH = [
    Mistake(lambda: launch_on("CPU", 0), ValueError, "^cores must be an integer >= 1, got 0; pass cores=1 or more, or"),
    Mistake(lambda: launch_on("CPU", 1, lambda: None), TypeError, "define the function at the top of a module"),
    Mistake(lambda: launch_on("TPU", 4), ValueError, "all cores of a TPU, got cores=4; omit cores, or set PJRT_DEVICE"),
]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named(mistake):
    check(mistake)


@pytest.mark.xla
@pytest.mark.parametrize("mistake", OF_LAUNCH)
def test_a_mistake_of_a_launch_is_named(mistake):
    check(mistake)
