"""The order of an epoch is as random as `torch.randperm`."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import scipy.stats  # type: ignore[import-untyped]
import torch
from numpy.typing import NDArray

from helpers.shuffle_twin import Twin, mix
from variable_batch_size.data import shuffle
from variable_batch_size.data.shuffle import Permutation

IntArray = NDArray[np.int64]
Floats = NDArray[np.float64]


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


def our_orders(n: int, keys: str, elements: int) -> tuple[IntArray, IntArray]:
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


def roughness(classes: IntArray, number: int) -> Floats:
    """How unequally often (sum of squares) a row's numbers, all in [0, number), occur."""
    rows = len(classes)
    keys = classes + number * np.arange(rows)[:, None]
    counts: Floats = np.bincount(keys.ravel(), minlength=rows * number).reshape(rows, number).astype(float)
    return np.asarray((counts**2).sum(1))


def features(orders: IntArray, positions: IntArray, n: int) -> Iterator[tuple[str, NDArray[Any]]]:
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
def test_orders_are_as_random_as_torch_randperm(n: int, keys: str) -> None:
    far = {name: z for name, z in deviations(n, keys, elements=180_000).items() if abs(z) > LIMIT}
    assert not far, (n, keys, far)


@pytest.mark.parametrize("n", [1025, 4097, 60_000])
def test_the_statistics_detect_that_four_rounds_are_not_random(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
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
