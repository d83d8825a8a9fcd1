"""What the replicas of test_xla_training.py run; here, because a child process has to import it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

import variable_batch_size as vbs
from helpers.reference import EQUATIONS, HYPERPARAMETERS, data, network, wrap

SAMPLES = 50


@dataclass(frozen=True)
class Case:
    """A training of `len(sizes)` updates."""

    kind: type[vbs.CustomOptimizer]
    sizes: tuple[int, ...]
    minibatch_size: int
    dtype: torch.dtype = torch.float64


class Replica:
    """A training on this thread's XLA core."""

    def __init__(self, case: Case, **options: Any) -> None:
        import torch_xla

        self.device = torch_xla.device()
        self.backend = vbs.XlaBackend()
        world = self.backend.world
        self.model = network(case.dtype).to(self.device)
        self.sampler = vbs.CustomSampler(
            SAMPLES, list(case.sizes), world.size, world.rank, case.minibatch_size, on_end="hold"
        )
        kind = EQUATIONS[case.kind].inners[0]
        inner: Any = kind(self.model.parameters(), **HYPERPARAMETERS[kind])
        self.optimizer = wrap(case.kind, inner, self.sampler, **options)
        self.x, self.target = (tensor.to(case.dtype) for tensor in data(SAMPLES))
        self.spoil: Callable[[], bool] = lambda: False  # whether the gradient that is due has to be infinite
        self.look: Callable[[Tensor, Tensor], None] = lambda loss, x: None  # before the step

    def steps(self) -> Iterator[bool]:
        """Train for ever; yields what `step()` returned."""
        while True:
            for indices in self.sampler:
                x, target = self.x[indices].to(self.device), self.target[indices].to(self.device)
                loss = (self.model(x) - target).square().sum(dim=1).mean()
                (loss * torch.inf if self.spoil() else loss).backward()
                self.look(loss, x)
                yield self.optimizer.step()
            self.sampler.set_epoch(self.sampler.epoch + 1)
            self.optimizer.set_epoch(self.optimizer.epoch + 1)

    def weights(self) -> list[Tensor]:
        return [self.backend.host(parameter) for parameter in self.model.parameters()]


def train(folder: Path, cases: Sequence[Case]) -> None:
    """Each case to its end; rank r leaves the weights in `rank<r>.pt`."""
    found = []
    for case in cases:
        replica = Replica(case)
        updates = 0
        for updated in replica.steps():
            updates += updated
            if updates == len(case.sizes):
                break
        found.append(replica.weights())
    torch.save(found, folder / f"rank{vbs.XlaBackend().world.rank}.pt")


def gains(folder: Path, case: Case, noise: str) -> None:
    """Rank r leaves the gain after each update, and the noise and progress at the end, in `gains<r>.pt`."""
    replica, found = Replica(case, noise=noise), []
    for updated in replica.steps():
        if updated:
            found.append(replica.optimizer.gain())
            if len(found) == len(case.sizes):
                break
    optimizer = replica.optimizer
    rest = optimizer.noise(), optimizer.progress, optimizer.current_lr()
    torch.save([found, *rest], folder / f"gains{replica.backend.world.rank}.pt")


def spoil(folder: Path, case: Case, spoiled: int) -> None:
    """The weights, noise and progress around an update that has an infinite gradient on the last rank.

    And what a hook of the inner step sees; all in `spoiled<r>.pt`.
    """
    replica, updates, found, seen = Replica(case), 0, [], []
    optimizer, world = replica.optimizer, replica.backend.world
    optimizer.register_step_post_hook(lambda *_: seen.append(replica.weights()))
    replica.spoil = lambda: optimizer.microbatch.step == spoiled and world.rank == world.size - 1
    for updated in replica.steps():
        updates += updated
        if updated and updates in (spoiled, spoiled + 1, spoiled + 2):
            noise = optimizer.noise()
            found.append((replica.weights(), (noise.sigma2, noise.mu2, noise.updates), optimizer.progress, seen[-1]))
        if updates == spoiled + 2:
            break
    torch.save(found, folder / f"spoiled{world.rank}.pt")


def refuse(folder: Path) -> None:
    """What AdaScale says to optimizers and parameters that it cannot serve on a device."""
    import torch_xla

    said = []
    sampler = vbs.CustomSampler(8, 4, 1, 0, 2)
    kinds = (torch.optim.Rprop, torch.optim.ASGD, torch.optim.Adafactor, torch.optim.SGD)
    for kind in kinds:
        dtype = torch.bfloat16 if kind is torch.optim.SGD else torch.float32
        weight = torch.zeros(2, dtype=dtype).to(torch_xla.device()).requires_grad_()
        try:
            vbs.AdaScaleOptimizer(kind([weight]), sampler, 2)  # type: ignore[abstract, call-arg]
        except TypeError as error:
            said.append(str(error))
    weight = torch.zeros(2).to(torch_xla.device()).requires_grad_()
    rule = vbs.ConstantTimescale(vbs.AdaScaleRule())
    try:
        vbs.CustomOptimizer(torch.optim.AdamW([weight]), sampler, 2, rule=rule)
    except TypeError as error:
        said.append(str(error))
    torch.save(said, folder / "said.pt")


def watch(folder: Path, case: Case, warm: int, by_progress: bool = False) -> None:
    """What torch_xla's metrics say of the updates after `warm` ones, while lr changes at each, also to 1 and to 0.

    By progress, whenever the training has passed another reference update.
    """
    import torch_xla.core.xla_model as xm
    import torch_xla.debug.metrics as met

    logging: dict[str, Any] = {} if by_progress else {"log_steps": 5, "tracker": vbs.Tracker(folder / "log")}
    replica = Replica(case, **logging)
    schedule: Any = LambdaLR(replica.optimizer, lambda update: (1.0, 50.0, 0.0, 25.0)[update % 4])
    if by_progress:
        schedule = vbs.ProgressScheduler(schedule, replica.optimizer)
    barrier = replica.backend.barrier
    collectives, reduce = [], xm.all_reduce
    barrier()
    if replica.backend.world.rank == 0:
        xm.all_reduce = lambda *args, **kwargs: (collectives.append(1), reduce(*args, **kwargs))[1]
    barrier()
    before: dict[str, int] = {}
    updates = 0
    for updated in replica.steps():
        if updated:
            updates += 1
            schedule.step()
            if updates == warm:
                barrier()
                before = counters(met) | {"all_reduce": len(collectives)}
                barrier()
            if updates == len(case.sizes):
                break
    barrier()
    after = counters(met) | {"all_reduce": len(collectives)}
    barrier()
    if replica.backend.world.rank == 0:
        assert not by_progress or schedule.passed > 4
        torch.save({name: count - before.get(name, 0) for name, count in after.items()}, folder / "delta.pt")


def measure(folder: Path, case: Case, warm: int) -> None:
    """Means over the first `warm` updates, and then over the others, in `means<r>.pt`.

    And what torch_xla's metrics say of the others, until their mean is read.
    """
    import torch_xla.debug.metrics as met

    replica, updates, before, found = Replica(case), 0, {}, []
    metrics, barrier = vbs.Accumulator(replica.optimizer), replica.backend.barrier

    def look(loss: Tensor, x: Tensor) -> None:
        steep = 2.0**30 if replica.optimizer.microbatch.step in (0, warm) else 0.5
        metrics.add(loss=loss, x=x[:, 0].mean(), number=2.0, steep=torch.tensor(steep).to(replica.device))

    replica.look = look
    for updated in replica.steps():
        updates += updated
        if updated and updates == warm:
            found.append(metrics.read())
            metrics.reset()
            barrier()
            before = counters(met)
            barrier()
        if updates == len(case.sizes):
            break
    barrier()
    after = counters(met)
    barrier()
    found.append(metrics.read())
    barrier()
    compiled = counters(met)["compiled"] - after["compiled"]
    delta = {name: count - before.get(name, 0) for name, count in after.items()} | {"compiled by read": compiled}
    torch.save((found, delta), folder / f"means{replica.backend.world.rank}.pt")


def counters(met: Any) -> dict[str, int]:
    """Compilations, transfers to the host, and operations that ran there, of all replicas together."""
    transfers = met.metric_data("TransferFromDeviceTime")
    host = {name: met.counter_value(name) for name in met.counter_names() if name.startswith("aten::")}
    return {"compiled": met.counter_value("UncachedCompile") or 0, "to host": transfers[0] if transfers else 0, **host}
