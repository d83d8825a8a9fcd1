"""Named optimizers: which inner optimizers and betas their rules accept, and the length of LEGW's warm-up."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import SGD, Adam, NAdam, Optimizer, RMSprop

import variable_batch_size as vbs
from helpers.properties import examples
from helpers.reference import REF, SIZES, assert_equal, network, training, twin


def sqrt_sde(inner: Optimizer, trace: Any, dataset_size: int = 10**6, ref_batchsize: int = REF) -> vbs.CustomOptimizer:
    return vbs.SqrtSDERuleOptimizer(inner, vbs.CustomSampler(dataset_size, trace, 1, 0), ref_batchsize)


def adam(*betas: float) -> Adam:
    return Adam(network().parameters(), betas=betas)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------------- SqrtSDE


@pytest.mark.parametrize("kind", [SGD, NAdam], ids=lambda kind: kind.__name__)
def test_sqrt_sde_accepts_only_adam_and_rmsprop(kind: Any) -> None:
    with pytest.raises(TypeError, match=rf"must be a .*Adam, AdamW or RMSprop, got {kind.__name__}; use the root rule"):
        sqrt_sde(kind(network().parameters()), 20)


@pytest.mark.parametrize(
    ("inner", "text"),
    [
        (adam(0.9, 0.999), r"k = 20 takes 0\.9 of betas to -1; limit .* to 640, or choose a beta of at least 0\.95"),
        (adam(0.99, 0.8), r"k = 20 takes 0\.8 of betas to -3; limit the batch sizes to 320, "),
        (adam(0.0, 0.99), r"k = 20 takes 0 of betas to -19; limit the batch sizes to 64, "),
        (RMSprop(network().parameters(), alpha=0.9), r"k = 20 takes 0\.9 of alpha to -1; limit .* to 640, or"),
    ],
    ids=["first", "second", "zero", "RMSprop"],
)
def test_rejects_a_trace_that_takes_a_beta_out_of_range(inner: Optimizer, text: str) -> None:
    with pytest.raises(
        ValueError, match=rf"^every beta must stay in \[0, 1\) .* the largest batch size is 1280, .*{text}"
    ):
        sqrt_sde(inner, "0:20 100:1280 200:64", ref_batchsize=REF)


@examples(100)
@given(beta=st.integers(0, 999).map(lambda number: number / 1000), reference=st.integers(1, 5000))
def test_the_batch_size_named_by_the_error_is_the_largest_that_trains(beta: float, reference: int) -> None:
    with pytest.raises(ValueError, match="limit the batch sizes to") as error:
        sqrt_sde(adam(beta, 0.9995), 10**8, 10**9, reference)
    largest = int(str(error.value).split("batch sizes to ")[1].split(",")[0])
    assert largest == 1000 * reference // round(1000 * (1 - beta))
    sqrt_sde(adam(beta, 0.9995), largest, 10**9, reference)
    with pytest.raises(ValueError, match="limit the batch sizes to"):
        sqrt_sde(adam(beta, 0.9995), largest + 1, 10**9, reference)


def test_the_smallest_beta_of_all_groups_is_checked() -> None:
    first, *rest = network().parameters()
    inner = Adam([{"params": [first], "betas": [0.999, 0.5]}, {"params": rest}])
    with pytest.raises(ValueError, match=r"takes 0\.5 of betas to"):
        sqrt_sde(inner, 192)


# ------------------------------------------------------------------------------------------------------------- LEGW


@examples(20)
@given(epochs=st.floats(0, 9), dataset_size=st.integers(50, 400))
def test_legw_warms_up_for_as_many_updates_as_at_the_reference(epochs: float, dataset_size: int) -> None:
    run = training(vbs.LEGWRuleOptimizer, SIZES, dataset_size=dataset_size, warmup_epochs=epochs).run(len(SIZES))
    assert run.optimizer.rules[0] == vbs.rules.LEGWRule(epochs * dataset_size / REF)
    rates = []
    for step, size in enumerate(SIZES):
        scaling = run.optimizer.rules[0](vbs.rules.RuleInput(size, REF, step))
        rates.append(scaling.lr / (size / REF) ** 0.5)
    assert rates == pytest.approx([min(1, (u + 1) / max(epochs * dataset_size / REF, 1e-9)) for u in range(len(SIZES))])


def test_legw_without_warm_up_equals_the_root_rule() -> None:
    run = training(vbs.LEGWRuleOptimizer, SIZES, warmup_epochs=0).run(len(SIZES))
    assert_equal(run.weights(), twin(vbs.RootRuleOptimizer, SIZES))


def test_legw_has_no_default_warm_up() -> None:
    sampler = vbs.CustomSampler(50, 20, 1, 0)
    with pytest.raises(TypeError, match="warmup_epochs"):
        vbs.LEGWRuleOptimizer(adam(0.9, 0.99), sampler, REF)  # type: ignore[call-arg]


@pytest.mark.parametrize("value", [-1, -0.5, float("nan"), float("inf"), "2", True, None, 1j], ids=repr)
def test_legw_rejects_a_wrong_warm_up(value: Any) -> None:
    error = ValueError if type(value) in (int, float) else TypeError
    text = rf"must be a finite number >= 0, got {re.escape(repr(value))}.*; pass"
    with pytest.raises(error, match=f"^warmup_epochs {text}"):
        training(vbs.LEGWRuleOptimizer, warmup_epochs=value)
    with pytest.raises(error, match=f"^warmup_updates {text}"):
        vbs.rules.LEGWRule(value)


def test_legw_accepts_numpy_numbers() -> None:
    for value in (np.float32(2.5), np.float64(2.5)):
        assert repr(vbs.rules.LEGWRule(value)) == "LEGWRule(warmup_updates=2.5)"
    assert vbs.rules.LEGWRule(np.int64(2)) == vbs.rules.LEGWRule(2.0)


def test_legw_checks_its_reference_and_sampler() -> None:
    with pytest.raises(ValueError, match="ref_batchsize must be an integer >= 1, got 0; pass"):
        training(vbs.LEGWRuleOptimizer, ref_batchsize=0)
    with pytest.raises(TypeError, match=r"the sampler must be the vbs\.CustomSampler"):
        vbs.LEGWRuleOptimizer(adam(0.9, 0.99), [[0]], REF, warmup_epochs=1)  # type: ignore[arg-type]


# --------------------------------------------------------------------------------------------- weight decay


class Still(torch.nn.Module):
    """Its weight has the gradient zero."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :2] + 0 * self.weight


def decays(rule: vbs.rules.Rule, inner: Any, sizes: tuple[int, ...] = SIZES) -> list[float]:
    """1 - w_new / w_old of each update, with lr 0.02 and lambda 0.1: a factor times 0.002."""
    hyperparameters = {"lr": 0.02, "weight_decay": 0.1}
    options: dict[str, Any] = {"rule": rule, "ref_batchsize": REF, "hyperparameters": hyperparameters}
    run = training(vbs.CustomOptimizer, sizes, dataset_size=sum(sizes), model=Still(), inner=inner, **options)
    found, before = [], 1.0
    for _ in sizes:
        after = float(run.run(1).weights()[0][0])
        found.append(1 - after / before)
        before = after
    return found


SCALED = [
    vbs.rules.LinearRule(),
    vbs.rules.RootRule(),
    vbs.rules.SqrtSDERule(),
    vbs.rules.LEGWRule(4),
    vbs.rules.ConstantRule(),
]
SCALED += [vbs.rules.PowerRule(0.25), vbs.rules.RootHalfLifeRule(), vbs.rules.SurgeRule(noise_scale=40)]


@pytest.mark.parametrize(("rule", "inner"), [(rule, torch.optim.AdamW) for rule in SCALED] + [(SCALED[1], SGD)])
def test_weight_decay_is_kept_by_default_and_its_timescale_by_constant_timescale(rule: Any, inner: Any) -> None:
    factors = [rule(vbs.rules.RuleInput(size, REF, step)).lr for step, size in enumerate(SIZES)]
    assert decays(rule, inner) == pytest.approx([0.002 * factor for factor in factors])
    assert decays(vbs.rules.ConstantTimescale(rule), inner) == pytest.approx([0.002 * size / REF for size in SIZES])


def test_the_decay_of_a_large_batch_equals_that_of_many_small_ones() -> None:
    (small, *_), (large,) = (
        decays(vbs.rules.ConstantRule(), torch.optim.AdamW, 4 * (REF,)),
        decays(vbs.rules.ConstantTimescale(vbs.rules.RootRule()), torch.optim.AdamW, (4 * REF,)),
    )
    assert large == pytest.approx(4 * small)


@pytest.mark.parametrize("inner", [Adam, torch.optim.AdamW], ids=lambda kind: kind.__name__)
def test_bias_correction_works_with_constant_timescale(inner: Any) -> None:
    sizes = (20, 300, 7, 128)
    rule = vbs.rules.ConstantTimescale(vbs.rules.SqrtSDERule())
    run = training(vbs.CustomOptimizer, sizes, dataset_size=300, rule=rule, ref_batchsize=REF, inner=inner)
    expected = twin(
        vbs.SqrtSDERuleOptimizer,
        sizes,
        dataset_size=300,
        factors=lambda at: vbs.rules.Scaling(lr=at.k**0.5, one_minus_beta=at.k, eps=at.k**-0.5, weight_decay=at.k**0.5),
        inner=inner,
    )
    assert_equal(run.run(len(sizes)).weights(), expected)


def test_a_check_sees_only_the_groups_of_its_rule() -> None:
    first, *rest = network().parameters()
    inner = Adam([{"params": [first]}, {"params": rest, "betas": (0.5, 0.6)}])
    sampler = vbs.CustomSampler(1000, 256, 1, 0)
    optimizer = vbs.CustomOptimizer(inner, sampler, REF, rule=("sqrt-sde", "constant"))
    assert optimizer.rules == (vbs.rules.SqrtSDERule(), vbs.rules.ConstantRule())
    with pytest.raises(ValueError, match=r"takes 0\.5 of betas to"):
        vbs.CustomOptimizer(inner, sampler, REF, rule=("constant", "sqrt-sde"))


def test_a_failed_check_leaves_the_sampler_free() -> None:
    sampler = vbs.CustomSampler(40, 20, 1, 0, minibatch_size=4)
    with pytest.raises(TypeError, match=r"must be a .*Adam"):
        vbs.SqrtSDERuleOptimizer(SGD(network().parameters(), lr=0.1), sampler, REF)
    assert len(list(sampler)) == len(sampler)
    sampler.set_epoch(1)  # raises if an optimizer counts the microbatches


@pytest.mark.parametrize("rule", ["sqrt-sde", "root-half-life"])
def test_a_rule_that_scales_betas_rejects_optimizers_without_a_second_moment(rule: str) -> None:
    for inner in (torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop):
        training(vbs.CustomOptimizer, sizes=(32,), rule=rule, inner=inner, hyperparameters={"lr": 0.02})
    for other in (SGD, torch.optim.Adagrad, NAdam):
        with pytest.raises(TypeError, match=rf"must be a torch.optim.Adam, AdamW or RMSprop, got {other.__name__}"):
            training(vbs.CustomOptimizer, sizes=(32,), rule=rule, inner=other, hyperparameters={"lr": 0.02})


def test_a_rule_passed_as_an_object_is_used_as_it_is() -> None:
    options: dict[str, Any] = {"inner": NAdam, "hyperparameters": {"lr": 0.02}}
    run = training(vbs.CustomOptimizer, sizes=(32, 16), rule=vbs.rules.SqrtSDERule(), **options)
    assert run.run(2).optimizer.updates == 2
    assert training(vbs.CustomOptimizer, rule=None, max_grad_norm=float("inf")).run(1).optimizer.lr_factor() == 1
