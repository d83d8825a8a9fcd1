"""Rules as pure functions: their equations, factor 1 at the reference, and rules of the user's own."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rule_pages import description

import variable_batch_size as vbs
from helpers.properties import examples
from helpers.reference import EQUATIONS, EXPONENT, OPTIMIZERS, WARMUP, Variables, training
from variable_batch_size.rules.selection import rules_for_groups

ARGUMENTS = {"legw": (WARMUP * 3,), "power": (EXPONENT,)}  # in a dataset of three reference batches
RULES = {rule(*ARGUMENTS.get(name, ())): name for name, rule in vbs.rules.RULES.items()}
NO_NOISE = vbs.rules.Noise(sigma2=0.0, mu2=1.0)
every_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)


def test_the_index_has_every_rule_of_the_table():
    public = {getattr(vbs.rules, name) for name in vbs.rules.__all__ if name.endswith("Rule")}
    assert public - {vbs.rules.Rule} == set(vbs.rules.RULES.values())


@every_rule
@examples(100)
@given(
    batch_size=st.integers(1, 2**40),
    ref_batchsize=st.integers(1, 2**40),
    updates=st.integers(0, 30),
    noise_scale=st.one_of(st.just(0.0), st.floats(1e-6, 1e12)),
)
def test_a_rule_equals_its_equation(rule, batch_size, ref_batchsize, updates, noise_scale):
    gain = vbs.rules.adascale_gain(noise_scale, 1.0, batch_size, ref_batchsize)
    update = Variables.of(batch_size, updates + 1, 3 * ref_batchsize, ref_batchsize, gain, noise_scale)
    expected = EQUATIONS[OPTIMIZERS[RULES[rule]]].factors(update)
    found = rule(vbs.rules.RuleInput(batch_size, ref_batchsize, updates, noise=vbs.rules.Noise(noise_scale, 1.0, gain)))
    assert dataclasses.astuple(found) == pytest.approx(dataclasses.astuple(expected), rel=1e-15, abs=0)


@every_rule
@given(size=st.integers(1, 2**53), updates=st.integers(17, 10**6), samples=st.integers(0, 10**12))
@examples(20)
def test_every_factor_is_one_at_the_reference(rule, size, updates, samples):
    assert rule(vbs.rules.RuleInput(size, size, updates, samples, NO_NOISE)) == vbs.rules.Scaling()


@every_rule
def test_the_progress_is_what_its_docstring_says(rule):
    update = vbs.rules.RuleInput(96, 32, noise=vbs.rules.Noise(1.0, 1.0, 1.5))
    known = {"1, whatever the batch size": 1.0, "k": 3.0, "the gain": 1.5}
    assert rule(update).progress == known[description(type(rule))["Progress"]]


@examples(100)
@given(
    sigma2=st.floats(1e-6, 1e6), mu2=st.floats(0, 1e6), size=st.integers(1, 2**30), ref_batchsize=st.integers(1, 2**30)
)
def test_adascale_gain_lies_between_one_and_k(sigma2, mu2, size, ref_batchsize):
    gain, k = vbs.rules.adascale_gain(sigma2, mu2, size, ref_batchsize), size / ref_batchsize
    assert min(1, k) * (1 - 1e-15) <= gain <= max(1, k) * (1 + 1e-15)
    assert vbs.rules.adascale_gain(sigma2, mu2, size, size) == 1
    assert vbs.rules.adascale_gain(sigma2, 0.0, size, ref_batchsize) == pytest.approx(k)


@every_rule
def test_a_rule_is_a_value(rule):
    same = eval(repr(rule), {name: getattr(vbs.rules, name) for name in vbs.rules.__all__})
    assert same is not rule
    assert (same, hash(same), type(same)) == (rule, hash(rule), type(rule))
    with pytest.raises((dataclasses.FrozenInstanceError, TypeError, AttributeError)):
        rule.k = 2


@every_rule
@examples(20)
@given(batch_size=st.integers(1, 2**40), ref_batchsize=st.integers(1, 2**40), updates=st.integers(0, 30))
def test_constant_timescale_changes_only_the_weight_decay(rule, batch_size, ref_batchsize, updates):
    update = vbs.rules.RuleInput(batch_size, ref_batchsize, updates, noise=vbs.rules.Noise(1.0, 1.0, 1.25))
    scaling, found = rule(update), vbs.rules.ConstantTimescale(rule)(update)
    assert found == dataclasses.replace(scaling, weight_decay=found.weight_decay)
    assert batch_size / (found.lr * found.weight_decay) == pytest.approx(ref_batchsize)


@examples(50)
@given(batch_size=st.integers(1, 2**40), ref_batchsize=st.integers(1, 2**40), exponent=st.floats(0, 1))
def test_constant_timescale_scales_lr_times_weight_decay_by_k(batch_size, ref_batchsize, exponent):
    update = vbs.rules.RuleInput(batch_size, ref_batchsize)
    assert vbs.rules.ConstantTimescale(vbs.rules.ConstantRule())(update) == vbs.rules.Scaling(weight_decay=update.ratio)
    found = vbs.rules.ConstantTimescale(vbs.rules.PowerRule(exponent))(update)
    assert found.lr * found.weight_decay == pytest.approx(update.ratio)
    assert found.weight_decay == pytest.approx(update.ratio ** (1 - exponent))


def test_constant_timescale_is_a_value():
    rule = vbs.rules.ConstantTimescale(vbs.rules.ConstantRule())
    assert repr(rule) == "ConstantTimescale(rule=ConstantRule())"
    assert (rule, hash(rule)) == (
        vbs.rules.ConstantTimescale(vbs.rules.ConstantRule()),
        hash(vbs.rules.ConstantTimescale(vbs.rules.ConstantRule())),
    )


def test_a_rule_gets_the_true_batch_size_and_the_position():
    seen = []

    def rule(update):
        seen.append(update)
        return vbs.rules.Scaling()

    training(vbs.CustomOptimizer, (20, 7), dataset_size=50, rule=rule).run(9)
    sizes = [20, 7, 7, 7, 7, 2, 7, 7, 7]
    assert seen == [vbs.rules.RuleInput(size, 64, step, sum(sizes[:step]), None) for step, size in enumerate(sizes)]


updates = st.builds(
    vbs.rules.RuleInput,
    batch_size=st.integers(1, 2**40),
    ref_batchsize=st.integers(1, 2**40),
    updates=st.integers(0, 1000),
)


@examples(200)
@given(update=updates)
def test_one_is_the_linear_rule_and_a_half_the_root_rule(update):
    assert vbs.rules.PowerRule(1)(update) == vbs.rules.LinearRule()(update)
    assert vbs.rules.PowerRule(0.5)(update) == vbs.rules.RootRule()(update)


@examples(100)
@given(first=st.integers(1, 10**6), second=st.integers(1, 10**6), exponent=st.floats(0, 2))
def test_the_exponent_is_that_of_two_tuned_learning_rates(first, second, exponent):
    lr = vbs.rules.PowerRule(exponent)(vbs.rules.RuleInput(second, first)).lr
    if first != second:
        assert math.log(lr) / math.log(second / first) == pytest.approx(exponent, abs=1e-6)


def test_a_name_may_have_a_number():
    made = vbs.rules.PowerRule(0.75), vbs.rules.LEGWRule(30.0), vbs.rules.SurgeRule(), vbs.rules.SurgeRule(9.0)
    assert rules_for_groups(["power:0.75", "legw:30", "surge", "surge:9"], 4) == made
