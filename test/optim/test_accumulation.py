"""The gradients of an update: of parameters that all microbatches use, or some, or none; and of any dtype."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import variable_batch_size as vbs
from helpers.models import Words, half_frozen
from helpers.reference import REF, SGD, SIZES, Array, Training, assert_equal, batches, filled, training, twin
from variable_batch_size.backend import Backend
from variable_batch_size.testing import run_ranks


def by_hand(model: nn.Module, updates: int) -> list[Array]:
    """The linear rule with torch's SGD, one big batch an update."""
    run, inner = training(model=model), torch.optim.SGD(model.parameters(), **SGD)
    for batch in batches(SIZES[:updates], 50):
        inner.zero_grad()
        run.loss(batch.tolist()).backward()
        inner.param_groups[0]["lr"] = SGD["lr"] * len(batch) / REF
        inner.step()
    return run.weights()


def test_a_frozen_parameter_does_not_change() -> None:
    def train(backend: Backend) -> Training:
        model = half_frozen()
        return training(model=model, backend=backend).run(4)

    for run in run_ranks(train, 2):
        assert_equal(run.weights()[:2], training().weights()[:2], tolerance=0)
        assert len(run.optimizer.state) == 2


def test_a_new_wrapper_continues_with_other_parameters() -> None:
    def train(backend: Backend) -> Training:
        model = half_frozen()
        run = training(model=model, backend=backend, find_unused_parameters=True).run(2)
        model[0].requires_grad_(True)
        state, sampler, inner = run.optimizer.state_dict(), run.sampler, run.optimizer.inner
        run.optimizer = vbs.LinearRuleOptimizer(inner, sampler, REF, backend=backend, find_unused_parameters=True)
        run.optimizer.load_state_dict(state)
        return run.run(2)

    model = half_frozen()
    run, inner = training(model=model), torch.optim.SGD(model.parameters(), **SGD)
    for step, batch in enumerate(batches(SIZES[:4], 50)):
        model[0].requires_grad_(step > 1)
        model.zero_grad()
        run.loss(batch.tolist()).backward()
        inner.param_groups[0]["lr"] = SGD["lr"] * len(batch) / REF
        inner.step()
    for rank in run_ranks(train, 2):
        assert_equal(rank.weights(), run.weights())
        assert rank.optimizer.progress == pytest.approx(50 / REF)


@pytest.mark.parametrize("minibatch_size", [4, 64], ids=["several microbatches", "one microbatch"])
@pytest.mark.parametrize("scaler", [False, True], ids=["", "GradScaler"])
def test_rejects_a_sparse_gradient(minibatch_size: int, scaler: bool) -> None:
    run = training(model=Words(sparse=True), minibatch_size=minibatch_size)
    driver = torch.amp.GradScaler("cpu", enabled=scaler)
    driver.scale(run.loss(next(iter(run.sampler)))).backward()
    with pytest.raises(
        TypeError, match=r"must be dense, but that of parameter 0, of shape \(10, 2\), .*sparse_coo; build .*=F"
    ):
        driver.step(run.optimizer)


def test_trains_an_embedding_with_dense_gradients() -> None:
    for run in run_ranks(lambda backend: training(model=filled(Words(sparse=False)), backend=backend).run(5), 2):
        assert_equal(run.weights(), by_hand(filled(Words(sparse=False)), 5))


def test_a_replay_has_no_effect_even_if_it_is_non_finite() -> None:
    def train(backend: Backend) -> Training:
        run = training(sizes=(5, 1, 2), dataset_size=8, backend=backend)
        for indices in run.sampler:
            factor = torch.nan if run.optimizer.microbatch.samples == 0 else 1.0
            (run.loss(indices) * factor).backward()
            run.optimizer.step()
        return run

    for run in run_ranks(train, 3):
        assert_equal(run.weights(), twin(vbs.LinearRuleOptimizer, (5, 1, 2), dataset_size=8))


# ----------------------------------------------------------------------------------------------------------- dtypes


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_trains_half_precision_parameters(dtype: torch.dtype, world: int) -> None:
    expected = twin(vbs.RootRuleOptimizer, SIZES, dtype=dtype)
    for run in run_ranks(
        lambda backend: training(vbs.RootRuleOptimizer, dtype=dtype, backend=backend).run(len(SIZES)), world
    ):
        assert {parameter.dtype for parameter in run.model.parameters()} == {dtype}
        assert_equal(run.weights(), expected, 3e-2 if dtype is torch.bfloat16 else 4e-3)


@pytest.mark.parametrize("options", [{}, {"noise": "microbatches"}], ids=str)
@pytest.mark.parametrize("world", [1, 2])
def test_half_precision_does_not_overflow_in_a_sum_of_microbatches(options: dict[str, Any], world: int) -> None:
    """128 gradients of 1000 have a sum of 128,000, above the largest float16, and a mean of 1000."""

    def train(backend: Backend) -> Tensor:
        weight = nn.Parameter(torch.zeros(3, dtype=torch.float16))
        sampler = vbs.CustomSampler(128, 128, backend.world.size, backend.world.rank, minibatch_size=1)
        inner = torch.optim.SGD([weight], lr=2**-10)
        optimizer = vbs.ConstantOptimizer(inner, sampler, 128, backend=backend, max_grad_norm=1e6, **options)
        for _ in sampler:
            (weight * 1000).sum().backward()
            optimizer.step()
        return weight.detach()

    for weight in run_ranks(train, world):
        torch.testing.assert_close(weight, torch.full((3,), -1000 / 1024, dtype=torch.float16), rtol=1e-3, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_gradients_are_accumulated_without_loss_of_digits(dtype: torch.dtype) -> None:
    """The update of 1000 microbatches is that of their exact mean, rounded once."""
    values = torch.linspace(0.5, 1.5, 1000).to(dtype)
    weight = nn.Parameter(torch.zeros((), dtype=dtype))
    sampler = vbs.CustomSampler(1000, 1000, 1, 0, minibatch_size=1)
    optimizer = vbs.ConstantOptimizer(torch.optim.SGD([weight], lr=1.0), sampler)
    for (index,) in sampler:
        (weight * values[index]).backward()
        optimizer.step()
    assert weight.item() == -values.double().mean().to(dtype).item()


def test_with_a_static_graph_gradients_are_replaced_before_anything_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What backward leaves may be a view of its transpose: if anything held it, both would be results of the graph."""
    monkeypatch.setattr(vbs.backend.LocalBackend, "static_graph", True)
    run = training(vbs.LinearRuleOptimizer, [20], minibatch_size=8)
    left: list[weakref.ref[Tensor]] = []
    held: list[bool] = []

    def mark_step(_: object) -> None:
        held.extend(gradient() is not None for gradient in left)
        left.clear()

    monkeypatch.setattr(vbs.backend.LocalBackend, "mark_step", mark_step)
    for indices in run.sampler:
        run.loss(indices).backward()
        left[:] = [weakref.ref(p.grad) for p in run.model.parameters() if p.grad is not None]
        run.optimizer.step()
    assert held
    assert not any(held)
