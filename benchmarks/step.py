"""What does an update cost, relative to the same loop without the library? What do AdaScale and logging add to it?

In one process the alternative is gradient accumulation written by hand; in two (gloo) it is DistributedDataParallel
with `no_sync`, which both the linear rule and AdaScale are compared with, for models of three sizes; and FSDP2, for the
larger two, which scatters the sum of each microbatch on both sides. AdaScale is also compared with the linear rule, two
rules of AdamW with one that measures nothing; and so is the linear rule with logging: the loss, the norm of the
gradient, and a row in `scalars.csv` and TensorBoard's events every 10 updates. Loops over `vbs.updates` with two
counts, a limit of the norm, or the same bits in any world, are compared with loops without. Both sides use the same
tensors; the library also draws indices from its sampler. Blocks of updates of the two sides are interleaved, and each
pair of blocks gives one ratio. Memory is the peak of a new process. `--keep-memory` sets two variables with which glibc
keeps freed memory instead of returning it to the kernel. `--device cuda` compares times on a GPU, in one process.
step_xla.py compares on PyTorch/XLA.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import variable_batch_size as vbs
from records import Measured, spread
from results import record
from variable_batch_size.adaptive import NoiseScale
from variable_batch_size.backend import DistributedBackend, current_world

ROWS = 32
Make = Callable[[], nn.Module]
Batches = list[tuple[Tensor, Tensor]]
MODELS: dict[str, Make] = {
    "small CNN": lambda: nn.Sequential(
        nn.Conv2d(1, 10, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(10, 20, 5), nn.MaxPool2d(2), nn.ReLU(),
        nn.Flatten(), nn.Linear(320, 50), nn.ReLU(), nn.Linear(50, 10),
    ),
    "10M parameters": lambda: perceptron(2048, 2),
}  # fmt: skip
BY_SIZE: dict[str, Make] = {
    "1M parameters": lambda: perceptron(512, 2),
    "10M parameters": lambda: perceptron(2048, 2),
    "100M parameters": lambda: perceptron(4096, 6),
}  # compared with DistributedDataParallel
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000"}  # glibc reads them when it starts
BLOCKS = {"small CNN": 64, "1M": 64, "6M": 16, "10M": 8, "100M": 1}  # model -> microbatches in a block


def perceptron(width: int, hidden: int) -> nn.Module:
    """Return a network with so many hidden layers between the first and the last one."""
    layers = [layer for _ in range(hidden) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), nn.Linear(784, width), nn.ReLU(), *layers, nn.Linear(width, 10))


def with_library(
    rule: str,
    make: Make,
    batches: Batches,
    *,
    logs: int = 0,
    grad_norm: bool = False,
    controlled: bool = False,
    by: str = "plain",
    adam: bool = False,
) -> Callable[[], None]:
    """Return a function that makes one update with the library.

    Args:
        rule: name of the rule.
        make: creates the model.
        batches: a microbatch each.
        logs: number of updates between two rows of scalars; 0 for no rows and no `log()`.
        grad_norm: whether the norm of the gradient is measured.
        controlled: whether a controller chooses the batch size.
        by: what sums: "plain", the backend; "ddp", DistributedDataParallel; or "fsdp", FSDP2.
        adam: whether AdamW is the optimizer.
    """
    model, world = make().to(batches[0][0].device), current_world()
    vbs.broadcast_parameters(model)  # XLA cores on a CPU are threads, which share one random generator
    model = DistributedDataParallel(model) if by == "ddp" else sharded(model) if by == "fsdp" else model
    size = ROWS * len(batches) * world.size
    trace = vbs.AdaptiveTrace(NoiseScale(), start=size, bounds=(size, size), every=8) if controlled else size
    sampler = vbs.CustomSampler(size * 1_000_000, trace, world.size, world.rank, ROWS)
    inner: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.5)
    if adam:
        inner = torch.optim.AdamW(model.parameters(), lr=1e-4)
    options: dict[str, Any] = {"rule": rule, "model": model, "grad_norm": grad_norm}
    if logs:
        options |= {"tracker": vbs.Tracker(tempfile.mkdtemp()), "log_steps": logs}
    optimizer = vbs.CustomOptimizer(inner, sampler, ref_batchsize=128, **options)
    indices = iter(sampler)

    def update() -> None:
        for images, labels in batches:
            next(indices)
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.backward(loss)
            if logs:
                optimizer.log(loss=loss)
            optimizer.step()

    return update


def by_updates(
    make: Make,
    batches: Batches,
    *,
    counted: bool = False,
    bare: bool = False,
    reproducible: bool = False,
    limit: float | None = None,
) -> Callable[[], None]:
    """Return a function that makes one update of `vbs.updates`.

    Args:
        make: creates the model.
        batches: a microbatch each.
        counted: whether the loss has two denominators.
        bare: whether several processes train a bare model, and not a DistributedDataParallel.
        reproducible: see `CustomSampler`.
        limit: `skip_grad_norm`.
    """
    model, world = make().to(batches[0][0].device), current_world()
    model = DistributedDataParallel(model) if world.size > 1 and not bare else model
    size = ROWS * len(batches) * world.size
    sampler = vbs.CustomSampler(size * 1_000_000, size, world.size, world.rank, ROWS, reproducible=reproducible)
    inner = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.5)
    optimizer = vbs.LinearRuleOptimizer(inner, sampler, 128, model=model, skip_grad_norm=limit)
    numbers = itertools.cycle(range(len(batches)))

    def counts(_: list[int]) -> dict[str, Tensor | float]:
        labels = batches[next(numbers)][1]
        return {"rows": len(labels), "labels": (labels != 9).sum()}

    updates = iter(vbs.updates(sampler, optimizer, counts=counts if counted else None))

    def update() -> None:
        due = next(updates)
        for (images, labels), _ in zip(batches, due, strict=True):
            losses = nn.functional.cross_entropy(model(images), labels, reduction="none")
            if counted:
                kept = (losses * (labels != 9)).sum() / due.counts["labels"]
                optimizer.backward(kept + losses.sum() / due.counts["rows"], divided=True)
            else:
                optimizer.backward((losses * (labels != 9)).mean() + losses.mean())
            optimizer.step()

    return update


def sharded(model: nn.Module) -> nn.Module:
    """Shard each layer, and the rest."""
    for layer in model.children():
        if any(True for _ in layer.parameters()):
            fully_shard(layer)
    return fully_shard(model)


def fsdp_by_hand(make: Make, batches: Batches) -> Callable[[], None]:
    """Return a function that makes one update with FSDP2, without the library."""
    model = sharded(make())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.5)

    def update() -> None:
        for images, labels in batches:
            (nn.functional.cross_entropy(model(images), labels) / len(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return update


def by_hand(
    make: Make, batches: Batches, *, hook: Callable[[dist.GradBucket], torch.futures.Future[Tensor]] | None = None
) -> Callable[[], None]:
    """Return a function that makes one update without the library; `hook`: how DDP communicates."""
    model = make().to(batches[0][0].device)
    if dist.is_initialized():
        model = DistributedDataParallel(model)
        if hook is not None:
            model.register_comm_hook(None, lambda _, bucket: hook(bucket))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.5)

    def update() -> None:
        for number, (images, labels) in enumerate(batches):
            accumulates = isinstance(model, DistributedDataParallel) and number < len(batches) - 1
            with model.no_sync() if accumulates else contextlib.nullcontext():
                (nn.functional.cross_entropy(model(images), labels) / len(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return update


linear, adascale = partial(with_library, "linear"), partial(with_library, "adascale")
linear_ddp, adascale_ddp = (partial(with_library, rule, by="ddp") for rule in ("linear", "adascale"))
linear_fsdp, adascale_fsdp = (partial(with_library, rule, by="fsdp") for rule in ("linear", "adascale"))
sqrt_sde, adamscale, invariant_adam = (
    partial(with_library, rule, adam=True) for rule in ("sqrt-sde", "adamscale", "invariant-adam")
)
LIBRARY = {"linear rule in DDP": linear_ddp, "linear rule": linear, "AdaScale in DDP": adascale_ddp}
WITH_ADAM = {
    "AdamScale / sqrt-SDE rule, AdamW": (adamscale, sqrt_sde),
    "invariant Adam / sqrt-SDE rule, AdamW": (invariant_adam, sqrt_sde),
}
LOGGING = {
    "linear rule with / without logging": (partial(with_library, "linear", logs=10, grad_norm=True), linear),
    "linear rule with / without log_steps=10": (partial(with_library, "linear", logs=10), linear),
    "linear rule with / without log_steps=1": (partial(with_library, "linear", logs=1), linear),
}

bare = partial(by_updates, bare=True)
UPDATES = {
    "counts=": (partial(by_updates, counted=True), by_updates),
    "skip_grad_norm=": (partial(by_updates, limit=1e9), by_updates),
    "reproducible=True": (partial(bare, reproducible=True), bare),
}


def data(microbatches: int, device: torch.device | None = None) -> Batches:
    """Return random images, (ROWS, 1, 28, 28), and labels, (ROWS,), for each microbatch."""
    torch.manual_seed(0)
    batches = [(torch.randn(ROWS, 1, 28, 28), torch.randint(10, (ROWS,))) for _ in range(microbatches)]
    return [(images.to(device), labels.to(device)) for images, labels in batches]


def case(microbatches: int) -> str:
    """Return the number of microbatches of an update on each rank, for a record."""
    return f"{microbatches} microbatch{'es' if microbatches > 1 else ''} of {ROWS}"


def kept() -> str:
    """Return what to add to the name of a model, for a record: whether glibc keeps memory."""
    return ", memory kept" if KEEP_MEMORY.items() <= os.environ.items() else ""


def ratios(
    sides: tuple[Callable[[], None], Callable[[], None]], block: int, pairs: int, barrier: Callable[[], object]
) -> Iterator[float]:
    """Yield, for each pair of blocks of updates, the time of the first side divided by that of the second."""
    for pair in range(-2, pairs):  # the first two are a warm-up
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


def compare(
    models: dict[str, Make],
    pairs: int,
    where: str,
    sides: dict[str, tuple[Callable, Callable]],
    counts: list[int],
    **options,
) -> None:
    """Record the ratios of all models.

    Args:
        models: name -> a function that creates the model.
        pairs: pairs of blocks to measure, a quarter of them for the largest model.
        where: the device and the ranks, for the records.
        sides: name of a ratio -> its numerator and its denominator.
        counts: numbers of microbatches per update and rank.
        options: `barrier`, and optionally `device`.
    """
    world, barrier = current_world(), options["barrier"]
    for name, make in models.items():
        number = max(3, pairs // 4) if name.startswith("100M") else pairs
        for microbatches in counts:
            block = max(1, BLOCKS[name.removesuffix(" parameters")] // microbatches)
            for ratio, pair in sides.items():
                batches = data(microbatches, options.get("device"))
                found = spread(list(ratios(tuple(side(make, batches) for side in pair), block, number, barrier)))
                if world.rank == 0:
                    own = {"on": f"{name}{kept()}", "where": where, "case": case(microbatches)}
                    record("time of an update", ratio, found, **own)


def compare_updates(models: dict[str, Make], pairs: int, where: str, names: list[str], **options) -> None:
    """Record the ratios of loops over `vbs.updates` with and without options, and what ranks sum for the same bits."""
    sides = {f"updates with / without {name}": UPDATES[name] for name in names}
    compare(models, pairs, where, sides, [1, 4], **options)
    if "reproducible=True" in names and (world := current_world()).size > 1:
        for name, make in models.items():
            found = [bytes_of_message(side, make) / 1e6 for side in UPDATES["reproducible=True"]]
            for what, size in zip(("with", "without"), found, strict=True):
                if world.rank == 0:
                    record("bytes of a message", f"updates {what} reproducible=True", size, "MB", on=name, where=where)


def bytes_of_message(side: Callable[..., Callable[[], None]], make: Make) -> int:
    """Return how many bytes the backend sums in an update."""
    update, sums, found = side(make, data(1)), DistributedBackend.all_reduce_sum, []
    update()  # in which the ranks also compare themselves

    def counted(backend: DistributedBackend, tensors: Sequence[Tensor]) -> None:
        found.append(sum(one.nbytes for one in tensors))
        sums(backend, tensors)

    with patch.object(DistributedBackend, "all_reduce_sum", counted):
        update()
    return sum(found)


def processes(
    rank: int,
    world: int,
    store: str,
    pairs: int,
    sizes: list[str],
    device: str = "cpu",
    *,
    only_fsdp: bool = False,
    only: str = "",
    only_updates: list[str] | None = None,
) -> None:
    """Compare in this process, which is one of `world`, for models of these sizes; on a GPU it is the only one.

    `only`: in one process, what is in the names of the ratios to measure; "" for all.
    """

    def chosen(models: dict[str, Make]) -> dict[str, Make]:
        return {name: make for name, make in models.items() if name.split()[0] in sizes}

    sides = {"AdaScale / linear rule": (adascale, linear)}
    if find_spec("tensorboardX"):  # which a rented machine with PyTorch may lack
        sides |= LOGGING
    else:
        print("tensorboardX is not installed: logging is not measured")
    if world > 1:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    on_gpu = device == "cuda"
    barrier = torch.cuda.synchronize if on_gpu else dist.barrier if world > 1 else (lambda: None)
    machine = torch.cuda.get_device_name() if on_gpu else "CPU"
    where, counts = f"{machine}, {world} process{'es' if world > 1 else ''}", [1, 4, 16]
    of_updates = chosen({**MODELS, "1M parameters": BY_SIZE["1M parameters"]})
    if not only:
        names = only_updates or [*UPDATES]
        compare_updates(of_updates, pairs, where, names, barrier=barrier, device=torch.device(device))
    if only_updates is not None:
        if world > 1:
            dist.destroy_process_group()
        return
    if world == 1:
        sides["linear rule / accumulation by hand"] = (linear, by_hand)
    else:
        sides = {f"{name} / DDP with no_sync": (side, by_hand) for name, side in LIBRARY.items()}
        sides["AdaScale in DDP / linear rule in DDP"] = (adascale_ddp, linear_ddp)
        of_fsdp = {
            "linear rule in FSDP2 / FSDP2 by hand": (linear_fsdp, fsdp_by_hand),
            "AdaScale in FSDP2 / linear rule in FSDP2": (adascale_fsdp, linear_fsdp),
        }
        large = {name: make for name, make in BY_SIZE.items() if not name.startswith("1M")}
        if not only_fsdp:
            compare(chosen({**MODELS, **BY_SIZE}), pairs, where, sides, counts, barrier=barrier)
        compare(chosen(large), pairs, where, of_fsdp, counts, barrier=barrier)
        dist.destroy_process_group()
        return
    for of_numbers, compared in ((counts, sides), (counts[1:], WITH_ADAM)):
        asked = {name: pair for name, pair in compared.items() if only in name}
        compare(chosen(MODELS), pairs, where, asked, of_numbers, barrier=barrier, device=torch.device(device))


def print_peak_memory(rule: str, xla: bool) -> None:
    """Print the peak memory of this process, in bytes, after some updates."""
    device = None
    if xla:
        import torch_xla

        device = torch_xla.device()
    update = with_library(rule, MODELS["10M parameters"], data(4, device))
    for _ in range(6):
        update()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def memory(xla: bool) -> None:
    """Record the memory that AdaScale needs beyond that of the linear rule, in copies of the gradients."""
    copy = 4 * sum(parameter.numel() for parameter in MODELS["10M parameters"]().parameters())
    command = [sys.executable, __file__, *(["--on-xla"] if xla else []), "--memory-of"]
    peaks = {
        rule: [int(subprocess.run([*command, rule], capture_output=True, check=True).stdout) for _ in range(3)]
        for rule in ("linear", "adascale")
    }
    more = (min(peaks["adascale"]) - min(peaks["linear"])) / copy
    own = {"on": f"10M parameters{kept()}", "case": "XLA" if xla else "CPU"}
    record("peak memory", "AdaScale - linear rule", Measured(more, n=3), "copies of the gradients", **own)


def peak_in_fsdp(rank: int, store: str, name: str, peaks: Any) -> None:
    """Note the peak memory of this process, one of two, in bytes, after some updates in FSDP2."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    make, batches = BY_SIZE[name], data(4)
    update = {"by hand": fsdp_by_hand, "linear rule": linear_fsdp}[peaks["side"]](make, batches)
    for _ in range(4):
        update()
    peaks[rank] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def memory_in_fsdp(names: list[str]) -> None:
    """Record the peak memory of FSDP2 with the library, relative to that by hand."""
    for name in names:
        found = {}
        for side in ("linear rule", "by hand"):
            with mp.Manager() as manager, tempfile.TemporaryDirectory() as folder:
                peaks = manager.dict(side=side)
                mp.spawn(peak_in_fsdp, (f"{folder}/store", name, peaks), nprocs=2)
                found[side] = max(peaks[rank] for rank in range(2))
        own = {"on": name, "where": "CPU, 2 processes", "case": case(4)}
        record("peak memory", "linear rule in FSDP2 / by hand", found["linear rule"] / found["by hand"], **own)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=41, help="pairs of blocks per ratio")
    parser.add_argument("--worlds", type=int, nargs="*", default=[1, 2], help="numbers of ranks, on the CPU")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where to compare")
    parser.add_argument("--sizes", nargs="*", default=["small", "1M", "10M", "100M"], help="models to compare")
    parser.add_argument("--only-fsdp", action="store_true", help="in two processes, compare in FSDP2 only")
    parser.add_argument("--only", default="", help="in one process, measure the ratios with these words in their names")
    how = "compare only loops over vbs.updates, with and without these options, or all of them"
    parser.add_argument("--only-updates", nargs="*", choices=UPDATES, help=how)
    parser.add_argument("--keep-memory", action="store_true", help="measure with glibc keeping the memory it has")
    parser.add_argument("--on-xla", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--memory-of", choices=["linear", "adascale"], help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.memory_of:
        print_peak_memory(flags.memory_of, flags.on_xla)
        raise SystemExit
    if flags.keep_memory and not kept():
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | KEEP_MEMORY)
    if flags.device == "cuda":
        processes(0, 1, "", flags.pairs, flags.sizes, flags.device)
        raise SystemExit
    for world in flags.worlds:
        if world == 1:
            processes(0, 1, "", flags.pairs, flags.sizes, only=flags.only, only_updates=flags.only_updates)
        else:
            with tempfile.TemporaryDirectory() as folder:
                own = world, f"{folder}/store", flags.pairs, flags.sizes, flags.device
                only = {"only_fsdp": flags.only_fsdp, "only_updates": flags.only_updates}
                mp.spawn(partial(processes, **only), own, nprocs=world)
            large = [name for name in ("10M parameters", "100M parameters") if name.split()[0] in flags.sizes]
            memory_in_fsdp(large if flags.only_updates is None else [])
    if not (flags.only_fsdp or flags.only or flags.only_updates is not None):
        memory(xla=False)
