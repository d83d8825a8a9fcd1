"""The gradients with which a training step calls its optimizer, in any loop."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from variable_batch_size._validation import FloatArray
from variable_batch_size.optim.tensors.parameters import PROBES


def gradients_of_step(step: Callable[[], object], trained: nn.Module) -> tuple[dict[str, FloatArray], bool]:
    """Return the gradients of one update, by the names of parameters, and whether it clears them before or after it.

    Raise RuntimeError if `step` makes no update, or several.
    """
    with _watch_uncleared(trained) as (look, left):
        reached = _gradients_at_step(step, trained, look)
    return reached, not any(parameter.grad is not None and parameter.grad.to_dense().any() for parameter in left)


@contextmanager
def _watch_uncleared(trained: nn.Module) -> Iterator[tuple[Callable[[], None], list[Tensor]]]:
    """Yield what looks at parameters without a backward, and a list of those whose gradient was not cleared before one.

    A gradient that is None or 0 is replaced by ones until then. Those of FSDP are left out: they are added elsewhere.
    """
    before, marks, left = dict[Tensor, Tensor | None](), dict[Tensor, Tensor](), list[Tensor]()

    def look(parameter: Tensor) -> None:
        mark = marks.pop(parameter, None)
        PROBES.discard(id(mark))  # before another tensor gets the id
        if mark is not None and parameter.grad is mark:
            left.extend([parameter] if mark.to_dense().any() else [])
            parameter.grad = before[parameter]

    def look_at_all() -> None:
        for parameter in before:
            look(parameter)

    for name, parameter in trained.named_parameters():
        if parameter.requires_grad and type(parameter) is nn.Parameter and "_fsdp_wrapped_module" not in name:
            before[parameter] = gradient = parameter.grad
            empty = gradient is None or not gradient.to_dense().any()
            parameter.grad = marks[parameter] = torch.ones_like(parameter) if empty else gradient  # type: ignore[assignment]
            if gradient is None:
                PROBES.add(id(parameter.grad))
    handles = [leaf.register_hook(lambda _, leaf=leaf: look(leaf)) for leaf in before]  # type: ignore[no-untyped-call]
    try:
        yield look_at_all, left
    finally:
        look_at_all()
        for handle in handles:
            handle.remove()


def _gradients_at_step(
    step: Callable[[], object], trained: nn.Module, look_at_left: Callable[[], None]
) -> dict[str, FloatArray]:
    """Return the gradients with which `step` calls its optimizers, of the parameters that these have."""
    reached: dict[str, FloatArray] = {}

    def look(optimizer: torch.optim.Optimizer, arguments: Any, options: Any) -> Any:
        closure = options.pop("closure", None) or dict(enumerate(arguments)).get(1)
        losses = [closure()] if closure else []  # the gradients are there after it
        look_at_left()
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        gradients = gradients_of_model(trained, lambda _, parameter: id(parameter) in stepped)
        if not reached.keys().isdisjoint(gradients):
            raise RuntimeError("step must make one update, but it makes several; let it end after the first")
        reached.update(gradients)
        return closure and ((optimizer, lambda: losses.pop() if losses else closure()), options)

    with register_optimizer_step_pre_hook(look):
        step()
    if not reached:
        requirement = "step must call step() of an optimizer that has parameters of the model, but no call was seen"
        raise RuntimeError(f"{requirement}; pass trained= if it trains another model, and a step of a whole update")
    return reached


def gradients_of_model(model: nn.Module, wanted: Callable[[str, nn.Parameter], bool]) -> dict[str, FloatArray]:
    """Return the gradients of parameters, of all ranks, (coordinates,), by their names without wrappers."""
    gradients: dict[str, FloatArray] = {}
    for wrapped, parameter in model.named_parameters():
        name = re.sub(r"\b(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.", "", wrapped)
        if parameter.requires_grad and wanted(name, parameter):
            gradient: Any = torch.zeros(parameter.shape) if parameter.grad is None else parameter.grad.detach()
            gradient = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            gradients[name] = gradient.to_dense().reshape(-1).double().cpu().numpy().copy()
    return gradients
