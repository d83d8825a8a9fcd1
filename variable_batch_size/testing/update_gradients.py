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
    with _watch_uncleared(trained) as (look_at_all, uncleared):
        gradients = _gradients_at_step(step, trained, look_at_all)
    still_there = (parameter.grad is not None and parameter.grad.to_dense().any() for parameter in uncleared)
    return gradients, not any(still_there)


@contextmanager
def _watch_uncleared(trained: nn.Module) -> Iterator[tuple[Callable[[], None], list[Tensor]]]:
    """Find the parameters whose gradient a step does not clear before its backward pass adds to it.

    Yields a function that looks at the parameters that had no backward pass yet, and the list of those that were not
    cleared, which grows within the block. A hook looks at each parameter right before its gradient is added. A gradient
    that is None or 0 is replaced by ones until then, because its clearing would not show. Parameters of FSDP are left
    out: their gradients are not added to `.grad` of the parameter.
    """
    before, marks = dict[Tensor, Tensor | None](), dict[Tensor, Tensor]()  # gradients; what replaces them until a look
    uncleared = list[Tensor]()

    def look(parameter: Tensor) -> None:
        """At the first call for a parameter, note whether the mark in `.grad` was cleared; put the gradient back."""
        mark = marks.pop(parameter, None)
        PROBES.discard(id(mark))  # before another tensor gets the id
        if mark is not None and parameter.grad is mark:  # neither set to None nor replaced
            if mark.to_dense().any():  # nor set to 0
                uncleared.append(parameter)
            parameter.grad = before[parameter]

    def look_at_all() -> None:
        """Look at each parameter that had no backward pass yet."""
        for parameter in before:
            look(parameter)

    for name, parameter in trained.named_parameters():
        if parameter.requires_grad and type(parameter) is nn.Parameter and "_fsdp_wrapped_module" not in name:
            before[parameter] = gradient = parameter.grad
            empty = gradient is None or not gradient.to_dense().any()
            parameter.grad = marks[parameter] = torch.ones_like(parameter) if empty else gradient  # type: ignore[assignment]
            if gradient is None:  # others, which find a gradient there, then know that it is none
                PROBES.add(id(parameter.grad))
    handles = [leaf.register_hook(lambda _, leaf=leaf: look(leaf)) for leaf in before]  # type: ignore[no-untyped-call]
    try:
        yield look_at_all, uncleared
    finally:
        look_at_all()
        for handle in handles:
            handle.remove()


def _gradients_at_step(
    step: Callable[[], object], trained: nn.Module, look_at_all: Callable[[], None]
) -> dict[str, FloatArray]:
    """Return the gradients with which `step` calls its optimizers, of the parameters of `trained` that these have.

    Args:
        step: makes one update.
        trained: the model.
        look_at_all: called when the gradients are complete.
    """
    collected: dict[str, FloatArray] = {}

    def collect(optimizer: torch.optim.Optimizer, arguments: Any, options: Any) -> Any:
        """Collect the gradients, as a hook right before each step; return the arguments of the step if they change."""
        closure = options.pop("closure", None) or dict(enumerate(arguments)).get(1)  # arguments[0] is the optimizer
        losses = [closure()] if closure else []  # it computes the gradients; the step below gets its loss
        look_at_all()
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        gradients = gradients_of_model(trained, lambda _, parameter: id(parameter) in stepped)
        if not collected.keys().isdisjoint(gradients):
            raise RuntimeError("step must make one update, but it makes several; let it end after the first")
        collected.update(gradients)
        if not closure:
            return None  # the arguments of step() stay
        return (optimizer, lambda: losses.pop() if losses else closure()), options

    with register_optimizer_step_pre_hook(collect):
        step()
    if not collected:
        requirement = "step must call step() of an optimizer that has parameters of the model, but no call was seen"
        raise RuntimeError(f"{requirement}; pass trained= if it trains another model, and a step of a whole update")
    return collected


def gradients_of_model(model: nn.Module, wanted: Callable[[str, nn.Parameter], bool]) -> dict[str, FloatArray]:
    """Return the whole gradients of `wanted` parameters, flat, by their names without the names of wrappers."""
    gradients: dict[str, FloatArray] = {}
    for wrapped_name, parameter in model.named_parameters():
        name = re.sub(r"\b(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.", "", wrapped_name)
        if parameter.requires_grad and wanted(name, parameter):
            gradient: Any = torch.zeros(parameter.shape) if parameter.grad is None else parameter.grad.detach()
            gradient = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            gradients[name] = gradient.to_dense().reshape(-1).double().cpu().numpy().copy()
    return gradients
