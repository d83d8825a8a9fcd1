"""How parameters are divided into buckets."""

from __future__ import annotations

import random

import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.properties import examples
from variable_batch_size.optim.buckets import SUMMED, make_buckets


@given(
    sizes=st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=12),
    seed=st.integers(0, 99),
    most=st.integers(0, 200),
)
@examples(100)
def test_buckets_hold_each_parameter_once_and_are_complete_in_their_order(
    sizes: list[tuple[int, bool]], seed: int, most: int
) -> None:
    parameters = [torch.zeros(size, dtype=torch.float64 if wide else torch.float32) for size, wide in sizes]
    order = random.Random(seed).sample(range(len(sizes)), len(sizes))
    buckets = make_buckets(order, parameters, most)
    assert sorted(index for bucket in buckets for index in bucket.indices) == sorted(order)
    last = [order.index(bucket.indices[-1]) for bucket in buckets]
    assert [bucket.number for bucket in buckets] == list(range(len(buckets)))
    for bucket in buckets:
        assert {parameters[index].dtype for index in bucket.indices} == {bucket.flat.dtype}
        assert [order.index(index) for index in bucket.indices] == sorted(order.index(i) for i in bucket.indices)
        assert sum(parameters[index].nbytes for index in bucket.indices[:-1]) < max(most, 1)
    full = [number for number, bucket in zip(last, buckets, strict=True) if bucket.flat.nbytes >= most]
    assert full == sorted(full)


def test_the_first_bucket_is_small_as_in_distributed_data_parallel() -> None:
    parameters = [torch.zeros(1 << 17) for _ in range(60)]  # half a MB each
    assert [len(bucket.indices) for bucket in make_buckets(range(60), parameters, 25 * 2**20)] == [2, 50, 8]


def test_changes_of_any_element_are_seen_in_the_first_updates() -> None:
    parameters = [torch.zeros(64, 64) for _ in range(5)]
    for parameter in parameters:
        parameter.grad = torch.ones(64, 64)
    (bucket,) = make_buckets(range(5), parameters, 25 * 2**20)
    for _ in range(SUMMED):
        bucket.reset()
        bucket.note_sent()
        assert not bucket.changed()
        parameters[1].grad.data[3, 3] += 1  # type: ignore[union-attr]  # of no sample
        assert bucket.is_same()
        assert bucket.changed()
    bucket.note_sent()
    parameters[0].grad.data.mul_(2)  # type: ignore[union-attr]
    assert bucket.changed()
