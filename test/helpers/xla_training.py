"""The functions that the replicas of test_xla_training.py run, in a module that a child process can import.

A world is launched once, and runs many jobs one after another: importing torch_xla takes longer than most of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

import variable_batch_size as vbs
from helpers.models import Experts
from helpers.reference import EQUATIONS, HYPERPARAMETERS, data, filled, network, wrap
from helpers.worlds import Layout, Place
from helpers.xla_graphs import Listed, quietly

SAMPLES = 50


@dataclass(frozen=True)
class Job:
    """A function of a replica, and its arguments after the folder that it writes to."""

    cores: int
    function: Callable[..., None]
    arguments: tuple[Any, ...] = ()


def run_jobs(folder: Path, jobs: Sequence[tuple[str, Job]]) -> None:
    """Run jobs one after another, each in a folder of its name."""
    backend = vbs.backend.XlaBackend()
    for name, job in jobs:
        (folder / name).mkdir(exist_ok=True)
        backend.barrier()
        job.function(folder / name, *job.arguments)


@dataclass(frozen=True)
class XlaCase:
    """A training of `len(sizes)` updates."""

    kind: type[vbs.CustomOptimizer]
    sizes: tuple[int, ...]
    minibatch_size: int
    dtype: torch.dtype = torch.float64
    every: int | None = None  # updates between two questions to a controller, which chooses the sizes
    counted: bool = False  # whether the terms of the loss are divided by counts, one on the host, one on the device
    width: int = 4  # hidden units; one that no other job of the process has where compilations count: graphs are cached


class Replica:
    """A training on this thread's XLA core."""

    def __init__(self, case: XlaCase, **options: Any) -> None:
        import torch_xla

        self.device = torch_xla.device()
        self.backend = vbs.backend.XlaBackend()
        world = self.backend.world
        self.model = network(case.dtype, case.width).to(self.device)
        trace: Any = vbs.BatchTrace.from_sizes(case.sizes, on_end="hold")
        if case.every is not None:
            trace = vbs.AdaptiveTrace(Listed(case.sizes), start=case.sizes[0], every=case.every, delay=4)
        self.sampler = vbs.CustomSampler(SAMPLES, trace, world.size, world.rank, case.minibatch_size)
        kind = EQUATIONS[case.kind].inners[0]
        inner: Any = kind(self.model.parameters(), **HYPERPARAMETERS[kind])
        self.optimizer = wrap(case.kind, inner, self.sampler, **options)
        self.x, self.target = (tensor.to(case.dtype) for tensor in data(SAMPLES))
        self.counted = case.counted
        self.overflows: Callable[[], bool] = lambda: False  # whether to make the next gradient infinite
        self.before_step: Callable[[Tensor, Tensor], None] = lambda loss, x: None

    def steps(self) -> Iterator[bool]:
        """Train without end; yield the result of each `step()`."""
        while self.counted:
            for update in vbs.updates(self.sampler, self.optimizer, counts=self._count):  # type: ignore[arg-type]
                for indices in update:
                    yield self._step_counted(indices, update.counts)
        while True:
            for indices in self.sampler:
                x, target = self.x[indices].to(self.device), self.target[indices].to(self.device)
                loss = (self.model(x) - target).square().sum(dim=1).mean()
                (loss * torch.inf if self.overflows() else loss).backward()
                self.before_step(loss, x)
                yield self.optimizer.step()
            self.sampler.set_epoch(self.sampler.epoch)
            self.optimizer.set_epoch(self.optimizer.epoch)

    def _count(self, indices: list[int]) -> dict[str, Any]:
        return {"rows": len(indices), "positive": (self.x[indices, 0] > 0).sum().to(self.device)}

    def _step_counted(self, indices: list[int], totals: Any) -> bool:
        x, target = self.x[indices].to(self.device), self.target[indices].to(self.device)
        output = self.model(x)
        squares = (output - target).square().sum(dim=1)
        loss = squares.sum() / totals["rows"] + (output.sum(dim=1) * (x[:, 0] > 0)).sum() / totals["positive"]
        self.optimizer.backward(loss, divided=True)
        return self.optimizer.step()

    def weights(self) -> list[Tensor]:
        return [self.backend.host(parameter) for parameter in self.model.parameters()]


def overflow(folder: Path, case: XlaCase, step: int) -> None:
    """Train with an infinite gradient on the last rank in one step.

    Rank r writes to `overflow<r>.pt`, before that step, after it and after the next one: the weights, the noise, the
    progress, and the weights that a post hook of the inner step has seen last.
    """
    replica, updates, found, seen = Replica(case), 0, [], []
    optimizer, world = replica.optimizer, replica.backend.world
    optimizer.register_step_post_hook(lambda *_: seen.append(replica.weights()))
    replica.overflows = lambda: optimizer.microbatch.step == step and world.rank == world.size - 1
    for updated in replica.steps():
        updates += updated
        if updated and updates in (step, step + 1, step + 2):
            noise = optimizer.noise()
            found.append((replica.weights(), (noise.sigma2, noise.mu2, noise.updates), optimizer.progress, seen[-1]))
        if updates == step + 2:
            break
    torch.save(found, folder / f"overflow{world.rank}.pt")


def unequal_speeds(folder: Path) -> None:
    """Write the error of ranks of unequal speed that run one graph."""
    import torch_xla

    weight = torch.zeros(2).to(torch_xla.device()).requires_grad_()
    sampler, rank = vbs.CustomSampler(8, 4, minibatch_size=2, speeds=(3, 1)), vbs.backend.XlaBackend().world.rank
    try:
        vbs.ConstantOptimizer(torch.optim.SGD([weight], lr=0.1), sampler)
    except ValueError as error:
        (folder / f"rank{rank}").write_text(str(error))


def unsupported_optimizers(folder: Path) -> None:
    """Write the errors of AdaScale for inner optimizers and parameters that it does not support on XLA."""
    import torch_xla

    messages = []
    sampler = vbs.CustomSampler(8, 4, 1, 0, 2)
    kinds = (torch.optim.Rprop, torch.optim.ASGD, torch.optim.Adafactor, torch.optim.SGD)
    for kind in kinds:
        dtype = torch.bfloat16 if kind is torch.optim.SGD else torch.float32
        weight = torch.zeros(2, dtype=dtype).to(torch_xla.device()).requires_grad_()
        try:
            vbs.AdaScaleOptimizer(kind([weight]), sampler, 2)  # type: ignore[abstract, call-arg]
        except TypeError as error:
            messages.append(str(error))
    weight = torch.zeros(2).to(torch_xla.device()).requires_grad_()
    rule = vbs.rules.ConstantTimescale(vbs.rules.AdaScaleRule())
    try:
        vbs.CustomOptimizer(torch.optim.AdamW([weight]), sampler, 2, rule=rule)
    except TypeError as error:
        messages.append(str(error))
    torch.save(messages, folder / "messages.pt")


def watch(folder: Path, case: XlaCase, warm: int, by_progress: bool = False, logs: bool = False) -> None:
    """Count compilations, transfers and collectives in the updates after the first `warm` ones.

    The learning rate changes at every update, also to 1 and to 0; `by_progress`, whenever the progress has passed
    another update at the reference. Rank 0 writes the counts to `delta.pt`. `logs`: the loss and the norm are logged.
    """
    import torch_xla.core.xla_model as xm
    import torch_xla.debug.metrics as met

    tracker = vbs.Tracker(folder / "log")
    logging: dict[str, Any] = {} if by_progress else {"log_steps": 5, "tracker": tracker, "grad_norm": logs}
    replica = Replica(case, **logging)
    if logs:
        replica.before_step = lambda loss, x: replica.optimizer.log(loss=loss, one=1.0)
    schedule: Any = LambdaLR(replica.optimizer, lambda update: (1.0, 50.0, 0.0, 25.0)[update % 4])
    if by_progress:
        schedule = vbs.ProgressScheduler(schedule, replica.optimizer)
    collectives, original = [], xm.all_reduce

    def patch() -> None:
        if replica.backend.world.rank == 0:
            xm.all_reduce = lambda *args, **kwargs: (collectives.append(1), original(*args, **kwargs))[1]

    def counted() -> dict[str, int]:
        return counters(met) | {"all_reduce": len(collectives)}

    quietly(replica.backend, patch)
    before: dict[str, int] = {}
    updates = 0
    for updated in replica.steps():
        if updated:
            updates += 1
            schedule.step()
            if updates == warm:
                before = quietly(replica.backend, counted)
            if updates == len(case.sizes):
                break
    after = quietly(replica.backend, counted)
    if replica.backend.world.rank == 0:
        assert not by_progress or schedule.passed > 4
        tracker.close()
        torch.save({name: count - before.get(name, 0) for name, count in after.items()}, folder / "delta.pt")


def measure(folder: Path, case: XlaCase, warm: int) -> None:
    """Read the means over the first `warm` updates, and then those over the others.

    Rank r writes them to `means<r>.pt`, with the compilations and transfers of the others up to the second read.
    """
    import torch_xla.debug.metrics as met

    replica, updates, before, found = Replica(case), 0, {}, []
    metrics, read = vbs.Accumulator(replica.optimizer), partial(counters, met)

    def add(loss: Tensor, x: Tensor) -> None:
        uneven = 2.0**30 if replica.optimizer.microbatch.step in (0, warm) else 0.5
        metrics.add(loss=loss, x=x[:, 0].mean(), number=2.0, uneven=torch.tensor(uneven).to(replica.device))

    replica.before_step = add
    for updated in replica.steps():
        updates += updated
        if updated and updates == warm:
            found.append(metrics.read())
            metrics.reset()
            before = quietly(replica.backend, read)
        if updates == len(case.sizes):
            break
    after = quietly(replica.backend, read)
    found.append(metrics.read())
    replica.backend.barrier()
    compiled = counters(met)["compiled"] - after["compiled"]
    delta = {name: count - before.get(name, 0) for name, count in after.items()} | {"compiled by read": compiled}
    torch.save((found, delta), folder / f"means{replica.backend.world.rank}.pt")


def counters(met: Any) -> dict[str, int]:
    """Return the compilations, the transfers to the host, and the operations that ran there, of all replicas."""
    transfers = met.metric_data("TransferFromDeviceTime")
    host = {name: met.counter_value(name) for name in met.counter_names() if name.startswith("aten::")}
    return {"compiled": met.counter_value("UncachedCompile") or 0, "to host": transfers[0] if transfers else 0, **host}


def tell(folder: Path, sizes: Sequence[int]) -> None:
    """Train a model of which a layer has no gradient in some updates; rank r writes the error."""
    backend = vbs.backend.XlaBackend()
    run = Place(Layout(backend.world.size, by="plain", where="cores"), backend).training(
        sizes=sizes, model=filled(Experts()), sampling={"fixed_shape": True}
    )
    try:
        run.run(len(sizes)).optimizer.state_dict()
    except RuntimeError as error:
        (folder / f"rank{backend.world.rank}").write_text(str(error))


def part(folder: Path) -> None:
    """Train with another weight decay on the last rank in the fourth update; rank r writes the error, and when."""
    backend = vbs.backend.XlaBackend()
    world = backend.world
    run = Place(Layout(world.size, by="plain", where="cores"), backend).training(
        sizes=[20], hyperparameters={"lr": 0.01, "weight_decay": 0.5}, sampling={"fixed_shape": True}
    )
    try:
        for update in range(40):
            odd = update == 3 and world.rank == world.size - 1
            run.optimizer.param_groups[0]["weight_decay"] = 0.25 if odd else 0.5
            run.run(1)
    except RuntimeError as error:
        (folder / f"rank{world.rank}").write_text(f"{run.optimizer.updates} after {error}")
