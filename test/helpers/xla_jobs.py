"""The functions that the replicas of test_xla.py run, in a module that a child process can import."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from variable_batch_size.backend.xla import XlaBackend, compiled_graphs
from variable_batch_size.optim.tensors import squared_norm

MICROBATCH = 32
STOP = threading.Event()  # set by a handler in the main thread
_rank_0_arrived = threading.Event()
_decision = {"stop": False}  # rank 0 writes it between two barriers
MIXED = (torch.float32, torch.bfloat16, torch.int32, torch.float32, torch.bfloat16, torch.int64)
NORMS = (torch.float32, torch.float64, torch.bfloat16)
NUMBERS = (0.3, 1.0, 0.0, -1.0, 2.0, 0.5, 1.0, 0.0)


def report(folder: Path, updates: int) -> None:
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
    results["parameters"], results["train compiles"] = train(backend, updates)
    torch.save(results, folder / f"rank{backend.world.rank}.pt")


def norm_of(dtype: torch.dtype) -> list[Tensor]:
    """Tensors whose squared norm is computed: large and small ones, rows and none."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1024, 1000), (40, 3, 5, 5), (20_000,), (1, 400_001), (7,), ()]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def device() -> torch.device:
    import torch_xla

    return torch_xla.device()


def quiet_count(backend: XlaBackend) -> int:
    """Return the number of compilations so far, read while no replica compiles."""
    backend.barrier()
    count = compiled_graphs()
    backend.barrier()
    return count


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
        counts.append(quiet_count(backend))
    return counts[-1] - counts[0]


def two_scalars(backend: XlaBackend, x: Tensor, number: float) -> None:
    """Use two scalars that are sometimes equal: two Python numbers would then share one input of the graph."""
    x.mul_(backend.scalar(number, x)).add_(backend.scalar(0.5, x))


def sgd_step(x: Tensor, lr: float) -> None:
    parameter = nn.Parameter(x)
    parameter.grad = torch.full_like(x, 3.0)
    torch.optim.SGD([parameter], lr=abs(lr), momentum=0.9, weight_decay=1e-4).step()


# --------------------------------------------------------------------------------------------------- a training


class Net(nn.Sequential):
    """Two convolutional and two linear layers, with an explicit generator: threads share the global one."""

    def __init__(self) -> None:
        super().__init__(
            *(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(400, 32), nn.ReLU(), nn.Linear(32, 10)),
        )
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / max(1, parameter[0].numel()) ** 0.5)


def plan(updates: int) -> list[list[int]]:
    """Return the samples of each microbatch of each update; some rank accumulates in the first two updates."""
    rng = np.random.default_rng(0)
    counts = [6, 6, *rng.integers(1, 7, size=updates)][:updates]
    return [sorted(int(size) for size in rng.choice([1, 8, 32], size=count)) for count in counts]


def microbatch(update: int, index: int) -> tuple[Tensor, Tensor]:
    """Return a microbatch of 32 rows, the same on every rank."""
    generator = torch.Generator().manual_seed(1000 * update + index)
    data = torch.randn(MICROBATCH, 1, 28, 28, generator=generator)
    return data, torch.randint(10, (MICROBATCH,), generator=generator)


def train(backend: XlaBackend, updates: int) -> tuple[list[Tensor], int]:
    """Train with unequal weights and uneven numbers of microbatches.

    Return the parameters, and the number of graphs that compiled after the third update.
    """
    model = Net().to(device())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    backend.mark_step()
    after_third = 0
    for update, sizes in enumerate(plan(updates)):
        one_update(backend, model, optimizer, update, sizes)
        if update == 2:
            after_third = quiet_count(backend)
    late = quiet_count(backend) - after_third
    return [backend.host(parameter) for parameter in model.parameters()], late


def one_update(
    backend: XlaBackend, model: nn.Module, optimizer: torch.optim.Optimizer, update: int, sizes: list[int]
) -> None:
    """Compute microbatch i on rank i mod W; a rank without one replays the first microbatch with weight 0."""
    own = list(enumerate(sizes))[backend.world.rank :: backend.world.size]  # (index, samples) of this rank
    weight = float(own[0][1]) if own else 0.0
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    for index, size in own or [(0, 1)]:
        scale(gradients, backend.scalar(weight / size, gradients[0]))
        data, target = (tensor.to(device()) for tensor in microbatch(update, index))
        nn.functional.cross_entropy(model(data), target).backward()
        backend.mark_step()
        weight = float(size)
    scale(gradients, backend.scalar((weight if own else 0.0) / sum(sizes), gradients[0]))
    backend.all_reduce_sum(gradients)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    backend.mark_step()


def scale(tensors: list[Tensor], factor: Tensor) -> None:
    for tensor in tensors:
        tensor.mul_(factor)


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
