"""sigma^2, mu^2 and the gain: by hand, against the float64 twin, without bias, and summed without loss of digits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import variable_batch_size as vbs
from helpers.properties import examples
from helpers.reference import Array, NoiseTwin
from variable_batch_size.backend import LocalBackend
from variable_batch_size.optim.gradient_noise import GradientNoise
from variable_batch_size.optim.noise_estimate import (
    Estimate,
    coefficients,
    estimate_from_groups,
    estimate_from_pair,
    update_averages,
)
from variable_batch_size.optim.tensors import squared_norm

Groups = Sequence[tuple[int, Array]]  # samples and mean gradient of each microbatch


def measure(ranks: Sequence[GradientNoise], groups: Groups, ref: int) -> vbs.rules.Noise | None:
    """Measure one update, with the groups dealt to the ranks in round robin; None if the host finds it non-finite."""
    batch_size = sum(n for n, _ in groups)
    for number, (n, gradient) in enumerate(groups):
        ranks[number % len(ranks)].add_square(squared_norm([torch.from_numpy(gradient)]), n)
    reduced = [torch.from_numpy(sum(n / batch_size * gradient for n, gradient in groups))]
    squares = torch.stack([rank.local_squares(reduced) for rank in ranks]).sum(dim=0)  # (1,)
    found: list[vbs.rules.Noise | None] = []
    for rank in ranks:
        statistics = rank.statistics(squares, reduced)
        if statistics.finite is not False:
            zeroed = [gradient.masked_fill(~torch.as_tensor(statistics.finite), 0) for gradient in reduced]
            found.append(rank.update(statistics, zeroed, batch_size=batch_size, groups=len(groups), ref=ref))
            rank.commit()
        else:
            found.append(None)
        rank.clear()
    assert all(noise is None or float(noise.gain) == float(found[0].gain) for noise in found)  # type: ignore[union-attr]
    return found[0]


def gaussian(rng: np.random.Generator, n: int, mean: Array, sigma: float) -> Array:
    """Return the mean of n gradients whose covariance has the trace sigma^2."""
    return mean + rng.normal(size=mean.shape) * sigma / np.sqrt(mean.size * n)


# -------------------------------------------------------------------------------------------------------- by hand


@pytest.mark.parametrize(
    ("gradients", "sigma2", "mu2", "gain"),
    [
        # A is the mean of |g_j|^2, and G that of g_j; B = J, ref = 1.
        # Two orthogonal ones: G = (1/2, 1/2), A = 1, |G|^2 = 1/2. sigma^2 = 2 (1 - 1/2) / 1, mu^2 = (2/2 - 1) / 1.
        # gain = (1 + 0) / (1/2 + 0).
        ([(1, 0), (0, 1)], 1, 0, 2),
        # Three orthogonal ones: A = 1, |G|^2 = 3/9. sigma^2 = 3 (1 - 1/3) / 2, mu^2 = (3/3 - 1) / 2; gain = 1 / (1/3).
        ([(1, 0, 0), (0, 1, 0), (0, 0, 1)], 1, 0, 3),
        # Four orthogonal ones: |G|^2 = 1/4. sigma^2 = 4 (1 - 1/4) / 3, mu^2 = (4/4 - 1) / 3; gain = 1 / (1/4).
        ([(1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)], 1, 0, 4),
        # Equal ones: A = |G|^2 = 4. sigma^2 = 0; mu^2 = (2 * 4 - 4) / 1; gain = 4 / 4.
        ([(2, 0), (2, 0)], 0, 4, 1),
        ([(2, 0)] * 3, 0, 4, 1),
        ([(2, 0)] * 4, 0, 4, 1),
        # Opposite ones: A = 1, G = 0. sigma^2 = 2 (1 - 0) / 1, mu^2 = (0 - 1) / 1, with a lower bound of 0 in the gain.
        ([(1, 0), (-1, 0)], 2, -1, 2),
        # Two and two opposite: sigma^2 = 4 (1 - 0) / 3, mu^2 = -1/3.
        ([(1, 0), (-1, 0), (1, 0), (-1, 0)], 4 / 3, -1 / 3, 4),
        # Two opposite and one: G = (1/3, 0), A = 1. sigma^2 = 3 (1 - 1/9) / 2, mu^2 = (3/9 - 1) / 2.
        ([(1, 0), (-1, 0), (1, 0)], 4 / 3, -1 / 3, 3),
        # A general pair: A = (5 + 1) / 2 = 3, G = (1, 1).
        # sigma^2 = 2 (3 - 2) / 1 = 2, mu^2 = (2 * 2 - 3) / 1 = 1; gain = (2 + 1) / (2/2 + 1).
        ([(2, 1), (0, 1)], 2, 1, 1.5),
    ],
)
def test_the_gain_equals_that_computed_by_hand(
    gradients: list[tuple[int, ...]], sigma2: float, mu2: float, gain: float
) -> None:
    """The loss -<x, w> of a sample has the gradient -x, and a microbatch is one sample."""
    x = torch.tensor(gradients, dtype=torch.float64)  # (samples, parameters)
    weight = torch.nn.Parameter(torch.zeros(x.shape[1], dtype=torch.float64))
    sampler = vbs.CustomSampler(len(x), len(x), num_replicas=1, rank=0, minibatch_size=1)
    optimizer = vbs.AdaScaleOptimizer(torch.optim.SGD([weight], lr=0.5), sampler, ref_batchsize=1)
    for indices in sampler:
        (-(x[indices] @ weight)).mean().backward()
        optimizer.step()
    noise = optimizer.noise()
    assert (noise.sigma2, noise.mu2) == (pytest.approx(sigma2), pytest.approx(mu2))
    assert noise.gain == optimizer.lr_factor() == optimizer.progress == pytest.approx(gain, rel=1e-12)
    torch.testing.assert_close(weight.detach(), 0.5 * gain * x.mean(dim=0))


# ------------------------------------------------------------------------------------------------ against the twin


def history(rng: np.random.Generator) -> tuple[int, list[list[tuple[int, Array]]]]:
    """Return a reference and the microbatches of a few updates, of sizes between 1/64 and 64 times the reference."""
    ref, size = int(rng.integers(1, 200)), int(rng.integers(1, 5))
    mean, sigma = rng.normal(size=size), rng.uniform(0.1, 10)
    updates = []
    for _ in range(rng.integers(1, 6)):
        batch_size = max(1, int(ref * 2 ** rng.uniform(-6, 6)))
        number = 1 if rng.random() < 0.3 else min(batch_size, int(rng.integers(2, 13)))
        ends = np.sort(rng.choice(np.arange(1, batch_size), size=number - 1, replace=False))  # (microbatches - 1,)
        sizes = np.diff([0, *ends, batch_size])  # (microbatches,)
        updates.append([(int(n), gaussian(rng, n, mean, sigma)) for n in sizes])
        if rng.random() < 0.05:
            updates[-1][rng.integers(number)][1][0] = rng.choice([np.nan, np.inf])
    return ref, updates


@pytest.mark.parametrize("differenced", [False, True], ids=["", "differenced"])
@pytest.mark.parametrize("on_device", [False, True], ids=["", "on_device"])
def test_the_noise_equals_that_of_the_twin_for_any_batch_sizes_and_worlds(on_device: bool, differenced: bool) -> None:
    rng = np.random.default_rng(1)
    for _ in range(100 if on_device or differenced else 300):
        ref, updates = history(rng)
        options = {"on_device": on_device, "differenced": differenced}
        ranks = [GradientNoise(LocalBackend(), **options) for _ in range(rng.integers(1, 10))]
        twin, largest = NoiseTwin(ref, differenced), 0.0
        for groups in updates:
            noise, finite = measure(ranks, groups, ref), all(np.isfinite(gradient).all() for _, gradient in groups)
            assert finite or on_device or noise is None
            if finite:
                gain = twin.update(groups)
                assert float(noise.gain) == pytest.approx(gain, rel=1e-9)  # type: ignore[union-attr]
                largest = max(largest, *(gradient @ gradient * 64 * ref for _, gradient in groups))
            found = ranks[0].noise()
            assert found.updates == twin.updates
            if twin.updates:
                assert found.sigma2 == pytest.approx(twin.sigma2, rel=1e-9, abs=1e-9 * largest)
                assert found.mu2 == pytest.approx(twin.mu2, rel=1e-9, abs=1e-9 * largest)
            else:
                assert math.isnan(found.sigma2)


def test_the_gain_lies_between_1_and_k() -> None:
    rng = np.random.default_rng(2)
    for _ in range(300):
        ref, updates = history(rng)
        ranks = [GradientNoise(LocalBackend(), on_device=False)]
        for groups in updates:
            k = sum(n for n, _ in groups) / ref
            if noise := measure(ranks, groups, ref):
                assert min(1.0, k) * (1 - 1e-12) <= noise.gain <= max(1.0, k) * (1 + 1e-12)


# ------------------------------------------------------------------------------------------------ without bias

MEAN, SIGMA = np.full(20, 0.3), 4.0  # mu^2 = 1.8, sigma^2 = 16, so the noise scale is 8.9 samples


@pytest.mark.parametrize("sizes", [(8, 8), (8,) * 10, (1, 31), (1, 2, 4, 32, 32, 32), (5, 3, 3, 1)])
def test_an_estimate_from_microbatches_has_no_bias(sizes: tuple[int, ...]) -> None:
    rng, draws = np.random.default_rng(3), 100_000
    # Each microbatch: (draws, parameters).
    groups = [MEAN + rng.normal(size=(draws, MEAN.size)) * SIGMA / np.sqrt(MEAN.size * n) for n in sizes]
    reduced = sum(n / sum(sizes) * g for n, g in zip(sizes, groups, strict=True))  # (draws, parameters)
    found = estimate_from_groups(
        weighted_squares=sum(n * (g**2).sum(axis=1) for n, g in zip(sizes, groups, strict=True)),  # (draws,)
        squared_norm=(reduced**2).sum(axis=1),  # (draws,)
        batch_size=sum(sizes),
        groups=len(sizes),
        inverse_dof=1 / (len(sizes) - 1),
    )
    assert_unbiased(found)


@pytest.mark.parametrize("sizes", [(8, 8), (3, 50), (50, 3)])
def test_an_estimate_from_two_updates_has_no_bias(sizes: tuple[int, int]) -> None:
    rng, draws = np.random.default_rng(4), 100_000
    # Each update: (draws, parameters).
    previous, now = (MEAN + rng.normal(size=(draws, MEAN.size)) * SIGMA / np.sqrt(MEAN.size * n) for n in sizes)
    found = estimate_from_pair(
        squared_norm=(now**2).sum(axis=1),  # (draws,)
        batch_size=sizes[1],
        previous_squared_norm=(previous**2).sum(axis=1),  # (draws,)
        previous_batch_size=sizes[0],
        squared_difference=((now - previous) ** 2).sum(axis=1),  # (draws,)
    )
    assert_unbiased(found)


def assert_unbiased(found: Any) -> None:
    """Allow three standard errors of the mean over the draws."""
    for values, truth in ((found.sigma2, SIGMA**2), (found.mu2, MEAN @ MEAN)):
        assert abs(values.mean() - truth) < 3 * values.std() / np.sqrt(len(values))


@pytest.mark.parametrize("seed", range(3))
def test_measures_the_noise_scale_while_the_batch_size_varies(seed: int) -> None:
    rng = np.random.default_rng(seed)
    mean, sigma = np.full(500, 0.02), 10.0
    ranks = [GradientNoise(LocalBackend(), on_device=False) for _ in range(3)]
    for _ in range(200):
        batch_size = int(2 ** rng.uniform(6, 12))
        sizes = [1 << bit for bit in range(5) if batch_size >> bit & 1] + [32] * (batch_size // 32)
        noise = measure(ranks, [(n, gaussian(rng, n, mean, sigma)) for n in sizes], ref=64)
    assert noise is not None
    assert noise.noise_scale == pytest.approx(sigma**2 / (mean @ mean), rel=0.05)
    assert noise.updates == 200


def test_the_noise_scale_is_a_number_of_samples() -> None:
    assert vbs.rules.Noise(6.0, 2.0).noise_scale == 3
    assert vbs.rules.Noise(6.0, -2.0).noise_scale == math.inf
    assert math.isnan(vbs.rules.Noise(math.nan, math.nan).noise_scale)
    assert vbs.rules.Noise(torch.tensor(6.0), torch.tensor(2.0)).noise_scale == 3
    assert vbs.rules.Noise(torch.tensor(6.0), torch.tensor(-2.0)).noise_scale == math.inf


@given(
    measured=st.tuples(*[st.floats(0.1, 10)] * 4),
    before=st.tuples(*[st.floats(-10, 10)] * 4),
    size=st.integers(1, 99),
    groups=st.integers(1, 9),
    weight=st.floats(0.01, 1),
    differenced=st.booleans(),
)
@examples(100)
def test_the_average_is_weighed_by_what_it_has_seen(
    measured: tuple[float, ...], before: tuple[float, ...], size: int, groups: int, weight: float, differenced: bool
) -> None:
    squares, square, sigma2, mu2 = measured
    paired = differenced and groups == 1
    decay, constant, *rows = map(np.array, coefficients(size, groups, weight, paired=paired))
    found = update_averages(np.array(before), decay, constant, zip(rows, measured, strict=True))
    if paired:
        estimate = Estimate(sigma2, mu2)
    elif groups > 1:
        estimate = estimate_from_groups(squares, square, size, groups, 1 / (groups - 1))
    else:
        assert found.tolist() == list(before)
        return
    expected = [(1 - weight) * old + weight * new for old, new in zip(before, (*estimate, 1.0), strict=False)]
    np.testing.assert_allclose(found, [*expected, before[3] + 1], rtol=1e-9, atol=1e-9)


# ------------------------------------------------------------------------------------------------------------ norms


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64])
def test_a_norm_is_exact_for_every_dtype(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1500, 2000), (40, 3, 5, 5), (20_000,), (1, 4_000_001), (7,), (0,), ()]
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    tensors[0] = tensors[0].t()
    exact = sum(tensor.to(torch.complex128).abs().square().sum().item() for tensor in tensors)
    assert squared_norm(tensors).item() == pytest.approx(exact, rel=1e-12 if dtype is torch.float64 else 1e-5)


def test_squares_of_half_precision_gradients_are_summed_in_float32() -> None:
    gradients = [torch.full((100,), 200.0, dtype=torch.float16)]  # |g|^2 = 4 * 10^6, more than float16 holds
    noise = GradientNoise(LocalBackend(), on_device=False)
    for _ in range(2):
        noise.add_square(squared_norm(gradients), factor=8.0)
    squares = noise.local_squares(gradients)
    assert (squares.dtype, squares.item()) == (torch.float32, 2 * 8 * 100 * 200.0**2)
