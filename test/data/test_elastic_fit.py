"""The numbers of Run:AI's elasticity module, and where that module is wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import variable_batch_size as vbs
from helpers.properties import examples
from variable_batch_size.data.fit import Elastic


@examples(200)
@given(batch=st.integers(1, 2000), largest=st.integers(1, 200), gpus=st.integers(1, 16))
def test_takes_the_fewest_steps_and_then_the_smallest_batch_size(batch: int, largest: int, gpus: int) -> None:
    found = vbs.elastic(*map(np.int64, (batch, largest, gpus)))  # type: ignore[arg-type]
    assert {*map(type, found)} == {int, bool}
    steps = -(-batch // (largest * gpus))
    assert found == Elastic(steps, found.batch_size, batch, gpus, True)
    assert -(-batch // (steps * gpus)) == found.batch_size <= largest


def test_a_sampler_computes_exactly_that_batch() -> None:
    found = vbs.elastic(100, 30, 3)
    assert found == (2, 17, 100, 3, True)
    ranks = [
        list(vbs.CustomSampler(100, 100, found.gpus, rank, found.batch_size, fixed_shape=False))
        for rank in range(found.gpus)
    ]
    assert [len(microbatches) for microbatches in ranks] == [found.steps] * found.gpus
    assert sorted(sample for rank in ranks for microbatch in rank for sample in microbatch) == list(range(100))


def test_counts_the_accelerators_of_this_process() -> None:
    assert vbs.elastic(256, 64).gpus == max(1, torch.accelerator.device_count())


@pytest.mark.parametrize("wrong", [{"gpus": 0}, {"gpus": 1.5}, {"global_batch_size": 0}, {"max_gpu_batch_size": "8"}])
def test_refuses_wrong_numbers(wrong: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match="must be an integer >= 1"):
        vbs.elastic(**{"global_batch_size": 8, "max_gpu_batch_size": 4, "gpus": 2} | wrong)
