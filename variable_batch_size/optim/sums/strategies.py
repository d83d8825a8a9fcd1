"""Chooses the strategy that sums the gradients of a model, and the ranks over which they are summed."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from variable_batch_size._validation import type_error, value_error
from variable_batch_size.backend import Backend, DistributedBackend, ElasticBackend, LocalBackend, detect
from variable_batch_size.backend.detection import numbers_for
from variable_batch_size.data.dealer import Dealer
from variable_batch_size.optim.reproducible.integer_sum import IntegerSum
from variable_batch_size.optim.stage import Needs
from variable_batch_size.optim.sums.base import Sum
from variable_batch_size.optim.sums.ddp import DDP
from variable_batch_size.optim.sums.plain import Buffered, Plain, Widened
from variable_batch_size.optim.sums.ranks import Ranks
from variable_batch_size.optim.sums.sharded import Sharded, data_parallel_group
from variable_batch_size.optim.tensors.arithmetic import is_narrow
from variable_batch_size.optim.tensors.parameters import Parameters

_REFUSED = {
    "FullyShardedDataParallel": "shard it with torch.distributed.fsdp.fully_shard(), FSDP2",
    "DeepSpeedEngine": "shard it with torch.distributed.fsdp.fully_shard(), FSDP2",
    "PipelineStage": "shard the model with fully_shard() or tensor parallelism, without pipeline stages",
    "PipelineSchedule": "shard the model with fully_shard() or tensor parallelism, without pipeline stages",
}


def unwrap(model: Module | None) -> Module | None:
    """Return a model as it was before `torch.compile`. Raise an error if a wrapper of it is not supported."""
    modules = [*model.modules()] if isinstance(model, Module) else [model]
    # Names, with those of base classes, so that libraries that may not be installed are not imported.
    class_names = {kind.__name__ for module in modules for kind in type(module).__mro__}
    for name, remedy in _REFUSED.items():
        if any(class_name.startswith(name) for class_name in class_names):
            requirement = f"model must be bare, or in DistributedDataParallel or FSDP2, not in {name}"
            raise type_error(requirement, model, remedy)
    if model is not None and not isinstance(model, Module):
        raise type_error("model must be a torch.nn.Module", model, "pass the model whose parameters are trained")
    inner: Module | None = getattr(model, "_orig_mod", model)
    if any(isinstance(module, FSDPModule) for module in modules) and not isinstance(inner, FSDPModule):
        raise ValueError(
            "the model that is passed as model= must be the root of what is sharded, but fully_shard() was applied to "
            "parts of it only; also apply it to the root, after its parts"
        )
    return inner


def backend_for(
    module: Module | None, parameters: Sequence[Tensor], sampler: Dealer, process_group: dist.ProcessGroup | None
) -> Backend:
    """Return the backend of the ranks among which the samples of a batch are split, if not the user's process group.

    Ranks of tensor parallelism compute parts of the same samples. Raise ValueError if these cannot be told apart.
    """
    sharded = [parameter for parameter in parameters if isinstance(parameter, DTensor)]
    if process_group is not None or not sharded:
        return detect(parameters, sampler.world, process_group)
    if module is None:
        raise ValueError(
            "an optimizer of sharded parameters (DTensors) must know the model, but there is none; pass it as model=, "
            "the root module if it was sharded with fully_shard()"
        )
    if isinstance(module, FSDPModule):
        group = data_parallel_group(module)
        return detect(parameters, sampler.world, group)
    if sharded[0].device_mesh.size() < dist.get_world_size():
        in_mesh, world = sharded[0].device_mesh.size(), dist.get_world_size()
        raise ValueError(
            f"the parameters' mesh has {in_mesh} of {world} ranks, but with tensor parallelism alone it does not "
            'say which share a batch; pass process_group=mesh["dp"].get_group(), of those with different samples'
        )
    # Tensor parallelism over all ranks: they compute parts of the same samples, as if they were one rank.
    return LocalBackend(job=DistributedBackend(), sent=numbers_for(parameters))


class Strategy(NamedTuple):
    """How the gradients of an optimizer are summed.

    Attributes:
        ranks: the ranks over which gradients are summed.
        create: function that returns the sum of the gradients of some parameters.
    """

    ranks: Ranks
    create: Callable[[Parameters], Sum]


def sums_in_backward(module: object) -> bool:
    """Return whether what wraps a model sums its gradients in `backward()`."""
    return isinstance(module, (DistributedDataParallel, FSDPModule))


def strategy_for(
    module: Module | None,
    parameters: Sequence[Tensor],
    backend: Backend,
    agreement: Any,
    *,
    sharded_accumulation: bool,
    find_unused: bool,
    by_rows: bool,
    needs: Callable[[], Needs] | None,
    reproducible: bool,
) -> Strategy:
    """Choose the class that sums the gradients of a model, by what wraps the model and what is measured.

    Args:
        module: the model, if it is known.
        parameters: the parameters of the optimizer.
        backend: the backend of the ranks that share a batch.
        agreement: how all ranks compare values; only needed if the model `sums_in_backward`.
        sharded_accumulation: as for `CustomOptimizer`.
        find_unused: as `find_unused_parameters` of `CustomOptimizer`.
        by_rows: as for `Sum`.
        needs: as for `Sum`.
        reproducible: whether updates must be the same to the last bit in any world.
    """
    options: dict[str, Any] = {"by_rows": by_rows, "needs": needs}
    ranks = Ranks(backend)
    if reproducible:
        _check_reproducible(module, parameters, backend)
    # With an elastic backend, replicas of the model come and go. A replica can be sharded over the ranks of a job.
    inside_replica, between_replicas = backend, None
    if isinstance(backend, ElasticBackend):
        _check_elastic(module, backend)
        inside_replica, between_replicas = backend.job, backend
    sharded: object = module
    if isinstance(sharded, FSDPModule):
        if needs is not None and not sharded_accumulation:
            raise ValueError(
                "a rule or a controller that reads the gradient noise needs the gradients of single microbatches, but "
                "sharded_accumulation=False adds them up before they are seen; omit it"
            )
        sharded_over = DistributedBackend(data_parallel_group(sharded))
        # More ranks share the shards than share a batch: some compute parts of the same samples, as in context
        # parallelism, and FSDP2 sums over all of them.
        sharing_a_batch = inside_replica.ranks if isinstance(inside_replica, DistributedBackend) else []
        shares_samples = sharded_over.ranks != sharing_a_batch
        ranks = Ranks(sharded_over if shares_samples else inside_replica)
        options |= {"needs_counts": shares_samples, "accumulates_shards": sharded_accumulation}
        options["between"] = between_replicas
        return Strategy(ranks, partial(Sharded, ranks, agreement=agreement, module=module, **options))
    if isinstance(module, DistributedDataParallel):
        return Strategy(ranks, partial(DDP, ranks, agreement=agreement, module=module, **options))

    def create(parameters: Parameters) -> Sum:  # they may change: half precision may come later
        narrow = any(map(is_narrow, parameters))
        kind: Callable[..., Sum] = Widened if narrow else Plain if needs is None else Buffered
        return (IntegerSum if reproducible else kind)(ranks, parameters, find_unused=find_unused, **options)

    return Strategy(ranks, create)


def _check_reproducible(module: Module | None, parameters: Sequence[Tensor], backend: Backend) -> None:
    """Raise an error unless this model, device and backend can give the same bits with any number of ranks."""
    requirement = "reproducible=True needs"
    if isinstance(module, (DistributedDataParallel, FSDPModule)):
        remedy = "pass the bare model, after vbs.broadcast_parameters(model)"
        raise type_error(f"{requirement} gradients that the backend sums", module, remedy)
    if isinstance(backend, ElasticBackend):
        raise value_error(f"{requirement} ranks that stay", "an elastic backend", "restart from checkpoints instead")
    device = parameters[0].device.type
    if device == "xla" and os.environ.get("PJRT_DEVICE") != "CPU":
        remedy = "train on CPUs or GPUs, or omit it"
        raise value_error(f"{requirement} true float64, which TPUs imitate", "parameters on XLA", remedy)
    if device == "cuda" and not (
        torch.are_deterministic_algorithms_enabled() and "CUBLAS_WORKSPACE_CONFIG" in os.environ
    ):
        remedy = "call torch.use_deterministic_algorithms(True) and set CUBLAS_WORKSPACE_CONFIG=:4096:8 before"
        raise RuntimeError(f"{requirement} deterministic algorithms, but CUDA may use others; {remedy}")


def _check_elastic(module: object, backend: ElasticBackend) -> None:
    """Raise TypeError unless an elastic backend, whose replicas of the model come and go, can sum its gradients."""
    if backend.job.world.size == 1:  # each replica is one process
        if isinstance(module, (DistributedDataParallel, FSDPModule)):
            requirement = "where the world may change, the gradients must be summed by the backend"
            raise type_error(requirement, module, "pass the bare model")
    elif not isinstance(module, FSDPModule) or data_parallel_group(module) is not None:
        requirement = "the processes of a replica group must shard the model among all of them, and nothing else"
        raise type_error(requirement, module, "pass model=, the root module, after fully_shard() without mesh=")
