"""What the processes of test_reduction_processes.py run, in a module that a child process can import."""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import variable_batch_size as vbs
from helpers.reference import Array, Training, filled, training

WORLDS = (3, 2)
SIZES = (20, 7, 1, 33, 12, 6, 3)
UPDATES = len(SIZES)
SECONDS = 120  # that a rank waits for the others, which may be slow to start


def deep() -> nn.Module:
    layers = [layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Tanh())]
    return filled(nn.Sequential(nn.Linear(3, 8), *layers, nn.Linear(8, 2)).double())


def create(**options: Any) -> Training:
    """A training with a bucket for each parameter."""
    given: dict[str, Any] = {"model": deep(), "backend": vbs.DistributedBackend(), "overlap": True, "bucket_cap_mb": 0}
    return training(vbs.AdaScaleOptimizer, SIZES, dataset_size=82, **{**given, **options})


def alone() -> list[Array]:
    """The weights after all updates of one process."""
    return training(vbs.AdaScaleOptimizer, SIZES, model=deep(), dataset_size=82).run(UPDATES).weights()


def begin(rank: int, size: int, path: Path) -> None:
    """Connect the ranks."""
    store = dist.FileStore(str(path), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=SECONDS))


def saved(folder: Path, size: int) -> list[dict[str, Any]]:
    """Return what the ranks of a world have saved, by rank."""
    return [torch.load(folder / f"world{size}-rank{rank}.pt", weights_only=False) for rank in range(size)]


@contextmanager
def events() -> Iterator[list[str]]:
    """Record when all-reduces are started."""
    seen: list[str] = []
    original = dist.all_reduce

    def all_reduce(*args: Any, **kwargs: Any) -> Any:
        seen.append("sum")
        return original(*args, **kwargs)

    dist.all_reduce = all_reduce
    try:
        yield seen
    finally:
        dist.all_reduce = original


def order(folder: Path) -> list[list[str]]:
    """What happens in each update: sums that start, and the ends of backward."""
    run, updates = create(), []
    with events() as seen:
        for indices in run.sampler:
            run.loss(indices).backward()
            seen.append("backward")
            if run.optimizer.step():
                updates.append(seen[:])
                seen.clear()
    return updates


def weights(folder: Path) -> dict[str, list[Array]]:
    """With and without overlap, twice, and resumed after each update."""
    found = {str(overlap): create(overlap=overlap).iterate(UPDATES).weights() for overlap in (False, True)}
    found["again"] = create().iterate(UPDATES).weights()
    for stop in (1, 3):
        before = create().iterate(stop)
        state = copy.deepcopy((before.model.state_dict(), before.optimizer.state_dict()))
        run = create()
        run.model.load_state_dict(state[0])
        run.optimizer.load_state_dict(state[1])
        found[f"resumed {stop}"] = run.iterate(UPDATES).weights()
    return found


class StopError(Exception):
    """Raised in a backward."""


def stop_in(layer: Any) -> Any:
    """Raise in the next backward, when it comes to a layer."""

    def fail(*_: Any) -> None:
        handle.remove()
        raise StopError

    handle = layer.register_full_backward_hook(fail)
    return handle


def discarded(folder: Path) -> dict[str, list[Array]]:
    """Discard steps in the middle of a backward: on all ranks, and on each one alone."""
    found = {}
    for who in ("all", *range(dist.get_world_size())):
        run, failures = create(), {2, 4}
        while run.optimizer.updates < UPDATES:
            run.sampler.set_epoch(0)
            try:
                for indices in run.sampler:
                    due = run.optimizer.microbatch
                    if due.ends_step and due.step in failures and who in ("all", dist.get_rank()):
                        failures.discard(due.step)
                        stop_in(run.model[4])  # type: ignore[index]
                    run.loss(indices).backward()
                    run.optimizer.step()
            except StopError:
                run.optimizer.discard_step()
        found[str(who)] = run.weights()
    return found


def strays(folder: Path) -> list[Array]:
    """Other backwards before zero_grad(), with sums of other things between."""
    run = create()
    for indices in run.sampler:
        if not run.optimizer.inside_step:
            for _ in range(2):
                (run.loss(indices) * 5).backward()
            if run.optimizer.updates % 2:
                dist.all_reduce(torch.ones(3))
            run.optimizer.zero_grad()
        run.loss(indices).backward()
        run.optimizer.step()
    return run.weights()


def second_backward(folder: Path) -> tuple[list[Array], str]:
    """Two backwards a microbatch: from the beginning, and in a later update only."""
    weights, message = [], ""
    for first in (0, 3):
        run = create()
        for indices in run.sampler:
            for part in (0.25, 0.75) if run.optimizer.updates >= first else (1.0,):
                (run.loss(indices) * part).backward()
            try:
                run.optimizer.step()
            except RuntimeError as error:
                message = str(error)
                break
        weights.append(run.weights())
    return weights[0], message


class Gan:
    """A generator and a discriminator whose loss also reaches the generator's parameters, or the other way round."""

    def __init__(self) -> None:
        self.generator, self.discriminator = filled(nn.Linear(2, 3).double()), filled(nn.Linear(3, 1).double())
        numbers = torch.linspace(-1, 1, 240, dtype=torch.float64)
        self.real, self.noise = numbers[:120].view(40, 3), numbers[-80:].view(40, 2)

    def loss_d(self, rows: Any) -> Tensor:
        fake = self.generator(self.noise[rows]).detach()
        return (self.discriminator(self.real[rows]) - 1).square().mean() + self.discriminator(fake).square().mean()  # type: ignore[no-any-return]

    def loss_g(self, rows: Any) -> Tensor:
        return (self.discriminator(self.generator(self.noise[rows])) - 1).square().mean()  # type: ignore[no-any-return]


def gan(zero: str = "optimizer", *, overlap: bool = True) -> list[Array]:
    """The ordinary loop of a GAN, with unequal numbers of microbatches."""
    own = Gan()
    sampler = vbs.CustomSampler(40, [4, 12, 3, 9, 12], minibatch_size=2, on_end="hold", fixed_shape=False)
    modules = own.discriminator, own.generator
    optimizers = [
        vbs.ConstantOptimizer(
            torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.5),
            sampler,
            accumulation="buffered",
            bucket_cap_mb=0,
            overlap=overlap,
        )
        for module in modules
    ]
    for rows in sampler:
        for module, optimizer, loss in zip(modules, optimizers, (own.loss_d, own.loss_g), strict=True):
            optimizer.zero_grad() if zero == "optimizer" else module.zero_grad()
            loss(rows).backward()
            optimizer.step()
    return [parameter.detach().numpy() for module in modules for parameter in module.parameters()]


def gans(folder: Path) -> dict[str, list[Array]]:
    found = {zero: gan(zero) for zero in ("optimizer", "module")}
    found["without overlap"] = gan(overlap=False)
    return found


def dropped(folder: Path) -> list[list[Array]]:
    """Optimizers that are dropped or replaced after a part of their sums has left."""
    found, kept = [], []
    for _ in range(3):
        run = create().iterate(3)
        for indices in run.sampler:
            run.loss(indices).backward()
            break
        if dist.get_rank() == 0:
            kept.append(run.optimizer)
        del run
        gc.collect()
        found.append(create().iterate(UPDATES).weights())
    return found


SCENARIOS: tuple[Callable[[Path], Any], ...] = (
    order,
    weights,
    discarded,
    strays,
    second_backward,
    gans,
    dropped,
)


def run_scenarios(rank: int, folder: Path) -> None:
    """Run the scenarios in each world that this rank belongs to; save the results to `world<size>-rank<rank>.pt`."""
    torch.set_num_threads(1)
    os.dup2(os.open(folder / f"stderr{rank}", os.O_WRONLY | os.O_CREAT), 2)
    for size in WORLDS:
        if rank < size:
            begin(rank, size, folder / f"store{size}")
            results = {scenario.__name__: scenario(folder) for scenario in SCENARIOS}
            torch.save(results, folder / f"world{size}-rank{rank}.pt")
            dist.destroy_process_group()


def one_rank_ends(rank: int, folder: Path) -> None:
    """Rank 1 ends after its first sums have left; rank 0 writes the error that it gets."""
    torch.set_num_threads(1)
    os.dup2(os.open(folder / f"stderr-end{rank}", os.O_WRONLY | os.O_CREAT), 2)
    begin(rank, 2, folder / "store-end")
    run = create()
    try:
        for indices in run.sampler:
            if rank and run.optimizer.updates == 2:
                stop_in(run.model[4])  # type: ignore[index]
            run.loss(indices).backward()
            run.optimizer.step()
    except StopError:
        os._exit(0)
    except RuntimeError as error:
        (folder / "error").write_text(str(error))
    os._exit(0)
