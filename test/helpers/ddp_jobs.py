"""What the processes of test_ddp.py run, with and without DistributedDataParallel, in a module that they can import."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import variable_batch_size as vbs
from helpers.mishaps import train_scaled
from helpers.models import Experts
from helpers.reference import ADAM, EQUATIONS, REF, Array, Training, filled, network, training

ODD = (9, 4, 17, 1, 12, 3, 2, 30)  # ranks have unequal numbers of microbatches, and some none

WRAPPERS: tuple[dict[str, Any], ...] = (
    {},
    {"gradient_as_bucket_view": True},
    {"find_unused_parameters": True},
    {"bucket_cap_mb": 1e-5},
)
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"reduction": "sum"},
    {"max_grad_norm": 0.5},
    {"grad_norm": True},
    {"noise": "microbatches"},
    {"noise": "differenced"},
)


def wrapped(model: nn.Module | None = None, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model or network(), **options)


def here() -> vbs.backend.Backend:
    return vbs.backend.DistributedBackend() if dist.is_initialized() else vbs.backend.LocalBackend()


def either(model: nn.Module, ddp: bool, **options: Any) -> nn.Module:
    return DistributedDataParallel(model, **options) if ddp and dist.is_initialized() else model


def results(run: Training) -> list[Array]:
    """The weights and, if it is measured, the noise, which an error may not reach the weights through."""
    if run.optimizer._updater.gradient_noise is None:
        return run.weights()
    return [*run.weights(), np.nan_to_num(np.array(astuple(run.optimizer.noise())), posinf=0)]


# Each of these returns what must not depend on who sums, nor, but for the GAN, on the ranks. ------------------------


def contract(ddp: bool) -> dict[str, list[Array]]:
    """All rules, each with an option and a wrapper; `make fuzz` draws the other triples."""
    found = {}
    for number, kind in enumerate(EQUATIONS):
        wrapper, options = WRAPPERS[number % len(WRAPPERS)], OPTIONS[number % len(OPTIONS)]
        run = training(kind, ODD, model=either(network(), ddp, **wrapper), backend=here(), **options)
        found[f"{kind.__name__} {options}"] = results(run.run(len(ODD)))
    return found


def second_moment(ddp: bool) -> dict[str, list[Array]]:
    """Batch-size-invariant Adam above its reference."""
    found = {}
    for number, options in enumerate(OPTIONS):
        module, own = either(network(), ddp, **WRAPPERS[number % len(WRAPPERS)]), options | {"ref_batchsize": 4}
        run = training(vbs.InvariantAdamRuleOptimizer, ODD, model=module, backend=here(), **own)
        found[str(options)] = results(run.run(len(ODD)))
    return found


def unused_and_tied(ddp: bool) -> dict[str, list[Array]]:
    """A layer for rare samples and one for none, and one that is called twice."""
    found = {}
    for noise in (None, "microbatches", "differenced"):
        for view in (False, True):
            model: Any = filled(Experts())
            model.common.weight = model.rare.weight
            options: dict[str, Any] = {"gradient_as_bucket_view": view, "find_unused_parameters": True}
            module = either(model, ddp, **options)
            run = training(model=module, backend=here(), noise=noise, find_unused_parameters=True, sizes=ODD)
            found[f"{noise} {view}"] = results(run.run(len(ODD)))
    return found


def scaled(ddp: bool) -> dict[str, list[Array]]:
    """Under a GradScaler, with a loss that overflows on rank 0 in the second and the fifth update."""
    found = {}
    for name, options in {"": {}, "noise": {"noise": "microbatches"}}.items():
        run = training(vbs.RootRuleOptimizer, ODD, model=either(network(), ddp), backend=here(), **options)
        found[name] = train_scaled(run, len(ODD), overflows=here().world.rank == 0)
    return found


def counted(ddp: bool) -> dict[str, Any]:
    """Steps with counts, and logged means."""
    run = training(sizes=ODD, model=either(network(), ddp), backend=here(), reduction="sum")
    logged = []
    for indices in run.sampler:
        loss, count = run.loss(indices), sum(index + 1 for index in indices)
        run.optimizer.backward(loss)
        run.optimizer.log(loss=loss / count)
        if run.optimizer.step(count=count):
            logged.append(float(run.optimizer.logged["loss"]))
        if run.optimizer.updates == len(ODD):
            break
    return {"weights": run.weights(), "logged": [torch.tensor(logged, dtype=torch.float64).numpy()]}


def loops(ddp: bool) -> dict[str, list[Array]]:
    """Epochs that the sampler alone sets, forwards that nothing follows, and several losses of a microbatch."""
    run = training(
        sizes=ODD, dataset_size=40, model=either(network(), ddp, find_unused_parameters=True), backend=here()
    )
    for epoch in range(3):
        run.sampler.set_epoch(epoch)
        for indices in run.sampler:
            with torch.no_grad():
                run.loss(indices)
            loss = run.loss(indices)
            run.optimizer.backward(loss / 4 + 3 * loss / 4)
            run.loss(indices)
            run.optimizer.step()
    loop = training(sizes=ODD, dataset_size=40, model=either(network(), ddp), backend=here())
    loader = torch.utils.data.DataLoader(range(40), batch_sampler=loop.sampler)
    while loop.optimizer.epoch < 3:
        for update in vbs.updates(loader, loop.optimizer):
            for indices in update:
                loop.optimizer.backward(loop.loss(indices))
                loop.optimizer.step()
    return {"plain loop": run.weights(), "updates": loop.weights()}


def hooked(ddp: bool) -> dict[str, list[Array]]:
    """A communication hook of the user: each loss carries its weight."""
    found = {}
    for options in ({}, {"reduction": "sum"}, {"max_grad_norm": 0.5}, {"scaled": True}):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled="scaled" in options)
        rest: dict[str, Any] = {name: value for name, value in options.items() if name != "scaled"}
        module = either(network(), ddp)
        if isinstance(module, DistributedDataParallel):
            module.register_comm_hook(None, allreduce_hook)
        run = training(vbs.SqrtSDERuleOptimizer, ODD, model=module, backend=here(), **rest)
        for indices in run.sampler:
            run.optimizer.backward(run.loss(indices), scaler=scaler)
            scaler.step(run.optimizer)
            scaler.update()
            if run.optimizer.updates == len(ODD):
                break
        found[str(options)] = run.weights()
    return found


def laid_out(ddp: bool) -> dict[str, list[Array]]:
    """Parameters that are not contiguous, as of convolutions in channels_last, apart from `.grad`."""
    found = {}
    for options in ({}, {"noise": "microbatches"}):
        model: Any = nn.Sequential(
            nn.Unflatten(1, (3, 1, 1)), nn.Conv2d(3, 4, 3, padding=1), nn.Flatten(), nn.Linear(4, 2)
        )
        model = filled(model.double()).to(memory_format=torch.channels_last)
        run = training(sizes=ODD, model=either(model, ddp), backend=here(), **options)
        found[str(options)] = results(run.run(len(ODD)))
    return found


def switched_off(ddp: bool) -> dict[str, list[Array]]:
    """A wrapper that the optimizer does not know, and that does not sum."""
    run = training(sizes=ODD, backend=here())
    run.model = either(run.model, ddp)
    if isinstance(run.model, DistributedDataParallel):
        run.model.require_backward_grad_sync = False
    return {"": run.run(len(ODD)).weights()}


def resumed(ddp: bool) -> dict[str, list[Array]]:
    """From plain sums to DistributedDataParallel and back."""
    found = {}
    for kind in (vbs.AdaScaleOptimizer, vbs.SqrtSDERuleOptimizer):
        own, run = ddp, training(kind, ODD, model=either(network(), ddp), backend=here()).run(2)
        for _ in range(3):
            state = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict()))
            own = not own
            module = either(network(), own)
            weights = {name.removeprefix("module."): value for name, value in state[0].items()}
            (module.module if isinstance(module, DistributedDataParallel) else module).load_state_dict(weights)
            run = training(kind, ODD, model=module, backend=here())
            run.optimizer.load_state_dict(state[1])
            run.run(2)
        found[kind.__name__] = run.weights()
    return found


def two_optimizers(ddp: bool) -> dict[str, list[Array]]:
    """Of one model, with different rules, one of which measures."""
    module = either(network(), ddp, bucket_cap_mb=1e-5)
    first, second = list(module.parameters())[:2], list(module.parameters())[2:]
    run = training(
        vbs.AdaScaleOptimizer, ODD, model=module, inner=lambda _, **own: torch.optim.SGD(first, **own), backend=here()
    )
    given: dict[str, Any] = {"model": module} if ddp and dist.is_initialized() else {}
    other = vbs.RootRuleOptimizer(torch.optim.AdamW(second, **ADAM), run.sampler, REF, backend=here(), **given)
    for indices in run.sampler:
        run.optimizer.backward(run.loss(indices), others=[other])
        run.optimizer.step()
        other.step()
        if other.updates == len(ODD):
            break
    return {"": results(run)}


def left_within_a_step(ddp: bool) -> dict[str, list[Array]]:
    """An optimizer that was left before the last microbatch of a step, and stays; another one trains the model."""
    found = {}
    sizes = [8 * here().world.size, *ODD]
    for name, options in {"scaled": {}, "noise": {"noise": "microbatches"}}.items():
        module, runs = either(network(), ddp), []
        for updates, scale in ((0, 1024.0), (len(ODD), 8.0)):
            run = training(sizes=ODD if runs else sizes, model=module, backend=here(), **options)
            scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=name == "scaled")
            for indices in run.sampler:
                run.optimizer.backward(run.loss(indices), scaler=scaler)
                scaler.step(run.optimizer)
                scaler.update()
                if run.optimizer.updates == updates:
                    break
            runs.append(run)
        found[name] = results(runs[-1])
    return found


class Gan:
    """A generator and a discriminator, through which the generator's loss goes."""

    def __init__(self, ddp: bool) -> None:
        self.generator, self.discriminator = (
            either(filled(nn.Linear(*sizes).double()), ddp) for sizes in ((2, 3), (3, 1))
        )
        numbers = torch.linspace(-1, 1, 240, dtype=torch.float64)
        self.real, self.noise = numbers[:120].view(40, 3), numbers[-80:].view(40, 2)

    def loss_d(self, rows: Any) -> Tensor:
        with torch.no_grad():
            fake = self.generator(self.noise[rows])
        both: Tensor = self.discriminator(torch.cat([self.real[rows], fake]))
        return (both[: len(rows)] - 1).square().mean() + both[len(rows) :].square().mean()

    def loss_g(self, rows: Any) -> Tensor:
        judge = self.discriminator
        bare = judge.module if isinstance(judge, DistributedDataParallel) else judge
        judged: Tensor = bare(self.generator(self.noise[rows]))
        return (judged - 1).square().mean()


def gan(ddp: bool) -> dict[str, list[Array]]:
    """With unequal numbers of microbatches, and gradients of one loss in the parameters of the other model."""
    own = Gan(ddp)
    sampler = vbs.CustomSampler(40, [4, 12, 3, 9, 12], minibatch_size=2, on_end="hold", fixed_shape=False)
    modules = own.discriminator, own.generator
    optimizers = [
        vbs.ConstantOptimizer(torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.5), sampler, model=module)
        for module in modules
    ]
    for rows in sampler:
        for optimizer, loss in zip(optimizers, (own.loss_d, own.loss_g), strict=True):
            optimizer.zero_grad()
            optimizer.backward(loss(rows))
            optimizer.step()
    return {"": [parameter.detach().numpy() for module in modules for parameter in module.parameters()]}


def compiled(ddp: bool) -> dict[str, list[Array]]:
    """`torch.compile` around and inside the wrapper, beside what is not compiled."""
    found = {}
    for place in ("around", "inside"):
        bare = network()
        if ddp and place == "inside":
            bare.compile(backend="aot_eager")
        module = either(bare, ddp)
        run = training(vbs.AdaScaleOptimizer, ODD, model=module, backend=here())
        if ddp and place == "around":
            run.model = torch.compile(module, backend="aot_eager")  # type: ignore[assignment]
        found[place] = run.run(len(ODD)).weights()
        torch._dynamo.reset()
    return found


def replayed() -> list[bool]:
    """Whether an update has changed the random numbers and the statistics of this rank; only rank 0 has samples."""
    found = []
    for ddp in (False, True):
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2)).double()
        run = training(sizes=[2], model=either(filled(model), ddp), backend=here())
        (statistics,) = (part for part in run.model.modules() if isinstance(part, nn.BatchNorm1d))
        before = torch.get_rng_state(), *(buffer.clone() for buffer in statistics.buffers())
        run.run(1)
        after = torch.get_rng_state(), *statistics.buffers()
        found += [not torch.equal(old, new) for old, new in zip(before, after, strict=True)]
    return found


SAME: tuple[Callable[[bool], dict[str, Any]], ...] = (
    contract, second_moment, unused_and_tied, scaled, counted, loops, hooked, laid_out, switched_off, resumed,
    two_optimizers, left_within_a_step, gan, compiled,
)  # fmt: skip


def run_scenarios(backend: vbs.backend.Backend) -> dict[str, Any]:
    """The results in DistributedDataParallel."""
    return {one.__name__: one(True) for one in SAME} | {"plain gan": gan(False), "replayed": replayed()}


def alone() -> dict[str, Any]:
    """The results of one process."""
    return {one.__name__: one(False) for one in SAME}
