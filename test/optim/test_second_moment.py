"""Batch-size-invariant Adam: its second moment is that of plain Adam at the reference, for any microbatches."""

from __future__ import annotations

import weakref
from typing import NamedTuple

import pytest
import torch
from torch import nn

import variable_batch_size as vbs
from helpers.fingerprint import compile_on_the_cpu
from helpers.reference import ADAM, REF, assert_equal, training, twin
from variable_batch_size.backend import LocalBackend
from variable_batch_size.microbatching import Microbatch
from variable_batch_size.optim.message import Message
from variable_batch_size.optim.noise.second_moment import SecondMoment
from variable_batch_size.optim.stage import Counted, MeasuredSquares, UpdateUnderWay
from variable_batch_size.optim.tensors.parameters import Parameters
from variable_batch_size.testing import run_ranks
from variable_batch_size.world import World

KIND = vbs.InvariantAdamRuleOptimizer
LARGE = (100, 70, 64, 130, 9, 210)  # beside REF


class Counts(NamedTuple):
    """A step of so many samples and microbatches."""

    batch_size: int
    num_microbatches: int


def under_way(step, parameters):
    """An update of one group, whose rule has answered."""
    rule, asked = vbs.rules.InvariantAdamRule(), vbs.rules.RuleInput(step.batch_size, 8, 0, 0)
    parts = (rule,), Parameters(parameters), {}, Message()
    return UpdateUnderWay(step, asked, *parts, scalings=[vbs.rules.Scaling()])


# ------------------------------------------------------------------------------------------------------ the equation


@pytest.mark.parametrize("cut", [(8,) * 4, (16,) * 2, (4,) * 8, (2, 3, 4, 5, 6, 12), (1, 31)], ids=str)
def test_its_expectation_is_that_at_the_reference(cut):
    mean, deviation, number, reference = 0.3, 2.0, 200_000, 8
    generator = torch.Generator().manual_seed(len(cut))
    parameter = nn.Parameter(torch.zeros(number, dtype=torch.float64))
    inner = torch.optim.Adam([parameter], betas=(0.9, 0.5))
    moment = SecondMoment(inner, LocalBackend(), reference)
    step = Counts(sum(cut), len(cut))
    update = under_way(step, [parameter])
    whole = torch.zeros_like(parameter)
    for n in cut:
        noise = torch.randn(number, generator=generator, dtype=torch.float64) / n**0.5
        gradient = mean + deviation * noise
        counted = Counted(Microbatch(0, sum(cut), n, n, 0, 0, False), None, False)
        moment.add(counted, MeasuredSquares(None, {parameter: gradient.square()}, n, None), parameter)
        whole += n / sum(cut) * gradient
    parameter.grad = whole
    moment.measure(update)
    moment.begin_step(update)
    inner.step()
    found = inner.state[parameter]["exp_avg_sq"] / (1 - 0.5)
    error = found.std() / number**0.5
    assert abs(found.mean() - (mean**2 + deviation**2 / reference)) < 4 * error
    assert found.min() >= 0
    assert abs((whole**2).mean() - found.mean()) > 100 * error  # which plain Adam would average


# -------------------------------------------------------------------------------------------- trainings with the rule


def test_a_resumed_training_warns_of_other_microbatches():
    state = training(KIND, LARGE, dataset_size=300).run(2).optimizer.state_dict()
    other = training(KIND, LARGE, dataset_size=300, minibatch_size=5)
    with pytest.warns(UserWarning, match="Resumed with other settings: minibatch_size was 4 and is 5"):
        other.optimizer.load_state_dict(state)


@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_a_device_that_compiles_graphs_computes_the_same(max_grad_norm):
    with compile_on_the_cpu():
        run = training(KIND, LARGE, dataset_size=300, world=World(0, 1), max_grad_norm=max_grad_norm)
        assert run.optimizer._backend.static_graph
        run.run(len(LARGE))
    fixed = {"fixed_shape": run.sampler.plan.fixed_shape}
    assert_equal(run.weights(), twin(KIND, LARGE, dataset_size=300, max_grad_norm=max_grad_norm, **fixed))


def test_a_rule_may_be_that_of_one_group():
    def grouped(rules):
        def inner(parameters, **options):
            first, *rest = parameters
            return torch.optim.Adam([{"params": [first]}, {"params": rest}], **options)

        options = {"inner": inner, "hyperparameters": ADAM, "rule": rules}
        return training(vbs.CustomOptimizer, LARGE, dataset_size=300, **options)

    mixed, invariant, root = (
        grouped(rules).run(1) for rules in (("invariant-adam", "root"), "invariant-adam", ("root", "root"))
    )
    assert_equal(mixed.weights()[:1], invariant.weights()[:1])
    assert_equal(mixed.weights()[1:], root.weights()[1:], 1e-9)
    assert abs(mixed.weights()[0] - root.weights()[0]).max() > 1e-3


def test_below_the_reference_nothing_travels_but_the_gradient():
    def bytes_of(kind):
        def train(backend):
            run, sent = training(kind, [REF, REF], dataset_size=300, backend=backend), 0
            reduce = backend.all_reduce_sum

            def counted(tensors):
                nonlocal sent
                sent += sum(tensor.nbytes for tensor in tensors)
                reduce(tensors)

            backend.all_reduce_sum = counted
            run.run(2)
            return sent

        return run_ranks(train, 2)[0]

    assert bytes_of(KIND) == bytes_of(vbs.SqrtSDERuleOptimizer)


# --------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("changes", [True, False])
def test_a_hook_that_changes_gradients_is_seen_before_the_weights_change(changes):
    run, plain = training(KIND, LARGE, dataset_size=300), training(KIND, LARGE, dataset_size=300)

    def hook(optimizer, arguments, options):
        if changes:
            nn.utils.clip_grad_norm_([*run.model.parameters()], 0.1)

    run.optimizer.inner.register_step_pre_hook(hook)
    before = run.weights()
    if changes:
        with pytest.raises(RuntimeError, match=r"no step_pre_hook may change gradients, .* clip with max_grad_norm="):
            run.run(1)
        assert_equal(run.weights(), before)
    else:
        assert_equal(run.run(3).weights(), plain.run(3).weights())


def test_a_single_microbatch_that_arrives_is_refused():
    parameter = nn.Parameter(torch.zeros(1))
    moment = SecondMoment(torch.optim.Adam([parameter]), LocalBackend(), 8)
    update = under_way(Counts(9, 1), [parameter])
    with pytest.raises(ValueError, match="two or more microbatches, got one of 9 samples; pass a smaller minibatch_"):
        moment.scale(update)


def test_a_beta_that_vanishes_is_refused():
    run = training(KIND, [300], dataset_size=300, hyperparameters=ADAM | {"betas": (0.9, 1e-9)})
    with pytest.raises(
        ValueError, match=r"beta2 .* must stay above 9e-19, but a rule changes 1e-09, got .*; limit the"
    ):
        run.run(1)


def test_the_gradients_of_an_update_are_freed_after_it():
    run = training(vbs.InvariantAdamRuleOptimizer, [16] * 3, minibatch_size=4, ref_batchsize=8, inner=torch.optim.AdamW)
    found = []
    run.optimizer.inner.register_step_pre_hook(lambda *_: found.append(weakref.ref(next(run.model.parameters()).grad)))
    run.run(2)
    assert len(found) == 2
    assert all(gradient() is None for gradient in found)
