"""Where a training runs: in one process, or over ranks that sum plainly, by DistributedDataParallel, or over shards."""

from __future__ import annotations

import copy
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

import variable_batch_size as vbs
from helpers.processes import Where
from helpers.reference import Training, network, training
from variable_batch_size.world import World

NAMES = ("replicas", "shards", "tensors")  # of the dimensions of meshes
ODD = (9, 4, 17, 1, 12, 3, 2, 30)  # ranks have unequal numbers of microbatches, and some none
WRAPPERS: tuple[dict[str, Any], ...] = (  # options of DistributedDataParallel, and a communication hook
    {},
    {"gradient_as_bucket_view": True},
    {"find_unused_parameters": True},
    {"bucket_cap_mb": 1e-5},
    {"hook": allreduce_hook},
)


@dataclass(frozen=True)
class Layout:
    """How a model is spread over ranks: replicas x shards x tensor parallel."""

    replicas: int = 1
    shards: int = 1
    tensors: int = 1
    by: Literal["plain", "ddp", "fsdp"] = "fsdp"  # what sums; "fsdp" is FSDP2, or tensor parallelism alone
    where: Where = "gloo"  # what the ranks are
    wrapper: dict[str, Any] = field(default_factory=dict, hash=False)  # for DDP; "hook": a communication hook
    reproducible: bool = False  # whether updates are the same to the last bit in any world

    @property
    def size(self) -> int:
        return self.replicas * self.shards * self.tensors

    @property
    def shape(self) -> tuple[int, int, int]:
        """That of the mesh."""
        return self.replicas, self.shards, self.tensors

    def __str__(self) -> str:
        return f"{self.where} {'x'.join(map(str, self.shape))} {self.by}{' reproducible' * self.reproducible}"

    @property
    def sharded(self) -> bool:
        return self.by == "fsdp" or self.tensors > 1

    def world(self, rank: int) -> World:
        """The ranks that get different samples."""
        return World(rank // self.tensors, self.replicas * self.shards)

    def shard(self, model: nn.Module, mesh: DeviceMesh, *, by_layer: bool = True) -> nn.Module:
        """Spread a Sequential whose first and last layers are linear; `plan`: its own for tensor parallelism."""
        if self.tensors > 1:
            last = str(len(list(model.children())) - 1)
            plan = getattr(model, "plan", {"0": ColwiseParallel(), last: RowwiseParallel()})
            parallelize_module(model, mesh["tensors"], plan)
        if self.by == "fsdp" and (self.replicas * self.shards > 1 or self.tensors == 1):
            own = mesh["replicas", "shards"] if self.replicas > 1 else mesh["shards"]
            for layer in model.children() if by_layer else ():
                if any(True for _ in layer.parameters()):
                    fully_shard(layer, mesh=own)
            fully_shard(model, mesh=own)
        return model


ALONE = Layout(by="plain", where="threads")


class Place(NamedTuple):
    """A rank of a layout."""

    layout: Layout
    backend: vbs.backend.Backend
    mesh: DeviceMesh | None = None

    @staticmethod
    def of(layout: Layout, backend: vbs.backend.Backend) -> Place:
        """Return the place of this rank; all ranks have to call it."""
        mesh = init_device_mesh("cpu", layout.shape, mesh_dim_names=NAMES) if layout.sharded else None
        return Place(layout, backend, mesh)

    @property
    def world(self) -> World:
        """This rank among those that get different samples."""
        return self.backend.world if self.mesh is None else self.layout.world(dist.get_rank())

    @property
    def device(self) -> torch.device | None:
        """That of the model, if it is not the CPU."""
        if self.layout.where != "cores":
            return None
        import torch_xla

        return torch_xla.device()

    def spread(self, model: nn.Module, *, by_layer: bool = True) -> nn.Module:
        """Spread a model over the ranks."""
        if self.mesh is not None:
            return self.layout.shard(model, self.mesh, by_layer=by_layer)
        if self.layout.by != "ddp":
            return model
        options = {**self.layout.wrapper}
        hook = options.pop("hook", None)
        wrapped = DistributedDataParallel(model, **options)
        if hook is not None:
            wrapped.register_comm_hook(wrapped.process_group, hook)
        return wrapped

    def options(self, **options: Any) -> dict[str, Any]:
        """The options of an optimizer here."""
        if self.layout.by != "fsdp":
            options.pop("sharded_accumulation", None)
        if self.mesh is None or self.layout.size < dist.get_world_size():  # others of the job take no part
            return {"backend": self.backend, **options}
        if self.layout.by == "plain":
            options["process_group"] = self.mesh["replicas"].get_group()
        return {"world": self.world, **options}

    def training(
        self,
        kind: type[vbs.CustomOptimizer] = vbs.LinearRuleOptimizer,
        sizes: Sequence[int] | vbs.AdaptiveTrace = ODD,
        *,
        model: nn.Module | None = None,
        spread: bool = True,
        **options: Any,
    ) -> Training:
        """Return a training here; `spread`: whether the model has still to be spread."""
        own = model or network(options.get("dtype", torch.float64))
        own = self.spread(own) if spread else own
        return training(kind, sizes, model=own, device=self.device, **self.options(**options))


def alone() -> Place:
    """Return the place of a process that trains for itself."""
    return Place(ALONE, vbs.backend.LocalBackend())


def bare(model: nn.Module) -> Any:
    """Return the model in a DistributedDataParallel."""
    return model.module if isinstance(model, DistributedDataParallel) else model


# States that go from one layout to another one. -----------------------------------------------------------------------


def state_of(run: Training) -> Any:
    """Return whole states of model and optimizer on the CPU; every rank has to call it."""
    states = copy.deepcopy((bare(run.model).state_dict(), run.optimizer.state_dict()))
    for own, parameter in zip(states[1]["state"].values(), run.optimizer.state, strict=True):
        if isinstance(parameter, DTensor):  # whose place counts: torch 2.9 writes Shard for _StridedShard in a copy
            where = parameter.device_mesh, parameter.placements
            shape, stride = parameter.shape, parameter.stride()
            own |= {
                name: DTensor.from_local(value.to_local(), *where, shape=shape, stride=stride)
                for name, value in own.items()
                if isinstance(value, DTensor) and value.shape == shape
            }
    whole = tree_map_only(DTensor, lambda tensor: tensor.full_tensor(), states)
    return tree_map_only(Tensor, lambda tensor: tensor.cpu(), whole)


def through_file(state: Any) -> Any:
    """Return a state as it comes back from a file that holds data only."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def load(run: Training, state: Any) -> None:
    """Load whole states; every rank has to call it."""
    model = bare(run.model)
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        set_model_state_dict(model, state[0], options=StateDictOptions(full_state_dict=True))
    else:
        model.load_state_dict(state[0])
    run.optimizer.load_state_dict(copy.deepcopy(state[1]))
    for parameter, own in run.optimizer.state.items():
        if isinstance(parameter, DTensor):
            whole = {name: value for name, value in own.items() if getattr(value, "shape", None) == parameter.shape}
            own |= {name: _placed(value, parameter) for name, value in whole.items()}


def _placed(whole: Tensor, like: DTensor) -> DTensor:
    """`distribute_tensor` of torch 2.9 does not know the placement of tensor parallelism within FSDP2."""
    where = like.device_mesh, like.placements
    shape, offset = compute_local_shape_and_global_offset(like.shape, *where)
    own = whole[tuple(slice(start, start + length) for start, length in zip(offset, shape, strict=True))].clone()
    return DTensor.from_local(own, *where, shape=like.shape, stride=like.stride())
