"""What every optimizer of the package guarantees: one suite over all rules in `vbs.rules.RULES`."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import LambdaLR

import variable_batch_size as vbs
from helpers.properties import examples
from helpers.reference import (
    EQUATIONS,
    HYPERPARAMETERS,
    OPTIMIZERS,
    SIZES,
    assert_equal,
    factors_along,
    network,
    training,
    twin,
    wrap,
)
from variable_batch_size.testing import run_ranks

Kind = type[vbs.CustomOptimizer]
every_class = pytest.mark.parametrize("kind", OPTIMIZERS.values(), ids=lambda kind: kind.__name__)


def test_the_suite_covers_every_named_optimizer():
    public = {getattr(vbs, name) for name in vbs.__all__ if name.endswith("Optimizer")}
    assert public - {vbs.CustomOptimizer} <= set(OPTIMIZERS.values())


def test_a_rule_is_chosen_by_its_name():
    by_name = training(vbs.CustomOptimizer, rule="linear").run(len(SIZES))
    assert_equal(by_name.weights(), twin(vbs.LinearRuleOptimizer, SIZES), tolerance=1e-12)
    groups = training(vbs.CustomOptimizer, rule=("root",)).optimizer
    assert groups.rules == (vbs.rules.RootRule(),)
    assert training(vbs.CustomOptimizer, rule="power:0.75").optimizer.rules == (vbs.rules.PowerRule(0.75),)


# ------------------------------------------------------------------------------------------- law 1: the exact batch


@every_class
@examples(14)
@given(
    sizes=st.lists(st.integers(1, 300), min_size=2, max_size=4),
    minibatch_size=st.integers(1, 64),
    world=st.integers(1, 9),
    fixed_shape=st.booleans(),
    reduction=st.sampled_from(["mean", "sum"]),
    max_grad_norm=st.sampled_from([None, 0.5, 1e6]),
    choice=st.integers(0, 2),
    single=st.booleans(),
    seed=st.integers(0, 2**64 - 1),
    tail=st.integers(0, 40),
)
def test_an_update_equals_that_of_one_big_batch(
    kind,
    sizes,
    minibatch_size,
    world,
    fixed_shape,
    reduction,
    max_grad_norm,
    choice,
    single,
    seed,
    tail,
):
    dtype, tolerance = (torch.float32, 1e-5) if single else (torch.float64, 1e-12)
    dataset_size, inners = max(sizes) + tail, EQUATIONS[kind].inners
    inner = {"inner": inners[0 if single else choice % len(inners)]}

    def train(backend):
        sampling = {"seed": seed, "fixed_shape": fixed_shape}
        options = {"minibatch_size": minibatch_size, "reduction": reduction, "dtype": dtype, **common}
        return training(kind, sizes, sampling=sampling, backend=backend, **options).run(len(sizes))

    common = {"dataset_size": dataset_size, "max_grad_norm": max_grad_norm, **inner}
    cut = {"minibatch_size": minibatch_size, "fixed_shape": fixed_shape}
    expected = twin(kind, sizes, dtype=dtype, seed=seed, **cut, **common)
    ranks = run_ranks(train, world)
    for rank in ranks:
        assert_equal(rank.weights(), expected, tolerance)
        assert_equal(rank.weights(), ranks[0].weights(), 0)


@every_class
def test_an_update_makes_one_collective_call(kind):
    def calls(backend):
        run = training(kind, SIZES, dataset_size=sum(SIZES), backend=backend)
        counts = [backend.collectives for updated in run.steps() if updated]
        return [after - before for before, after in pairwise(counts)]

    assert run_ranks(calls, 3) == 3 * [[1] * (len(SIZES) - 1)]  # after the first one, which compares the ranks


# ---------------------------------------------------------------------- law 7: the user's optimizer stays the user's


@every_class
def test_is_a_torch_optimizer_that_shares_the_inner_state(kind):
    run = training(kind).run(2)
    optimizer, inner = run.optimizer, run.optimizer.inner
    assert isinstance(optimizer, torch.optim.Optimizer)
    for name in ("param_groups", "state", "defaults"):
        assert getattr(optimizer, name) is getattr(inner, name)
    assert set(optimizer.state) == set(run.model.parameters())
    assert repr(inner).split("\n", 1)[1] == repr(optimizer).split("\n", 1)[1]


@every_class
@pytest.mark.parametrize("fails", [False, True])
def test_hyperparameters_are_scaled_only_inside_an_update(kind, fails):
    def groups(parameters, **common):
        own = [{"params": [p], "lr": 0.01 * (i + 1)} for i, p in enumerate(parameters)]
        return EQUATIONS[kind].inners[0](own, **common)

    run = training(kind, [20, 7], inner=groups)
    outside = [dict(group) for group in run.optimizer.param_groups]
    inside = []

    def numbers(group):
        return [group["lr"], group["weight_decay"], group.get("eps", 1.0), *group.get("betas", ())]

    def look(inner, args, kwargs):
        inside.extend(map(numbers, inner.param_groups))
        if fails:
            raise LookupError

    run.optimizer.register_step_pre_hook(look)
    with pytest.raises(LookupError) if fails else nullcontext():
        run.run(1)
    (by,) = factors_along(kind, [20])
    for found, group in zip(inside, outside, strict=True):
        lr, decay, eps, *betas = numbers(group)
        moved = [
            (1 - by.one_minus_beta * (1 - b)) ** power
            for b, power in zip(betas, (by.beta1_power, by.beta2_power), strict=False)
        ]
        assert found == pytest.approx([lr * by.lr, decay * by.weight_decay, eps * (by.eps if betas else 1), *moved])
    assert run.optimizer.param_groups == outside


@every_class
def test_lr_factor_and_current_lr_describe_the_last_update(kind):
    run = training(kind, SIZES, dataset_size=sum(SIZES))
    lr = run.optimizer.param_groups[0]["lr"]
    assert (run.optimizer.lr_factor(), run.optimizer.current_lr()) == (1, lr)
    for by in factors_along(kind, SIZES, dataset_size=sum(SIZES)):
        run.run(1)
        factor = by.lr * by.gradient
        assert run.optimizer.lr_factor() == pytest.approx(factor)
        assert run.optimizer.current_lr() == pytest.approx(lr * factor)


@every_class
def test_progress_counts_reference_updates(kind):
    run = training(kind, SIZES, dataset_size=sum(SIZES)).run(len(SIZES))
    expected = sum(by.progress for by in factors_along(kind, SIZES, dataset_size=sum(SIZES)))
    assert run.optimizer.progress == pytest.approx(expected)


@every_class
def test_a_scheduler_changes_the_reference_lr(kind):
    inner = EQUATIONS[kind].inners[0]
    run, plain = training(kind, SIZES, dataset_size=sum(SIZES)), inner(network().parameters(), **HYPERPARAMETERS[inner])
    ours, theirs = (LambdaLR(optimizer, lambda step: 1 / (step + 1)) for optimizer in (run.optimizer, plain))
    for _ in SIZES:
        run.run(1)
        assert run.optimizer.current_lr() == pytest.approx(plain.param_groups[0]["lr"] * run.optimizer.lr_factor())
        plain.step()
        ours.step()
        theirs.step()
        assert run.optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
        assert ours.get_last_lr() == theirs.get_last_lr()


@every_class
def test_state_dict_holds_plain_numbers_and_no_world(kind):
    state = training(kind, SIZES).run(3).optimizer.state_dict()
    assert set(state) == {"state", "param_groups", "vbs"}
    position = {"epoch": 0, "step": 3, "samples": sum(SIZES[:3])}
    assert position.items() <= state["vbs"]["sampler"].items()

    def leaves(value):
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
        yield from [value] if parts is None else (leaf for part in parts for leaf in leaves(part))

    assert {type(leaf) for leaf in leaves(state["vbs"])} <= {int, float, bool, str}
    assert not {"rank", "world", "num_replicas"} & {*state["vbs"], *state["vbs"]["sampler"]}


@every_class
def test_state_dict_raises_in_the_middle_of_a_step(kind):
    run = training(kind, SIZES)
    assert next(run.steps()) is False
    with pytest.raises(
        RuntimeError, match=r"^state_dict\(\) must be called between steps, but step 0 .*; call it when"
    ):
        run.optimizer.state_dict()


@every_class
def test_rejects_wrapped_wrappers(kind):
    run = training(kind, SIZES)
    if EQUATIONS[kind].any_inner:
        with pytest.raises(TypeError, match=f"{kind.__name__} cannot be the inner .* wrap the optimizer inside it"):
            wrap(kind, run.optimizer, run.sampler)
