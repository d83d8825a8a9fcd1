"""The order of an epoch: equal to its slow twin, a bijection for every n, the same on every platform."""

from __future__ import annotations

import copy
import pickle
import tracemalloc
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.properties import examples
from helpers.shuffle_twin import Twin
from variable_batch_size.data.plan.shuffle import Identity, Permutation, order

SEEDS = st.integers(0, 2**64 - 1)
EPOCHS = st.one_of(st.integers(0, 100), st.integers(0, 2**200))
SIZES = st.one_of(st.integers(1, 3000), st.integers(1, 2**48), st.integers(2**28 - 5, 2**28 + 5))


# -------------------------------------------------------------------------------------------------------- the slow twin


@examples(100)
@given(SIZES, SEEDS, EPOCHS, st.data())
def test_equals_the_twin_whose_inverse_restores_positions(n, seed, epoch, data):
    positions = [0, n - 1, *data.draw(st.lists(st.integers(0, n - 1), max_size=5))]
    samples = Permutation(n, seed, epoch)(np.array(positions)).tolist()
    twin = Twin(n, seed, epoch)
    assert samples == [twin.sample(position) for position in positions]
    assert positions == [twin.position(sample) for sample in samples]


# (n, seed, epoch) -> the samples at the first two, the middle and the last position
GOLDEN_ORDERS = {
    (1, 0, 0): [0, 0, 0, 0],
    (5, 0, 0): [2, 4, 1, 0],
    (1024, 1, 2): [165, 298, 135, 668],
    (1025, 1, 2): [772, 948, 826, 731],
    (60_000, 2026, 0): [39635, 52677, 45218, 15185],
    (1_000_003, 0, 99): [26819, 322526, 440297, 779564],
    (2**28, 7, 1): [165063502, 187345031, 175930376, 209822729],
    (2**28 + 1, 7, 1): [223058194, 19350463, 195889374, 51772428],
    (2**32, 2**63, 2**64): [2053492843, 3047176504, 1085770092, 4039376526],
    (2**48, 2**64 - 1, 10**30): [238845588634500, 209792640663408, 262306604809126, 174191464288611],
}


@pytest.mark.parametrize(("n", "seed", "epoch"), GOLDEN_ORDERS)
def test_the_order_is_that_of_the_first_release(n, seed, epoch):
    positions = np.array([0, min(1, n - 1), n // 2, n - 1])
    assert Permutation(n, seed, epoch)(positions).tolist() == GOLDEN_ORDERS[n, seed, epoch]


# ------------------------------------------------------------------------------------------------------------ bijection


def assert_bijection(n, seed, epoch):
    samples = Permutation(n, seed, epoch)(np.arange(n))
    assert samples.min() >= 0
    assert samples.max() < n
    assert (np.bincount(samples, minlength=n) == 1).all(), (n, seed, epoch)


def test_every_sample_is_used_once_for_every_size_up_to_4096():
    for n in range(1, 4097):
        assert_bijection(n, seed=n * n, epoch=n % 7)


# --------------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("n", [100, 5000, 2**40])
@pytest.mark.parametrize("shuffled", [True, False])
def test_samples_have_the_shape_of_the_positions(n, shuffled):
    samples_at = order(n, 1, 2, shuffle=shuffled)
    positions = np.arange(24)
    flat = samples_at(positions)
    assert flat.dtype == np.int64
    assert np.array_equal(positions, np.arange(24))
    assert np.array_equal(samples_at(positions.reshape(2, 3, 4)), flat.reshape(2, 3, 4))
    assert np.array_equal(samples_at(positions.reshape(4, 6).T), flat.reshape(4, 6).T)
    assert np.array_equal(samples_at(positions[::-2]), flat[::-2])
    assert samples_at(np.array(7)).shape == ()
    assert samples_at(np.array(7)) == flat[7]
    assert samples_at(np.zeros((3, 0), np.int64)).shape == (3, 0)
    for dtype in (np.int32, np.uint64, np.dtype(">i8")):
        foreign = samples_at(positions.astype(dtype))
        assert foreign.dtype == np.int64
        assert np.array_equal(foreign, flat)


def test_identity_is_the_order_of_the_dataset():
    positions = np.array([3, 0, 9])
    samples = order(10, 0, 0, shuffle=False)(positions)
    assert samples.tolist() == [3, 0, 9]
    assert not np.shares_memory(samples, positions)


@pytest.mark.parametrize("value", [Permutation(5, 1, 2), Permutation(5000, 2**64 - 1, 2**70), Identity(5)])
def test_orders_are_values(value):
    positions = np.arange(value.n)
    travelled = pickle.dumps(value)
    assert len(travelled) < 200
    for other in (pickle.loads(travelled), copy.deepcopy(value)):
        assert other == value
        assert hash(other) == hash(value)
        assert repr(other) == repr(value)
        assert np.array_equal(other(positions), value(positions))
    with pytest.raises(AttributeError):
        value.n = 6


def test_memory_does_not_grow_with_the_dataset():
    tracemalloc.start()
    try:
        Permutation(2**48, 1, 2)(np.arange(8192))
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("n", "seed", "epoch", "error", "message"),
    [
        (0, 0, 0, ValueError, "n must be an integer >= 1, got 0; pass the number of samples"),
        (2**48 + 1, 0, 0, ValueError, "n must be an integer >= 1 and <= 281474976710656, got 281474976710657;"),
        (10, -1, 0, ValueError, "seed must be an integer >= 0, got -1; take it modulo 2**64"),
        (
            10,
            2**64,
            0,
            ValueError,
            "seed must be an integer >= 0 and <= 18446744073709551615, got 18446744073709551616;",
        ),
        (10, 0, -1, ValueError, "epoch must be an integer >= 0, got -1; count epochs from 0"),
        (10.0, 0, 0, TypeError, "n must be an integer >= 1, got 10.0 (float); pass the number"),
        (10, "3", 0, TypeError, "seed must be an integer >= 0, got '3' (str);"),
        (10, 0, True, TypeError, "epoch must be an integer >= 0, got True (bool); count epochs from 0"),
    ],
)
def test_rejects_numbers_out_of_range(n, seed, epoch, error, message):
    for make in (Permutation, partial(order, shuffle=False)):
        with pytest.raises(error) as raised:
            make(n, seed, epoch)
        assert str(raised.value).startswith(message)


@pytest.mark.parametrize("n", [10, 5000, 2**48])
@pytest.mark.parametrize("shuffled", [True, False])
def test_rejects_positions_out_of_range(n, shuffled):
    samples_at = order(n, 1, 2, shuffle=shuffled)
    for wrong in (-1, n, 2**63 - 1, -(2**63)):
        with pytest.raises(IndexError) as raised:
            samples_at(np.array([[0, wrong]]))
        assert str(raised.value) == f"positions must be in [0, {n}), got {wrong}; there are {n} samples"
    with pytest.raises(TypeError, match="positions must be integers, got an array of float64"):
        samples_at(np.array([0.5]))
