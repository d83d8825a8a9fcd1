"""sigma^2, mu^2 and the gain: by hand, against the float64 twin, without bias, in a training, and in other units."""

import copy
import csv
import gc
import math
import warnings
from contextlib import nullcontext
from copy import deepcopy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import variable_batch_size as vbs
from helpers.fingerprint import compile_on_the_cpu
from helpers.models import half_frozen
from helpers.properties import examples
from helpers.reference import REF, SIZES, NoiseTwin, assert_equal, batches, data, gradient, network, training
from helpers.splitting import split_batch
from variable_batch_size.optim.noise.estimate import estimate_from_groups, estimate_from_pair, gain
from variable_batch_size.optim.tensors.arithmetic import squared_norm
from variable_batch_size.testing import run_ranks
from variable_batch_size.world import World

# -------------------------------------------------------------------------------------------------------- by hand


@pytest.mark.parametrize(
    ("gradients", "sigma2", "mu2", "gain"),
    [
        # A is the mean of |g_j|^2, and G that of g_j; B = J, ref = 1.
        # Two orthogonal ones: G = (1/2, 1/2), A = 1, |G|^2 = 1/2. sigma^2 = 2 (1 - 1/2) / 1, mu^2 = (2/2 - 1) / 1.
        # gain = (1 + 0) / (1/2 + 0).
        ([(1, 0), (0, 1)], 1, 0, 2),
        # Four orthogonal ones: |G|^2 = 1/4. sigma^2 = 4 (1 - 1/4) / 3, mu^2 = (4/4 - 1) / 3; gain = 1 / (1/4).
        ([(1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)], 1, 0, 4),
        # Equal ones: A = |G|^2 = 4. sigma^2 = 0; mu^2 = (2 * 4 - 4) / 1; gain = 4 / 4.
        ([(2, 0), (2, 0)], 0, 4, 1),
        # Opposite ones: A = 1, G = 0. sigma^2 = 2 (1 - 0) / 1, mu^2 = (0 - 1) / 1, with a lower bound of 0 in the gain.
        ([(1, 0), (-1, 0)], 2, -1, 2),
        # Two opposite and one: G = (1/3, 0), A = 1. sigma^2 = 3 (1 - 1/9) / 2, mu^2 = (3/9 - 1) / 2.
        ([(1, 0), (-1, 0), (1, 0)], 4 / 3, -1 / 3, 3),
        # A general pair: A = (5 + 1) / 2 = 3, G = (1, 1).
        # sigma^2 = 2 (3 - 2) / 1 = 2, mu^2 = (2 * 2 - 3) / 1 = 1; gain = (2 + 1) / (2/2 + 1).
        ([(2, 1), (0, 1)], 2, 1, 1.5),
    ],
)
def test_the_gain_equals_that_computed_by_hand(gradients, sigma2, mu2, gain):
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


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("by", ["loss", "optimizer"])
def test_measures_what_each_backward_adds_and_nothing_else(by, early):
    """A hook of a parameter counts, whenever it was registered, and what `torch.autograd.grad` returns does not."""
    model, unused, (x, target) = network(), torch.nn.Parameter(torch.ones(2, dtype=torch.float64)), data(12)
    weights = [*model.parameters()]
    if early:
        weights[0].register_hook(lambda gradient: gradient * 0.01)
    sampler = vbs.CustomSampler(12, 12, num_replicas=1, rank=0, minibatch_size=4)
    optimizer = vbs.AdaScaleOptimizer(torch.optim.SGD([*weights, unused], lr=0.01), sampler, ref_batchsize=4)
    if not early:
        weights[0].register_hook(lambda gradient: gradient * 0.01)
    gradients = []
    for indices in sampler:
        loss = (model(x[indices]) - target[indices]).square().mean()
        parts = torch.autograd.grad(loss, weights, retain_graph=True)
        gradients.append(torch.cat([part.view(-1) for part in parts]))
        optimizer.backward(loss) if by == "optimizer" else loss.backward()
        torch.autograd.grad((1e3 * unused).sum(), unused)
        optimizer.step()
    squares = sum(4 * one.square().sum().item() for one in gradients)
    square = torch.stack(gradients).mean(0).square().sum().item()
    expected = estimate_from_groups(squares, square, batch_size=12, groups=3, inverse_dof=0.5)
    assert (optimizer.noise().sigma2, optimizer.noise().mu2) == pytest.approx(tuple(expected), rel=1e-12)


# ------------------------------------------------------------------------------------------------ against the twin


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    noise=st.sampled_from(["microbatches", "differenced"]),
    static_graph=st.booleans(),
)
@examples(60)
def test_noise_and_gain_are_those_of_the_twin(sizes, noise, static_graph):
    """Also where the host does not read the device."""
    with compile_on_the_cpu() if static_graph else nullcontext():
        options = {"world": World(0, 1)} if static_graph else {}
        run = training(vbs.AdaScaleOptimizer, sizes, noise=noise, minibatch_size=4, **options)
        assert run.optimizer.backend.static_graph == static_graph
        other = NoiseTwin(REF, noise == "differenced")
        for batch in batches(sizes, 50):
            parts, weights = split_batch(batch, 4), run.weights()
            gradients = [gradient(weights, run.x.numpy()[part], run.target.numpy()[part]) for part in parts]
            run.run(1)
            vectors = [np.concatenate([one.ravel() for one in own]) for own in gradients]
            gain = other.update([(len(part), own) for part, own in zip(parts, vectors, strict=True)])
            found = run.optimizer.noise()
            assert (found.updates, found.gain) == (other.updates, pytest.approx(gain, rel=1e-9))
            largest = 1e-9 * max(own @ own for own in vectors) * REF
            if other.updates:
                assert found.sigma2 == pytest.approx(other.sigma2, rel=1e-9, abs=largest)
                assert found.mu2 == pytest.approx(other.mu2, rel=1e-9, abs=largest)


# ------------------------------------------------------------------------------------------------ without bias

MEAN, SIGMA = np.full(20, 0.3), 4.0  # mu^2 = 1.8, sigma^2 = 16, so the noise scale is 8.9 samples


@pytest.mark.parametrize("sizes", [(8, 8), (8,) * 10, (1, 31), (1, 2, 4, 32, 32, 32), (5, 3, 3, 1)])
def test_an_estimate_from_microbatches_has_no_bias(sizes):
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
def test_an_estimate_from_two_updates_has_no_bias(sizes):
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


def assert_unbiased(found):
    """Allow three standard errors of the mean over the draws."""
    for values, truth in ((found.sigma2, SIGMA**2), (found.mu2, MEAN @ MEAN)):
        assert abs(values.mean() - truth) < 3 * values.std() / np.sqrt(len(values))


def test_the_noise_scale_is_a_number_of_samples():
    assert vbs.rules.Noise(6.0, 2.0).noise_scale == 3
    assert vbs.rules.Noise(6.0, -2.0).noise_scale == math.inf
    assert math.isnan(vbs.rules.Noise(math.nan, math.nan).noise_scale)
    assert vbs.rules.Noise(torch.tensor(6.0), torch.tensor(2.0)).noise_scale == 3
    assert vbs.rules.Noise(torch.tensor(6.0), torch.tensor(-2.0)).noise_scale == math.inf


# ------------------------------------------------------------------------------------------------------------ norms


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64])
def test_a_norm_is_exact_for_every_dtype(dtype):
    generator = torch.Generator().manual_seed(0)
    shapes = [(1500, 2000), (40, 3, 5, 5), (20_000,), (1, 4_000_001), (7,), (0,), ()]
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    tensors[0] = tensors[0].t()
    exact = sum(tensor.to(torch.complex128).abs().square().sum().item() for tensor in tensors)
    assert squared_norm(tensors).item() == pytest.approx(exact, rel=1e-12 if dtype is torch.float64 else 1e-5)


# In a training. -------------------------------------------------------------------------------------------------------


def measured(sizes, minibatch_size=4):
    """The updates that give an estimate: those of several microbatches."""
    return sum(size > minibatch_size for size in sizes)


def lr_factors(run, updates):
    found = []
    for _ in range(updates):
        run.run(1)
        found.append(run.optimizer.lr_factor())
    return found


@pytest.mark.parametrize("enabled", [False, True], ids=["", "GradScaler"])
@pytest.mark.parametrize("world", [1, 3])
def test_a_non_finite_microbatch_changes_nothing(world, enabled):
    bad_step = 3  # 33 samples, 9 microbatches

    def train(backend):
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


def snapshot(run):
    """Return weights, velocities, noise and progress."""
    velocities = [state["momentum_buffer"].tolist() for state in run.optimizer.state.values()]
    noise = run.optimizer.noise()
    known = None if noise.updates == 0 else noise
    return [weight.tolist() for weight in run.weights()], velocities, known, run.optimizer.progress


def test_an_update_of_one_microbatch_uses_the_averages():
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


@pytest.mark.parametrize("noise", ["microbatches", "differenced"])
def test_a_failed_update_is_not_measured(noise):
    failing, plain = (training(vbs.AdaScaleOptimizer, SIZES, noise=noise) for _ in range(2))
    state = copy.deepcopy(failing.run(2).optimizer.state_dict())

    def fail(*_):
        raise LookupError

    hook = failing.optimizer.register_step_pre_hook(fail)
    with pytest.raises(LookupError):
        failing.run(1)
    hook.remove()
    assert failing.optimizer.noise() == plain.run(2).optimizer.noise()
    failing.optimizer.load_state_dict(state)
    assert lr_factors(failing, 5) == lr_factors(plain, 5)


def test_a_state_without_noise_resets_the_noise():
    run = training(vbs.AdaScaleOptimizer, SIZES).run(4)
    with pytest.warns(UserWarning, match="Resumed with other settings: rule was LinearRule"):
        run.optimizer.load_state_dict(training(vbs.LinearRuleOptimizer, SIZES).run(2).optimizer.state_dict())
    assert (run.optimizer.updates, run.optimizer.noise().updates, run.optimizer.noise().gain) == (2, 0, 1)


@pytest.mark.parametrize("noise", ["microbatches", "differenced"])
def test_measures_with_frozen_and_with_new_parameters(noise):
    def make():
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


def test_logs_the_noise(tmp_path):
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


@pytest.mark.slow("measures memory in processes")
@pytest.mark.parametrize("noise", [None, "differenced"])
def test_measuring_takes_one_gradient_more(noise):
    """Differenced takes two. Copies are counted where most exist: after each backward and in each step."""
    shape = (3, 211, 2)  # of no other tensor
    weight = torch.nn.Parameter(torch.ones(shape))
    sampler = vbs.CustomSampler(16, [4, 5, 7], num_replicas=1, rank=0, minibatch_size=4)
    optimizer = vbs.AdaScaleOptimizer(torch.optim.SGD([weight], lr=0.1), sampler, ref_batchsize=16, noise=noise)
    held = []
    gc.collect()  # what other tests have left

    def count(*_):
        _ = weight.grad  # creates its Python object
        alive = [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]
        held.append(len({tensor.data_ptr() for tensor in alive if tensor.shape == shape}) - 1)

    optimizer.register_step_pre_hook(count)
    optimizer.register_step_post_hook(count)
    for indices in sampler:
        (weight.sum() * len(indices)).backward()
        count()
        optimizer.step()
    assert max(held) == (3 if noise else 2)


# In other units: no gain depends on the scale of the loss. ------------------------------------------------------------


def gains(scale, sizes, **options):
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
def test_the_gain_does_not_depend_on_the_scale_of_the_loss(exponent, sizes, noise):
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
def test_the_gain_lies_between_1_and_k_in_any_units(sigma2, mu2, scale, k, on_device):
    def of(factor):
        numbers = [factor * sigma2, factor * mu2, 1.0, 1.0]
        averages = torch.tensor(numbers, dtype=torch.float64) if on_device else np.array(numbers)
        return float(gain(averages, 100 * k, 100.0))

    assert of(scale) == pytest.approx(of(1.0), rel=1e-9)
    assert min(1, k) - 1e-12 <= of(scale) <= max(1, k) + 1e-12


# ------------------------------------------------------------------------------------------------------- the warnings


def warned(updates, sizes, minibatch_size, **options):
    run = training(vbs.AdaScaleOptimizer, sizes, minibatch_size=minibatch_size, dataset_size=2000, **options)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run.run(updates)
    return [str(warning.message) for warning in found if warning.category is UserWarning]


def test_fifty_updates_without_an_estimate_warn_once():
    (message,) = warned(120, [8], 8)
    assert "first 50 updates" in message
    assert 'noise="differenced"' in message
    assert "pass minibatch_size=4 to the sampler" in message
    assert "until there is an estimate the gain is at most 1;" in message
    assert warned(49, [8], 8) == []
    assert warned(120, [8] * 49 + [9] + [8], 8) == []
    assert warned(120, [8], 8, noise="differenced") == []


@pytest.mark.parametrize("name", ["Adam", "AdamW", "Adagrad", "RAdam", "RMSprop", "Lion", "Signum", "Muon"])
def test_adascale_around_adam_and_what_uses_the_sign_warns_and_names_adamscale(name):
    kind = type(name, (torch.optim.SGD,), {})
    model = network()
    sampler = vbs.CustomSampler(50, list(SIZES), 1, 0, on_end="hold")
    with pytest.warns(UserWarning, match=f"around {name}, which divides .*AdamScale"):
        vbs.AdaScaleOptimizer(kind(model.parameters()), sampler, 8)
    with pytest.warns(UserWarning, match="use AdamScaleOptimizer"):
        vbs.CustomOptimizer(kind(model.parameters()), sampler, 8, rule="adascale")
    vbs.AdamScaleOptimizer(kind(model.parameters()), sampler, 8)
    vbs.AdaScaleOptimizer(torch.optim.SGD(model.parameters()), sampler, 8)


def test_a_loaded_state_is_not_changed_by_later_updates():
    run = training(vbs.AdaScaleOptimizer, [4] * 20, minibatch_size=4, noise="differenced").run(3)
    state = run.optimizer.state_dict()
    earlier = copy.deepcopy(state["vbs"]["noise"]["earlier"])
    run.optimizer.load_state_dict(state)
    run.run(3)
    for found, expected in zip(state["vbs"]["noise"]["earlier"].values(), earlier.values(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
