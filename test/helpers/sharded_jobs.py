"""What the processes of test_sharded_sync.py run, over each way of sharding, in a module that they can import."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import variable_batch_size as vbs
from helpers.mishaps import train_scaled
from helpers.reference import ADAM, Array, Training, filled, network, training
from variable_batch_size.world import World

NAMES = ("replicas", "shards", "tensors")  # of the dimensions of meshes
ODD = (9, 4, 17, 1, 12, 3, 2, 30)  # ranks have unequal numbers of microbatches, and some none

KINDS = (
    vbs.LinearRuleOptimizer,
    vbs.LinearRuleMomentumOptimizer,
    vbs.SqrtSDERuleOptimizer,
    vbs.AdaScaleOptimizer,
    vbs.AdamScaleOptimizer,
)
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"reduction": "sum"},
    {"max_grad_norm": 0.5},
    {"grad_norm": True},
    {"sharded_accumulation": False},
    {"noise": "microbatches"},
    {"noise": "differenced"},
)


@dataclass(frozen=True)
class Layout:
    """How a model is spread over processes: replicas x shards x tensor parallel.

    `plain`: replicas are summed without FSDP2.
    """

    replicas: int = 1
    shards: int = 1
    tensors: int = 1
    plain: bool = False

    @property
    def size(self) -> int:
        return self.replicas * self.shards * self.tensors

    def __str__(self) -> str:
        return f"{self.replicas}x{self.shards}x{self.tensors}" + "-plain" * self.plain

    @property
    def world(self) -> World:
        """The ranks that get different samples."""
        return World(dist.get_rank() // self.tensors, self.replicas * self.shards)

    @property
    def shape(self) -> tuple[int, int, int]:
        """That of the mesh."""
        return self.replicas, self.shards, self.tensors

    def shard(self, model: nn.Module, mesh: DeviceMesh | None = None, *, by_layer: bool = True) -> nn.Module:
        """Spread a Sequential whose first and last layers are linear."""
        mesh = mesh or _mesh
        assert mesh is not None
        if self.tensors > 1:
            last = str(len(list(model.children())) - 1)
            plan = {"0": ColwiseParallel(), last: RowwiseParallel()}
            if isinstance(model, OverSequence):
                plan = model.plan
            if isinstance(model, Deep):
                plan = {
                    "0": ColwiseParallel(output_layouts=Replicate()),
                    last: RowwiseParallel(input_layouts=Replicate()),
                }
            parallelize_module(model, mesh["tensors"], plan)
        if not self.plain and (self.replicas * self.shards > 1 or self.tensors == 1):
            own = mesh["replicas", "shards"] if self.replicas > 1 else mesh["shards"]
            for layer in model.children() if by_layer else ():
                if any(True for _ in layer.parameters()):
                    fully_shard(layer, mesh=own)
            fully_shard(model, mesh=own)
        return model


LAYOUTS = (
    Layout(shards=2),
    Layout(shards=3),
    Layout(2, 2),
    Layout(tensors=2),
    Layout(shards=2, tensors=2),
    Layout(),
    Layout(2, tensors=2, plain=True),
)
_layout: Layout | None = None  # None: whole, in one process
_mesh: DeviceMesh | None = None


def spread(layout: Layout) -> None:
    """Spread models over processes from now on."""
    global _layout, _mesh
    _layout, _mesh = layout, init_device_mesh("cpu", layout.shape, mesh_dim_names=NAMES)


def run_of(kind: type[vbs.CustomOptimizer] = vbs.LinearRuleOptimizer, **options: Any) -> Training:
    model, sizes = options.pop("model", None) or network(), options.pop("sizes", ODD)
    spread_already = options.pop("spread_already", False)
    if _layout is None:
        options.pop("sharded_accumulation", None)
        return training(kind, sizes, model=model, **options)
    if _layout.plain:
        assert _mesh is not None
        options["process_group"] = _mesh["replicas"].get_group()
    model = model if spread_already else _layout.shard(model)
    return training(kind, sizes, model=model, world=_layout.world, **options)


def results(run: Training) -> list[Array]:
    """The weights and, if it is measured, the noise, which an error may not reach the weights through."""
    if run.optimizer._updater.gradient_noise is None:
        return run.weights()
    return [*run.weights(), np.nan_to_num(np.array(astuple(run.optimizer.noise())), posinf=0)]


# Each of these returns what must not depend on the layout. ----------------------------------------------------------


def contract() -> dict[str, list[Array]]:
    """A rule of each kind, with one more option: of the learning rate, the gradient, the betas, the noise."""
    found = {}
    for number, kind in enumerate(KINDS):
        options = OPTIONS[number % len(OPTIONS)]
        if kind in (vbs.AdaScaleOptimizer, vbs.AdamScaleOptimizer):
            options = {}
        found[f"{kind.__name__} {options}"] = results(run_of(kind, **options).run(len(ODD)))
    return found


def every_option() -> dict[str, list[Array]]:
    """All options of a rule."""
    return {str(options): results(run_of(**options).run(len(ODD))) for options in OPTIONS}


def scaled() -> dict[str, list[Array]]:
    """Under a GradScaler, with a loss that overflows in the second and the fifth update."""
    found = {}
    for name, options in {
        "": {},
        "noise": {"noise": "microbatches"},
        "accumulated": {"sharded_accumulation": False},
    }.items():
        run = run_of(vbs.RootRuleOptimizer, **options)
        found[name] = train_scaled(run, len(ODD), overflows=_layout is None or _layout.world.rank == 0)
    return found


def counted() -> dict[str, list[Array]]:
    """Steps with counts, and logged means."""
    run = run_of(reduction="sum")
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


class Deep(nn.Sequential):
    """A network whose middle is computed again in backward, or compiled."""

    def __init__(self, recomputed: bool) -> None:
        middle = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        super().__init__(nn.Linear(3, 4), middle, nn.Tanh(), nn.Linear(4, 2))
        self.recomputed = recomputed
        filled(self.double())

    def forward(self, x: Tensor) -> Tensor:
        first, middle, tanh, last = self
        x = first(x)
        return last(tanh(checkpoint(middle, x, use_reentrant=False) if self.recomputed else middle(x)))  # type: ignore[no-any-return]


class OverSequence(nn.Sequential):
    """A network over sequences of four, whose norm each rank of tensor parallelism computes for a part of them."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
        filled(self.double())

    def forward(self, x: Tensor) -> Tensor:
        scales = torch.arange(1, 5, dtype=x.dtype)[:, None]  # (sequence, 1)
        y: Tensor = super().forward(x[:, None] * scales)
        return y.square().mean(1)

    plan: ClassVar[dict[str, Any]] = {
        "0": ColwiseParallel(output_layouts=Shard(1)),
        "1": SequenceParallel(),
        "2": RowwiseParallel(input_layouts=Shard(1)),
    }


def over_sequences() -> dict[str, list[Array]]:
    """Gradients that ranks have still to add, of parameters that all of them have."""
    found = {}
    for kind, options in (
        (vbs.LinearRuleOptimizer, {"max_grad_norm": 0.5}),
        (vbs.LinearRuleOptimizer, {"max_grad_norm": 0.5}),
        (vbs.AdaScaleOptimizer, {}),
        (vbs.LinearRuleOptimizer, {"noise": "differenced"}),
    ):
        found[f"{kind} {options}"] = results(run_of(kind, model=OverSequence(), **options).run(len(ODD)))
    return found


def loops() -> dict[str, list[Array]]:
    """Closures, `vbs.updates`, forwards that no backward follows, recomputation, and compiled parts."""
    found = {}
    run = run_of()
    for indices in run.sampler:
        run.optimizer.step(lambda indices=indices: run.optimizer.backward(run.loss(indices)))
        if run.optimizer.updates == 4:
            break
    for indices in run.sampler:
        with torch.no_grad():
            run.loss(indices)
        run.optimizer.backward(run.loss(indices))
        if run.optimizer.step() and run.optimizer.updates == len(ODD):
            break
    found["loops"] = run.weights()
    run = run_of()
    for number, indices in enumerate(run.sampler):
        if isinstance(run.model, FSDPModule):  # what a loop for FSDP2 sets
            run.model.set_requires_gradient_sync(number % 2 > 0)
            run.model.set_gradient_divide_factor(7.0)
        run.optimizer.backward(run.loss(indices))
        if run.optimizer.step() and run.optimizer.updates == 4:
            break
    found["settings of FSDP2"] = run.weights()
    for recomputed in (False, True):
        for kind in (vbs.LinearRuleOptimizer, vbs.AdaScaleOptimizer):
            # torch 2.15 with tensor parallelism cannot compile again for a single row.
            run = run_of(kind, model=Deep(recomputed), sizes=ODD if recomputed else (9, 8, 17, 12, 30))
            if not recomputed:
                run.model[1].compile(backend="aot_eager")  # type: ignore[index, operator]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch 2.15 compiles with a warning about inputs that are no leaves
                found[f"{recomputed} {kind}"] = results(run.run(len(ODD)))
    torch._dynamo.reset()
    return found


def inner_optimizers() -> dict[str, list[Array]]:
    """Foreach, fused and plain ones, of two groups, with a rule for each."""
    found = {}
    for name, kind, options in (
        ("foreach", torch.optim.AdamW, {"foreach": True}),
        ("fused", torch.optim.AdamW, {"fused": True}),
        ("plain", torch.optim.Adam, {"foreach": False}),
        ("fused Adam", torch.optim.Adam, {"fused": True}),
    ):

        def inner(parameters: Any, *, kind: Any = kind, **options: Any) -> torch.optim.Optimizer:
            return kind(_groups(parameters), **options)  # type: ignore[no-any-return]

        run = run_of(inner=inner, hyperparameters=ADAM | options)
        found[name] = run.run(len(ODD)).weights()
    return found


def _groups(parameters: Any) -> list[dict[str, Any]]:
    own = list(parameters)
    return [{"params": own[0::2]}, {"params": own[1::2], "weight_decay": 0.0}]


def resumed() -> dict[str, list[Array]]:
    """A state after each update, loaded into new objects; and a model that was created without memory."""
    run, found = run_of(vbs.AdaScaleOptimizer), {}
    for until in range(1, len(ODD)):
        run.run(until - run.optimizer.updates)
        states = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict()))
        run = run_of(vbs.AdaScaleOptimizer)
        run.model.load_state_dict(states[0])
        run.optimizer.load_state_dict(states[1])
    found["resumed"] = results(run.run(1))
    with torch.device("meta"):
        model: nn.Module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    if _layout is not None:
        model = _layout.shard(model)
        model.to_empty(device="cpu")
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, network().state_dict(), options=options)
        run = run_of(model=model, spread_already=True)
    else:
        run = run_of()
    found["meta"] = run.run(len(ODD)).weights()
    return found


SAME: tuple[Callable[[], dict[str, Any]], ...] = (
    contract, every_option, scaled, counted, over_sequences, loops, inner_optimizers, resumed,
)  # fmt: skip


def context_parallel(backend: vbs.backend.Backend) -> tuple[str, str, list[Array]]:
    """Two ranks compute the two parts of each sample's loss; two others have other samples. All four have shards."""
    spread(Layout(shards=4))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    data, context = (mesh[name] for name in ("data", "context"))
    model = Layout(shards=4).shard(network())
    options: dict[str, Any] = {"reduction": "sum", "process_group": data.get_group()}
    run = training(sizes=ODD, model=model, world=World(data.get_local_rank(), 2), **options)
    errors = parts(run, context.get_local_rank(), counted=False)
    found = parts(run, context.get_local_rank(), counted=True)
    return errors, found, run.weights()


def parts(run: Training, *columns: int, counted: bool = True) -> str:
    """Train on the losses of these outputs; return the error."""
    for indices in run.sampler:
        squares = (run.model(run.x[indices]) - run.target[indices]).square()
        run.optimizer.backward(squares[:, list(columns)].sum())
        try:
            run.optimizer.step(count=len(columns) * len(indices) if counted else None)
        except RuntimeError as error:
            run.optimizer.discard_step()
            return str(error)
        if run.optimizer.updates == len(ODD):
            break
    return ""


def run_scenarios(backend: vbs.backend.Backend, layout: Layout) -> dict[str, Any]:
    """The results over several processes."""
    spread(layout)
    return alone()


def alone() -> dict[str, Any]:
    """The results of one process."""
    return {one.__name__: one() for one in SAME}
