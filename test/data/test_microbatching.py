"""The split of a batch: the remainder into divisors, and the counts for all microbatch sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.reference import examples
from helpers.splitting import split_sizes
from variable_batch_size.data.microbatching import divisors, microbatch_counts, partial_sizes


@pytest.mark.parametrize("minibatch_size", range(1, 65))
def test_the_remainder_is_split_greedily_into_divisors(minibatch_size: int) -> None:
    for remainder in range(minibatch_size):
        assert list(partial_sizes(remainder, minibatch_size)) == split_sizes(remainder, minibatch_size, True)
        assert sum(partial_sizes(remainder, minibatch_size)) == remainder
        assert all(minibatch_size % size == 0 for size in partial_sizes(remainder, minibatch_size))
        assert list(partial_sizes(remainder, minibatch_size)) == sorted(partial_sizes(remainder, minibatch_size))
        assert partial_sizes(remainder, minibatch_size, False) == ((remainder,) if remainder else ())


def test_known_and_longest_splits() -> None:
    assert partial_sizes(17, 32) == (1, 16)
    assert max(len(partial_sizes(remainder, 64)) for remainder in range(64)) == 6  # log2
    assert max(len(partial_sizes(remainder, 61)) for remainder in range(61)) == 60  # a prime


@pytest.mark.parametrize("largest", [*range(1, 27), 61, 64])
def test_microbatch_counts_equal_those_of_the_split(largest: int) -> None:
    for batch_size in (*range(1, 140), 4001):
        expected = [batch_size // m + len(partial_sizes(batch_size % m, m)) for m in range(1, largest + 1)]
        assert microbatch_counts(batch_size, largest).tolist() == expected


def test_microbatch_counts_of_large_batches_equal_those_of_the_split() -> None:
    found = microbatch_counts(2**53 - 111, 4096)
    for m in (1, 2, 63, 64, 65, 3600, 4032, 4093, 4096):
        assert found[m - 1] == (2**53 - 111) // m + len(partial_sizes((2**53 - 111) % m, m))


@given(st.integers(1, 10**6))
@examples(50)
def test_divisors_are_complete_and_descending(number: int) -> None:
    found = divisors(number)
    assert list(found) == sorted(set(found), reverse=True)
    assert all(number % divisor == 0 for divisor in found)
    assert len(found) == sum(2 - (d * d == number) for d in range(1, int(number**0.5) + 1) if number % d == 0)
