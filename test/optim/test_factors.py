"""What a rule returns: numbers of any kind are used as reported, and anything else is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import variable_batch_size as vbs
from helpers.properties import examples
from helpers.reference import ADAM, SGD, SIZES, assert_equal, training
from variable_batch_size.optim.rule_check import scalings_of_groups

KINDS: dict[str, Callable[[float], Any]] = {
    "tensor": torch.tensor,
    "float64 tensor": lambda number: torch.tensor(number, dtype=torch.float64),
    "tensor of one element": lambda number: torch.tensor([number], dtype=torch.float64),
    "parameter": lambda number: torch.nn.Parameter(torch.tensor(number, dtype=torch.float64)),
    "np.float64": np.float64,
    "np.float32": np.float32,
}


@given(
    kind=st.sampled_from(sorted(KINDS)),
    factors=st.fixed_dictionaries(
        {
            "lr": st.sampled_from([0.5, 1.0, 2.0]),
            "gradient": st.sampled_from([0.25, 1.0]),
            "weight_decay": st.sampled_from([0.5, 1.0]),
            "one_minus_beta": st.sampled_from([0.5, 1.0]),
            "eps": st.sampled_from([2.0, 1.0]),
            "progress": st.sampled_from([0.5, 1.0]),
        }
    ),
    options=st.sampled_from([{}, {"max_grad_norm": 0.5}, {"noise": "microbatches"}]),
)
@examples(60)
def test_a_factor_of_any_type_has_the_effect_of_a_float(
    kind: str, factors: dict[str, float], options: dict[str, Any]
) -> None:
    def train(convert: Callable[[float], Any]) -> Any:
        def rule(update: vbs.rules.RuleInput) -> vbs.rules.Scaling:
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


@pytest.mark.parametrize("bad", [1.5, None, {"lr": 1.0}, vbs.rules.Scaling])
def test_refuses_anything_but_a_scaling(bad: Any) -> None:
    run = training(vbs.CustomOptimizer, rule=lambda update: bad, ref_batchsize=8)
    with pytest.raises(
        TypeError, match=r"^a rule must return a vbs.rules.Scaling, but .* did not, got .*; return Scaling\(lr="
    ):
        run.run(1)


@pytest.mark.parametrize("name", [field.name for field in fields(vbs.rules.Scaling)])
@pytest.mark.parametrize("bad", ["1", None, True, torch.ones(2), 1j])
def test_refuses_factors_that_are_no_numbers(name: str, bad: Any) -> None:
    run = training(vbs.CustomOptimizer, rule=lambda update: vbs.rules.Scaling(**{name: bad}), ref_batchsize=8)
    with pytest.raises(TypeError, match=rf"^every factor of a rule must be a number, but .* returned {name}, got"):
        run.run(1)


@pytest.mark.parametrize("name", [field.name for field in fields(vbs.rules.Scaling)])
@pytest.mark.parametrize("bad", [np.float32("nan"), torch.tensor(torch.inf), float("-inf"), np.float64("inf")])
def test_refuses_factors_that_are_not_finite(name: str, bad: Any) -> None:
    run = training(vbs.CustomOptimizer, rule=lambda update: vbs.rules.Scaling(**{name: bad}), ref_batchsize=8)
    with pytest.raises(
        ValueError, match=rf"^every factor of a rule must be finite, got {name}=-?(nan|inf) from .*; ret"
    ):
        run.run(1)


def test_on_a_device_only_some_factors_may_be_tensors() -> None:
    """The device of the parameters is the CPU here, but the host must not read from it."""
    device, update = torch.device("cpu"), vbs.rules.RuleInput(8, 8)
    (scaling,) = scalings_of_groups([lambda update: vbs.rules.Scaling(lr=torch.tensor([2.0]))], update, device)
    assert isinstance(scaling.lr, torch.Tensor)
    assert scaling.lr.shape == ()
    with pytest.raises(TypeError, match=r"on cpu the factor eps must be a number that does not depend on the noise"):
        scalings_of_groups([lambda update: vbs.rules.Scaling(eps=torch.tensor(2.0))], update, device)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------- the inner optimizer itself


def test_a_step_of_the_inner_optimizer_is_refused_at_once() -> None:
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


def test_a_grad_scaler_that_steps_the_inner_optimizer_is_refused() -> None:
    run, scaler = training(), torch.amp.GradScaler("cpu")
    run.optimizer.backward(run.loss(next(iter(run.sampler))), scaler=scaler)
    with pytest.raises(RuntimeError, match="a wrapped optimizer must be stepped by its wrapper"):
        scaler.step(run.optimizer.inner)


def test_an_inner_optimizer_is_free_when_its_wrapper_is_gone() -> None:
    run = training().run(1)
    inner, model = run.optimizer.inner, run.model
    del run
    model(torch.ones(1, 3).double()).sum().backward()
    inner.step()
    inner.add_param_group({"params": [torch.zeros(1, requires_grad=True)]})
    assert len(inner.param_groups) == 2


def test_a_group_that_is_added_to_the_inner_optimizer_is_adopted() -> None:
    def train(through_inner: bool) -> Any:
        run = training(inner=lambda ps, **options: torch.optim.SGD(list(ps)[:2], **options)).run(2)
        target = run.optimizer.inner if through_inner else run.optimizer
        target.add_param_group({"params": list(run.model.parameters())[2:], **SGD, "lr": 0.1})
        return run.run(3)

    run, expected = train(True), train(False)
    assert_equal(run.weights(), expected.weights(), tolerance=0)
    assert len(run.optimizer.rules) == 2
    next(run.steps())
    with pytest.raises(RuntimeError, match=r"^add_param_group\(\) must be called between steps"):
        run.optimizer.inner.add_param_group({"params": [torch.zeros(1, requires_grad=True)]})


@pytest.mark.parametrize("name", ["gain", "sigma2", "noise_scale"])
def test_a_rule_that_reads_the_noise_and_does_not_ask_for_it_is_told_how(name: str) -> None:
    def rule(update: vbs.rules.RuleInput) -> vbs.rules.Scaling:
        return vbs.rules.Scaling(lr=min(1.0, getattr(update.noise, name)))

    message = rf"must have needs_noise = True in its class, but .*rule.* reads noise\.{name} and has not; add it, or"
    with pytest.raises(AttributeError, match=message):
        training(vbs.CustomOptimizer, SIZES, rule=rule).run(1)
    training(vbs.CustomOptimizer, SIZES, rule=rule, noise="microbatches").run(1)


@pytest.mark.parametrize("error", [AttributeError("mine"), AttributeError("mine", name="gain", obj=3)])
def test_other_errors_of_a_rule_are_left_alone(error: AttributeError) -> None:
    def rule(update: vbs.rules.RuleInput) -> vbs.rules.Scaling:
        raise error

    with pytest.raises(AttributeError) as found:
        training(vbs.CustomOptimizer, SIZES, rule=rule).run(1)
    assert found.value is error
