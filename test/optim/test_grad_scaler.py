"""Mixed precision: torch's GradScaler and autocast around the wrapper."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import variable_batch_size as vbs
from helpers.reference import REF, SIZES, Training, assert_equal, training, twin
from variable_batch_size.backend import Backend
from variable_batch_size.testing import run_ranks


def label(value: Any) -> str:
    return value.__name__ if isinstance(value, type) else "-".join(value)


def scaled_steps(run: Training, scaler: torch.amp.GradScaler, spoil: int = -1) -> Iterator[bool]:
    """The rest of an epoch under a GradScaler; the loss of microbatch number `spoil` is infinite."""
    for number, indices in enumerate(run.sampler):
        loss = run.loss(indices) * (torch.inf if number == spoil else 1)
        run.optimizer.backward(loss, scaler=scaler)
        yield scaler.step(run.optimizer)  # type: ignore[misc]
        scaler.update()


def grad_scaler(growth_interval: int = 2) -> torch.amp.GradScaler:
    """One whose scale grows at every second microbatch."""
    return torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=growth_interval)


@pytest.mark.parametrize("kind", [vbs.RootRuleOptimizer, vbs.LinearRuleMomentumOptimizer], ids=label)
def test_the_update_is_exact_if_the_loss_scale_changes_within_a_step(kind: Any) -> None:
    def train(backend: Backend) -> Training:
        run = training(kind, SIZES[:4], dataset_size=61, backend=backend, max_grad_norm=0.5)
        scaler = grad_scaler()
        assert sum(scaled_steps(run, scaler)) == 4
        assert scaler.get_scale() > 2.0**8
        return run

    for run in run_ranks(train, 3):
        assert_equal(run.weights(), twin(kind, SIZES[:4], dataset_size=61, max_grad_norm=0.5))
        assert run.optimizer.progress == pytest.approx(61 / REF)


def test_an_overflow_on_one_rank_skips_the_update_on_all() -> None:
    def train(backend: Backend) -> tuple[Training, list[bool]]:
        run = training(vbs.RootRuleOptimizer, SIZES[:4], dataset_size=61, backend=backend)
        return run, list(scaled_steps(run, grad_scaler(), spoil=0 if backend.world.rank == 1 else -1))

    for run, returned in run_ranks(train, 3):
        assert_equal(run.weights(), twin(vbs.RootRuleOptimizer, SIZES[:4], dataset_size=61, skipped={0}))
        assert sum(returned) == 3
        assert run.optimizer.progress == pytest.approx((61 - SIZES[0]) / REF)
        assert (run.optimizer.updates, run.optimizer.samples) == (4, 61)


def test_an_overflow_in_a_replay_is_ignored() -> None:
    def train(backend: Backend) -> Training:
        run = training(sizes=SIZES[:4], dataset_size=61, backend=backend)
        list(scaled_steps(run, grad_scaler(), spoil=3 if backend.world.rank == 1 else -1))  # its turn in the step of 1
        return run

    for run in run_ranks(train, 3):
        assert_equal(run.weights(), twin(vbs.LinearRuleOptimizer, SIZES[:4], dataset_size=61))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_trains_with_grad_scaler_and_autocast(dtype: torch.dtype) -> None:
    run = training(sizes=SIZES[:4], dataset_size=61, dtype=torch.float32)
    whole_loss = run.loss

    def loss(indices: Any) -> Tensor:
        with torch.autocast("cpu", dtype=dtype):
            return whole_loss(indices)

    run.loss = loss  # type: ignore[method-assign]
    assert sum(scaled_steps(run, grad_scaler(growth_interval=8))) == 4
    assert_equal(run.weights(), twin(vbs.LinearRuleOptimizer, SIZES[:4], dataset_size=61), 1e-2)


def test_a_loss_that_is_scaled_in_the_loop_is_refused() -> None:
    run, scaler = training(), grad_scaler()
    before = run.weights()
    scaler.scale(run.loss(next(iter(run.sampler)))).backward()
    with pytest.raises(RuntimeError, match=r"was scaled in the loop, .*; call optimizer\.backward\(loss, sc"):
        scaler.step(run.optimizer)
    assert_equal(run.weights(), before, 0)


@pytest.mark.parametrize("scaled", [(True, False), (False, True)])
@pytest.mark.parametrize("of", ["microbatch", "step"])
def test_losses_of_which_some_are_not_scaled_are_refused(scaled: tuple[bool, bool], of: str) -> None:
    run, scaler = training(sizes=[20]), grad_scaler()
    before, first, indices = run.weights(), True, iter(run.sampler)
    own = next(indices)
    with pytest.raises(RuntimeError, match="must be scaled, or none, but some have a scaler= and others have not"):  # noqa: PT012
        for one in scaled:
            run.optimizer.backward(run.loss(own), scaler=scaler if one else None)
            if first and of == "step":
                scaler.step(run.optimizer) if one else run.optimizer.step()
                own = next(indices)
            first = False
    assert_equal(run.weights(), before, 0)


def test_a_step_without_its_scaler_is_refused() -> None:
    run, scaler = training(), grad_scaler()
    run.optimizer.backward(run.loss(next(iter(run.sampler))), scaler=scaler)
    with pytest.raises(RuntimeError, match=r"step\(\) was called without it; call scaler\.step\(optimizer\)"):
        run.optimizer.step()


def test_a_scale_that_is_too_large_costs_few_updates_for_any_number_of_microbatches() -> None:
    """All microbatches of a step have one scale, but those that follow one that overflows need not do so, too."""

    def train(minibatch_size: int) -> tuple[float, int]:
        run = training(
            vbs.RootRuleOptimizer,
            [160],
            dataset_size=1600,
            dtype=torch.float32,
            minibatch_size=minibatch_size,
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=10**6)
        made = 0
        for indices in run.sampler:
            run.optimizer.backward(run.loss(indices), scaler=scaler)
            made += bool(scaler.step(run.optimizer))
            scaler.update()
        return scaler.get_scale(), made

    for minibatch_size in (40, 4):
        scale, made = train(minibatch_size)
        assert scale >= train(160)[0] / 4
        assert made >= train(160)[1] - 1
