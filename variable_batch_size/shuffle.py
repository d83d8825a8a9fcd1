"""The order of an epoch's samples: a keyed permutation of 0 .. n-1 that is computed where it is asked for.

Up to 1024 samples the order is a table, the ranks of n hashed words. Above, a position is a cell of a grid,

    position = high * 2^k + low,   2^k columns, rows = ceil(n / 2^k),   2^k ~ sqrt(n),

and rounds of a Feistel network take turns on the two coordinates:

    high <- (high + floor(rows * hash_i(low) / 2^w)) mod rows,      low <- (low + hash_(i+1)(high)) mod 2^k,

each of them undone by a subtraction, so that all of them together are a bijection of the grid whatever the hash is.
The grid has fewer than 2^k cells too many; who lands on one walks on until inside. A number of w bits (32 up to 2^28
samples, else 64) is hashed by ((m x + c) ^ (m x + c) >> w/2) * m', odd m and m', of which the highest bits are used.

Sources: Black and Rogaway 2002, "Ciphers with arbitrary finite domains" (grid, rounds modulo its sides, cycle walking);
Mitchell et al. 2021 (arXiv 2106.06161, such ciphers for shuffling, and that few rounds are not random); Steele, Lea and
Flood 2014, "Fast splittable pseudorandom number generators" (the hash that makes the keys).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast, final

import numpy as np
from numpy.typing import NDArray

__all__ = ["Identity", "Permutation", "order"]

Positions: TypeAlias = NDArray[np.int64]

_TABLE = 1024  # longest order that is kept as a table: short ones have too few cells for a Feistel network
_LONGEST = 2**48
_ROUNDS = 12
_BLOCK = 8192  # positions that are encrypted at once: the working arrays stay in the core's own cache
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@final
@dataclass(frozen=True, slots=True)
class Permutation:
    """The shuffled order of an epoch: `Permutation(n, seed, epoch)(positions)` are the samples at these positions.

    A bijection of 0 .. n-1, the same for the same (n, seed, epoch) on every platform and in chunks of any size; no more
    than 8 KiB are kept, whatever n is. It is made to be statistically random, not secret.

    Twelve rounds: by 836 statistics (batch means, neighbours, pairs and quadruples of the grid, fixed points, sign,
    inversions, the order of the next seed, ...) 6 rounds differ from uniform shuffles of 1025 samples after 10,000
    orders, 7 after 300,000, and 8 no more; half as many again are margin.

    Args:
        n: number of samples, 1 to 2^48.
        seed: a Python int in [0, 2^64).
        epoch: a Python int >= 0.
    Call:
        positions: integers in [0, n), any shape. Returns int64 samples in [0, n) of the same shape.
    Raises:
        TypeError: a number that is no Python int; positions that are not integers.
        ValueError: n, seed or epoch out of range.
        IndexError: a position outside [0, n).
    Sources: see the module.
    """

    n: int
    seed: int
    epoch: int
    _samples: Callable[[Positions], Positions] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _require("n", self.n, 1, _LONGEST, "give the number of samples of the dataset")
        _require("seed", self.seed, 0, 2**64 - 1, "take it modulo 2**64")
        _require("epoch", self.epoch, 0, None, "count epochs from 0")
        if self.n <= _TABLE:
            ranks = np.argsort(_words(self.n, self.seed, self.epoch, self.n), kind="stable")
            object.__setattr__(self, "_samples", ranks.astype(np.int64).take)
        else:
            object.__setattr__(self, "_samples", _Feistel(self.n, _words(self.n, self.seed, self.epoch, 3 * _ROUNDS)))

    def __call__(self, positions: Positions) -> Positions:
        """The samples at these positions; int64, of the same shape."""
        flat = _checked(positions, self.n).reshape(-1)
        samples = np.empty_like(flat)
        for start in range(0, flat.size, _BLOCK):
            samples[start : start + _BLOCK] = self._samples(flat[start : start + _BLOCK])
        return cast(Positions, samples.reshape(np.shape(positions)))

    def __reduce__(self) -> tuple[type[Permutation], tuple[int, int, int]]:
        """Travels as its three numbers; the keys are made again where it arrives."""
        return Permutation, (self.n, self.seed, self.epoch)


@final
@dataclass(frozen=True, slots=True)
class Identity:
    """The order of the dataset itself: sample i at position i of 0 .. n-1; checks and raises like `Permutation`."""

    n: int

    def __post_init__(self) -> None:
        _require("n", self.n, 1, _LONGEST, "give the number of samples of the dataset")

    def __call__(self, positions: Positions) -> Positions:
        """A copy of the positions; int64, of the same shape."""
        return np.array(_checked(positions, self.n))


def order(n: int, seed: int, epoch: int, shuffle: bool = True) -> Permutation | Identity:
    """The order of an epoch's n samples: `Permutation(n, seed, epoch)`, or with `shuffle=False` `Identity(n)`.

    The three numbers are checked either way; raises what `Permutation` raises.
    """
    shuffled = Permutation(n, seed, epoch)
    return shuffled if shuffle else Identity(n)


@final
class _Feistel:
    """The rounds of the module's docstring; `words`, three a round, become m, c and m'."""

    def __init__(self, n: int, words: NDArray[np.uint64]) -> None:
        bits = (n - 1).bit_length()
        width, word = (32, np.uint32) if bits <= 28 else (64, np.uint64)
        column_bits = bits // 2
        rows = -(-n >> column_bits)
        row_bits = (rows - 1).bit_length()
        keys: NDArray[Any] = (words >> np.uint64(64 - width)).astype(word).reshape(-1, 3)
        keys[:, [0, 2]] |= word(1)
        self.word, self.keys = word, [tuple(key) for key in keys]
        self.n, self.rows, self.last_column = word(n), word(rows), word((1 << column_bits) - 1)
        self.column_bits, self.above_columns = word(column_bits), word(width - column_bits)
        self.row_bits, self.above_rows = word(row_bits), word(width - row_bits)
        self.half = word(width // 2)

    def __call__(self, positions: Positions) -> Positions:
        """Samples at positions, both int64 (m,)."""
        samples: NDArray[Any] = self.encrypt(positions.astype(self.word))
        outside = np.flatnonzero(samples >= self.n)
        while outside.size:
            samples[outside] = walked = self.encrypt(samples[outside])
            outside = outside[walked >= self.n]
        return cast(Positions, samples.astype(np.int64))

    def encrypt(self, cells: NDArray[Any]) -> NDArray[Any]:
        """All rounds, a bijection of the grid's rows * 2^k cells; words (m,)."""
        low: NDArray[Any] = cells & self.last_column
        high: NDArray[Any] = cells >> self.column_bits
        mixed, shifted = np.empty_like(cells), np.empty_like(cells)
        for i, (m, c, m_) in enumerate(self.keys):
            np.multiply(high if i % 2 else low, m, out=mixed)
            mixed += c
            np.right_shift(mixed, self.half, out=shifted)
            mixed ^= shifted
            mixed *= m_
            if i % 2:
                mixed >>= self.above_columns
                low += mixed
                low &= self.last_column
            else:
                # floor(rows * hash / 2^w) of the hash's w - row_bits highest bits: the product fits its word
                mixed >>= self.row_bits
                mixed *= self.rows
                mixed >>= self.above_rows
                high += mixed
                # high mod rows: below rows the difference wraps around to a huge number
                np.minimum(high, np.subtract(high, self.rows, out=mixed), out=high)
        high <<= self.column_bits
        high |= low
        return high


def _words(n: int, seed: int, epoch: int, count: int) -> NDArray[np.uint64]:
    """`count` distinct pseudo-random words (count,) from (n, seed, epoch); the epoch is read 64 bits at a time."""
    limbs = [epoch >> shift & 2**64 - 1 for shift in range(0, max(epoch.bit_length(), 1), 64)]
    state = np.zeros(1, np.uint64)
    for limb in (n, seed, *limbs):
        state = _mix((state + _GOLDEN) ^ np.uint64(limb))
    return _mix(state + _GOLDEN * np.arange(1, count + 1, dtype=np.uint64))


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection of 64-bit words in which every bit of the argument changes half of the bits; x is not changed."""
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return cast(NDArray[np.uint64], x ^ x >> np.uint64(31))


def _checked(positions: Positions, n: int) -> Positions:
    """The positions as contiguous int64 of the same shape, each in [0, n)."""
    array = np.asarray(positions)
    if array.dtype.kind not in "iu":
        raise TypeError(f"positions must be integers, got an array of {array.dtype}; use np.int64")
    array = np.ascontiguousarray(array, np.int64).reshape(array.shape)
    # as an unsigned number a negative position is huge: one pass finds both ends
    if array.size and int(array.view(np.uint64).max()) >= n:
        wrong = array[(array < 0) | (array >= n)].flat[0]
        raise IndexError(f"positions must be in [0, {n}), got {wrong}; there are {n} samples")
    return array


def _require(name: str, value: int, low: int, high: int | None, remedy: str) -> None:
    allowed = f">= {low}" if high is None else f"in [{low}, {high}]"
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a Python int {allowed}, got {value!r}; convert it with int(...)")
    if value < low or (high is not None and value > high):
        raise ValueError(f"{name} must be a Python int {allowed}, got {value}; {remedy}")
