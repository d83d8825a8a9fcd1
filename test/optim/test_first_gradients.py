"""What the gradients of the first update show."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from helpers.properties import examples
from variable_batch_size.optim.first_gradients import FirstGradients


def parameters(dtype: torch.dtype, number: int = 4) -> list[Tensor]:
    found = [torch.zeros(3, 2, dtype=dtype) for _ in range(number)]
    for parameter in found:
        parameter.grad = torch.linspace(-1, 2, 6).to(dtype).view(2, 3).t()
    return found


@given(st.lists(st.lists(st.integers(0, 3), max_size=5), min_size=1, max_size=4))
@examples(50)
def test_the_order_is_that_of_the_last_microbatch_that_counts(microbatches: list[list[int]]) -> None:
    first = FirstGradients(parameters(torch.float32))
    for number, indices in enumerate(microbatches):
        for index in indices:
            first.count(index)
        first.end_microbatch(alone=True, replay=number > 0)
    expected = list(dict.fromkeys(microbatches[0]))
    assert first.row() == expected + (4 - len(expected)) * [-1]
    assert first.once == all(len(set(indices)) == len(indices) for indices in microbatches)


CHANGES: dict[str, Callable[[Tensor], object]] = {
    "half": lambda gradient: gradient.mul_(0.5),
    "negative": lambda gradient: gradient.neg_(),
    "one element": lambda gradient: gradient[1, 1].zero_(),
    "finite": lambda gradient: gradient[0, 0].fill_(float("inf")),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("change", CHANGES)
def test_changes_without_a_version_are_seen(dtype: torch.dtype, change: str) -> None:
    for changed in (False, True):
        first, members = FirstGradients(own := parameters(dtype)), range(4)
        for index in members:
            first.count(index)
        if changed:
            CHANGES[change](own[2].grad.data)  # type: ignore[union-attr]
        first.end_microbatch(alone=True, replay=False)
        assert first.once is not changed


def test_non_finite_and_missing_gradients_are_no_changes() -> None:
    own = parameters(torch.float32)
    own[0].grad, own[1].grad = None, torch.full((3, 2), float("nan"))
    first = FirstGradients(own)
    for index in range(4):
        first.count(index)
    first.end_microbatch(alone=True, replay=False)
    assert first.once


def test_dropped_gradients_keep_the_others_from_leaving_early_and_a_discarded_step_does_not() -> None:
    for forget, once in ((FirstGradients.forget, True), (FirstGradients.drop, False)):
        first = FirstGradients(parameters(torch.float32))
        first.count(0)
        forget(first)
        first.end_microbatch(alone=True, replay=False)
        assert first.once is once
