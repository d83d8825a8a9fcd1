"""What the processes of test_cuda_processes.py run, in a module that a new process can import."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import variable_batch_size as vbs
from helpers.gpu import TOLERANCES
from helpers.reference import SIZES, training

KINDS = vbs.ConstantOptimizer, vbs.LinearRuleOptimizer, vbs.SqrtSDERuleOptimizer, vbs.AdaScaleOptimizer
CASES = [(kind, dtype, norm) for kind in KINDS for dtype in TOLERANCES for norm in (None, 0.5)]
TIMEOUT = timedelta(seconds=60)  # that a process waits for the others


def weights(kind: type[vbs.CustomOptimizer], dtype: torch.dtype, norm: float | None, device: str) -> list[Any]:
    """Return the weights of a training of one of the cases in this world."""
    backend = vbs.backend.DistributedBackend() if dist.is_initialized() else vbs.backend.LocalBackend()
    run = training(kind, SIZES, dtype=dtype, max_grad_norm=norm, device=device, backend=backend)
    return run.run(len(SIZES)).weights()


def train(rank: int, world: int, backend: str, device: str, folder: Path) -> None:
    """Train each case; write the weights to a file. With NCCL each process has a GPU of its own."""
    if device == "cuda":
        device = f"cuda:{rank if backend == 'nccl' else 0}"
        torch.cuda.set_device(device)
    rendezvous = f"file://{folder}/store"
    dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=world, timeout=TIMEOUT)
    found = [[torch.from_numpy(one) for one in weights(*case, device)] for case in CASES]
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()
