"""DistributedDataParallel: refused where it reduces the gradients, too, and accepted where its reduction is off."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import variable_batch_size as vbs
from helpers.reference import SIZES, Training, assert_equal, network, training, twin
from variable_batch_size.optim.consistency import broadcast_parameters

TWICE = (
    r"wrapped in DistributedDataParallel, which reduces them too; train the bare module \(model\.module\), or switch"
)


class Subclass(DistributedDataParallel):
    """As users and frameworks write them."""


class SecondSubclass(Subclass):
    """A subclass of a subclass."""


KINDS = [DistributedDataParallel, Subclass, SecondSubclass]


@pytest.fixture(autouse=True)
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def through(wrapped: nn.Module, run: Training, updates: int = 4) -> None:
    """Train with the forward of the wrapped model."""
    bare, run.model = run.model, wrapped
    try:
        run.iterate(updates)
    finally:
        run.model = bare


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("updates_before", [0, 1, 3])
@pytest.mark.parametrize("made_first", [True, False])
def test_a_wrapper_that_reduces_is_refused_whenever_it_is_made(
    kind: Any, updates_before: int, made_first: bool
) -> None:
    model = network()
    wrapped = kind(model) if made_first else None
    run = training(model=model)
    if wrapped is not None and updates_before:
        wrapped.require_backward_grad_sync = False
        through(wrapped, run, updates_before)
        wrapped.require_backward_grad_sync = True
    elif updates_before:
        run.run(updates_before)
    wrapped = wrapped if wrapped is not None else kind(model)
    with pytest.raises(RuntimeError, match=TWICE):
        through(wrapped, run)
    assert run.optimizer.updates == updates_before


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_wrapper_whose_reduction_is_off_is_accepted(kind: Any, options: dict[str, Any]) -> None:
    run = training(model=network())
    wrapped = kind(run.model, **options)
    wrapped.require_backward_grad_sync = False
    broadcast_parameters(wrapped)
    through(wrapped, run)
    assert_equal(run.weights(), twin(vbs.LinearRuleOptimizer, SIZES[:4]))


@pytest.mark.parametrize("kind", KINDS)
def test_no_sync_is_accepted_although_step_is_called_after_it(kind: Any) -> None:
    run = training(model=network())
    wrapped, bare = kind(run.model), run.model
    for indices in run.sampler:
        run.model = wrapped
        with wrapped.no_sync():
            run.loss(indices).backward()
        run.model = bare
        run.optimizer.step()
    assert_equal(run.weights(), twin(vbs.LinearRuleOptimizer, SIZES[:4]))


def test_a_wrapper_of_another_model_does_not_matter() -> None:
    run = training(model=network())
    other = DistributedDataParallel(network())
    for indices in run.sampler:
        other(torch.ones(1, 3).double()).sum().backward()
        run.loss(indices).backward()
        run.optimizer.step()
    assert_equal(run.weights(), twin(vbs.LinearRuleOptimizer, SIZES[:4]))


def test_broadcast_parameters_refuses_a_wrapper_that_reduces() -> None:
    with pytest.raises(TypeError, match=TWICE):
        broadcast_parameters(SecondSubclass(network()))
