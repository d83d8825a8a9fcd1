"""The functions that the replicas of test_xla.py run, in a module that a child process can import."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from helpers.xla_graphs import quietly
from variable_batch_size.backend.xla import XlaBackend, compiled_graphs
from variable_batch_size.optim.tensors.arithmetic import squared_norm

STOP = threading.Event()  # set by a handler in the main thread
_rank_0_arrived = threading.Event()
_decision = {"stop": False}  # rank 0 writes it between two barriers
MIXED = (torch.float32, torch.bfloat16, torch.int32, torch.float32, torch.bfloat16, torch.int64)
NORMS = (torch.float32, torch.float64, torch.bfloat16)
NUMBERS = (0.3, 1.0, 0.0, -1.0, 2.0, 0.5, 1.0, 0.0)


def report(folder: Path) -> None:
    """Compute all results that the tests read; rank r writes them to `rank<r>.pt`."""
    backend = XlaBackend()
    results: dict[str, Any] = {"size": backend.world.size}
    results["sums"], results["collectives"] = mixed_sums(backend)
    results["waited"] = wait_for_a_slow_rank(backend)
    results["hosted"] = host_while_others_are_in_a_collective(backend)
    results["5/3"] = five_thirds(backend)
    results["norms"] = {dtype: squared_norm([one.to(device()) for one in norm_of(dtype)]).cpu() for dtype in NORMS}
    results["scalar compiles"] = compiles(backend, lambda x, number: two_scalars(backend, x, number))
    results["lr compiles"] = compiles(backend, sgd_step)
    torch.save(results, folder / f"rank{backend.world.rank}.pt")


def norm_of(dtype: torch.dtype) -> list[Tensor]:
    """Tensors whose squared norm is computed: large and small ones, rows and none."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1024, 1000), (40, 3, 5, 5), (20_000,), (1, 400_001), (7,), ()]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def device() -> torch.device:
    import torch_xla

    return torch_xla.device()


def mixed_sums(backend: XlaBackend) -> tuple[list[Tensor], list[str]]:
    """Return the sums of rank + i, for tensor i of the dtypes in MIXED, and the dtypes of the graph's collectives."""
    import torch_xla

    shapes: list[tuple[int, ...]] = [(3,), (4, 2), (2,), (), (5,), (1,)]
    tensors = [
        torch.full(shape, backend.world.rank + i).to(dtype).to(device())
        for i, (shape, dtype) in enumerate(zip(shapes, MIXED, strict=True))
    ]
    backend.mark_step()
    backend.all_reduce_sum(tensors)
    lines = torch_xla._XLAC._get_xla_tensors_hlo(tensors).splitlines()
    collectives = [line.split("= (")[1].split("[")[0] for line in lines if " all-reduce(" in line]
    return [backend.host(tensor) for tensor in tensors], collectives


def wait_for_a_slow_rank(backend: XlaBackend) -> bool:
    """Let rank 0 be late at an all-reduce; return whether this rank waited on the host, before its device."""
    total = torch.ones(2).to(device())
    if backend.world.rank == 0:
        time.sleep(0.5)
        _rank_0_arrived.set()
    backend.all_reduce_sum([total])
    waited = _rank_0_arrived.is_set()
    backend.mark_step()
    return waited


def host_while_others_are_in_a_collective(backend: XlaBackend) -> Tensor:
    """Copy to the host on rank 0 while the others wait for it on the device, in an all-reduce of the user's."""
    import torch_xla.core.xla_model as xm

    local, shared = (torch.arange(3.0).to(device()) + 1, torch.ones(2).to(device()))
    backend.mark_step()
    backend.barrier()
    if backend.world.rank == 0:
        time.sleep(0.5)
        local = backend.host(local * 2)
    xm.all_reduce(xm.REDUCE_SUM, [shared])
    backend.mark_step()
    return backend.host(local)


def five_thirds(backend: XlaBackend) -> Tensor:
    x = torch.full((2,), 5.0, dtype=torch.bfloat16).to(device())
    return backend.host(x * backend.scalar(1 / 3, x))


def compiles(backend: XlaBackend, apply: Callable[[Tensor, float], object]) -> int:
    """Return how many graphs compile for NUMBERS after the first number."""
    counts = []
    for number in NUMBERS:
        x = torch.ones(5).to(device())
        backend.mark_step()
        apply(x, number)
        backend.mark_step()
        counts.append(quietly(backend, compiled_graphs))
    return counts[-1] - counts[0]


def two_scalars(backend: XlaBackend, x: Tensor, number: float) -> None:
    """Use two scalars that are sometimes equal: two Python numbers would then share one input of the graph."""
    x.mul_(backend.scalar(number, x)).add_(backend.scalar(0.5, x))


def sgd_step(x: Tensor, lr: float) -> None:
    parameter = nn.Parameter(x)
    parameter.grad = torch.full_like(x, 3.0)
    torch.optim.SGD([parameter], lr=abs(lr), momentum=0.9, weight_decay=1e-4).step()


# ---------------------------------------------------------------------------------------------------- failures


def fail(folder: Path) -> None:
    (folder / "failed").write_text(f"{os.getpid()} {time.time()}")
    raise LookupError("nothing on shelf 17")


def fail_in_one_rank(folder: Path) -> None:
    """Raise on rank 1 while the others wait in an all-reduce."""
    backend = XlaBackend()
    shared = torch.ones(2).to(device())
    backend.barrier()
    if backend.world.rank == 1:
        fail(folder)
    backend.all_reduce_sum([shared])
    backend.mark_step()


def fail_in_one_loader(folder: Path) -> None:
    """Raise in the thread that reads the data of rank 1, where it would otherwise look like the end of the data."""
    from torch_xla.distributed.parallel_loader import MpDeviceLoader

    backend = XlaBackend()
    shared = torch.ones(2).to(device())

    def data() -> Iterator[Tensor]:
        yield torch.ones(2)
        if backend.world.rank == 1:
            fail(folder)
        yield from torch.ones(100, 2)

    for _ in MpDeviceLoader(data(), device()):
        backend.all_reduce_sum([shared])


def train_until_stopped(folder: Path) -> None:
    """Train until a signal handler sets STOP. A file named after the pid shows that all ranks are training."""
    backend = XlaBackend()
    shared = torch.ones(2).to(device())
    while not _decision["stop"]:
        backend.all_reduce_sum([shared])
        backend.mark_step()
        backend.barrier()
        if backend.world.rank == 0:
            _decision["stop"] = STOP.is_set()
            (folder / str(os.getpid())).touch()
        backend.barrier()
