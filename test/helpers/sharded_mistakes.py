"""Mistakes with sharded models, and exceptions, which the processes of test_sharded_sync.py run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import variable_batch_size as vbs
from helpers.mishaps import Ended, discard
from helpers.reference import SGD, Array, network, training
from helpers.sharded_jobs import ODD, Layout, run_of, spread
from variable_batch_size.world import World


def _sampler() -> vbs.CustomSampler:
    return vbs.CustomSampler(50, 50)


def _plain_backward() -> None:
    run = run_of()
    for indices in run.sampler:
        run.loss(indices).backward()
        run.optimizer.step()


def _narrow_sums() -> None:
    model = network(torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(model, mp_policy=policy)
    training(sizes=[50], model=model, world=_world(), dtype=torch.float32).run(1)


def _accumulated_noise() -> None:
    run_of(vbs.AdaScaleOptimizer, sharded_accumulation=False)


def _second_moment() -> None:
    run_of(vbs.InvariantAdamRuleOptimizer)


def _two_backwards_with_noise() -> None:
    run = run_of(vbs.AdaScaleOptimizer)
    for indices in run.sampler:
        loss = run.loss(indices)
        run.optimizer.backward(loss / 2, retain_graph=True)
        run.optimizer.backward(loss / 2)


def _not_passed() -> None:
    model = fully_shard(network())
    vbs.ConstantOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), _sampler())


def _parameter_before_sharding() -> None:
    model = network()
    inner = torch.optim.SGD(model.parameters(), **SGD)
    vbs.ConstantOptimizer(inner, _sampler(), model=fully_shard(model))  # type: ignore[arg-type]


def _root_not_sharded() -> None:
    model: Any = network()
    fully_shard(model[0])
    vbs.ConstantOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), _sampler(), model=model)


def _other_meshes() -> None:
    model: Any = network()
    mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("one", "two"))
    fully_shard(model[0], mesh=mesh["one"])
    fully_shard(model, mesh=mesh["two"])
    vbs.ConstantOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), _sampler(), model=model)


def _other_world() -> None:
    model = fully_shard(network())
    sampler = vbs.CustomSampler(50, 50, 1, 0)
    vbs.ConstantOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), sampler, model=model)  # type: ignore[arg-type]


def _first_fsdp() -> None:
    model = FullyShardedDataParallel(network(), device_id=torch.device("cpu"))
    vbs.ConstantOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), _sampler(), model=model)


class DeepSpeedEngine(nn.Module):
    """What DeepSpeed returns has this name."""


def _deepspeed() -> None:
    model = network()
    engine = DeepSpeedEngine()
    vbs.ConstantOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), _sampler(), model=engine)


def _broadcast() -> None:
    vbs.broadcast_parameters(fully_shard(network()))  # type: ignore[arg-type]


def _scale_unknown() -> None:
    run, scaler = run_of(), torch.amp.GradScaler("cpu")
    for indices in run.sampler:
        scaler.scale(run.loss(indices)).backward()
        scaler.step(run.optimizer)


def _zero_grad() -> None:
    run = run_of()
    for indices in run.sampler:
        run.optimizer.backward(run.loss(indices))
        run.optimizer.zero_grad()


def _clipping() -> None:
    run = run_of()
    for indices in run.sampler:
        run.optimizer.backward(run.loss(indices))
        nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
        run.optimizer.step()


def _clipping_after_step() -> None:
    run = run_of()
    for indices in run.sampler:
        run.optimizer.backward(run.loss(indices))
        run.optimizer.step()
        nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)


class _Choosing(nn.Sequential):
    """Each rank calls other layers."""

    def forward(self, x: Tensor) -> Tensor:
        layers = [*self.children()]
        chosen = layers[dist.get_rank()] if self.training else layers[0]
        return chosen(x)  # type: ignore[no-any-return]


def _other_parts() -> None:
    model = _Choosing(nn.Linear(3, 2), nn.Linear(3, 2)).double()
    for layer in model:
        fully_shard(layer)
    training(sizes=[50], model=fully_shard(model), world=_world()).run(1)


ERRORS: tuple[Callable[[], None], ...] = (
    _plain_backward, _narrow_sums, _accumulated_noise, _second_moment, _two_backwards_with_noise, _not_passed,
    _parameter_before_sharding, _root_not_sharded, _other_meshes, _other_world, _first_fsdp, _deepspeed,
    _broadcast, _scale_unknown, _zero_grad, _clipping, _clipping_after_step, _other_parts,
)  # fmt: skip


def _world() -> World:
    return World(dist.get_rank(), dist.get_world_size())


def run_mistakes(backend: vbs.backend.Backend) -> dict[str, str]:
    """Make the mistakes on two ranks, and return the messages."""
    spread(Layout(shards=2))
    found = {}
    for mistake in ERRORS:
        try:
            mistake()
        except (RuntimeError, TypeError, ValueError) as error:
            found[mistake.__name__.lstrip("_")] = str(error)
    return found


def replicas_differ(backend: vbs.backend.Backend) -> str:
    """Begin with other values on the second replica; return the error."""
    spread(Layout(2, 2))
    run = run_of()
    if backend.world.rank >= 2:
        (first, *_) = run.model.parameters()
        assert isinstance(first, DTensor)
        with torch.no_grad():
            first.to_local().add_(1e-9)
    try:
        run.run(1)
    except RuntimeError as error:
        return str(error)
    return "no error"


def one_is_slow(backend: vbs.backend.Backend) -> list[Array]:
    """Train, and wait on one rank in its first forward, before the part that others have already called."""
    spread(Layout(shards=3))
    run = run_of()
    if backend.world.rank == 1:
        run.model[1].register_forward_hook(lambda *_: time.sleep(0 if run.optimizer.updates else 3))  # type: ignore[index]
    return run.run(3).weights()


def discards(backend: vbs.backend.Backend, layout: Layout, where: str, who: str, options: dict[str, Any]) -> Ended:
    """Raise in the third update of a sharded training, see `discard`."""
    spread(layout)
    run, fails = run_of(**options), who == "all ranks" or backend.world.rank == layout.size - 1
    layer: Any = run.model[1]  # type: ignore[index]
    return discard(run, layer, len(ODD), where, fails=fails)
