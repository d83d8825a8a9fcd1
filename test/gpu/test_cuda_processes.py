"""Two processes on one GPU with gloo, or on two GPUs with NCCL, train as one process does."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import variable_batch_size as vbs
from helpers.gpu import DEVICE, GPUS, MARKS, ON_GPU, TOLERANCES
from helpers.reference import SIZES, assert_equal, training

pytestmark = MARKS
KINDS = vbs.ConstantOptimizer, vbs.LinearRuleOptimizer, vbs.SqrtSDERuleOptimizer, vbs.AdaScaleOptimizer
CASES = [(kind, dtype, norm) for kind in KINDS for dtype in TOLERANCES for norm in (None, 0.5)]
TIMEOUT = timedelta(seconds=60)  # that a process waits for the others


def weights(kind, dtype, norm, device):
    """Return the weights of a training of one of the cases in this world."""
    backend = vbs.backend.DistributedBackend() if dist.is_initialized() else vbs.backend.LocalBackend()
    run = training(kind, SIZES, dtype=dtype, max_grad_norm=norm, device=device, backend=backend)
    return run.run(len(SIZES)).weights()


def train(rank, world, backend, device, folder):
    """Train each case; write the weights to a file. With NCCL each process has a GPU of its own."""
    if device == "cuda":
        device = f"cuda:{rank if backend == 'nccl' else 0}"
        torch.cuda.set_device(device)
    rendezvous = f"file://{folder}/store"
    dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=world, timeout=TIMEOUT)
    found = [[torch.from_numpy(one) for one in weights(*case, device)] for case in CASES]
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


two_gpus = pytest.mark.skipif(not ON_GPU or GPUS < 2, reason=f"NCCL needs two GPUs, found {GPUS}")


@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=two_gpus)])
def test_two_processes_on_gpus_equal_one(backend, tmp_path):
    mp.start_processes(train, (2, backend, DEVICE, tmp_path), nprocs=2, start_method="spawn")
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    for case, one, other in zip(CASES, first, second, strict=True):
        found = [tensor.numpy() for tensor in one]
        assert_equal(found, weights(*case, DEVICE), TOLERANCES[case[1]])
        assert_equal([tensor.numpy() for tensor in other], found, 0)
