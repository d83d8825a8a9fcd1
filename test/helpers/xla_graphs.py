"""The function that the replicas of test_xla_graphs.py run, in a module that a child process can import."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._python_dispatch import _disable_current_modes

import variable_batch_size as vbs
from variable_batch_size.adaptive import ControlInput
from variable_batch_size.backend.xla import compiled_graphs

SAMPLES = 60
MINIBATCH_SIZE = 4
REF = 8


@dataclass(frozen=True)
class Training:
    """A training of `len(sizes)` updates, of two parameter groups."""

    sizes: tuple[int, ...]
    rule: str | tuple[str, ...] = "linear"
    kind: str = "SGD"
    lrs: tuple[Any, Any] = (0.1, 0.1)
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    schedule: tuple[float, ...] = (1.0,)  # factors on lr, which follow one another in a cycle
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    # "zero_grad" or "log" at each microbatch, "reads" after each update, "resumes" after each epoch; "counts";
    # "tensors" and "log tensors": numbers of the host, at each microbatch; "backward": that of the optimizer
    loop: str = ""
    controlled: bool = False  # whether a controller chooses the sizes from update 4 on


@dataclass(frozen=True)
class Listed:
    """A controller that reads the noise, and chooses given sizes."""

    sizes: tuple[int, ...]
    needs_noise: ClassVar[bool] = True

    def __call__(self, input: ControlInput) -> int:
        assert input.noise is not None
        return self.sizes[min(input.updates + 4, len(self.sizes) - 1)]


@dataclass(frozen=True)
class CompiledUpdate:
    """What an update has compiled."""

    rounds: int  # microbatches on each rank
    compiled: int  # graphs, since the previous update


def late(updates: list[CompiledUpdate]) -> dict[int, int]:
    """The numbers of the updates that compiled against the law, with how many graphs: the first update is 1."""
    numbered = [*enumerate(updates, 1)][1:]  # an accumulation in the first update is not yet that of others
    first = next((number for number, update in numbered if update.rounds > 1), len(updates))
    return {
        number: update.compiled
        for number, update in enumerate(updates, 1)
        if update.compiled and (3 < number < first or number > first + 3)
    }


def count(folder: Path, trainings: Sequence[Training]) -> None:
    """Run each training; rank 0 writes the list of its updates, for each of them, to `updates.pt`."""
    found = [_updates(training, 3 + number) for number, training in enumerate(trainings)]
    if vbs.backend.XlaBackend().world.rank == 0:
        torch.save(found, folder / "updates.pt")


def _updates(training: Training, width: int) -> list[CompiledUpdate]:
    """Run a training of a model with `width` hidden units, which no other training has: graphs are cached."""
    import torch_xla

    backend = vbs.backend.XlaBackend()
    found, before = list[CompiledUpdate](), quietly(backend, compiled_graphs)
    for rounds in rounds_of(training, width, torch_xla.device()):
        now = quietly(backend, compiled_graphs)
        found.append(CompiledUpdate(rounds, now - before))
        before = now
    return found


def rounds_of(
    training: Training, width: int, device: torch.device, wrap: Callable[[nn.Module], nn.Module] | None = None
) -> Iterator[int]:
    """Run a training, of a model in a wrapper, and yield after each update its microbatches on each rank.

    0 after the first one of a resumed optimizer, which reads its state.
    """
    generator = torch.Generator().manual_seed(width)
    x, target = (torch.randn(SAMPLES, n, generator=generator).to(training.dtype) for n in (3, 2))
    model = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2)).to(training.dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    model.to(device)
    wrapped = wrap(model) if wrap else None
    groups = [{"params": list(model[i].parameters()), "lr": lr} for i, lr in zip((0, 2), training.lrs, strict=True)]
    inner = getattr(torch.optim, training.kind)(groups, **training.hyperparameters)
    trace: Any = vbs.BatchTrace.from_sizes(training.sizes, on_end="hold")
    if training.controlled:
        trace = vbs.AdaptiveTrace(Listed(training.sizes), start=training.sizes[0], every=1, delay=4)
    sampler = vbs.CustomSampler(SAMPLES, trace, minibatch_size=MINIBATCH_SIZE)
    optimizer = vbs.CustomOptimizer(inner, sampler, REF, rule=training.rule, model=wrapped, **training.options)
    forward = wrapped or model
    scheduler = LambdaLR(optimizer, lambda update: training.schedule[update % len(training.schedule)])
    rounds = updates = 0
    resumed = False
    while updates < len(training.sizes):
        for indices, totals in _read(training, sampler, optimizer):
            loss = (forward(x[indices].to(device)) - target[indices].to(device)).square().sum(dim=1)
            if training.loop == "zero_grad":
                optimizer.zero_grad()
            loss_of_rows = loss.sum() if optimizer.reduction == "sum" else loss.mean()
            if totals is not None:
                optimizer.backward(loss.sum() / totals["rows"] + loss.square().sum() / totals["odd"], divided=True)
            elif wrapped is None and training.loop != "backward":
                loss_of_rows.backward()
            else:
                optimizer.backward(loss_of_rows)
            if training.loop == "log":
                optimizer.log(loss=loss.mean())
            rounds += 1
            host = torch.tensor(float(updates % 3 if updates > 6 else 2 + updates))  # exactly 0 or 1 in late updates
            if training.loop == "log tensors":
                optimizer.log(host=host)
            if not (optimizer.step(count=host) if training.loop == "tensors" else optimizer.step()):
                continue
            scheduler.step()
            if training.loop == "reads":
                optimizer.state_dict()
            yield 0 if resumed else rounds
            rounds, updates, resumed = 0, updates + 1, False
            if updates == len(training.sizes):
                break
        else:
            if training.loop == "resumes":
                with _disable_current_modes():  # which is no part of an update
                    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
                    resumed = True
            sampler.set_epoch(sampler.epoch)
            optimizer.set_epoch(optimizer.epoch)
    sizes = (*4 * training.sizes[:1], *training.sizes[4:]) if training.controlled else training.sizes
    assert sampler.trace.batch_sizes(range(len(sizes))).tolist() == list(sizes)


def _read(
    training: Training, sampler: vbs.CustomSampler, optimizer: vbs.CustomOptimizer
) -> Iterator[tuple[list[int], Any]]:
    """Yield the microbatches of an epoch, and the totals of their update, if they are counted."""
    if training.loop != "counts":
        for indices in sampler:
            yield indices, None
        return

    def counts(indices: list[int]) -> dict[str, float]:
        return {"rows": len(indices), "odd": sum(index % 2 for index in indices)}

    for update in vbs.updates(sampler, optimizer, counts=counts):  # type: ignore[arg-type]
        for indices in update:
            yield indices, update.counts


def quietly(backend: vbs.backend.XlaBackend, read: Callable[[], Any]) -> Any:
    """Return what is read while no replica compiles."""
    backend.barrier()
    found = read()
    backend.barrier()
    return found
