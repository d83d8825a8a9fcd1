"""Named optimizers: which inner optimizers and betas their rules accept, and the length of LEGW's warm-up."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import SGD, Adam, NAdam, RMSprop

import variable_batch_size as vbs
from helpers.properties import examples
from helpers.reference import REF, SIZES, network, training


def sqrt_sde(inner, trace, dataset_size=10**6, ref_batchsize=REF):
    return vbs.SqrtSDERuleOptimizer(inner, vbs.CustomSampler(dataset_size, trace, 1, 0), ref_batchsize)


def adam(*betas):
    return Adam(network().parameters(), betas=betas)


# ---------------------------------------------------------------------------------------------------------- SqrtSDE


@pytest.mark.parametrize(
    ("inner", "text"),
    [
        (adam(0.9, 0.999), r"= 20 takes 0\.9 of betas to -1; limit .* to 640, or choose a beta >= 0\.95"),
        (adam(0.99, 0.8), r"= 20 takes 0\.8 of betas to -3; limit the batch sizes to 320, "),
        (adam(0.0, 0.99), r"= 20 takes 0 of betas to -19; limit the batch sizes to 64, "),
        (RMSprop(network().parameters(), alpha=0.9), r"= 20 takes 0\.9 of alpha to -1; limit .* to 640, or"),
    ],
    ids=["first", "second", "zero", "RMSprop"],
)
def test_rejects_a_trace_that_takes_a_beta_out_of_range(inner, text):
    with pytest.raises(
        ValueError, match=rf"^every beta must stay in \[0, 1\), but the largest batch size 1280 with k = .*{text}"
    ):
        sqrt_sde(inner, "0:20 100:1280 200:64", ref_batchsize=REF)


@examples(100)
@given(beta=st.integers(0, 999).map(lambda number: number / 1000), reference=st.integers(1, 5000))
def test_the_batch_size_named_by_the_error_is_the_largest_that_trains(beta, reference):
    with pytest.raises(ValueError, match="limit the batch sizes to") as error:
        sqrt_sde(adam(beta, 0.9995), 10**8, 10**9, reference)
    largest = int(str(error.value).split("batch sizes to ")[1].split(",")[0])
    assert largest == 1000 * reference // round(1000 * (1 - beta))
    sqrt_sde(adam(beta, 0.9995), largest, 10**9, reference)
    with pytest.raises(ValueError, match="limit the batch sizes to"):
        sqrt_sde(adam(beta, 0.9995), largest + 1, 10**9, reference)


# --------------------------------------------------------------------------------------------- weight decay


class Still(torch.nn.Module):
    """Its weight has the gradient zero."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))

    def forward(self, x):
        return x[:, :2] + 0 * self.weight


def decays(rule, inner, sizes=SIZES):
    """1 - w_new / w_old of each update, with lr 0.02 and lambda 0.1: a factor times 0.002."""
    hyperparameters = {"lr": 0.02, "weight_decay": 0.1}
    options = {"rule": rule, "ref_batchsize": REF, "hyperparameters": hyperparameters}
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
def test_weight_decay_is_kept_by_default_and_its_timescale_by_constant_timescale(rule, inner):
    factors = [rule(vbs.rules.RuleInput(size, REF, step)).lr for step, size in enumerate(SIZES)]
    assert decays(rule, inner) == pytest.approx([0.002 * factor for factor in factors])
    assert decays(vbs.rules.ConstantTimescale(rule), inner) == pytest.approx([0.002 * size / REF for size in SIZES])


def test_a_check_sees_only_the_groups_of_its_rule():
    first, *rest = network().parameters()
    inner = Adam([{"params": [first]}, {"params": rest, "betas": (0.5, 0.6)}])
    sampler = vbs.CustomSampler(1000, 256, 1, 0)
    optimizer = vbs.CustomOptimizer(inner, sampler, REF, rule=("sqrt-sde", "constant"))
    assert optimizer.rules == (vbs.rules.SqrtSDERule(), vbs.rules.ConstantRule())
    with pytest.raises(ValueError, match=r"takes 0\.5 of betas to"):
        vbs.CustomOptimizer(inner, sampler, REF, rule=("constant", "sqrt-sde"))


def test_a_failed_check_leaves_the_sampler_free():
    sampler = vbs.CustomSampler(40, 20, 1, 0, minibatch_size=4)
    with pytest.raises(TypeError, match=r"must be a .*Adam"):
        vbs.SqrtSDERuleOptimizer(SGD(network().parameters(), lr=0.1), sampler, REF)
    assert len(list(sampler)) == len(sampler)
    sampler.set_epoch(1)  # raises if an optimizer counts the microbatches


def test_a_rule_passed_as_an_object_is_used_as_it_is():
    options = {"inner": NAdam, "hyperparameters": {"lr": 0.02}}
    run = training(vbs.CustomOptimizer, sizes=(32, 16), rule=vbs.rules.SqrtSDERule(), **options)
    assert run.run(2).optimizer.updates == 2
    assert training(vbs.CustomOptimizer, rule=None, max_grad_norm=float("inf")).run(1).optimizer.lr_factor() == 1
