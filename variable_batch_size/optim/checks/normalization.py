"""Batch normalization and small microbatches: it normalizes each microbatch by the statistics of its own rows."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor
from torch.nn import SyncBatchNorm
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from variable_batch_size._validation import type_error, value_error
from variable_batch_size.data.dealer import Dealer
from variable_batch_size.microbatching import cut

ENOUGH = 8  # distinct samples in a microbatch

_seen: WeakSet[torch.nn.Module] = WeakSet()  # models that `broadcast_parameters` has seen
_warned: WeakSet[torch.nn.Module] = WeakSet()


class _Smallest(NamedTuple):
    samples: int  # distinct samples of the smallest microbatch
    batch_size: int  # samples of its step


def check_batch_norm(model: torch.nn.Module, sampler: Dealer) -> None:
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
    if not isinstance(sampler, Dealer):
        raise type_error("sampler must be a vbs.CustomSampler", sampler, "pass the one that feeds the loop")
    if model in _warned or not any(_depends_on_cut(part) and part.training for part in model.modules()):
        return
    if sampler.batches.arriving or sampler.batches.packs:
        return  # nobody knows how large the batches will be
    plan = sampler.plan
    smallest = _smallest_microbatch(sampler)
    if smallest.samples >= (min(ENOUGH, plan.minibatch_size) if plan.fixed_shape else 2):
        return
    _warned.add(model)
    number = "1 distinct sample" if smallest.samples == 1 else f"{smallest.samples} distinct samples"
    consequence = "whose repetition makes its variance too small" if plan.fixed_shape else "with which torch raises"
    warnings.warn(
        f"Batch normalization gets microbatches of {number}, {consequence}: a step of {smallest.batch_size} with "
        f"minibatch_size={plan.minibatch_size}; remedies are {_remedies_in_words(sampler, smallest)}",
        UserWarning,
        stacklevel=3,
    )


def check_model_known(model: torch.nn.Module, sampler: Dealer) -> None:
    """Check a model as `check_batch_norm` does, and that its optimizer knew it when it chose how to split steps."""
    if sampler.batches.reproducible:
        check_reproducible(model, [])
    if sampler.dealing.multiple_of > 1 and any(map(_depends_on_cut, model.modules())):
        raise ValueError(
            "with batch normalization the result depends on how steps are cut, but the optimizer was created without "
            "the model; pass model= to it, or call vbs.broadcast_parameters(model) before it is created"
        )
    check_batch_norm(model, sampler)


def _remedies_in_words(sampler: Dealer, smallest: _Smallest) -> str:
    """Return the part of the warning that tells the user how to make the smallest microbatch larger."""
    plan = sampler.plan
    epoch = sampler.batches.epoch(sampler.position)
    last = plan.step(epoch, epoch.end_step - 1)
    is_rest = smallest.batch_size == last.batch_size < plan.trace.batch_size(last.number)
    remedies = ["drop_last=True, because the step is the rest of an epoch"] if is_rest else []
    if plan.fixed_shape:
        remedies.append(f"a trace of multiples of {plan.minibatch_size} (BatchTrace.round_to)")
        remedies.append("fixed_shape=False where nothing is compiled, and GroupNorm")
    elif smallest.batch_size > 1:
        remedies.append("a larger minibatch_size, and GroupNorm")
    else:
        remedies.append("a trace without such steps, and GroupNorm")
    return ", ".join(remedies)


def remember_model(model: torch.nn.Module) -> None:
    """Let the first update check a model, see `check_remembered_models`."""
    _seen.add(model)


def check_remembered_models(parameters: Sequence[Tensor], sampler: Dealer) -> None:
    """Before the first update, check the batch normalization of models that `broadcast_parameters` has seen.

    Only models that have one of these parameters, of the optimizer, are checked, each once.
    """
    identities = {*map(id, parameters)} if _seen else set()
    for model in list(_seen):
        if not identities.isdisjoint(map(id, model.parameters())):
            _seen.discard(model)
            check_model_known(model, sampler)


def cut_options(
    model: torch.nn.Module | None, parameters: Sequence[Tensor], *, measured: bool, alone: bool
) -> dict[str, bool]:
    """Return how the sampler has to split steps into microbatches, as arguments of `Dealer.attach`.

    "spread" allows more microbatches than necessary, so that no rank is idle, unless the result depends on the split.

    Args:
        model: the model, if it is known.
        parameters: the parameters of the optimizer, by which models that were broadcast are found.
        measured: whether gradients of microbatches are compared, as for the noise.
        alone: whether there is a single rank.
    """
    modules = _known_modules(model, parameters)
    # SyncBatchNorm has a collective in its forward, which all ranks must call equally often.
    communicates = any(isinstance(module, SyncBatchNorm) and module.training for module in modules)
    return {
        "spread": alone or not (measured or any(map(_depends_on_cut, modules))),
        "equal_rounds": communicates and not alone,
    }


def check_reproducible(model: torch.nn.Module | None, parameters: Sequence[Tensor]) -> None:
    """Raise ValueError if a layer keeps updates from having the same bits with any number of ranks.

    Such layers see several samples of a microbatch together, or keep statistics of microbatches.
    """
    requirement = "reproducible=True needs"
    for module in _known_modules(model, parameters):
        is_batch_norm = isinstance(module, _BatchNorm)
        tracks = isinstance(module, _NormBase) and module.track_running_stats
        if module.training and (is_batch_norm or tracks or type(module).__name__ in ("SpectralNorm", "_SpectralNorm")):
            found = "batch normalization" if is_batch_norm else type(module).__name__
            remedy = "use GroupNorm, or freeze it in evaluation mode"
            raise value_error(f"{requirement} layers that see each sample alone, and keep nothing", found, remedy)


def _known_modules(model: torch.nn.Module | None, parameters: Sequence[Tensor]) -> list[torch.nn.Module]:
    """Return all modules of a model, and of models that `broadcast_parameters` got, if they have some parameters."""
    identities = {*map(id, parameters)}
    models = [broadcast for broadcast in _seen if not identities.isdisjoint(map(id, broadcast.parameters()))]
    return [module for known_model in (model, *models) if known_model is not None for module in known_model.modules()]


def _depends_on_cut(part: torch.nn.Module) -> bool:
    """Return whether a layer normalizes each microbatch by itself, so that the result depends on how a step is cut."""
    return isinstance(part, _BatchNorm) and not isinstance(part, SyncBatchNorm)


def _smallest_microbatch(sampler: Dealer) -> _Smallest:
    """Return the microbatch with the fewest distinct samples in the rest of the epoch."""
    plan = sampler.plan
    epoch = sampler.batches.epoch(sampler.position)
    dealing = sampler.dealing  # how microbatches are assigned to ranks
    deals = plan.deals(epoch, epoch.first_step, sampler.world, dealing._replace(unequal=None))
    batch_sizes = np.unique(np.concatenate([deal.sizes for deal in deals])).tolist()
    options: dict[str, Any] = {"fixed_shape": plan.fixed_shape, "multiple_of": dealing.multiple_of}
    cuts = ((cut(size, plan.minibatch_size, **options), size) for size in batch_sizes)
    # The first microbatch of a step is its smallest: `locate(0)` returns the position and the size of it.
    return min(_Smallest(cut_of_step.locate(0)[1], size) for cut_of_step, size in cuts)
