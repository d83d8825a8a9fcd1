"""Batch normalization and small microbatches: it normalizes each microbatch by the statistics of its own rows."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from variable_batch_size._validation import type_error
from variable_batch_size.data.microbatching import cut
from variable_batch_size.data.plan import STEPS_PER_DEAL
from variable_batch_size.data.sampler import CustomSampler
from variable_batch_size.optim.instances import instances

ENOUGH = 8  # distinct samples in a microbatch

_seen: WeakSet[torch.nn.Module] = WeakSet()  # models that `broadcast_parameters` has seen
_warned: WeakSet[torch.nn.Module] = WeakSet()


class _Smallest(NamedTuple):
    samples: int  # distinct samples of the smallest microbatch
    batch_size: int  # samples of its step


def check_model(model: torch.nn.Module, sampler: CustomSampler) -> None:
    """Warn, once for a model, if its batch normalization gets very small microbatches in the present epoch.

    With a fixed shape the remainder of a step is split into microbatches of few distinct samples, which are repeated:
    fewer than 8 of them, and fewer than `minibatch_size`, make the variance too small. Otherwise only a microbatch of
    a single sample is too small, and torch raises there. `Checkpoint` calls this function, and so does the first
    update for a model that was passed to `broadcast_parameters`.

    Args:
        model: the model; layers in evaluation mode do not count.
        sampler: the sampler that feeds it.

    Raises:
        TypeError: if `model` is not a Module, or `sampler` is not a CustomSampler.
    """
    if not isinstance(model, torch.nn.Module):
        raise type_error("model must be a torch.nn.Module", model, "pass the model")
    if not isinstance(sampler, CustomSampler):
        raise type_error("sampler must be a vbs.CustomSampler", sampler, "pass the one that feeds the loop")
    if model in _warned or not any(isinstance(part, _BatchNorm) and part.training for part in model.modules()):
        return
    plan, smallest = sampler.plan, _smallest(sampler)
    if smallest.samples >= (min(ENOUGH, plan.minibatch_size) if plan.fixed_shape else 2):
        return
    _warned.add(model)
    number = "1 distinct sample" if smallest.samples == 1 else f"{smallest.samples} distinct samples"
    consequence = "whose repetition makes its variance too small" if plan.fixed_shape else "with which torch raises"
    warnings.warn(
        f"Batch normalization gets microbatches of {number}, {consequence}: a step of {smallest.batch_size} with "
        f"minibatch_size={plan.minibatch_size}; remedies are {_remedies(sampler, smallest)}",
        UserWarning,
        stacklevel=3,
    )


def _remedies(sampler: CustomSampler, smallest: _Smallest) -> str:
    plan = sampler.plan
    last = plan.step(sampler.clock.epoch, sampler.clock.epoch.end_step - 1)
    rest = smallest.batch_size == last.batch_size < plan.trace.batch_size(last.number)
    tail = ["drop_last=True, because the step is the rest of an epoch"] if rest else []
    if plan.fixed_shape:
        whole = f"a trace of multiples of {plan.minibatch_size} (BatchTrace.round_to)"
        return ", ".join([*tail, whole, "fixed_shape=False where nothing is compiled, and GroupNorm"])
    larger = "a larger minibatch_size" if smallest.batch_size > 1 else "a trace without such steps"
    return ", ".join([*tail, f"{larger}, and GroupNorm"])


def remember(model: torch.nn.Module) -> None:
    """Let the first update check a model, see `check_seen`."""
    _seen.add(model)


def check_seen(parameters: Sequence[Tensor], sampler: CustomSampler) -> None:
    """Check the remembered models that have one of these parameters."""
    own = {*map(id, parameters)} if _seen else set()
    for model in list(_seen):
        if not own.isdisjoint(map(id, model.parameters())):
            _seen.discard(model)
            check_model(model, sampler)


def normalizes_batches(parameters: Sequence[Tensor]) -> bool:
    """Return whether a batch normalization has one of these parameters, or is in a remembered model that has one.

    Then the result of a training depends on how a step is split. A layer whose own parameters are not among these, and
    whose model was not passed to `broadcast_parameters` before, is not found.
    """
    own = {*map(id, parameters)}
    models = [model for model in _seen if not own.isdisjoint(map(id, model.parameters()))]
    if any(isinstance(part, _BatchNorm) for model in models for part in model.modules()):
        return True
    lengths = [parameter.numel() for parameter in parameters if parameter.dim() == 1]
    if len({*lengths}) == len(lengths):  # weight and bias of a layer are vectors of the same length
        return False
    return any(not own.isdisjoint(map(id, layer.parameters())) for layer in instances(_BatchNorm))


def _smallest(sampler: CustomSampler) -> _Smallest:
    """Return the smallest microbatch of the present epoch."""
    plan, epoch = sampler.plan, sampler.clock.epoch
    deals = (plan.deal(epoch, step, sampler.world) for step in range(epoch.first_step, epoch.end_step, STEPS_PER_DEAL))
    batch_sizes = np.unique(np.concatenate([deal.sizes for deal in deals])).tolist()
    how: dict[str, Any] = {"fixed_shape": plan.fixed_shape, "min_microbatches": sampler.min_microbatches}
    cuts = ((cut(size, plan.minibatch_size, **how), size) for size in batch_sizes)
    return min(_Smallest(found.locate(0)[1], size) for found, size in cuts)
