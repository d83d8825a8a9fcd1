"""The loop in JAX of examples/trainers: against one whole batch an update by hand, and each function compiled once."""

from __future__ import annotations

import runpy

import jax
import numpy as np
import pytest
import torch

import variable_batch_size as vbs
from helpers.pages import ROOT
from helpers.yardstick import MICROBATCH, SAMPLES, STOPS, TRACE, UPDATES, by_hand, network, samples

EXAMPLE = str(ROOT / "examples" / "trainers" / "jax_loop.py")
NAMES = ("w1", "b1", "w2", "b2")


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def sampler(**options):
    return vbs.CustomSampler(SAMPLES, TRACE, 1, 0, MICROBATCH, fixed_shape=True, **options)


def begin():
    x, target = (part.numpy() for part in samples())
    params = {name: p.detach().numpy().T for name, p in zip(NAMES, network().parameters(), strict=True)}
    return x, target, params, {name: np.zeros_like(value) for name, value in params.items()}


def difference(params, twin):
    pairs = zip((params[name] for name in NAMES), twin.parameters(), strict=True)
    return max(float(np.abs(np.asarray(own).T - p.detach().numpy()).max()) for own, p in pairs)


def test_it_makes_the_updates_of_whole_batches_with_one_compilation_of_each_function():
    example = runpy.run_path(EXAMPLE)
    x, target, params, velocity = begin()
    params, _, losses = example["train"](x, target, sampler(), params, velocity, UPDATES)
    twin = network()
    expected = by_hand(twin, torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9))
    assert difference(params, twin) < 1e-12
    assert losses == pytest.approx(expected, abs=1e-12)
    assert {name: example[name]._cache_size() for name in ("accumulate", "update")} == {"accumulate": 1, "update": 1}


@pytest.mark.parametrize("stop", STOPS)
def test_the_state_of_the_sampler_resumes_after_any_update(stop):
    train = runpy.run_path(EXAMPLE)["train"]
    whole = train(*begin()[:2], sampler(), *begin()[2:], UPDATES)[0]
    x, target, params, velocity = begin()
    first, second = sampler(), sampler()
    params, velocity, _ = train(x, target, first, params, velocity, stop)
    second.load_state_dict(first.state_dict())
    params, _, _ = train(x, target, second, params, velocity, UPDATES - stop)
    assert all(np.array_equal(params[name], whole[name]) for name in NAMES)


def test_data_may_be_arrays_of_jax():
    train = runpy.run_path(EXAMPLE)["train"]
    x, target, params, velocity = begin()
    expected = train(x, target, sampler(), params, velocity, 5)[0]
    found = train(jax.numpy.asarray(x), jax.numpy.asarray(target), sampler(), params, velocity, 5)[0]
    assert all(np.array_equal(found[name], expected[name]) for name in NAMES)


@pytest.mark.parametrize(
    ("rule", "factors"),
    [
        ("linear-momentum", "gradient, weight_decay"),
        ("sqrt-sde", "eps, one_minus_beta"),
        ("root-half-life", "beta2_power"),
        ("invariant-adam", "beta1_power, beta2_power"),
    ],
)
def test_a_rule_that_scales_more_than_the_learning_rate_is_refused(rule, factors):
    train = runpy.run_path(EXAMPLE)["train"]
    x, target, params, velocity = begin()
    train.__globals__["RULE"] = vbs.rules.RULES[rule]()
    with pytest.raises(ValueError, match=rf"must scale the learning rate only, but .* the factors {factors}, which"):
        train(x, target, sampler(), params, velocity, UPDATES)


def test_rules_that_scale_the_learning_rate_alone_are_accepted():
    check = runpy.run_path(EXAMPLE)["check_rule"]
    for rule in (
        vbs.rules.ConstantRule(),
        vbs.rules.LinearRule(),
        vbs.rules.RootRule(),
        vbs.rules.PowerRule(0.7),
        vbs.rules.LEGWRule(10),
    ):
        check(rule)


@pytest.mark.parametrize("end", [5, 11])
def test_it_ends_where_the_sampler_does(end):
    train = runpy.run_path(EXAMPLE)["train"]
    x, target, params, velocity = begin()
    assert len(train(x, target, sampler(max_updates=end), params, velocity, UPDATES)[2]) == end


def test_the_script_runs(capsys):
    runpy.run_path(EXAMPLE, run_name="__main__")
    assert "update 32" in capsys.readouterr().out
