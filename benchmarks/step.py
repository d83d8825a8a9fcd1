"""What does one update cost, against the same loop written by hand? And what does AdaScale add to it?

In one process the rival is gradient accumulation as everyone writes it; in two (gloo) it is DistributedDataParallel
with `no_sync`; AdaScale's rival is the linear rule. Both sides see the same tensors; ours also draws its indices from
the sampler. Updates of the two are interleaved, and each pair of blocks gives one ratio. `--xla` compares AdaScale
with the linear rule on cores of PyTorch/XLA. Memory is the most that a fresh process ever held.
"""

from __future__ import annotations

import argparse
import contextlib
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import variable_batch_size as vbs
from results import record, spread

ROWS = 32
Make = Callable[[], nn.Module]
Batches = list[tuple[Tensor, Tensor]]
MODELS: dict[str, Make] = {
    "small CNN": lambda: nn.Sequential(
        nn.Conv2d(1, 10, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(10, 20, 5), nn.MaxPool2d(2), nn.ReLU(),
        nn.Flatten(), nn.Linear(320, 50), nn.ReLU(), nn.Linear(50, 10),
    ),
    "10M parameters": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 2048),
        nn.ReLU(), nn.Linear(2048, 10),
    ),
}  # fmt: skip


def ours(kind: Callable[..., vbs.CustomOptimizer], make: Make, batches: Batches) -> Callable[[], None]:
    """One update by the library."""
    model, world = make().to(batches[0][0].device), vbs.backend.current_world()
    vbs.broadcast_parameters(model)  # cores that are threads draw from one generator
    size = ROWS * len(batches) * world.size
    sampler = vbs.CustomSampler(size * 1_000_000, size, world.size, world.rank, ROWS)
    inner = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.5)
    optimizer = kind(inner, sampler, ref_batchsize=128)
    indices = iter(sampler)

    def update() -> None:
        for images, labels in batches:
            next(indices)
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()

    return update


def by_hand(make: Make, batches: Batches) -> Callable[[], None]:
    """One update as it is written without the library."""
    model = make()
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.5)

    def update() -> None:
        for number, (images, labels) in enumerate(batches):
            waits = isinstance(model, DistributedDataParallel) and number < len(batches) - 1
            with model.no_sync() if waits else contextlib.nullcontext():
                (nn.functional.cross_entropy(model(images), labels) / len(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return update


linear, adascale = partial(ours, vbs.LinearRuleOptimizer), partial(ours, vbs.AdaScaleOptimizer)


def data(microbatches: int, device: torch.device | None = None) -> Batches:
    torch.manual_seed(0)
    batches = [(torch.randn(ROWS, 1, 28, 28), torch.randint(10, (ROWS,))) for _ in range(microbatches)]
    return [(images.to(device), labels.to(device)) for images, labels in batches]


def ratios(
    sides: tuple[Callable[[], None], Callable[[], None]], block: int, pairs: int, barrier: Callable[[], object]
) -> Iterator[float]:
    """Time of a block of updates of the first side over that of the second, pair by pair."""
    for pair in range(-2, pairs):
        seconds = [0.0, 0.0]
        for side in (0, 1) if pair % 2 else (1, 0):
            barrier()
            began = time.perf_counter()
            for _ in range(block):
                sides[side]()
            barrier()
            seconds[side] = time.perf_counter() - began
        if pair >= 0:
            yield seconds[0] / seconds[1]


def compare(pairs: int, where: str, rivals: dict[str, tuple[Callable, Callable]], counts: list[int], **options) -> None:
    """All models, each with so many microbatches; `rivals` is by what is divided."""
    world, barrier = vbs.backend.current_world(), options["barrier"]
    for name, make in MODELS.items():
        for microbatches in counts:
            block = max(1, (64 if name == "small CNN" else 8) // microbatches)
            for what, sides in rivals.items():
                batches = data(microbatches, options.get("device"))
                answer = spread(list(ratios(tuple(side(make, batches) for side in sides), block, pairs, barrier)))
                if world.rank == 0:
                    record(
                        f"time of an update, {name}, {where} x {microbatches} microbatches of {ROWS}, {what}", answer
                    )


def processes(rank: int, world: int, store: str, pairs: int) -> None:
    """One process alone, or one of a gloo group."""
    rival = "accumulation by hand" if world == 1 else "DistributedDataParallel, no_sync"
    rivals = {f"/ {rival}": (linear, by_hand), "AdaScale / the linear rule": (adascale, linear)}
    if world > 1:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    barrier = dist.barrier if world > 1 else (lambda: None)
    compare(pairs, str(world), rivals, [1, 4, 16], barrier=barrier)
    if world > 1:
        dist.destroy_process_group()


def cores(pairs: int) -> None:
    """One core of PyTorch/XLA."""
    import torch_xla

    backend = vbs.XlaBackend()  # whose step marker waits for this core, on a CPU
    where, rivals = f"XLA, {backend.world.size}", {"AdaScale / the linear rule": (adascale, linear)}
    compare(pairs, where, rivals, [1, 4], barrier=backend.barrier, device=torch_xla.device())


def held(kind: str, xla: bool) -> None:
    """Print the most memory that this process held, in bytes, after some updates."""
    device = None
    if xla:
        import torch_xla

        device = torch_xla.device()
    update = {"linear": linear, "adascale": adascale}[kind](MODELS["10M parameters"], data(4, device))
    for _ in range(6):
        update()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def memory(xla: bool) -> None:
    """What AdaScale holds more than the linear rule, in copies of the gradients."""
    copy = 4 * sum(parameter.numel() for parameter in MODELS["10M parameters"]().parameters())
    command = [sys.executable, __file__, *(["--xla"] if xla else []), "--held"]
    found = {
        kind: [int(subprocess.run([*command, kind], capture_output=True, check=True).stdout) for _ in range(3)]
        for kind in ("linear", "adascale")
    }
    more = (min(found["adascale"]) - min(found["linear"])) / copy
    record(
        f"memory of AdaScale - that of the linear rule, 10M parameters, {'XLA' if xla else 'CPU'}", f"{more:.2f} copies"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=41)
    parser.add_argument("--worlds", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--xla", action="store_true", help="cores of PyTorch/XLA in the place of processes")
    parser.add_argument("--held", choices=["linear", "adascale"], help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.held:
        held(flags.held, flags.xla)
        raise SystemExit
    for world in flags.worlds:
        if flags.xla:
            vbs.backend.xla.launch(cores, (flags.pairs,), cores=world)
        elif world == 1:
            processes(0, 1, "", flags.pairs)
        else:
            with tempfile.TemporaryDirectory() as folder:
                mp.spawn(processes, (world, f"{folder}/store", flags.pairs), nprocs=world)
    memory(flags.xla)
