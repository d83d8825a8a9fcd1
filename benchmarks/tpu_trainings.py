"""The trainings whose graphs tpu_compiler.py compiles for a TPU, by hand and with the library, on two cores of XLA:CPU.

The library is told that it is on a TPU, where it computes norms in another way than on a CPU.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import variable_batch_size as vbs
from step import MODELS, perceptron
from variable_batch_size.backend import xla
from variable_batch_size.lab.evaluation.tasks.char_gpt import GPT, LENGTH

CORES, MICROBATCHES = 2, 2  # XLA compiles the same graph for any number of cores
WARM_UP, MEASURED = 4, 2  # updates; nothing compiles after the third one


@dataclass(frozen=True)
class Model:
    """A model of images, trained by SGD, or of `vocabulary` tokens, trained by AdamW."""

    title: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]  # of a microbatch
    vocabulary: int = 0

    def inner(self, network: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer."""
        if self.vocabulary:
            return torch.optim.AdamW(network.parameters(), lr=1e-4)
        return torch.optim.SGD(network.parameters(), lr=1e-4, momentum=0.5)

    def data(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return a microbatch and its labels."""
        inputs = torch.randint(self.vocabulary, self.shape) if self.vocabulary else torch.randn(self.shape)
        labels = torch.randint(self.vocabulary or 10, (math.prod(self.shape) if self.vocabulary else len(inputs),))
        return inputs.to(device), labels.to(device)


def gpt(title: str, width: int, layers: int, vocabulary: int) -> Model:
    """Return a GPT with 64 numbers a head, and microbatches of 1,024 tokens."""

    def make() -> nn.Module:
        model = GPT(width, layers, width // 64)
        model.tokens, model.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)
        return model

    return Model(title, make, (1024 // LENGTH, LENGTH), vocabulary)


TRAINED = {
    "cnn": Model("small CNN", MODELS["small CNN"], (64, 1, 28, 28)),
    "perceptron": Model("perceptron, 6M parameters", lambda: perceptron(2048, 1), (64, 1, 28, 28)),
    "gpt": gpt("GPT, 10M parameters", 384, 4, 4096),
    # GPT-2, with an output layer of its own
    "gpt-large": gpt("GPT, 162M parameters", 768, 12, 50257),
}


@dataclass(frozen=True)
class Side:
    """How an update is made."""

    rule: str = ""  # by hand without
    zeroed: bool = False  # by hand: whether gradients stay allocated
    fused: bool = False  # by hand: whether the last microbatch and the update are one graph
    half: bool = False  # whether the forward runs in bfloat16, by autocast
    logs: bool = False
    max_grad_norm: float | None = None
    reproducible: bool = False
    before_step: Callable[..., None] | None = None  # a pre-hook of the inner optimizer's step


SIDES = {
    "by hand": Side(),  # zero_grad(set_to_none=True)
    "by hand, zeroed": Side(zeroed=True),
    "by hand, one graph less": Side(fused=True),
    "linear": Side("linear"),
    "AdaScale": Side("adascale"),
    "root": Side("root"),
    "sqrt-SDE": Side("sqrt-sde"),  # for Adam, as the next one
    "invariant Adam": Side("invariant-adam"),
    "linear, clipping": Side("linear", max_grad_norm=1.0),
    "linear, logging": Side("linear", logs=True),
    "linear, reproducible": Side("linear", reproducible=True),
    "by hand, bfloat16": Side(half=True),
    "linear, bfloat16": Side("linear", half=True),
}


def make_update(model: Model, side: Side) -> Callable[[], None]:
    """Return a function that makes one update on this core."""
    import torch_xla

    backend, network = vbs.backend.XlaBackend(), model.make().to(torch_xla.device())
    vbs.broadcast_parameters(network)
    inner, (inputs, labels) = model.inner(network), model.data(torch_xla.device())
    rows, world = len(inputs), backend.world
    if side.before_step is not None:
        inner.register_step_pre_hook(side.before_step)

    def loss() -> Tensor:
        with torch.autocast("xla", torch.bfloat16) if side.half else contextlib.nullcontext():
            return nn.functional.cross_entropy(network(inputs).view(len(labels), -1), labels)

    def by_hand() -> None:
        for microbatch in range(MICROBATCHES):
            (loss() / (MICROBATCHES * world.size)).backward()
            if not (side.fused and microbatch == MICROBATCHES - 1):
                torch_xla.sync()
        backend.all_reduce_sum([parameter.grad for parameter in network.parameters()])
        inner.step()
        inner.zero_grad(set_to_none=not side.zeroed)
        torch_xla.sync()

    if not side.rule:
        return by_hand
    size = rows * MICROBATCHES * world.size
    sampler = vbs.CustomSampler(1000 * size, size, world.size, world.rank, rows, reproducible=side.reproducible)
    rule = "adamscale" if side.rule == "adascale" and model.vocabulary else side.rule
    options: dict[str, Any] = {"tracker": vbs.Tracker(tempfile.mkdtemp()), "grad_norm": True} if side.logs else {}
    optimizer = vbs.CustomOptimizer(
        inner, sampler, ref_batchsize=rows, rule=rule, max_grad_norm=side.max_grad_norm, **options
    )
    updates = iter(vbs.updates(sampler, optimizer))

    def update() -> None:
        for _ in next(updates):
            value = loss()
            value.backward()
            if side.logs:
                optimizer.log(loss=value)
            optimizer.step()

    return update


def train(folder: Path, name: str, sides: Sequence[str]) -> None:
    """Make updates of each side on this core; core 0 writes what torch_xla says of those after the warm-up.

    `executed.json` has, by side, the part of the file PT_XLA_DEBUG_FILE with them, and their copies to the host.
    """
    from torch_xla.debug import metrics

    xla.is_cpu = lambda device: False  # type: ignore[assignment]
    backend, debug = vbs.backend.XlaBackend(), Path(os.environ["PT_XLA_DEBUG_FILE"])
    found: dict[str, dict[str, float]] = {}

    def now() -> tuple[int, float, int]:
        backend.barrier()  # metrics may be read only while no core works
        copies = (metrics.metric_data("TransferFromDeviceTime") or (0,))[0]
        values = debug.stat().st_size, copies, xla.compiled_graphs()
        backend.barrier()
        return values

    for side in sides:
        update = make_update(TRAINED[name], SIDES[side])
        for _ in range(WARM_UP):
            update()
        begin, copies_before, compiled_before = now()
        for _ in range(MEASURED):
            update()
        end, copies, compiled = now()
        if compiled > compiled_before:
            raise RuntimeError(f"{name}, {side}: a graph was compiled after {WARM_UP} updates")
        found[side] = {"begin": begin, "end": end, "copies": (copies - copies_before) / MEASURED / CORES}
    if backend.world.rank == 0:
        (folder / "executed.json").write_text(json.dumps(found))


def main(folder: str, name: str, *sides: str) -> None:
    """Train on two cores."""
    xla.launch(train, (Path(folder), name, sides), cores=CORES)
