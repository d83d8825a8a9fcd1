"""The gradient noise in a training: worlds, loss scales, non-finite gradients, resuming, errors and memory."""

from __future__ import annotations

import copy
import csv
import gc
import math
from collections.abc import Sequence
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

import variable_batch_size as vbs
from helpers.models import half_frozen
from helpers.reference import SIZES, Array, Training, assert_equal, training
from variable_batch_size.backend import Backend
from variable_batch_size.testing import run_ranks


def measured(sizes: Sequence[int], minibatch_size: int = 4) -> int:
    """The updates that give an estimate: those of several microbatches."""
    return sum(size > minibatch_size for size in sizes)


def lr_factors(run: Training, updates: int) -> list[float]:
    found = []
    for _ in range(updates):
        run.run(1)
        found.append(run.optimizer.lr_factor())
    return found


@pytest.mark.parametrize("enabled", [False, True], ids=["", "GradScaler"])
@pytest.mark.parametrize("world", [1, 3])
def test_a_non_finite_microbatch_changes_nothing(world: int, enabled: bool) -> None:
    bad_step = 3  # 33 samples, 9 microbatches

    def train(backend: Backend) -> Training:
        run = training(vbs.AdaScaleOptimizer, SIZES, dataset_size=sum(SIZES), backend=backend)
        scaler, number = torch.amp.GradScaler("cpu", init_scale=1.0, enabled=enabled), 0
        for indices in run.sampler:
            due, before = run.optimizer.microbatch, snapshot(run)
            number = number + 1 if due.step == bad_step else 0
            bad = due.step == bad_step and backend.world.rank == world - 1 and number == 2
            run.optimizer.backward(run.loss(indices) * (torch.inf if bad else 1), scaler=scaler)
            updated = scaler.step(run.optimizer)
            scaler.update()
            if due.step == bad_step:
                assert not updated
                assert before == snapshot(run)
            elif due.ends_step:
                assert updated
                assert before != snapshot(run)
        assert run.optimizer.updates == len(SIZES)
        return run

    skipped = "^Skipped an update: non-finite gradient; check the loss if this persists$"
    with nullcontext() if enabled else pytest.warns(RuntimeWarning, match=skipped):
        ranks = run_ranks(train, world)
    for rank in ranks:
        assert rank.optimizer.noise().updates == measured(SIZES) - 1
        assert_equal(rank.weights(), ranks[0].weights(), tolerance=0)


def snapshot(run: Training) -> Any:
    """Return weights, velocities, noise and progress."""
    velocities = [state["momentum_buffer"].tolist() for state in run.optimizer.state.values()]
    noise = run.optimizer.noise()
    known = None if noise.updates == 0 else noise
    return [weight.tolist() for weight in run.weights()], velocities, known, run.optimizer.progress


def test_an_update_of_one_microbatch_uses_the_averages() -> None:
    run = training(vbs.AdaScaleOptimizer, (4, 12, 2, 64), dataset_size=200)
    assert (run.run(1).optimizer.lr_factor(), run.optimizer.noise().updates) == (4 / 64, 0)
    assert math.isnan(run.optimizer.noise().sigma2)
    assert math.isnan(run.optimizer.noise().noise_scale)
    known = run.run(1).optimizer.noise()
    assert known.updates == 1
    same = run.run(1).optimizer.noise()
    assert (same.sigma2, same.mu2, same.updates) == (known.sigma2, known.mu2, 1)
    assert same.gain == vbs.rules.adascale_gain(known.sigma2, max(known.mu2, 0), batch_size=2, ref_batchsize=64)
    assert run.run(1).optimizer.noise().updates == 2


def test_differenced_estimates_updates_of_one_microbatch() -> None:
    def train(backend: Backend) -> tuple[list[Array], vbs.rules.Noise]:
        run = training(vbs.AdaScaleOptimizer, [4] * 12, dataset_size=50, backend=backend, noise="differenced")
        return run.run(12).weights(), run.optimizer.noise()

    (weights, noise), *others = run_ranks(train, 3)
    assert noise.updates == 11
    assert noise.sigma2 > 0
    for other, same in others:
        assert_equal(other, weights, tolerance=0)
        assert same == noise


@pytest.mark.parametrize("noise", ["microbatches", "differenced"])
def test_a_failed_update_is_not_measured(noise: str) -> None:
    failing, plain = (training(vbs.AdaScaleOptimizer, SIZES, noise=noise) for _ in range(2))
    state = copy.deepcopy(failing.run(2).optimizer.state_dict())

    def fail(*_: object) -> None:
        raise LookupError

    hook = failing.optimizer.register_step_pre_hook(fail)
    with pytest.raises(LookupError):
        failing.run(1)
    hook.remove()
    assert failing.optimizer.noise() == plain.run(2).optimizer.noise()
    failing.optimizer.load_state_dict(state)
    assert lr_factors(failing, 5) == lr_factors(plain, 5)


def test_a_state_without_noise_resets_the_noise() -> None:
    run = training(vbs.AdaScaleOptimizer, SIZES).run(4)
    with pytest.warns(UserWarning, match="Resumed with other settings: rule was LinearRule"):
        run.optimizer.load_state_dict(training(vbs.LinearRuleOptimizer, SIZES).run(2).optimizer.state_dict())
    assert (run.optimizer.updates, run.optimizer.noise().updates, run.optimizer.noise().gain) == (2, 0, 1)


@pytest.mark.parametrize("noise", ["microbatches", "differenced"])
def test_measures_with_frozen_and_with_new_parameters(noise: str) -> None:
    def make() -> Training:
        return training(vbs.AdaScaleOptimizer, [4, 12] * 6, dataset_size=200, model=half_frozen(), noise=noise)

    run = make().run(2)
    resumed = make()
    resumed.model.load_state_dict(run.model.state_dict())
    resumed.optimizer.load_state_dict(deepcopy(run.optimizer.state_dict()))
    assert lr_factors(resumed, 2) == lr_factors(run, 2)
    late = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    run.optimizer.add_param_group({"params": [late]})
    run.model.register_forward_hook(lambda module, inputs, output: output + late)
    before = run.optimizer.noise().updates
    run.run(4)
    # The first one has no comparable previous gradient; of the other three, every other one has several microbatches.
    assert run.optimizer.noise().updates == before + (3 if noise == "differenced" else 2)
    assert (late != 1).all()


def test_rejects_ranks_with_different_estimators() -> None:
    def train(backend: Backend) -> None:
        training(vbs.LinearRuleOptimizer, backend=backend, noise=[None, "microbatches"][backend.world.rank]).run(1)

    with pytest.raises(RuntimeError, match="must train with the same noise, but"):
        run_ranks(train, 2)


def test_a_buffer_of_half_precision_gradients_does_not_overflow() -> None:
    weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.float16))
    # One microbatch of one sample, then 64 full ones.
    sampler = vbs.CustomSampler(4097, 4097, num_replicas=1, rank=0, minibatch_size=64)
    optimizer = vbs.AdaScaleOptimizer(torch.optim.SGD([weight], lr=0.001), sampler, ref_batchsize=4097)
    for _ in sampler:
        (20 * weight.sum()).backward()
        updated = optimizer.step()
    assert updated
    torch.testing.assert_close(weight.detach(), torch.full_like(weight, -0.02), rtol=2e-3, atol=0)


def test_rejects_a_factor_that_is_not_finite() -> None:
    def rule(update: vbs.rules.RuleInput) -> vbs.rules.Scaling:
        assert update.noise is not None
        return vbs.rules.Scaling(lr=1 / (1 + update.noise.noise_scale))

    run = training(vbs.CustomOptimizer, [4, 4], rule=rule, noise="microbatches", ref_batchsize=8)
    with pytest.raises(ValueError, match=r"every factor of a rule must be finite, got lr=nan from .*; return 1"):
        run.run(1)


def test_measuring_needs_a_reference() -> None:
    with pytest.raises(ValueError, match=r"measuring the noise needs ref_batchsize, .*, got none; pass the batch size"):
        training(vbs.ConstantOptimizer, noise="microbatches", ref_batchsize=None)


def test_the_noise_can_be_measured_for_any_rule() -> None:
    with_noise, plain = (
        training(vbs.LinearRuleOptimizer, SIZES, noise=noise).run(len(SIZES)) for noise in ("microbatches", None)
    )
    assert_equal(with_noise.weights(), plain.weights())
    assert with_noise.optimizer.noise().updates == measured(SIZES)
    with pytest.raises(RuntimeError, match=r'LinearRule\(\) does not use it; pass noise="microbatches"'):
        plain.optimizer.noise()


def test_logs_the_noise(tmp_path: Path) -> None:
    with vbs.Tracker(tmp_path) as tracker:
        run = training(vbs.AdaScaleOptimizer, (4, 12, 20), tracker=tracker, log_steps=1).run(3)
    rows = list(csv.DictReader((tmp_path / "scalars.csv").read_text().splitlines()))
    noise, last = run.optimizer.noise(), rows[-1]
    assert {name: float(last[f"vbs/{name}"]) for name in ("gain", "progress", "noise_scale", "sigma2", "mu2")} == {
        "gain": noise.gain,
        "progress": run.optimizer.progress,
        "noise_scale": noise.noise_scale,
        "sigma2": noise.sigma2,
        "mu2": noise.mu2,
    }
    assert rows[0]["vbs/sigma2"] == "nan"  # an update of one microbatch


@pytest.mark.parametrize("noise", ["differences", True, 0])
def test_rejects_an_unknown_estimator(noise: Any) -> None:
    with pytest.raises(ValueError, match='noise must be "microbatches" or "differenced", got'):
        training(vbs.LinearRuleOptimizer, SIZES, noise=noise)


@pytest.mark.slow("measures memory in processes")
@pytest.mark.parametrize("noise", [None, "differenced"])
def test_measuring_takes_no_copy_of_the_gradients(noise: str | None) -> None:
    """Differenced takes one. Copies are counted where most exist: after each backward and in each step."""
    shape = (3, 211, 2)  # of no other tensor
    weight = torch.nn.Parameter(torch.ones(shape))
    sampler = vbs.CustomSampler(16, [4, 5, 7], num_replicas=1, rank=0, minibatch_size=4)
    optimizer = vbs.AdaScaleOptimizer(torch.optim.SGD([weight], lr=0.1), sampler, ref_batchsize=16, noise=noise)
    held: list[int] = []

    def count(*_: object) -> None:
        _ = weight.grad  # creates its Python object
        alive = [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]
        held.append(len({tensor.data_ptr() for tensor in alive if tensor.shape == shape}) - 1)

    optimizer.register_step_pre_hook(count)
    optimizer.register_step_post_hook(count)
    for indices in sampler:
        (weight.sum() * len(indices)).backward()
        count()
        optimizer.step()
    assert max(held) == (2 if noise else 1)
