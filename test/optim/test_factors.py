"""What a rule returns: numbers of any kind are used as reported, and anything else is refused."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import variable_batch_size as vbs
from helpers.properties import examples
from helpers.reference import ADAM, SIZES, assert_equal, training
from variable_batch_size.backend import LocalBackend
from variable_batch_size.optim.scaling.rule_check import scalings_of_groups
from variable_batch_size.optim.scaling.scaling import HyperparameterScaling
from variable_batch_size.optim.update import Progress
from variable_batch_size.rules.base import Scaling

FACTORS = ("lr", "gradient", "weight_decay", "one_minus_beta", "eps", "progress")
KINDS = {
    "tensor": torch.tensor,
    "float64 tensor": lambda number: torch.tensor(number, dtype=torch.float64),
    "tensor of one element": lambda number: torch.tensor([number], dtype=torch.float64),
    "parameter": lambda number: torch.nn.Parameter(torch.tensor(number, dtype=torch.float64)),
    "np.float64": np.float64,
    "np.float32": np.float32,
}


@given(
    kind=st.sampled_from(sorted(KINDS)),
    factors=st.fixed_dictionaries({name: st.sampled_from([0.5, 1.0, 0.25]) for name in FACTORS}),
    options=st.sampled_from([{}, {"max_grad_norm": 0.5}, {"noise": "microbatches"}]),
)
@examples(60)
def test_a_factor_of_any_type_has_the_effect_of_a_float(kind, factors, options):
    def train(convert):
        def rule(update):
            return vbs.rules.Scaling(**{name: convert(value) for name, value in factors.items()})

        make = {"inner": torch.optim.Adam, "hyperparameters": ADAM}
        return training(vbs.CustomOptimizer, rule=rule, ref_batchsize=8, **make, **options).run(len(SIZES))

    run, expected = train(KINDS[kind]), train(float)
    assert_equal(run.weights(), expected.weights(), tolerance=0)
    optimizer = run.optimizer
    assert optimizer.lr_factor() == factors["lr"] * factors["gradient"]
    assert optimizer.current_lr() == ADAM["lr"] * factors["lr"] * factors["gradient"]
    assert optimizer.progress == pytest.approx(len(SIZES) * factors["progress"])
    assert all(type(value) is not torch.Tensor for value in optimizer.state_dict()["vbs"].values())


def test_on_a_device_only_some_factors_may_be_tensors():
    """The device of the parameters is the CPU here, but the host must not read from it."""
    device, update = torch.device("cpu"), vbs.rules.RuleInput(8, 8)
    (scaling,) = scalings_of_groups([lambda update: vbs.rules.Scaling(lr=torch.tensor([2.0]))], update, device)
    assert isinstance(scaling.lr, torch.Tensor)
    assert scaling.lr.shape == ()
    with pytest.raises(TypeError, match=r"on cpu the factor eps must not depend on the noise, .* returned a tensor"):
        scalings_of_groups([lambda update: vbs.rules.Scaling(eps=torch.tensor(2.0))], update, device)


# ------------------------------------------------------------------------------------------- the inner optimizer itself


def test_a_step_of_the_inner_optimizer_is_refused_at_once():
    run = training()
    for indices in run.sampler:
        run.loss(indices).backward()
        before = [parameter.clone() for parameter in run.model.parameters()]
        with pytest.raises(
            RuntimeError, match=r"step\(\) of the inner SGD was called; call step\(\) of the vbs optimizer"
        ):
            run.optimizer.inner.step()
        assert all(map(torch.equal, before, run.model.parameters()))
        run.optimizer.step()
    expected = training()
    list(expected.steps())
    assert_equal(run.weights(), expected.weights(), tolerance=0)


def test_an_inner_optimizer_is_free_when_its_wrapper_is_gone():
    run = training().run(1)
    inner, model = run.optimizer.inner, run.model
    del run
    model(torch.ones(1, 3).double()).sum().backward()
    inner.step()
    inner.add_param_group({"params": [torch.zeros(1, requires_grad=True)]})
    assert len(inner.param_groups) == 2


@pytest.mark.parametrize("name", ["gain", "sigma2", "noise_scale"])
def test_a_rule_that_reads_the_noise_and_does_not_ask_for_it_is_told_how(name):
    def rule(update):
        return vbs.rules.Scaling(lr=min(1.0, getattr(update.noise, name)))

    message = rf"must have needs_noise = True in its class, but .*rule.* reads noise\.{name} and has not; add it, or"
    with pytest.raises(AttributeError, match=message):
        training(vbs.CustomOptimizer, SIZES, rule=rule).run(1)
    training(vbs.CustomOptimizer, SIZES, rule=rule, noise="microbatches").run(1)


@pytest.mark.parametrize("error", [AttributeError("mine"), AttributeError("mine", name="gain", obj=3)])
def test_other_errors_of_a_rule_are_left_alone(error):
    def rule(update):
        raise error

    with pytest.raises(AttributeError) as found:
        training(vbs.CustomOptimizer, SIZES, rule=rule).run(1)
    assert found.value is error


# A factor that stays on the device. -----------------------------------------------------------------------------------


def momentum_sgd(weights):
    return torch.optim.SGD(weights, lr=0.5, momentum=0.9)


@pytest.mark.parametrize("factor", [0.0, 0.25, 3.0])
def test_a_deferred_factor_equals_a_factor_on_lr(factor):
    initial = torch.tensor([1.0, -2.0], dtype=torch.float64)
    found, expected = (initial.clone().requires_grad_() for _ in range(2))
    deferred, plain = momentum_sgd([found]), momentum_sgd([expected])
    scaling = HyperparameterScaling(deferred, LocalBackend(), deferred_lr=True)
    for gradient in (torch.tensor([1.0, 3.0]), torch.tensor([-2.0, 0.5])):
        found.grad, expected.grad = (gradient.double() for _ in range(2))
        with scaling.apply([Scaling(lr=torch.tensor(factor, dtype=torch.float64))]):
            assert deferred.param_groups[0]["lr"] == 0.5
            deferred.step()
        plain.param_groups[0]["lr"] = 0.5 * factor
        plain.step()
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_a_deferred_factor_comes_before_later_hooks_and_ends_with_its_step():
    weight = torch.zeros(1, requires_grad=True)
    weight.grad = torch.ones(1)
    inner = torch.optim.SGD([weight], lr=1.0)
    scaling = HyperparameterScaling(inner, LocalBackend(), deferred_lr=True)
    seen = []
    inner.register_step_post_hook(lambda *_: seen.append(weight.item()))
    with scaling.apply([Scaling(lr=torch.tensor(0.5))]):
        inner.step()
    with pytest.raises(LookupError), scaling.apply([Scaling(lr=torch.tensor(0.5))]):
        raise LookupError
    inner.step()
    assert seen == [-0.5, -1.5]


# The sum of the progress. ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("begin", [0.0, 3.75, 2.0**23 + 0.5])
def test_the_sum_on_a_device_stays_exact_in_a_long_training(begin):
    progress, gain = Progress(begin), torch.tensor(0.3)
    for _ in range(5000):
        progress.add(gain)
    exact = begin + 5000 * gain.double().item()
    assert float(progress) == pytest.approx(exact, abs=1e-3)
    plain = torch.tensor(begin)
    for _ in range(5000):
        plain += gain
    assert begin < 2**23 or abs(plain.item() - exact) > 100  # the error of a single float32


def test_later_reads_the_sum_as_of_the_call():
    for gain in (1.0, torch.tensor(1.0)):
        progress = Progress()
        progress.add(gain)
        later = progress.reader()
        progress.add(gain)
        assert (later(), float(progress)) == (1.0, 2.0)
