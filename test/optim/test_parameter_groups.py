"""A rule for each parameter group, against a float64 twin that scales each weight by its own factors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.optim import Optimizer

import variable_batch_size as vbs
from helpers.properties import examples
from helpers.reference import (
    EQUATIONS,
    REF,
    SGD,
    SIZES,
    Array,
    Training,
    assert_equal,
    batches,
    gradient,
    network,
    rule_at,
    training,
    twin,
)
from helpers.twins import InnerTwin, PlainTraining
from variable_batch_size.backend import Backend
from variable_batch_size.testing import run_ranks

RULES: dict[vbs.rules.Rule, type[vbs.CustomOptimizer]] = {
    vbs.rules.LinearRule(): vbs.LinearRuleOptimizer,
    vbs.rules.RootRule(): vbs.RootRuleOptimizer,
    vbs.rules.LinearMomentumRule(): vbs.LinearRuleMomentumOptimizer,
}


def layers(parameters: Iterable[Tensor], **hyperparameters: Any) -> Optimizer:
    """A group for each of the two layers."""
    weights = list(parameters)
    return torch.optim.SGD([{"params": weights[:2]}, {"params": weights[2:]}], **hyperparameters)


def by_layer(
    rules: Sequence[vbs.rules.Rule], sizes: Sequence[int], dataset_size: int, max_grad_norm: float | None
) -> list[Array]:
    """SGD with rules[0] for the two weights of the first layer and rules[1] for the second, one big batch an update."""
    run = training(vbs.ConstantOptimizer, sizes, dataset_size=dataset_size)
    x, target, weights = run.x.numpy(), run.target.numpy(), dict(enumerate(run.weights()))
    inner = InnerTwin(torch.optim.SGD, weights, [([0, 1], SGD), ([2, 3], SGD)])
    plain = PlainTraining(weights, inner.step, max_grad_norm)
    for batch in batches(sizes, dataset_size):
        gradients = dict(enumerate(gradient(list(weights.values()), x[batch], target[batch])))
        of_layers = [rule_at(EQUATIONS[RULES[rule]].factors, len(batch), 1, dataset_size) for rule in rules]
        plain.update(gradients, [], of_layers)
    return list(weights.values())


@examples(40)
@given(
    rules=st.tuples(st.sampled_from(sorted(RULES, key=str)), st.sampled_from(sorted(RULES, key=str))),
    sizes=st.lists(st.integers(1, 200), min_size=1, max_size=5),
    world=st.integers(1, 4),
    max_grad_norm=st.sampled_from([None, 0.5, 1e6]),
)
def test_each_group_follows_its_rule(
    rules: tuple[vbs.rules.Rule, vbs.rules.Rule], sizes: list[int], world: int, max_grad_norm: float | None
) -> None:
    def train(backend: Backend) -> Training:
        options: dict[str, Any] = {"rule": rules, "ref_batchsize": REF, "max_grad_norm": max_grad_norm}
        run = training(vbs.CustomOptimizer, sizes, dataset_size=200, inner=layers, backend=backend, **options)
        return run.run(len(sizes))

    expected = by_layer(rules, sizes, dataset_size=200, max_grad_norm=max_grad_norm)
    for rank in run_ranks(train, world):
        assert_equal(rank.weights(), expected)


def make(*rules: Any, **options: Any) -> Training:
    return training(vbs.CustomOptimizer, SIZES, dataset_size=sum(SIZES), inner=layers, rule=rules, **options)


def test_lr_factor_learning_rate_and_progress_are_those_of_the_first_group() -> None:
    run = make(vbs.rules.RootRule(), vbs.rules.LinearRule(), ref_batchsize=REF).run(1)
    k = SIZES[0] / REF
    assert run.optimizer.lr_factor() == pytest.approx(k**0.5)
    assert run.optimizer.current_lr() == pytest.approx(SGD["lr"] * k**0.5)
    mixed = make(vbs.rules.ConstantRule(), vbs.rules.LinearRule(), ref_batchsize=REF).run(3)
    assert mixed.optimizer.progress == 3


def test_rules_holds_one_rule_for_each_group() -> None:
    rule = vbs.rules.RootRule()
    (only,) = training(vbs.CustomOptimizer, rule=rule, ref_batchsize=REF).optimizer.rules
    assert only is rule
    both = training(vbs.CustomOptimizer, inner=layers, rule=rule, ref_batchsize=REF).optimizer.rules
    assert [one is rule for one in both] == [True, True]
    rules = [vbs.rules.LinearRule(), vbs.rules.RootRule()]
    optimizer = training(vbs.CustomOptimizer, inner=layers, rule=rules, ref_batchsize=REF).optimizer
    rules.reverse()
    assert optimizer.rules == (vbs.rules.LinearRule(), vbs.rules.RootRule())


def test_constant_rules_need_no_reference() -> None:
    run = make(vbs.rules.ConstantRule(), vbs.rules.ConstantRule(), ref_batchsize=None).run(3)
    assert run.optimizer.ref_batchsize is None
    assert_equal(run.weights(), twin(vbs.ConstantOptimizer, SIZES[:3], dataset_size=sum(SIZES)))


@pytest.mark.parametrize(
    ("rules", "error", "text"),
    [
        ([vbs.rules.ConstantRule(), vbs.rules.RootRule()], ValueError, r"^RootRule\(\) needs ref_batchsize"),
        (
            [vbs.rules.ConstantRule()],
            ValueError,
            "^a sequence of rules must hold one for each .* group, got 1 for 2; pass as",
        ),
        ([], ValueError, "got 0 for 2; pass as many, or one rule for all"),
        (3 * [vbs.rules.ConstantRule()], ValueError, "got 3 for 2; pass"),
        (
            [vbs.rules.ConstantRule(), vbs.rules.RootRule],
            TypeError,
            r"^rule must be a name, or a callable .*, got <class",
        ),
        ([None, vbs.rules.ConstantRule()], TypeError, r"^rule must be a name, or a callable .*, got None .*; pass"),
        (
            [vbs.rules.ConstantRule(), [vbs.rules.ConstantRule()]],
            TypeError,
            r"^rule must be a name, or a callable .*, got \[ConstantRule",
        ),
    ],
    ids=str,
)
def test_rejects_rules_that_do_not_match_the_groups(rules: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make(*rules, ref_batchsize=None)


def test_rejects_a_new_group_if_every_group_has_its_own_rule() -> None:
    run = make(vbs.rules.LinearRule(), vbs.rules.RootRule(), ref_batchsize=REF).run(1)
    group = {"params": [torch.zeros(1, requires_grad=True)]}
    with pytest.raises(ValueError, match=r"got 2 for 3; .* add it to the inner optimizer and wrap it again"):
        run.optimizer.add_param_group(group)
    assert len(run.optimizer.param_groups) == 2


def test_rejects_ranks_with_different_rules() -> None:
    def train(backend: Backend) -> None:
        rules = [vbs.rules.LinearRule(), vbs.rules.RootRule()]
        options: dict[str, Any] = {"rule": rules if backend.world.rank else rules[::-1], "ref_batchsize": REF}
        training(vbs.CustomOptimizer, inner=layers, backend=backend, **options).run(1)

    with pytest.raises(RuntimeError, match="must train with the same rule, but"):
        run_ranks(train, 2)


def test_an_update_takes_one_collective() -> None:
    def calls(backend: Backend) -> int:
        run = training(
            vbs.CustomOptimizer,
            inner=layers,
            rule=(vbs.rules.LinearMomentumRule(), vbs.rules.RootRule()),
            ref_batchsize=REF,
            backend=backend,
        ).run(1)
        before = backend.collectives  # type: ignore[attr-defined]
        run.run(4)
        return int(backend.collectives - before)  # type: ignore[attr-defined]

    assert run_ranks(calls, 2) == [4, 4]


def test_a_sequence_of_one_rule_equals_that_rule() -> None:
    run = training(vbs.CustomOptimizer, rule=[vbs.rules.LinearMomentumRule()], ref_batchsize=REF).run(len(SIZES))
    assert_equal(run.weights(), twin(vbs.LinearRuleMomentumOptimizer, SIZES))


def test_a_group_is_added_after_a_backward_that_is_dropped() -> None:
    def train(backend: Backend, dropped: bool) -> list[Array]:
        model = network()
        first, _, last = model  # type: ignore[misc]
        first.requires_grad_(False)
        inner: dict[str, Any] = {"inner": lambda _, **options: torch.optim.SGD(last.parameters(), **options)}
        options = {"model": model, "backend": backend, "dataset_size": sum(SIZES), **inner}
        run = training(vbs.LinearRuleMomentumOptimizer, **options)
        for updated in run.steps():
            if updated and run.optimizer.updates == 4:
                if dropped:
                    run.loss([0, 1, 2]).backward()
                    run.optimizer.zero_grad()
                first.requires_grad_(True)
                run.optimizer.add_param_group({"params": list(first.parameters()), "lr": 0.03})
        return run.weights()

    expected = train(vbs.backend.LocalBackend(), False)
    for found in run_ranks(lambda backend: [train(backend, dropped) for dropped in (False, True)], 2):
        for weights in found:
            assert_equal(weights, expected)
