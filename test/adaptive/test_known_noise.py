"""Controllers that follow the noise, on a quadratic whose noise is known."""

from __future__ import annotations

import pytest
import torch

import variable_batch_size as vbs
from helpers.controllers import smoothed
from variable_batch_size.adaptive import NoiseScale, NormTest

SAMPLES, DIMENSION = 40_000, 200  # without replacement, mu^2 is too small by sigma^2 / SAMPLES


def batch_sizes(controller, distance, start, updates, noise):
    """Return the batch sizes of a training whose weights stay, and the noise scale of its dataset.

    The loss of a sample x is |w - x|^2 / 2, so that sigma^2 is the variance of the samples, and mu^2 the squared
    distance of w from their mean.
    """
    generator = torch.Generator().manual_seed(3)
    data = torch.randn(SAMPLES, DIMENSION, generator=generator, dtype=torch.float64)
    data -= data.mean(dim=0)
    weights = torch.nn.Parameter(torch.full((DIMENSION,), distance / DIMENSION**0.5, dtype=torch.float64))
    trace = vbs.AdaptiveTrace(controller, start=start, bounds=(8, 2000), every=20)
    sampler = vbs.CustomSampler(SAMPLES, trace, 1, 0, minibatch_size=32, max_updates=updates, fixed_shape=False)
    inner = torch.optim.SGD([weights], lr=0.0)
    optimizer = vbs.ConstantOptimizer(inner, sampler, ref_batchsize=64, noise=noise)
    for _ in vbs.remaining_epochs(sampler, optimizer):
        for batch in sampler:
            (0.5 * (weights - data[batch]).square().sum(dim=1)).mean().backward()
            optimizer.step()
    sigma2, mu2 = data.square().sum(dim=1).mean().item(), weights.square().sum().item()
    return sampler.trace.batch_sizes(range(updates)).tolist(), sigma2 / mu2


@pytest.mark.slow("trains for 500 updates")
@pytest.mark.parametrize(
    ("factor", "distance", "noise"), [(1.0, 0.7, None), (0.5, 0.6, "differenced"), (2.0, 1.0, None)]
)
def test_the_batch_becomes_the_noise_scale(factor, distance, noise):
    sizes, scale = batch_sizes(smoothed(NoiseScale(factor), 0.2, 1), distance, 64, 500, noise)
    assert sizes[-1] == pytest.approx(factor * scale, rel=0.1)


@pytest.mark.slow("trains for 300 updates")
@pytest.mark.parametrize("eta", [0.8, 1.0])
def test_the_batch_grows_until_it_passes_the_norm_test(eta):
    sizes, scale = batch_sizes(NormTest(eta), 0.7, 256, 300, None)
    assert sizes == sorted(sizes)
    assert sizes[-1] == pytest.approx(scale / eta**2, rel=0.1)
