"""The numbers of an optimizer's step as inputs of the graph, on tensors of the CPU; test_xla_graphs.py is on XLA."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.properties import examples
from helpers.reference import assert_equal
from variable_batch_size.backend.numbers_as_inputs import NumbersAsInputs

KINDS = {
    "SGD": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "Adam": {"weight_decay": 0.1, "amsgrad": True},
    "AdamW": {},
    "Adamax": {"weight_decay": 0.1},
    "NAdam": {"weight_decay": 0.1},
    "RAdam": {"weight_decay": 0.1},
    "RMSprop": {"momentum": 0.5, "centered": True},
    "Adagrad": {"lr_decay": 0.1},
    "Adadelta": {"weight_decay": 0.1},
}
RATES = st.sampled_from([0.0, 0.05, 0.1, 0.5, 0.9, 1.0])  # some are equal to a momentum, to 1 - beta or to 1


class Sent:
    """Which numbers were sent: one for each call."""

    def __init__(self):
        self.numbers = []

    def __call__(self, value, like):
        self.numbers.append(torch.tensor(value, dtype=like.dtype))
        return self.numbers[-1]


def optimizer(kind, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, 2), (4,), (2,), (5,))
    one, other, third, last = (torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes)
    groups = [{"params": [one, other]}, {"params": [third, last]}]
    return getattr(torch.optim, kind)(groups, foreach=False, **KINDS[kind])


def set_gradients(inner, step):
    for group in inner.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.cos(torch.arange(parameter.numel()) + step).view_as(parameter).to(parameter.dtype)


def weights(inner):
    return [p.detach().double().numpy() for group in inner.param_groups for p in group["params"]]


@pytest.mark.parametrize("kind", KINDS)
@examples(10)
@given(rates=st.lists(st.tuples(RATES, RATES), min_size=1, max_size=8))
def test_steps_equal_those_with_python_numbers(kind, rates):
    plain, own = optimizer(kind), optimizer(kind)
    context = NumbersAsInputs(own, Sent(), device_type="cpu")
    for step, pair in enumerate(rates):
        for inner in (plain, own):
            set_gradients(inner, step)
            for group, lr in zip(inner.param_groups, pair, strict=True):
                group["lr"] = lr
        plain.step()
        with context:
            own.step()
    assert_equal(weights(own), weights(plain), 1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_each_number_of_a_step_is_an_input_of_its_own_for_each_group(kind):
    inner, sent = optimizer(kind), Sent()
    context, used = NumbersAsInputs(inner, sent, device_type="cpu"), []
    rates = [(0.3, 0.4), (0.3, 0.3), (0.1, 0.9), (1.0, 1.0), (0.0, 0.0), (0.2, 0.1)]
    for step, pair in enumerate(rates):
        set_gradients(inner, step)
        for group, lr in zip(inner.param_groups, pair, strict=True):
            group["lr"] = lr
        with context:
            inner.step()
        kept = [tensor for _, tensor in context._sent.values()]
        used.append((len(kept), len({id(tensor) for tensor in kept})))
    after_first = set(used[1:5])  # the rectification of RAdam begins with step 6
    assert len(after_first) == 1
    number, distinct = after_first.pop()
    assert number == distinct > 0


def test_a_number_that_has_not_changed_is_not_sent_again():
    inner, sent = optimizer("SGD"), Sent()
    context, counts = NumbersAsInputs(inner, sent, device_type="cpu"), []
    for step in range(4):
        set_gradients(inner, step)
        inner.param_groups[1]["lr"] = 0.1 * step
        before = len(sent.numbers)
        with context:
            inner.step()
        counts.append(len(sent.numbers) - before)
    assert counts[2:] == [1, 1]


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_parameters_in_half_precision_keep_their_dtype(kind):
    inner = optimizer(kind, torch.bfloat16)
    context = NumbersAsInputs(inner, lambda value, like: torch.tensor(value, dtype=torch.float32), device_type="cpu")
    for step in range(2):
        set_gradients(inner, step)
        with context:
            inner.step()
    assert {p.dtype for group in inner.param_groups for p in group["params"]} == {torch.bfloat16}


def test_tensors_of_other_devices_and_integers_keep_their_numbers():
    inner, sent = optimizer("SGD"), Sent()
    with NumbersAsInputs(inner, sent, device_type="xla"):
        assert torch.ones(2).mul_(2.0).tolist() == [2.0, 2.0]
    with NumbersAsInputs(inner, sent, device_type="cpu"):
        assert torch.arange(2).add(1).tolist() == [1, 2]
        assert torch.arange(2.0).masked_fill(torch.tensor([True, False]), 3.0).tolist() == [3.0, 1.0]
    assert sent.numbers == []
