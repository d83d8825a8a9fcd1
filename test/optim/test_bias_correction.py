"""Adam with betas that change: its bias is corrected by the product of all betas so far, as in the float64 twin."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.optim import Adam, AdamW, NAdam

import variable_batch_size as vbs
from helpers.properties import examples
from helpers.reference import ADAM, SIZES, assert_equal, batches, network, training, twin
from variable_batch_size.optim.scaling.scaling import HyperparameterScaling
from variable_batch_size.testing import run_ranks

KIND = vbs.SqrtSDERuleOptimizer


@dataclass(frozen=True)
class BetasRule:
    """Scales 1 - beta by k, from update number `begin` on."""

    begin: int = 0

    def __call__(self, update):
        return vbs.rules.Scaling(one_minus_beta=update.ratio if update.updates >= self.begin else 1)


def terms(run):
    """[updates, C_1, C_2] for each parameter group, or None."""
    return run.optimizer.state_dict()["vbs"].get("bias_correction")


# ------------------------------------------------------------------------------------------------- against the paper


@pytest.mark.parametrize("kind", [KIND, vbs.RootHalfLifeRuleOptimizer])
@examples(40)
@given(
    sizes=st.lists(st.integers(1, 300), min_size=2, max_size=12),
    world=st.integers(1, 4),
    inner=st.sampled_from([Adam, AdamW]),
    amsgrad=st.booleans(),
    maximize=st.booleans(),
    weight_decay=st.sampled_from([0.0, 0.3]),
    kernel=st.sampled_from(["foreach", "fused", "single-tensor"]),
)
def test_every_adam_equals_that_of_the_paper(kind, sizes, world, inner, amsgrad, maximize, weight_decay, kernel):
    own = {"amsgrad": amsgrad, "maximize": maximize, "weight_decay": weight_decay}
    kernels = {name: kernel == name for name in ("foreach", "fused")}

    def train(backend):
        options = {"inner": inner, "hyperparameters": ADAM | own | kernels}
        return training(kind, sizes, dataset_size=300, backend=backend, **options).run(len(sizes))

    expected = twin(kind, sizes, dataset_size=300, inner=inner, **own)
    for rank in run_ranks(train, world):
        assert_equal(rank.weights(), expected)


def test_a_beta_of_zero_forgets_the_earlier_updates():
    sizes, betas = [64, 128, 96, 128, 20], (0.5, 0.75)  # k = 2 changes the first beta to 0
    run = training(KIND, sizes, dataset_size=500, hyperparameters=ADAM | {"betas": betas}).run(2)
    assert terms(run)[0][1] == 1
    assert_equal(run.run(3).weights(), twin(KIND, sizes, dataset_size=500, betas=betas))


@pytest.mark.parametrize("begin", [0, 3])
def test_the_correction_begins_at_the_first_update_that_scales_the_betas(begin):
    def factors(at):
        return vbs.rules.Scaling(one_minus_beta=at.k if at.u > begin else 1)

    run = training(vbs.CustomOptimizer, rule=BetasRule(begin), ref_batchsize=64, inner=Adam).run(begin)
    assert terms(run) is None
    run.run(len(SIZES) - begin)
    assert terms(run)[0][0] == len(SIZES)
    assert_equal(run.weights(), twin(KIND, SIZES, factors=factors))


@examples(20)
@given(
    factors=st.lists(st.floats(1e-10, 9.99).filter(lambda factor: factor != 1), min_size=1, max_size=60),
    beta=st.sampled_from([0.9, 0.99999, 1 - 1e-12]),
)
def test_the_terms_are_exact_for_betas_close_to_one(factors, beta):
    assume(all(1 - factor * (1 - beta) < 1 for factor in factors))  # a beta that rounds to 1 is rejected
    weight = torch.ones(1, requires_grad=True)
    weight.grad = torch.ones(1)
    adam = Adam([weight], betas=(0.9, beta))
    scaling = HyperparameterScaling(adam, vbs.backend.LocalBackend())
    products = [Fraction(1), Fraction(1)]
    for factor in factors:
        with scaling.apply([vbs.rules.Scaling(one_minus_beta=factor)]):
            products = [p * Fraction(1 - factor * (1 - b)) for p, b in zip(products, (0.9, beta), strict=True)]
    (found,) = scaling.state_dict()["bias_correction"]
    assert found[0] == len(factors)
    assert found[1:] == pytest.approx([float(1 - product) for product in products], rel=1e-13)


# ------------------------------------------------------------------------------------------- optimizers not corrected


def test_other_optimizers_keep_their_own_correction():
    run = training(vbs.CustomOptimizer, rule=BetasRule(), ref_batchsize=64, inner=NAdam, hyperparameters={"lr": 0.02})
    run.run(len(SIZES))
    other = training(vbs.ConstantOptimizer)
    inner = NAdam(other.model.parameters(), lr=0.02)
    for batch in batches(SIZES, 50):
        other.loss(batch.tolist()).backward()
        scaled = tuple(1 - len(batch) / 64 * (1 - beta) for beta in (0.9, 0.999))
        inner.param_groups[0]["betas"] = scaled
        inner.step()
        inner.zero_grad()
    assert_equal(run.weights(), other.weights())
    assert terms(run) is None


# ------------------------------------------------------------------------------------------------- groups and states


def first_layer(parameters, **hyperparameters):
    return Adam(list(parameters)[:2], **hyperparameters)


def test_the_terms_of_a_group_that_is_added_later_begin_there():
    run = training(KIND, inner=first_layer).run(2)
    run.optimizer.add_param_group({"params": list(run.model.parameters())[2:]})
    assert [group and group[0] for group in terms(run)] == [2, []]
    run.run(2)
    assert [group[0] for group in terms(run)] == [4, 2]


def test_rejects_parameters_of_one_group_that_begin_at_different_updates():
    model = network()
    model[0].requires_grad_(False)
    run = training(KIND, model=model).run(2)
    model[0].requires_grad_(True)
    run.optimizer.add_param_group({"params": [torch.zeros(1, requires_grad=True)]})  # fixes the membership again
    before = terms(run)
    with pytest.raises(ValueError, match="updates in a group, but group 0 has 0 or 2; put parameters that"):
        run.run(1)
    run.optimizer.discard_step()
    assert terms(run) == before


def test_rejects_a_state_whose_counts_contradict_its_optimizer():
    state = training(KIND).run(2).optimizer.state_dict()
    state["vbs"]["bias_correction"][0][0] = 7
    run = training(KIND)
    run.optimizer.load_state_dict(state)
    with pytest.raises(ValueError, match="updates in a group, but group 0 has 2 or 7;"):
        run.run(1)


def test_the_updates_of_a_plain_adam_count():
    plain = training(vbs.ConstantOptimizer, inner=Adam).run(3)
    run = training(KIND, SIZES).run(2)  # its terms must be replaced by loading
    run.optimizer.load_state_dict(plain.optimizer.inner.state_dict(), strict=False)
    assert terms(run) is None
    run.run(1)
    size = SIZES[2]
    expected = [1 - beta**3 * (1 - size / 64 * (1 - beta)) for beta in ADAM["betas"]]
    assert terms(run) == [[4, *map(pytest.approx, expected)]]
