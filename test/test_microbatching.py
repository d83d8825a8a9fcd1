"""The split of a batch: the remainder into divisors, and the counts for all microbatch sizes."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.properties import examples
from helpers.splitting import split_sizes
from variable_batch_size.microbatching import count_microbatches, cut, microbatch_counts, partial_sizes


@pytest.mark.parametrize("minibatch_size", range(1, 65))
def test_the_remainder_is_split_greedily_into_divisors(minibatch_size):
    for remainder in range(minibatch_size):
        assert list(partial_sizes(remainder, minibatch_size)) == split_sizes(remainder, minibatch_size, True)
        assert sum(partial_sizes(remainder, minibatch_size)) == remainder
        assert all(minibatch_size % size == 0 for size in partial_sizes(remainder, minibatch_size))
        assert list(partial_sizes(remainder, minibatch_size)) == sorted(partial_sizes(remainder, minibatch_size))


def sizes_of(cut):
    return [cut.locate(number)[1] for number in range(cut.microbatches)]


@given(st.integers(1, 3000), st.integers(1, 200), st.booleans(), st.integers(1, 40))
@examples(300)
def test_a_cut_holds_every_sample_once(batch_size, minibatch_size, fixed_shape, multiple_of):
    found = cut(batch_size, minibatch_size, fixed_shape=fixed_shape, multiple_of=multiple_of)
    assert sizes_of(found) == split_sizes(batch_size, minibatch_size, fixed_shape, multiple_of)
    assert sum(sizes_of(found)) == batch_size
    starts = [found.locate(number)[0] for number in range(found.microbatches)]
    assert starts == [0, *accumulate(sizes_of(found)[:-1])]


@given(st.integers(1, 3000), st.integers(1, 200), st.integers(1, 300))
@examples(300)
def test_all_ranks_have_the_fewest_rounds_and_no_replay_if_there_are_samples(batch_size, minibatch_size, world):
    sizes = sizes_of(cut(batch_size, minibatch_size, fixed_shape=False, multiple_of=world))
    rounds = -(-batch_size // (minibatch_size * world))
    assert sum(sizes) == batch_size
    assert max(sizes) <= minibatch_size
    assert max(sizes) - min(sizes) <= 1
    assert -(-len(sizes) // world) == rounds
    if batch_size >= world * rounds:
        assert [len(sizes[rank::world]) for rank in range(world)] == [rounds] * world
    else:
        assert sizes == [1] * batch_size


@given(st.integers(1, 3000), st.integers(1, 200))
@examples(300)
def test_without_a_fixed_shape_sizes_differ_by_at_most_one(batch_size, minibatch_size):
    sizes = sizes_of(cut(batch_size, minibatch_size, fixed_shape=False))
    assert len(sizes) == -(-batch_size // minibatch_size)
    assert max(sizes) <= minibatch_size
    assert max(sizes) - min(sizes) <= 1
    if batch_size > 1 and minibatch_size >= 3:  # with 2, three samples are 1 + 2
        assert min(sizes) >= 2


@given(st.lists(st.integers(1, 3000), min_size=1), st.integers(1, 200), st.booleans(), st.integers(1, 40))
@examples(100)
def test_counts_of_many_batches_equal_those_of_their_cuts(batch_sizes, minibatch_size, fixed_shape, multiple_of):
    how = {"fixed_shape": fixed_shape, "multiple_of": multiple_of}
    found = count_microbatches(np.array(batch_sizes), minibatch_size, **how)
    assert found.tolist() == [cut(size, minibatch_size, **how).microbatches for size in batch_sizes]


@pytest.mark.parametrize("fixed_shape", [True, False])
@pytest.mark.parametrize("largest", [*range(1, 27), 61, 64])
def test_microbatch_counts_equal_those_of_the_cut(largest, fixed_shape):
    for batch_size in (*range(1, 140), 4001):
        expected = [cut(batch_size, m, fixed_shape=fixed_shape).microbatches for m in range(1, largest + 1)]
        assert microbatch_counts(batch_size, largest, fixed_shape=fixed_shape).tolist() == expected


def test_microbatch_counts_of_large_batches_equal_those_of_the_cut():
    found = microbatch_counts(2**53 - 111, 4096, fixed_shape=True)
    for m in (1, 2, 63, 64, 65, 3600, 4032, 4093, 4096):
        assert found[m - 1] == cut(2**53 - 111, m, fixed_shape=True).microbatches
