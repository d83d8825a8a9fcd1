"""sigma^2 and mu^2: by hand, against the twin, without bias, the same for every world, and with nothing lost."""

from __future__ import annotations

import csv
import gc
import math
from collections.abc import Sequence
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import variable_batch_size as vbs
from helpers.models import Mixed, half_frozen
from helpers.reference import SIZES, Array, NoiseTwin, Training, assert_equal, examples, filled, training
from variable_batch_size.backend import Backend, LocalBackend
from variable_batch_size.optim.gradient_noise import Moments, of_groups, of_pair, squared_norm
from variable_batch_size.testing import run_ranks

Groups = Sequence[tuple[int, Array]]  # samples and mean gradient of each microbatch
scaled_by_noise = pytest.mark.parametrize("kind", [vbs.AdaScaleOptimizer, vbs.AdamScaleOptimizer])


def take_in(moments: Sequence[Moments], groups: Groups, ref: int) -> vbs.Noise | None:
    """An update of a world with a rank for each of `moments`, to which the groups are dealt one after the other.

    None where the host knows that it is not finite.
    """
    batch_size = sum(n for n, _ in groups)
    for number, (n, gradient) in enumerate(groups):
        moments[number % len(moments)].add([torch.from_numpy(gradient)], n)
    whole = [torch.from_numpy(sum(n / batch_size * gradient for n, gradient in groups))]
    squares = torch.stack([rank.share(whole) for rank in moments]).sum(dim=0)
    found: list[vbs.Noise | None] = []
    for rank in moments:
        sums = rank.sums(squares, whole)
        if sums.finite is not False:
            held = [gradient.masked_fill(~torch.as_tensor(sums.finite), 0) for gradient in whole]
            found.append(rank.update(sums, held, batch_size=batch_size, groups=len(groups), ref=ref))
            rank.commit()
        else:
            found.append(None)
        rank.clear()
    assert all(noise is None or float(noise.gain) == float(found[0].gain) for noise in found)  # type: ignore[union-attr]
    return found[0]


def gaussian(rng: np.random.Generator, n: int, mean: Array, sigma: float) -> Array:
    """The mean of n gradients whose covariance has the trace sigma^2."""
    return mean + rng.normal(size=mean.shape) * sigma / np.sqrt(mean.size * n)


# -------------------------------------------------------------------------------------------------------- by hand


@pytest.mark.parametrize(
    ("gradients", "sigma2", "mu2", "gain"),
    [
        # Two, G = (1/2, 1/2): A = 1, |G|^2 = 1/2. sigma^2 = 2 (1 - 1/2) / 1, mu^2 = (2/2 - 1) / 1.
        # B = 2, ref = 1: (1 + 0) / (1/2 + 0).
        ([(1, 0), (0, 1)], 1, 0, 2),
        # Three orthogonal ones: A = 1, |G|^2 = 3/9. sigma^2 = 3 (1 - 1/3) / 2, mu^2 = (3/3 - 1) / 2; 1 / (1/3).
        ([(1, 0, 0), (0, 1, 0), (0, 0, 1)], 1, 0, 3),
        # Four orthogonal ones: |G|^2 = 1/4. sigma^2 = 4 (1 - 1/4) / 3, mu^2 = (4/4 - 1) / 3; 1 / (1/4).
        ([(1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)], 1, 0, 4),
        # Equal ones: A = |G|^2 = 4. sigma^2 = 0, of which 10^-6 is left; mu^2 = (2 * 4 - 4) / 1.
        ([(2, 0), (2, 0)], 0, 4, (1e-6 + 4) / (1e-6 / 2 + 4)),
        ([(2, 0)] * 3, 0, 4, (1e-6 + 4) / (1e-6 / 3 + 4)),
        ([(2, 0)] * 4, 0, 4, (1e-6 + 4) / (1e-6 / 4 + 4)),
        # Opposite ones: A = 1, G = 0. sigma^2 = 2 (1 - 0) / 1, mu^2 = (0 - 1) / 1, which counts as 0.
        ([(1, 0), (-1, 0)], 2, -1, 2),
        # Two and two opposite: sigma^2 = 4 (1 - 0) / 3, mu^2 = -1/3.
        ([(1, 0), (-1, 0), (1, 0), (-1, 0)], 4 / 3, -1 / 3, 4),
        # Two opposite and one: G = (1/3, 0), A = 1. sigma^2 = 3 (1 - 1/9) / 2, mu^2 = (3/9 - 1) / 2.
        ([(1, 0), (-1, 0), (1, 0)], 4 / 3, -1 / 3, 3),
        # In between: A = (5 + 1) / 2 = 3, G = (1, 1).
        # sigma^2 = 2 (3 - 2) / 1 = 2, mu^2 = (2 * 2 - 3) / 1 = 1; (2 + 1) / (2/2 + 1).
        ([(2, 1), (0, 1)], 2, 1, 1.5),
    ],
)
def test_the_gain_is_what_it_is_by_hand(
    gradients: list[tuple[int, ...]], sigma2: float, mu2: float, gain: float
) -> None:
    """Each sample's gradient is given: the loss is -<x, w>, and a microbatch is one sample."""
    x = torch.tensor(gradients, dtype=torch.float64)
    weight = torch.nn.Parameter(torch.zeros(x.shape[1], dtype=torch.float64))
    sampler = vbs.CustomSampler(len(x), len(x), 1, 0, 1)
    optimizer = vbs.AdaScaleOptimizer(torch.optim.SGD([weight], lr=0.5), sampler, ref_batchsize=1)
    for indices in sampler:
        (-(x[indices] @ weight)).mean().backward()
        optimizer.step()
    noise = optimizer.noise()
    assert (noise.sigma2, noise.mu2) == (pytest.approx(sigma2), pytest.approx(mu2))
    assert noise.gain == optimizer.gain() == optimizer.progress == pytest.approx(gain, rel=1e-12)
    torch.testing.assert_close(weight.detach(), 0.5 * gain * x.mean(dim=0))


# --------------------------------------------------------------------------------------------------- with the twin


def history(rng: np.random.Generator) -> tuple[int, list[list[tuple[int, Array]]]]:
    """A reference, and the microbatches of a few updates, whose sizes go up and down by factors up to 64."""
    ref, size = int(rng.integers(1, 200)), int(rng.integers(1, 5))
    mean, sigma = rng.normal(size=size), rng.uniform(0.1, 10)
    updates = []
    for _ in range(rng.integers(1, 6)):
        batch_size = max(1, int(ref * 2 ** rng.uniform(-6, 6)))
        number = 1 if rng.random() < 0.3 else min(batch_size, int(rng.integers(2, 13)))
        cuts = np.sort(rng.choice(np.arange(1, batch_size), size=number - 1, replace=False))
        sizes = np.diff([0, *cuts, batch_size])
        updates.append([(int(n), gaussian(rng, n, mean, sigma)) for n in sizes])
        if rng.random() < 0.05:
            updates[-1][rng.integers(number)][1][0] = rng.choice([np.nan, np.inf])
    return ref, updates


@pytest.mark.parametrize("differenced", [False, True], ids=["", "differenced"])
@pytest.mark.parametrize("deferred", [False, True], ids=["", "deferred"])
def test_histories_of_any_batch_sizes_and_worlds_are_those_of_the_twin(deferred: bool, differenced: bool) -> None:
    rng = np.random.default_rng(1)
    for _ in range(1_000 if deferred or differenced else 10_000):
        ref, updates = history(rng)
        options = {"deferred": deferred, "differenced": differenced}
        ranks = [Moments(LocalBackend(), **options) for _ in range(rng.integers(1, 10))]
        twin, largest = NoiseTwin(ref, differenced), 0.0
        for groups in updates:
            noise, finite = take_in(ranks, groups, ref), all(np.isfinite(gradient).all() for _, gradient in groups)
            assert finite or deferred or noise is None
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


def test_gains_stay_in_their_range() -> None:
    rng = np.random.default_rng(2)
    for _ in range(300):
        ref, updates = history(rng)
        moments = [Moments(LocalBackend(), deferred=False)]
        for groups in updates:
            k = sum(n for n, _ in groups) / ref
            if noise := take_in(moments, groups, ref):
                assert min(1.0, k) * (1 - 1e-12) <= noise.gain <= max(1.0, k) * (1 + 1e-12)


# ------------------------------------------------------------------------------------------------------ simulation

MEAN, SIGMA = np.full(20, 0.3), 4.0  # mu^2 = 1.8, sigma^2 = 16, so the noise scale is 8.9 samples


@pytest.mark.parametrize("sizes", [(8, 8), (8,) * 10, (1, 31), (1, 2, 4, 32, 32, 32), (5, 3, 3, 1)])
def test_an_estimate_has_no_bias(sizes: tuple[int, ...]) -> None:
    rng, draws = np.random.default_rng(3), 100_000
    groups = [MEAN + rng.normal(size=(draws, MEAN.size)) * SIGMA / np.sqrt(MEAN.size * n) for n in sizes]
    squares = sum(n * (g**2).sum(axis=1) for n, g in zip(sizes, groups, strict=True))
    whole = sum(n / sum(sizes) * g for n, g in zip(sizes, groups, strict=True))
    found = of_groups(squares, (whole**2).sum(axis=1), sum(sizes), len(sizes), 1 / (len(sizes) - 1))
    assert_unbiased(found)


@pytest.mark.parametrize("sizes", [(8, 8), (3, 50), (50, 3)])
def test_a_pair_of_updates_has_no_bias(sizes: tuple[int, int]) -> None:
    rng, draws = np.random.default_rng(4), 100_000
    earlier, now = (MEAN + rng.normal(size=(draws, MEAN.size)) * SIGMA / np.sqrt(MEAN.size * n) for n in sizes)
    square, other, difference = ((g**2).sum(axis=1) for g in (now, earlier, now - earlier))
    assert_unbiased(of_pair(square, sizes[1], other, sizes[0], difference))


def assert_unbiased(found: Any) -> None:
    """Three standard errors, over the draws."""
    for values, truth in ((found.sigma2, SIGMA**2), (found.mu2, MEAN @ MEAN)):
        assert abs(values.mean() - truth) < 3 * values.std() / np.sqrt(len(values))


@pytest.mark.parametrize("seed", range(3))
def test_the_noise_scale_is_found_while_the_batch_size_varies(seed: int) -> None:
    rng = np.random.default_rng(seed)
    mean, sigma, moments = np.full(500, 0.02), 10.0, [Moments(LocalBackend(), deferred=False) for _ in range(3)]
    for _ in range(200):
        batch_size = int(2 ** rng.uniform(6, 12))
        sizes = [1 << bit for bit in range(5) if batch_size >> bit & 1] + [32] * (batch_size // 32)
        noise = take_in(moments, [(n, gaussian(rng, n, mean, sigma)) for n in sizes], ref=64)
    assert noise is not None
    assert noise.noise_scale == pytest.approx(sigma**2 / (mean @ mean), rel=0.05)
    assert noise.updates == 200


# --------------------------------------------------------------------------------------------- in a real training


def gains(run: Training, updates: int) -> list[float]:
    found = []
    for _ in range(updates):
        run.run(1)
        found.append(run.optimizer.gain())
    return found


@scaled_by_noise
@examples(10)
@given(
    world=st.sampled_from([2, 3, 8]),
    minibatch_size=st.integers(1, 12),
    reduction=st.sampled_from(["mean", "sum"]),
    fixed_shape=st.booleans(),
    noise=st.sampled_from(["microbatches", "differenced"]),
)
def test_gains_are_the_same_in_every_world(kind: Any, world: int, **options: Any) -> None:
    sampling = {"fixed_shape": options.pop("fixed_shape")}

    def train(backend: Backend) -> list[float]:
        run = training(kind, SIZES, backend=backend, sampling=sampling, **options)
        return gains(run, len(SIZES))

    alone = train(LocalBackend())
    assert len(set(alone)) > 3
    for found in run_ranks(train, world):
        np.testing.assert_allclose(found, alone, rtol=1e-12)


@scaled_by_noise
def test_the_loss_scale_is_divided_out(kind: Any) -> None:
    def train(backend: Backend, enabled: bool) -> tuple[list[float], Training]:
        run, found = training(kind, SIZES, sum(SIZES), backend=backend), []
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2, enabled=enabled)
        for indices in run.sampler:
            scaler.scale(run.loss(indices)).backward()
            if scaler.step(run.optimizer):
                found.append(run.optimizer.gain())
            scaler.update()
        assert not enabled or scaler.get_scale() > 2.0**12
        return found, run

    plain, reference = train(LocalBackend(), False)
    for found, run in run_ranks(lambda backend: train(backend, True), 3):
        np.testing.assert_allclose(found, plain, rtol=1e-12)
        assert_equal(run.weights(), reference.weights())


@pytest.mark.parametrize("enabled", [False, True], ids=["", "GradScaler"])
@pytest.mark.parametrize("world", [1, 3])
def test_a_microbatch_that_is_not_finite_leaves_everything_as_it_was(world: int, enabled: bool) -> None:
    spoiled = 3  # an update of 33 samples, so of 9 microbatches

    def train(backend: Backend) -> Training:
        run = training(vbs.AdaScaleOptimizer, SIZES, sum(SIZES), backend=backend)
        scaler, turn = torch.amp.GradScaler("cpu", init_scale=1.0, enabled=enabled), 0
        for indices in run.sampler:
            due, before = run.optimizer.microbatch, snapshot(run)
            turn = turn + 1 if due.step == spoiled else 0
            bad = due.step == spoiled and backend.world.rank == world - 1 and turn == 2
            scaler.scale(run.loss(indices) * (torch.inf if bad else 1)).backward()
            updated = scaler.step(run.optimizer)
            scaler.update()
            if due.step == spoiled:
                assert not updated
                assert before == snapshot(run)
            elif due.ends_step:
                assert updated
                assert before != snapshot(run)
        assert run.optimizer.updates == len(SIZES)
        return run

    with nullcontext() if enabled else pytest.warns(RuntimeWarning, match="^an update was left out, because"):
        ranks = run_ranks(train, world)
    for rank in ranks:
        assert rank.optimizer.noise().updates == len(SIZES) - 2  # a step of one sample gives no estimate either
        assert_equal(rank.weights(), ranks[0].weights(), 0)


def snapshot(run: Training) -> Any:
    """Weights, velocities, noise and progress."""
    velocities = [state["momentum_buffer"].tolist() for state in run.optimizer.state.values()]
    noise = run.optimizer.noise()
    known = None if noise.updates == 0 else noise
    return [weight.tolist() for weight in run.weights()], velocities, known, run.optimizer.progress


def test_an_update_of_one_microbatch_has_the_gain_of_the_averages() -> None:
    run = training(vbs.AdaScaleOptimizer, (4, 12, 2, 64), 200)
    assert (run.run(1).optimizer.gain(), run.optimizer.noise().updates) == (1, 0)
    assert math.isnan(run.optimizer.noise().sigma2)
    assert math.isnan(run.optimizer.noise().noise_scale)
    known = run.run(1).optimizer.noise()
    assert known.updates == 1
    stays = run.run(1).optimizer.noise()
    assert (stays.sigma2, stays.mu2, stays.updates) == (known.sigma2, known.mu2, 1)
    assert stays.gain == vbs.adascale_gain(known.sigma2, max(known.mu2, 0), 2, 64)
    assert run.run(1).optimizer.noise().updates == 2


def test_differences_of_updates_replace_what_one_microbatch_cannot_tell() -> None:
    def train(backend: Backend) -> tuple[list[Array], vbs.Noise]:
        run = training(vbs.AdaScaleOptimizer, [4] * 12, 50, backend=backend, noise="differenced")
        return run.run(12).weights(), run.optimizer.noise()

    (weights, noise), *others = run_ranks(train, 3)
    assert noise.updates == 11
    assert noise.sigma2 > 0
    for other, same in others:
        assert_equal(other, weights, 0)
        assert same == noise


@pytest.mark.parametrize("noise", ["microbatches", "differenced"])
def test_the_noise_goes_on_from_a_state(noise: str) -> None:
    def make() -> Training:
        return training(vbs.AdaScaleOptimizer, SIZES, noise=noise)

    unbroken, broken = make(), make().run(4)
    again = make()
    again.model.load_state_dict(broken.model.state_dict())
    again.optimizer.load_state_dict(broken.optimizer.state_dict())
    assert again.optimizer.noise() == broken.optimizer.noise()
    expected = gains(unbroken, len(SIZES))
    assert gains(again, len(SIZES) - 4) == expected[4:]
    assert again.optimizer.progress == unbroken.optimizer.progress
    assert_equal(again.weights(), unbroken.weights(), 0)


@pytest.mark.parametrize("noise", ["microbatches", "differenced"])
def test_an_update_that_fails_is_not_measured(noise: str) -> None:
    failing, plain = (training(vbs.AdaScaleOptimizer, SIZES, noise=noise) for _ in range(2))
    failing.run(2)

    def fail(*_: object) -> None:
        raise LookupError

    hook = failing.optimizer.register_step_pre_hook(fail)
    with pytest.raises(LookupError):
        failing.run(1)
    hook.remove()
    assert failing.optimizer.noise() == plain.run(2).optimizer.noise()
    failing.optimizer.discard_step()
    expected = gains(plain, 5)
    if noise == "microbatches":
        assert gains(failing, 5) == expected
    else:  # the third update, of one sample, finds nothing to be compared with
        assert failing.run(5).optimizer.noise().updates == plain.optimizer.noise().updates - 1


def test_the_noise_begins_anew_with_a_state_that_has_none() -> None:
    run = training(vbs.AdaScaleOptimizer, SIZES).run(4)
    run.optimizer.load_state_dict(training(vbs.LinearRuleOptimizer, SIZES).run(2).optimizer.state_dict())
    assert (run.optimizer.updates, run.optimizer.noise().updates, run.optimizer.noise().gain) == (2, 0, 1)


@pytest.mark.parametrize("noise", ["microbatches", "differenced"])
def test_parameters_without_gradients_and_new_ones_do_no_harm(noise: str) -> None:
    def make() -> Training:
        return training(vbs.AdaScaleOptimizer, [4, 12] * 6, 200, model=half_frozen(), noise=noise)

    run = make().run(2)
    again = make()
    again.model.load_state_dict(run.model.state_dict())
    again.optimizer.load_state_dict(deepcopy(run.optimizer.state_dict()))
    assert gains(again, 2) == gains(run, 2)
    late = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    run.optimizer.add_param_group({"params": [late]})
    run.model.register_forward_hook(lambda module, inputs, output: output + late)
    before = run.optimizer.noise().updates
    run.run(4)
    # The first of them cannot be compared with what came before; of the others one in two has several microbatches.
    assert run.optimizer.noise().updates == before + (3 if noise == "differenced" else 2)
    assert (late != 1).all()


def test_ranks_that_measure_otherwise_are_refused() -> None:
    def train(backend: Backend) -> None:
        training(vbs.LinearRuleOptimizer, backend=backend, noise=[None, "microbatches"][backend.world.rank]).run(1)

    with pytest.raises(RuntimeError, match="same rule, reduction, max_grad_norm and noise"):
        run_ranks(train, 2)


def test_a_buffer_of_half_precision_gradients_does_not_overflow() -> None:
    weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.float16))
    sampler = vbs.CustomSampler(4097, 4097, 1, 0, 64)  # one sample, and then 64 full microbatches
    optimizer = vbs.AdaScaleOptimizer(torch.optim.SGD([weight], lr=0.001), sampler, ref_batchsize=4097)
    for _ in sampler:
        (20 * weight.sum()).backward()
        updated = optimizer.step()
    assert updated
    torch.testing.assert_close(weight.detach(), torch.full_like(weight, -0.02), rtol=2e-3, atol=0)


def test_a_factor_that_is_not_finite_is_refused() -> None:
    def rule(update: vbs.RuleInput) -> vbs.Scaling:
        assert update.noise is not None
        return vbs.Scaling(lr=1 / (1 + update.noise.noise_scale))

    run = training(vbs.CustomOptimizer, [4, 4], rule=rule, noise="microbatches", ref_batchsize=8)
    with pytest.raises(ValueError, match=r"every factor of a rule must be finite, but .* gave lr=nan; let it give 1"):
        run.run(1)


def test_measuring_needs_a_reference() -> None:
    with pytest.raises(ValueError, match="so measuring it needs ref_batchsize, got none; pass the batch size"):
        training(vbs.ConstantOptimizer, noise="microbatches")


def test_the_noise_scale_is_a_number_of_samples() -> None:
    assert vbs.Noise(6.0, 2.0).noise_scale == 3
    assert vbs.Noise(6.0, -2.0).noise_scale == math.inf
    assert math.isnan(vbs.Noise(math.nan, math.nan).noise_scale)
    assert vbs.Noise(torch.tensor(6.0), torch.tensor(2.0)).noise_scale == 3
    assert vbs.Noise(torch.tensor(6.0), torch.tensor(-2.0)).noise_scale == math.inf


def test_a_rule_that_needs_no_noise_may_have_it_measured() -> None:
    measured, plain = (training(vbs.LinearRuleOptimizer, SIZES, noise=noise).run(7) for noise in ("microbatches", None))
    assert_equal(measured.weights(), plain.weights())
    assert measured.optimizer.noise().updates == len(SIZES) - 1  # a step of one sample gives no estimate
    with pytest.raises(RuntimeError, match=r'LinearRule\(\) does without; pass noise="microbatches"'):
        plain.optimizer.noise()


def test_the_noise_is_logged_with_the_other_scalars(tmp_path: Path) -> None:
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
    assert rows[0]["vbs/sigma2"] == "nan"  # of one microbatch


@pytest.mark.parametrize("noise", ["differences", True, 0])
def test_another_estimator_is_refused(noise: Any) -> None:
    with pytest.raises(ValueError, match='noise must be "microbatches" or "differenced", got'):
        training(vbs.LinearRuleOptimizer, SIZES, noise=noise)


@pytest.mark.parametrize("noise", [None, "differenced"])
def test_it_takes_one_more_copy_of_the_gradients(noise: str | None) -> None:
    """And another one where updates are compared; counted where the most is held: after each backward, in each step."""
    shape = (3, 211, 2)  # of nothing else
    weight = torch.nn.Parameter(torch.ones(shape))
    sampler = vbs.CustomSampler(16, [4, 5, 7], 1, 0, 4)
    optimizer = vbs.AdaScaleOptimizer(torch.optim.SGD([weight], lr=0.1), sampler, 16, noise=noise)
    held: list[int] = []

    def count(*_: object) -> None:
        _ = weight.grad  # which has a Python object only from now on
        alive = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
        held.append(len({tensor.data_ptr() for tensor in alive if tensor.shape == shape}) - 1)

    optimizer.register_step_pre_hook(count)
    optimizer.register_step_post_hook(count)
    for indices in sampler:
        (weight.sum() * len(indices)).backward()
        count()
        optimizer.step()
    assert max(held) == (3 if noise else 2)


# ------------------------------------------------------------------------------------------------------------ norms


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64])
def test_a_norm_is_exact_whatever_the_type(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1500, 2000), (40, 3, 5, 5), (20_000,), (1, 4_000_001), (7,), (0,), ()]
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    tensors[0] = tensors[0].t()
    exact = sum(tensor.to(torch.complex128).abs().square().sum().item() for tensor in tensors)
    assert squared_norm(tensors).item() == pytest.approx(exact, rel=1e-12 if dtype is torch.float64 else 1e-5)


def test_noise_of_half_precision_gradients_is_summed_in_float32() -> None:
    gradients = [torch.full((100,), 200.0, dtype=torch.float16)]  # |g|^2 = 4 * 10^6, beyond float16
    moments = Moments(LocalBackend(), deferred=False)
    for _ in range(2):
        moments.add(gradients, 8.0)
    squares = moments.share(gradients)
    assert (squares.dtype, squares.item()) == (torch.float32, 2 * 8 * 100 * 200.0**2)


def test_parameters_of_several_types_are_measured_together() -> None:
    def train(backend: Backend) -> list[float]:
        model = filled(Mixed(torch.float32, torch.float64, torch.bfloat16))
        return gains(training(vbs.AdaScaleOptimizer, SIZES, model=model, backend=backend), len(SIZES))

    alone = train(LocalBackend())
    for found in run_ranks(train, 3):
        np.testing.assert_allclose(found, alone, rtol=1e-2)
