"""Loops that change gradients between two calls of `step()` are refused, in their first update with such a change."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import variable_batch_size as vbs
from helpers.properties import examples
from helpers.reference import assert_equal, filled, training, twin
from variable_batch_size.optim.backward_check import WATCHED
from variable_batch_size.testing import run_ranks

REFUSED = r"only backward\(\) may change gradients .*|must stay in \.grad until .*|must follow the backward\(\).*"


def parameters(run):
    return list(run.model.parameters())


def clip(run):
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)


def halve(run):
    for parameter in run.model.parameters():
        if parameter.grad is not None:
            parameter.grad *= 0.5


def replace(run):
    parameters(run)[2].grad = parameters(run)[2].grad * 0.5


AFTER_BACKWARD = {
    "clip_grad_norm_": clip,
    "clip_grad_value_": lambda run: torch.nn.utils.clip_grad_value_(run.model.parameters(), 1e-3),
    "in place": halve,
    "replaced": replace,
}
BEFORE_BACKWARD = {
    "zero_grad(set_to_none=False)": lambda run: run.model.zero_grad(set_to_none=False),
    "zero_grad()": lambda run: run.model.zero_grad(),
    "inner.zero_grad": lambda run: run.optimizer.inner.zero_grad(set_to_none=False),
    "halved": lambda run: halve(run),
}


def wrong_loop(run, change, *, after_backward, updates):
    for indices in run.sampler:
        if not after_backward and run.optimizer.inside_step:
            change(run)
        run.loss(indices).backward()
        if after_backward:
            change(run)
        run.optimizer.step()
        if run.optimizer.updates == updates:
            return


@given(
    change=st.sampled_from(sorted(AFTER_BACKWARD) + sorted(BEFORE_BACKWARD)),
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=6),
    minibatch_size=st.integers(1, 8),
    world=st.integers(1, 2),
    options=st.sampled_from([{}, {}, {"noise": "microbatches"}]),
)
@examples(150)
def test_a_wrong_loop_is_refused_or_has_no_effect(change, sizes, minibatch_size, world, options):
    after = change in AFTER_BACKWARD

    def train(backend):
        run = training(sizes=sizes, dataset_size=200, minibatch_size=minibatch_size, backend=backend, **options)
        wrong_loop(run, (AFTER_BACKWARD | BEFORE_BACKWARD)[change], after_backward=after, updates=len(sizes))
        return run

    try:
        runs = run_ranks(train, world)
    except RuntimeError as error:
        if not re.search(REFUSED, str(error)):
            raise
        return
    assert not after
    for run in runs:  # there was nothing to change: each step had one microbatch
        assert_equal(run.weights(), twin(vbs.LinearRuleOptimizer, sizes, dataset_size=200))


@pytest.mark.parametrize("change", [*AFTER_BACKWARD, *BEFORE_BACKWARD])
def test_the_error_names_the_remedy(change):
    run, after = training(), change in AFTER_BACKWARD
    with pytest.raises(RuntimeError, match=REFUSED) as caught:
        wrong_loop(run, (AFTER_BACKWARD | BEFORE_BACKWARD)[change], after_backward=after, updates=4)
    assert run.optimizer.updates == 0
    for remedy in (
        "max_grad_norm=",
        "register_step_pre_hook()",
        "remove zero_grad() of the model and of the inner optimizer",
        "call optimizer.zero_grad() before each microbatch if other backwards run in a step",
    ):
        assert remedy in str(caught.value)


@pytest.mark.parametrize("change", BEFORE_BACKWARD)
def test_a_wrong_loop_is_found_when_steps_get_several_microbatches_late(change):
    run = training(sizes=[4] * 40 + [40], dataset_size=400)
    with pytest.raises(RuntimeError, match=REFUSED):
        wrong_loop(run, BEFORE_BACKWARD[change], after_backward=False, updates=60)
    assert run.optimizer.updates == 40


def test_hooks_are_removed_after_some_updates():
    def hooks(run):
        return sum(bool(parameter._post_accumulate_grad_hooks) for parameter in parameters(run))

    run = training(sizes=[8], dataset_size=200)
    assert hooks(run) == 4
    run.run(WATCHED)
    assert hooks(run) == 0
    run.run(3)
    assert hooks(run) == 0
    dropped = training()
    model = dropped.model
    del dropped
    model(torch.ones(1, 3).double()).sum().backward()  # the hooks of an optimizer that is gone do nothing


@pytest.mark.parametrize("reentrant", [True, False])
def test_several_backwards_and_checkpointed_layers_are_accumulations(reentrant):
    class Shared(nn.Module):
        """A layer that is used three times, twice in a segment that is computed again in backward."""

        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3).double()
            self.last = nn.Linear(3, 2).double()

        def forward(self, x):
            x = x.requires_grad_(True)
            for _ in range(2):
                x = checkpoint(self.layer, x, use_reentrant=reentrant)
            return self.last(self.layer(x))

    run, plain = training(model=filled(Shared())), training(model=filled(Shared()))
    for indices in run.sampler:
        loss = run.loss(indices)
        (loss / 4).backward(retain_graph=True)
        (loss * 3 / 4).backward()
        run.optimizer.step()
    for indices in plain.sampler:
        plain.loss(indices).backward()
        plain.optimizer.step()
    assert_equal(run.weights(), plain.weights())
