"""Trainings in PyTorch/XLA's SPMD mode, which a process with several devices runs, and the same ones in plain torch.

That process has one rank: XLA cuts each microbatch, and the parameters, along the axes of a mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import variable_batch_size as vbs
from helpers.reference import HYPERPARAMETERS, batches, data, network, twin, wrap
from helpers.xla_graphs import CompiledUpdate
from variable_batch_size.backend._xla_launch import run_child
from variable_batch_size.backend.xla import compiled_graphs

DEVICES = 4
SAMPLES = 50
SIZES = (20, 7, 33, 8, 50, 16, 3, 12, 25, 1, 41, 9, 17, 2)
SAVED = 6  # updates before the save
RESTORED = {"data": "fsdp", "fsdp": "tensor", "tensor": "data"}  # mesh -> that of the checkpoint


@dataclass(frozen=True)
class SpmdCase:
    """A training along SIZES. `width`: hidden units, other ones than those of other trainings: graphs are cached."""

    mesh: str  # "data", "fsdp" or "tensor"
    width: int
    kind: type[vbs.CustomOptimizer] = vbs.LinearRuleOptimizer
    inner: type[torch.optim.Optimizer] = torch.optim.SGD
    options: Mapping[str, Any] = field(default_factory=dict)
    counted: bool = False  # whether the terms of the loss have two denominators
    minibatch_size: int = 8
    # "step" or "compile" of torch_xla around a microbatch; the latter with a "full graph", around all or the "backward"
    around: str = ""

    def sampler(self) -> vbs.CustomSampler:
        options: dict[str, Any] = {"on_end": "hold", "fixed_shape": True}
        return vbs.CustomSampler(SAMPLES, SIZES, 1, 0, self.minibatch_size, **options)

    def optimizer(self, model: nn.Module, sampler: vbs.CustomSampler) -> vbs.CustomOptimizer:
        inner: Any = self.inner
        hyperparameters = HYPERPARAMETERS[self.inner]
        return wrap(self.kind, inner(model.parameters(), **hyperparameters), sampler, model=model, **self.options)


class SpmdTraining:
    """A training whose microbatches, and parameters, lie on all devices of this process; or on the CPU."""

    def __init__(self, case: SpmdCase, *, spmd: bool = True) -> None:
        self.case, model = case, network(torch.float32, case.width)
        self.model, self._put = _place(case.mesh, model) if spmd else (model, lambda rows: rows)
        self.sampler = case.sampler()
        self.optimizer = case.optimizer(self.model, self.sampler)
        self._x, self._target = (tensor.float() for tensor in data(SAMPLES))
        self.updates: list[CompiledUpdate] = []
        self._compiled: Callable[[], int] = compiled_graphs if spmd else lambda: 0
        if not case.around:
            return
        import torch_xla

        if case.around in ("compile", "full graph"):
            self._train_on = torch_xla.compile(self._train_on, full_graph=case.around == "full graph")
        elif case.around == "backward":
            self._backward = torch_xla.compile(self._backward, full_graph=True)

    def run(self, until: int = len(SIZES)) -> SpmdTraining:
        """Train until this update."""
        before, count = self._compiled(), partial(_count, self._x) if self.case.counted else None
        while self.optimizer.updates < until:
            for update in vbs.updates(self.sampler, self.optimizer, counts=count):  # type: ignore[arg-type]
                rounds = 0
                for indices in update:
                    with _step() if self.case.around == "step" else nullcontext():
                        terms = update.counts if self.case.counted else {"rows": len(indices)}
                        self._train_on(self._put(self._x[indices]), self._put(self._target[indices]), terms)
                    rounds += 1
                now = self._compiled()
                self.updates.append(CompiledUpdate(rounds, now - before))
                before = now
                if self.optimizer.updates == until:
                    break
        return self

    def _train_on(self, x: Tensor, target: Tensor, terms: Mapping[str, Any]) -> None:
        self._backward(x, target, terms)
        self.optimizer.step()

    def _backward(self, x: Tensor, target: Tensor, terms: Mapping[str, Any]) -> None:
        self.optimizer.backward(_loss(self.model, x, target, terms), divided=self.case.counted)

    def weights(self) -> list[Tensor]:
        return [parameter.detach().cpu() for parameter in self.model.parameters()]

    def shardings(self) -> list[str]:
        """Return how each parameter, and each tensor of the optimizer's state that is as large, lies on the devices."""
        import torch_xla

        parameters = [*self.model.parameters()]
        states = [value for one in parameters for value in self.optimizer.state[one].values() if value.dim()]
        return [torch_xla._XLAC._get_xla_sharding_spec(tensor) for tensor in (*parameters, *states)]

    def checkpoint(self, folder: Path) -> vbs.Checkpoint:
        return vbs.Checkpoint(folder, model=self.model, optimizer=self.optimizer)


def _place(mesh_name: str, model: nn.Module) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """Return a model on a mesh of all devices, and what puts rows on it."""
    import torch_xla.distributed.spmd as xs
    from torch_xla.distributed.fsdp.wrap import transformer_auto_wrap_policy
    from torch_xla.experimental.spmd_fully_sharded_data_parallel import SpmdFullyShardedDataParallel

    shape, names = ((2, 2), ("data", "tensor")) if mesh_name == "tensor" else ((DEVICES,), (mesh_name,))
    mesh = xs.Mesh(np.arange(DEVICES), shape, names)
    model.to("xla")
    if mesh_name == "tensor":
        first, last = (model.get_parameter(f"{layer}.weight") for layer in (0, 2))
        xs.mark_sharding(first, mesh, ("tensor", None))
        xs.mark_sharding(last, mesh, (None, "tensor"))
    elif mesh_name == "fsdp":
        policy = partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear})
        model = SpmdFullyShardedDataParallel(model, mesh=mesh, auto_wrap_policy=policy)

    def put(rows: Tensor) -> Tensor:
        on_device = rows.to("xla")
        xs.mark_sharding(on_device, mesh, (names[0], None))
        return on_device

    return model, put


def _step() -> Any:
    import torch_xla

    return torch_xla.step()


def _count(x: Tensor, indices: list[int]) -> dict[str, Any]:
    return {"rows": len(indices), "positive": int((x[indices, 0] > 0).sum())}


def _loss(model: nn.Module, x: Tensor, target: Tensor, terms: Mapping[str, Any]) -> Tensor:
    """Return the sum of terms, each over what is counted of it."""
    output = model(x)
    loss = (output - target).square().sum() / terms["rows"]
    return loss + (output.sum(dim=1).sin() * (x[:, 0] > 0)).sum() / terms["positive"] if "positive" in terms else loss


# ---------------------------------------------------------------------------------------------- in plain torch, by hand


def by_hand(case: SpmdCase) -> tuple[list[Tensor], list[float]]:
    """Return the weights of a training with one big batch an update, on the CPU, and the norms of its gradients."""
    model, (x, target) = network(torch.float32, case.width), (tensor.float() for tensor in data(SAMPLES))
    factors: list[vbs.rules.Scaling] = []
    clip, largest = (case.options.get(name) for name in ("max_grad_norm", "skip_grad_norm"))
    hand = {"minibatch_size": case.minibatch_size, "fixed_shape": True, "width": case.width, "max_grad_norm": clip}
    twin(case.kind, SIZES, dataset_size=SAMPLES, inner=case.inner, taken=factors, **hand)  # which measures the noise
    inner: Any = case.inner
    optimizer, norms = inner(model.parameters(), **HYPERPARAMETERS[case.inner]), list[float]()
    lr = optimizer.param_groups[0]["lr"]
    for batch, scaling in zip(batches(SIZES, SAMPLES), factors, strict=True):
        optimizer.zero_grad()
        terms = _count(x, batch.tolist()) if case.counted else {"rows": len(batch)}
        terms = {name: number or torch.inf for name, number in terms.items()}  # what nothing counts is 0
        _loss(model, x[batch], target[batch], terms).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip or torch.inf)))
        if largest and len(norms) > 1 and norms[-1] > largest:
            continue
        optimizer.param_groups[0]["lr"] = lr * scaling.lr
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()], norms


# ----------------------------------------------------------------------------------------- in a process of four devices


@dataclass(frozen=True)
class Found:
    """What a training ends with."""

    weights: list[Tensor]
    updates: list[CompiledUpdate]
    skipped: int
    shardings: list[str]


def run_cases(folder: Path, cases: Mapping[str, SpmdCase]) -> dict[str, Found | str]:
    """Run trainings in a process with DEVICES devices of XLA:CPU, and return what they end with.

    Those with AdamW save update SAVED in a folder of the name of their mesh; "MESH from OTHER" has gone on from it, as
    RESTORED says. "full graph" is the message of an error.
    """
    environment = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(DEVICES), "TF_CPP_MIN_LOG_LEVEL": "2"}
    run_child(_run_cases, (folder, dict(cases)), environment)
    found: dict[str, Found | str] = torch.load(folder / "found.pt", weights_only=False)
    return found


def _run_cases(folder: Path, cases: Mapping[str, SpmdCase]) -> int:
    import torch_xla.runtime as xr

    xr.use_spmd()
    found: dict[str, Found | str] = {}
    for name, case in cases.items():
        training = SpmdTraining(case).run(SAVED)
        if case.inner is torch.optim.AdamW:
            with training.checkpoint(folder / case.mesh) as checkpoint:
                checkpoint.save()
        found[name] = _found(training.run())
    for mesh, other in RESTORED.items():
        (case,) = (one for one in cases.values() if one.inner is torch.optim.AdamW and one.mesh == other)
        training = SpmdTraining(replace(case, mesh=mesh))
        with training.checkpoint(folder / other) as checkpoint:
            assert checkpoint.restore()
        found[f"{mesh} from {other}"] = _found(training.run())
    try:  # last: torch_xla executes nothing after it
        SpmdTraining(SpmdCase("data", 6, around="full graph")).run(1)
    except RuntimeError as error:
        found["full graph"] = str(error.__context__)
    torch.save(found, folder / "found.pt")
    return 0


def _found(training: SpmdTraining) -> Found:
    skipped: int = next(iter(training.optimizer.state_dict()["vbs"].get("skipped", {"": 0}).values()))
    return Found(training.weights(), training.updates, skipped, training.shardings())


def farthest(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest difference of two models, over the largest weight."""
    largest = max(float(tensor.abs().max()) for tensor in expected)
    return max(float((one - other).abs().max()) for one, other in zip(found, expected, strict=True)) / largest
