"""The order of an epoch: a bijection for every n, as random as `torch.randperm`, the same everywhere."""

from __future__ import annotations

import bisect
import copy
import math
import pickle
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any, TypeAlias

import numpy as np
import pytest
import scipy.stats  # type: ignore[import-untyped]
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from variable_batch_size.data import shuffle
from variable_batch_size.data.shuffle import Identity, Permutation, order

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Key: TypeAlias = tuple[int, int, int]

SEEDS = st.integers(0, 2**64 - 1)
EPOCHS = st.one_of(st.integers(0, 100), st.integers(0, 2**200))
SIZES = st.one_of(st.integers(1, 3000), st.integers(1, 2**48), st.integers(2**28 - 5, 2**28 + 5))
examples = settings(derandomize=True, database=None, deadline=None, max_examples=100)


# --------------------------------------------------------------------------------------------------------- the twin


@dataclass(frozen=True)
class Twin:
    """The order in Python integers, one position at a time, forwards and backwards."""

    n: int
    seed: int
    epoch: int

    def words(self, count: int) -> list[int]:
        state, epoch = 0, self.epoch
        for limb in (self.n, self.seed):
            state = mix((state + GOLDEN) % 2**64 ^ limb)
        while True:
            state, epoch = mix((state + GOLDEN) % 2**64 ^ epoch % 2**64), epoch // 2**64
            if not epoch:
                return [mix((state + i * GOLDEN) % 2**64) for i in range(1, count + 1)]

    def rounds(self) -> list[tuple[Key, Key]]:
        words = [word >> 64 - self.bits for word in self.words(36)]
        keys = [(words[i] | 1, words[i + 1], words[i + 2] | 1) for i in range(0, 36, 3)]
        return list(zip(keys[::2], keys[1::2], strict=True))

    @property
    def bits(self) -> int:
        return 32 if self.n <= 2**28 else 64

    @cached_property
    def columns(self) -> int:
        least = math.ceil(math.sqrt(self.n))
        least += least % 2
        widths = [width for width in range(least, least + 1024, 2) if width < least + least // 2]
        return min(widths, key=lambda width: (math.ceil(self.n / width) * width, width))

    @cached_property
    def rows(self) -> int:
        return math.ceil(self.n / self.columns)

    def hash(self, key: Key, x: int) -> int:
        first, added, second = key
        x = (x * first + added) % (1 << self.bits)
        return (x ^ x >> self.bits // 2) * second % (1 << self.bits)

    def part(self, size: int, key: Key, x: int) -> int:
        """A number in [0, size) from the highest bits of the hash."""
        bits = self.bits - (size - 1).bit_length()
        return (self.hash(key, x) >> self.bits - bits) * size >> bits

    def sample(self, position: int) -> int:
        if self.n <= 1024:
            return self.table()[position]
        row, column = divmod(position, self.columns)
        for first, second in self.rounds():
            row = (row + self.part(self.rows, first, column)) % self.rows
            column = (column + self.part(self.columns, second, row)) % self.columns
        cell = row * self.columns + column
        return cell if cell < self.n else self.sample(cell)

    def position(self, sample: int) -> int:
        if self.n <= 1024:
            return self.table().index(sample)
        row, column = divmod(sample, self.columns)
        for first, second in reversed(self.rounds()):
            column = (column - self.part(self.columns, second, row)) % self.columns
            row = (row - self.part(self.rows, first, column)) % self.rows
        cell = row * self.columns + column
        return cell if cell < self.n else self.position(cell)

    def table(self) -> list[int]:
        words = self.words(self.n)
        return sorted(range(self.n), key=words.__getitem__)


GOLDEN = 0x9E3779B97F4A7C15


def mix(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


@examples
@given(SIZES, SEEDS, EPOCHS, st.data())
def test_equals_the_twin_and_the_twin_finds_the_way_back(n: int, seed: int, epoch: int, data: st.DataObject) -> None:
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
def test_the_order_is_the_one_of_the_first_release(n: int, seed: int, epoch: int) -> None:
    positions = np.array([0, min(1, n - 1), n // 2, n - 1])
    assert Permutation(n, seed, epoch)(positions).tolist() == GOLDEN_ORDERS[n, seed, epoch]


# ---------------------------------------------------------------------------------------------------------- bijection


def assert_bijection(n: int, seed: int, epoch: int) -> None:
    samples = Permutation(n, seed, epoch)(np.arange(n))
    assert samples.min() >= 0
    assert samples.max() < n
    assert (np.bincount(samples, minlength=n) == 1).all(), (n, seed, epoch)


def test_every_sample_is_used_once_for_every_size_up_to_4096() -> None:
    for n in range(1, 4097):
        assert_bijection(n, seed=n * n, epoch=n % 7)


@pytest.mark.parametrize("exponent", range(12, 21))
def test_every_sample_is_used_once_around_powers_of_two(exponent: int) -> None:
    for n in (2**exponent - 1, 2**exponent, 2**exponent + 1):
        assert_bijection(n, seed=2**64 - 1 - n, epoch=exponent)


@examples
@given(st.integers(2**20, 2**48), SEEDS, EPOCHS, st.integers(0, 2**32))
def test_no_sample_of_a_huge_dataset_is_used_twice(n: int, seed: int, epoch: int, draw: int) -> None:
    anywhere = np.random.default_rng(draw).integers(0, n, 3000)
    positions = np.unique(np.concatenate([anywhere, np.arange(500), n - 1 - np.arange(500)]))
    samples = Permutation(n, seed, epoch)(positions)
    assert samples.min() >= 0
    assert samples.max() < n
    assert np.unique(samples).size == positions.size


@pytest.mark.parametrize("keys", ["seeds", "epochs"])
@pytest.mark.parametrize("n", [2, 3, 4, 5, 6])
def test_all_orders_of_few_samples_are_equally_frequent(n: int, keys: str) -> None:
    orders = math.factorial(n)
    everything = np.arange(n)
    digits = n ** np.arange(n)
    seen = [
        int(Permutation(n, *((i, 5) if keys == "seeds" else (5, i)))(everything) @ digits)
        for i in range(max(2000, 10 * orders))
    ]
    frequencies = np.unique(seen, return_counts=True)[1]
    assert frequencies.size == orders
    p_value = scipy.stats.chisquare(frequencies).pvalue
    assert 1e-4 < p_value < 1 - 1e-4, p_value


# ---------------------------------------------------------------------------------------------------------- randomness

# Every row of a matrix of orders is one order (or its part at the same `width` positions). Each feature is a number a
# row; its mean over the rows is compared with that of `torch.randperm`, and with theory where theory is short.

KEYS: dict[str, Callable[[int], tuple[int, int]]] = {
    "seeds 0, 1, 2, ...": lambda i: (i, 0),
    "epochs 0, 1, 2, ...": lambda i: (2026, i),
    "seed + epoch constant": lambda i: (10_000 - i, i),
    "seeds of one bit or two": lambda i: (1 << i % 64 | 1 << i // 64 % 64, 3),
    "random seeds": lambda i: (mix(i), 1),
}
# n -> how many positions are looked at, from the first, the last or the middle one on
WIDTHS = {97: 97, 1000: 1000, 1025: 1025, 4097: 4097, 60_000: 60_000, 1_000_003: 4096}
LIMIT = 5.0  # standard deviations; about 1300 numbers are compared, all of fixed keys


def our_orders(n: int, keys: str, elements: int) -> tuple[Ints, Ints]:
    first = {"seeds 0, 1, 2, ...": 0, "random seeds": (n - WIDTHS[n]) // 2}.get(keys, n - WIDTHS[n])
    positions = np.arange(first, first + WIDTHS[n])
    rows = [Permutation(n, *KEYS[keys](i))(positions) for i in range(elements // WIDTHS[n])]
    return np.stack(rows), positions


@lru_cache
def torch_features(n: int) -> dict[str, NDArray[Any]]:
    """Of about half a million elements; up to 32 rows are cut from one permutation, where it is so long."""
    generator, width = torch.Generator().manual_seed(n), WIDTHS[n]
    cuts = min(n // width, 32)
    rows = [
        row
        for _ in range(500_000 // (width * cuts))
        for row in torch.randperm(n, generator=generator)[: width * cuts].reshape(cuts, width).numpy()
    ]
    return dict(features(np.stack(rows), np.arange(width), n))


def roughness(classes: Ints, number: int) -> Floats:
    """How unequally often (sum of squares) a row's numbers, all in [0, number), occur."""
    rows = len(classes)
    keys = classes + number * np.arange(rows)[:, None]
    counts: Floats = np.bincount(keys.ravel(), minlength=rows * number).reshape(rows, number).astype(float)
    return np.asarray((counts**2).sum(1))


def features(orders: Ints, positions: Ints, n: int) -> Iterator[tuple[str, NDArray[Any]]]:
    """Name and value in each row, of what should look alike in all uniformly random orders."""
    columns = Twin(n, 0, 0).columns  # neighbours in a column are where a Feistel network shows first
    before = np.roll(orders, 1, axis=0)
    centred = orders - (n - 1) / 2
    width = orders.shape[1]

    for size in (2, 8, 32):
        batches = centred[:, : width // size * size].reshape(len(orders), -1, size)
        yield f"variance of means of {size}", (batches.mean(2) ** 2).mean(1)
    grid = centred[:, : width // columns * columns].reshape(len(orders), -1, columns)
    yield "variance of column means", (grid.mean(1) ** 2).mean(1)

    for lag in (1, 2, columns, columns + 1, 2 * columns):
        here, there = orders[:, :-lag], orders[:, lag:]
        difference = there - here
        yield f"distance at lag {lag}", np.abs(difference).mean(1)
        yield f"same row at lag {lag}", (here // columns == there // columns).sum(1)
        yield f"same column at lag {lag}", (here % columns == there % columns).sum(1)
        yield f"differences at lag {lag}", roughness(difference % n * 16 // n, 16)
        yield f"low bits at lag {lag}", roughness((here ^ there) & 15, 16)

    second = orders[:, 2:] - 2 * orders[:, 1:-1] + orders[:, :-2]
    yield "second differences", roughness(second % n * 16 // n, 16)
    step = orders[:, columns:] - orders[:, :-columns]
    rectangle = step[:, 1:] - step[:, :-1]
    yield "rectangles", roughness(rectangle % n * 16 // n, 16)
    yield "rectangles that close", (rectangle % n == 0).sum(1)

    yield "fixed points", (orders == positions).sum(1)
    along = (centred * (positions - positions.mean())).sum(1)
    yield "correlation with the position", along
    yield "correlation with the position, squared", along**2
    yield "displacements", roughness((orders - positions) % n * 16 // n, 16)
    yield "low bits of the displacement", roughness((orders ^ positions) & 15, 16)
    for bit in range(4):
        yield f"bit {bit} at even positions", (orders[:, ::2] >> bit & 1).sum(1)

    along = (centred * (before - (n - 1) / 2)).sum(1)
    yield "correlation with the order before", along
    yield "correlation with the order before, squared", along**2
    yield "samples where the order before has them", (orders == before).sum(1)
    yield "rows where the order before has them", (orders // columns == before // columns).sum(1)
    yield "differences from the order before", roughness((orders - before) % n * 16 // n, 16)
    yield "low bits of differences from the order before", roughness((orders ^ before) & 15, 16)


def theory(n: int) -> dict[str, float]:
    """Expectations over all n! orders."""
    variance = (n * n - 1) / 12
    means = {f"variance of means of {b}": variance / b * (n - b) / (n - 1) for b in (2, 8, 32)}
    distances = {f"distance at lag {lag}": (n + 1) / 3 for lag in (1, 2)}
    return means | distances | {"correlation with the position": 0.0, "correlation with the order before": 0.0}


def deviations(n: int, keys: str, elements: int) -> dict[str, float]:
    """How many standard deviations each feature lies from torch's mean, and from the theory's."""
    found: dict[str, float] = {}
    for name, ours in features(*our_orders(n, keys, elements), n):
        theirs = torch_features(n)[name]
        variance = theirs.var() + 1 / len(ours)  # the second term matters for the rarest events only
        found[name] = (ours.mean() - theirs.mean()) / (variance / len(ours) + variance / len(theirs)) ** 0.5
        if name in theory(n):
            found[name + ", theory"] = (ours.mean() - theory(n)[name]) / (variance / len(ours)) ** 0.5
    return found


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("n", WIDTHS)
def test_orders_are_as_random_as_those_of_torch(n: int, keys: str) -> None:
    far = {name: z for name, z in deviations(n, keys, elements=180_000).items() if abs(z) > LIMIT}
    assert not far, (n, keys, far)


@pytest.mark.parametrize("n", [1025, 4097, 60_000])
def test_the_same_statistics_see_that_four_rounds_are_not_random(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shuffle, "_ROUNDS", 4)
    assert max(map(abs, deviations(n, "random seeds", elements=180_000).values())) > 2 * LIMIT


def sign(samples: list[int]) -> int:
    """+1 or -1, by the number of cycles."""
    seen = [False] * len(samples)
    cycles = 0
    for start in range(len(samples)):
        cycles += not seen[start]
        while not seen[start]:
            seen[start], start = True, samples[start]
    return 1 - 2 * ((len(samples) - cycles) % 2)


def inversions(samples: list[int]) -> int:
    """Number of pairs in the wrong order."""
    earlier: list[int] = []
    count = 0
    for sample in samples:
        place = bisect.bisect(earlier, sample)
        count += len(earlier) - place
        earlier.insert(place, sample)
    return count


def longest_increasing(samples: list[int]) -> int:
    """Length of the longest increasing subsequence, by patience sorting."""
    piles: list[int] = []
    for sample in samples:
        at = bisect.bisect(piles, sample)
        piles[at : at + 1] = [sample]
    return len(piles)


@pytest.mark.parametrize("n", [97, 1024, 1025])
def test_signs_inversions_and_increasing_subsequences(n: int) -> None:
    orders = [Permutation(n, i, 0)(np.arange(n)).tolist() for i in range(200)]
    generator = torch.Generator().manual_seed(n)
    reference = [longest_increasing(torch.randperm(n, generator=generator).tolist()) for _ in orders]
    root = len(orders) ** 0.5

    assert abs(np.mean([sign(samples) for samples in orders])) * root < 4

    standard = (np.array([inversions(samples) for samples in orders]) - n * (n - 1) / 4) / (
        n * (n - 1) * (2 * n + 5) / 72
    ) ** 0.5
    assert abs(standard.mean()) * root < 4
    assert abs((standard**2).mean() - 1) / 2**0.5 * root < 4

    longest = [longest_increasing(samples) for samples in orders]
    assert abs(scipy.stats.ttest_ind(longest, reference).statistic) < 4


# -------------------------------------------------------------------------------------------------------------- values


@examples
@given(SIZES, SEEDS, EPOCHS, st.lists(st.integers(0, 20_000), max_size=4), st.booleans())
def test_chunks_are_parts_of_the_whole(n: int, seed: int, epoch: int, cuts: list[int], shuffled: bool) -> None:
    positions = np.arange(max(0, n - 20_000), n)
    samples_at = order(n, seed, epoch, shuffled)
    chunks = [samples_at(chunk) for chunk in np.split(positions, sorted(cuts))]
    assert np.array_equal(np.concatenate(chunks), samples_at(positions))


@pytest.mark.parametrize("n", [100, 5000, 2**40])
@pytest.mark.parametrize("shuffled", [True, False])
def test_samples_have_the_shape_of_the_positions(n: int, shuffled: bool) -> None:
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


def test_without_shuffling_the_order_is_that_of_the_dataset() -> None:
    positions = np.array([3, 0, 9])
    samples = order(10, 0, 0, shuffle=False)(positions)
    assert samples.tolist() == [3, 0, 9]
    assert not np.shares_memory(samples, positions)


@pytest.mark.parametrize("value", [Permutation(5, 1, 2), Permutation(5000, 2**64 - 1, 2**70), Identity(5)])
def test_orders_are_values(value: Permutation | Identity) -> None:
    positions = np.arange(value.n)
    travelled = pickle.dumps(value)
    assert len(travelled) < 200
    for other in (pickle.loads(travelled), copy.deepcopy(value)):
        assert other == value
        assert hash(other) == hash(value)
        assert repr(other) == repr(value)
        assert np.array_equal(other(positions), value(positions))
    with pytest.raises(AttributeError):
        value.n = 6  # type: ignore[misc]


def test_each_of_the_three_numbers_matters() -> None:
    for n in (1000, 5000):
        positions = np.arange(900)
        base = Permutation(n, 1, 2)(positions)
        for other in ((n, 2, 1), (n, 1, 3), (n, 2, 2), (n, 1, 2 + 2**64), (n, 1 + 2**63, 2), (n + 1, 1, 2)):
            assert (Permutation(*other)(positions) == base).sum() < 10


def test_the_memory_does_not_grow_with_the_dataset() -> None:
    tracemalloc.start()
    try:
        Permutation(2**48, 1, 2)(np.arange(8192))
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("n", "seed", "epoch", "error", "message"),
    [
        (0, 0, 0, ValueError, "n must be a Python int in [1, 281474976710656], got 0; give the number of samples"),
        (2**48 + 1, 0, 0, ValueError, "n must be a Python int in [1, 281474976710656], got 281474976710657;"),
        (10, -1, 0, ValueError, "seed must be a Python int in [0, 18446744073709551615], got -1; take it modulo 2**64"),
        (10, 2**64, 0, ValueError, "seed must be a Python int in [0, 18446744073709551615], got 18446744073709551616;"),
        (10, 0, -1, ValueError, "epoch must be a Python int >= 0, got -1; count epochs from 0"),
        (10.0, 0, 0, TypeError, "n must be a Python int in [1, 281474976710656], got 10.0; convert it with int(...)"),
        (10, np.int64(3), 0, TypeError, "seed must be a Python int in [0, 18446744073709551615], got np.int64(3);"),
        (10, 0, True, TypeError, "epoch must be a Python int >= 0, got True; convert it with int(...)"),
    ],
)
def test_numbers_out_of_range_are_refused(n: int, seed: int, epoch: int, error: type[Exception], message: str) -> None:
    for make in (Permutation, partial(order, shuffle=False)):
        with pytest.raises(error) as refusal:
            make(n, seed, epoch)
        assert str(refusal.value).startswith(message)


def test_an_identity_without_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="n must be a Python int in"):
        Identity(0)


@pytest.mark.parametrize("n", [10, 5000, 2**48])
@pytest.mark.parametrize("shuffled", [True, False])
def test_positions_out_of_range_are_refused(n: int, shuffled: bool) -> None:
    samples_at = order(n, 1, 2, shuffle=shuffled)
    for wrong in (-1, n, 2**63 - 1, -(2**63)):
        with pytest.raises(IndexError) as refusal:
            samples_at(np.array([[0, wrong]]))
        assert str(refusal.value) == f"positions must be in [0, {n}), got {wrong}; there are {n} samples"
    with pytest.raises(TypeError, match="positions must be integers, got an array of float64"):
        samples_at(np.array([0.5]))
