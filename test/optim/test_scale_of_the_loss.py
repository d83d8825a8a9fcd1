"""AdaScale in other units: no gain depends on the scale of the loss, before and after the first estimate."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import variable_batch_size as vbs
from helpers.properties import examples
from helpers.reference import SIZES, network, training
from variable_batch_size.optim.noise_estimate import gain


def gains(scale: float, sizes: list[int], **options: Any) -> tuple[list[float], list[np.ndarray[Any, Any]]]:
    """Train with the loss times `scale` and lr / scale."""
    hyperparameters = {"lr": 0.02 / scale, "momentum": 0.5}
    run = training(vbs.AdaScaleOptimizer, sizes, hyperparameters=hyperparameters, ref_batchsize=8, **options)
    found = []
    for _ in sizes:
        for indices in run.sampler:
            (run.loss(indices) * scale).backward()
            if run.optimizer.step():
                break
        found.append(run.optimizer.lr_factor())
    return found, run.weights()


@given(
    exponent=st.integers(-60, 60),
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    noise=st.sampled_from(["microbatches", "differenced"]),
)
@examples(60)
def test_the_gain_does_not_depend_on_the_scale_of_the_loss(exponent: int, sizes: list[int], noise: str) -> None:
    expected, weights = gains(1.0, sizes, noise=noise)
    found, others = gains(2.0**exponent, sizes, noise=noise)  # a power of two only changes exponents
    assert found == pytest.approx(expected, rel=1e-12)
    for one, other in zip(weights, others, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10)


@given(
    sigma2=st.one_of(st.just(0.0), st.floats(1e-200, 1e3)),
    mu2=st.one_of(st.just(0.0), st.floats(-1e3, -1e-200), st.floats(1e-200, 1e3)),
    scale=st.sampled_from([1e-30, 1e-12, 1e-5, 1e5, 1e12, 1e30]),
    k=st.sampled_from([0.1, 0.5, 1.0, 4.0, 100.0]),
    on_device=st.booleans(),
)
@examples(200)
def test_the_gain_lies_between_1_and_k_in_any_units(
    sigma2: float, mu2: float, scale: float, k: float, on_device: bool
) -> None:
    def of(factor: float) -> float:
        numbers = [factor * sigma2, factor * mu2, 1.0, 1.0]
        averages = torch.tensor(numbers, dtype=torch.float64) if on_device else np.array(numbers)
        return float(gain(averages, 100 * k, 100.0))

    assert of(scale) == pytest.approx(of(1.0), rel=1e-9)
    assert min(1, k) - 1e-12 <= of(scale) <= max(1, k) + 1e-12


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(("k", "expected"), [(1 / 16, 1 / 16), (1.0, 1.0), (8.0, 1.0)])
def test_the_gain_without_an_estimate_is_at_most_one(k: float, expected: float, on_device: bool) -> None:
    for weight in (0.0, 1.0):  # no estimate, and gradients of 0
        numbers = [0.0, 0.0, weight, weight]
        averages = torch.tensor(numbers) if on_device else np.array(numbers)
        assert float(gain(averages, 64 * k, 64.0)) == expected


def test_small_batches_without_an_estimate_shrink_the_learning_rate() -> None:
    run = training(vbs.AdaScaleOptimizer, [8] * 6, ref_batchsize=128, minibatch_size=8, dataset_size=100)
    assert run.run(5).optimizer.lr_factor() == 8 / 128
    assert run.optimizer.progress == pytest.approx(5 * 8 / 128)


# ------------------------------------------------------------------------------------------------------- the warnings


def warned(updates: int, sizes: list[int], minibatch_size: int, **options: Any) -> list[str]:
    run = (
        training(
            vbs.AdaScaleOptimizer, sizes, minibatch_size=minibatch_size, dataset_size=2000, sampling={"shuffle": False}
        )
        if not options
        else training(vbs.AdaScaleOptimizer, sizes, minibatch_size=minibatch_size, dataset_size=2000, **options)
    )
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run.run(updates)
    return [str(warning.message) for warning in found if warning.category is UserWarning]


def test_fifty_updates_without_an_estimate_warn_once() -> None:
    (message,) = warned(120, [8], 8)
    assert "first 50 updates" in message
    assert 'noise="differenced"' in message
    assert "smaller minibatch_size" in message
    assert "until there is an estimate the gain is at most 1;" in message
    assert warned(49, [8], 8) == []
    assert warned(120, [8] * 49 + [9] + [8], 8) == []
    assert warned(120, [8], 8, noise="differenced") == []


@pytest.mark.parametrize("kind", [None, torch.optim.lr_scheduler.StepLR, torch.optim.lr_scheduler.OneCycleLR])
@pytest.mark.parametrize("inner", [False, True])
def test_the_warning_names_the_line_that_calls_step(kind: Any, inner: bool) -> None:
    """Also if a scheduler of torch wraps `step()`."""
    run = training(vbs.AdaScaleOptimizer, [8], minibatch_size=8, dataset_size=2000)
    if kind is not None:
        kind(
            run.optimizer.inner if inner else run.optimizer, 100, **({"total_steps": 99} if "One" in str(kind) else {})
        )
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for indices in run.sampler:
            run.loss(indices).backward()
            run.optimizer.step()
    (warning,) = [warning for warning in found if "first 50 updates" in str(warning.message)]
    assert warning.filename == __file__


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RAdam, torch.optim.RMSprop])
def test_adascale_around_adam_warns_and_names_adamscale(kind: Any) -> None:
    model = network()
    sampler = vbs.CustomSampler(50, list(SIZES), 1, 0, on_end="hold")
    with pytest.warns(UserWarning, match=r"around \w*(Adam|RMSprop).*AdamScale"):
        vbs.AdaScaleOptimizer(kind(model.parameters()), sampler, 8)
    with pytest.warns(UserWarning, match="use AdamScaleOptimizer"):
        vbs.CustomOptimizer(kind(model.parameters()), sampler, 8, rule="adascale")
    vbs.AdamScaleOptimizer(kind(model.parameters()), sampler, 8)
    vbs.AdaScaleOptimizer(torch.optim.SGD(model.parameters()), sampler, 8)
