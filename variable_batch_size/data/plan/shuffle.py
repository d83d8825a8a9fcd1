"""The order of the samples of an epoch: a keyed permutation of 0 .. n-1 with random access and constant memory.

Up to 1024 samples the order is a table, the ranks of n hashed words. Beyond, a position is a cell of a grid of about
sqrt(n) rows and columns, position = row * columns + column, and the rounds of a Feistel network alternate between

    row    <- (row + floor(rows * hash_i(column) / 2^w)) mod rows
    column <- (column + floor(columns * hash_(i+1)(row) / 2^w)) mod columns

A subtraction inverts each of them, so together they are a bijection of the grid for any hash. The sides are chosen such
that the grid has few cells more than n; a result outside [0, n) is encrypted again until it is inside (cycle walking).
The hash of x has w bits (32 up to 2^28 samples, else 64): (y ^ y >> w/2) * m' with y = m x + c, odd m and m'.

Sources: Black and Rogaway 2002, "Ciphers with arbitrary finite domains" (grid, rounds modulo its sides, cycle walking);
Mitchell et al. 2021 (arXiv 2106.06161, such ciphers for shuffling, and that few rounds are not random); Steele, Lea and
Flood 2014, "Fast splittable pseudorandom number generators" (the hash that makes the keys).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast, final

import numpy as np
from numpy.typing import NDArray

from variable_batch_size._validation import IntArray, check_int

__all__ = ["Identity", "Permutation", "order"]

_TABLE = 1024  # longest order that is stored as a table: short ones have too few cells for a Feistel network
_LONGEST = 2**48
_ROUNDS = 12
_BLOCK = 8192  # positions encrypted together: the working arrays stay in the cache of the core
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@final
@dataclass(frozen=True, slots=True)
class Permutation:
    """The shuffled order of an epoch: `Permutation(n, seed, epoch)(positions)` are the samples at these positions.

    A bijection of 0 .. n-1, the same for the same (n, seed, epoch) on every platform and for chunks of any size. It
    stores at most 8 KiB for any n. It is statistically random, not cryptographically secure.

    Twelve rounds: in 830 statistics (batch means, neighbors, pairs and quadruples of the grid, fixed points, sign,
    inversions, the order of the next seed, ...) of 100,000 orders of 1025 and of 1057 samples, the hardest sizes, 6
    rounds deviate by up to 20 standard errors from uniform shuffles, and 7, 8 and 12 by no more than chance; five
    rounds are margin.

    Args:
        n: number of samples, 1 to 2^48.
        seed: an integer in [0, 2^64).
        epoch: an integer >= 0.
    Call:
        positions: integers in [0, n), of any shape. Returns int64 samples in [0, n) of the same shape.
    Raises:
        TypeError: if n, seed, epoch or the positions are not integers.
        ValueError: if n, seed or epoch is out of range.
        IndexError: if a position is outside [0, n).
    Sources: see the module.
    """

    n: int
    seed: int
    epoch: int
    _samples: Callable[[IntArray], IntArray] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the arguments, and derive the order: a table of a short one, keys of a cipher of a long one."""
        object.__setattr__(self, "n", check_int(self.n, "n", 1, _LONGEST, "pass the number of samples of the dataset"))
        object.__setattr__(self, "seed", check_int(self.seed, "seed", 0, 2**64 - 1, "take it modulo 2**64"))
        object.__setattr__(self, "epoch", check_int(self.epoch, "epoch", remedy="count epochs from 0"))
        if self.n <= _TABLE:
            samples = np.argsort(_words(self.n, self.seed, self.epoch, self.n), kind="stable")  # of random words
            object.__setattr__(self, "_samples", samples.astype(np.int64).take)
        else:
            keys = _words(self.n, self.seed, self.epoch, 3 * _ROUNDS)  # three words for each round
            object.__setattr__(self, "_samples", _Feistel(self.n, keys))

    def __call__(self, positions: IntArray) -> IntArray:
        """Return the samples at these positions of the shuffled order; int64, of the same shape.

        Args:
            positions: integers in [0, n), of any shape.
        """
        flat = _check_positions(positions, self.n).reshape(-1)
        samples = np.empty_like(flat)
        for start in range(0, flat.size, _BLOCK):
            samples[start : start + _BLOCK] = self._samples(flat[start : start + _BLOCK])
        return cast(IntArray, samples.reshape(np.shape(positions)))

    def __reduce__(self) -> tuple[type[Permutation], tuple[int, int, int]]:
        """Pickle the three numbers only; the keys are derived from them again."""
        return Permutation, (self.n, self.seed, self.epoch)


@final
@dataclass(frozen=True, slots=True)
class Identity:
    """The order of the dataset itself: sample i at position i of 0 .. n-1; checks and raises like `Permutation`."""

    n: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", check_int(self.n, "n", 1, _LONGEST, "pass the number of samples of the dataset"))

    def __call__(self, positions: IntArray) -> IntArray:
        """Return a copy of the positions; int64, of the same shape."""
        return np.array(_check_positions(positions, self.n))


def order(n: int, seed: int, epoch: int, shuffle: bool = True) -> Permutation | Identity:
    """Return the order of the n samples of an epoch: `Permutation(n, seed, epoch)`, or `Identity(n)` if not `shuffle`.

    Raises what `Permutation` raises, in both cases.

    >>> order(5, seed=0, epoch=0, shuffle=False)(np.array([4, 0]))
    array([4, 0])
    """
    shuffled = Permutation(n, seed, epoch)
    return shuffled if shuffle else Identity(n)


@final
class _Feistel:
    """The Feistel network that the docstring of the module describes.

    Args:
        n: number of samples.
        words: random words, three for each round: its m, c and m'.
    """

    def __init__(self, n: int, words: NDArray[np.uint64]) -> None:
        """Derive the keys of each round, and the sides of the grid, for a permutation of n samples.

        A word is an unsigned integer of 32 bits, or of 64 if n is large. Three words are the key of a round.
        """
        width, word = (32, np.uint32) if n <= 2**28 else (64, np.uint64)
        keys: NDArray[Any] = (words >> np.uint64(64 - width)).astype(word).reshape(-1, 3)
        keys[:, [0, 2]] |= word(1)  # m and m' are odd, so that a multiplication by them is a bijection of words
        self.keys = [tuple(key) for key in keys]
        self.columns = _columns(n)
        sizes = -(-n // self.columns), self.columns  # rows and columns of the grid
        # Of each side its size, the bits that it takes, and the bits that a word has beyond these.
        self.sides = [(word(size), word(bits := (size - 1).bit_length()), word(width - bits)) for size in sizes]
        self.n = n
        self.word = word
        self.half = word(width // 2)

    def __call__(self, positions: IntArray) -> IntArray:
        """Return the samples at some positions of a shuffled order; both are int64, (positions,).

        The network permutes the cells of a grid that has a few more cells than there are samples. A position that falls
        on such a cell is encrypted again, until it falls on a sample: so the samples are permuted among themselves.
        """
        samples: NDArray[Any] = self.encrypt(positions.astype(self.word))
        outside = np.flatnonzero(samples >= self.word(self.n))
        while outside.size:  # cycle walking: cells beyond the samples are encrypted again
            encrypted = self.encrypt(samples[outside])
            samples[outside] = encrypted
            outside = outside[encrypted >= self.word(self.n)]
        return cast(IntArray, samples.astype(np.int64))

    def encrypt(self, cells: NDArray[Any]) -> NDArray[Any]:
        """Return where the rounds of a Feistel network move cells of a grid, a bijection of all cells; words, (cells,).

        A cell is row * columns + column. Each round moves the row by a hash of the column, or the column by a hash of
        the row:

            moved <- (moved + floor(size * hash(other) / 2^w)) mod size

        for words of w bits, the size of the side along which the cell moves, and hash(x) = (y ^ y >> w/2) * m' with
        y = m x + c. A subtraction would undo it, whatever the hash is.
        """
        columns = self.word(self.columns)
        row = cells // columns
        column = cells - row * columns
        hashed, shifted = np.empty_like(cells), np.empty_like(cells)  # every operation below is in place, for speed
        for i, (m, c, m_) in enumerate(self.keys):  # one iteration is one round
            moved, other = (row, column) if i % 2 == 0 else (column, row)
            size, size_bits, rest_bits = self.sides[i % 2]
            np.multiply(other, m, out=hashed)
            hashed += c
            np.right_shift(hashed, self.half, out=shifted)
            hashed ^= shifted
            hashed *= m_
            # size * hash / 2^w, with the highest bits of the hash only: the product of more would overflow
            hashed >>= size_bits
            hashed *= size
            hashed >>= rest_bits
            moved += hashed
            # modulo size: if moved < size, the difference wraps around to a huge number
            np.minimum(moved, np.subtract(moved, size, out=hashed), out=moved)
        row *= columns
        row += column
        return row


def _columns(n: int) -> int:
    """Return the number of columns of a grid that has at least n cells, but as few more as possible.

    It tries up to 512 even numbers from sqrt(n) to 1.5 sqrt(n). The width is even so that odd permutations are
    possible: to rotate an even number of cells by one is an odd permutation, but an even one if the number of cells is
    odd.
    """
    least = math.isqrt(n - 1) + 2 & -2  # the square root, rounded up to an even number
    candidates = np.arange(least, least + min(least // 2, 1024), 2, dtype=np.int64)
    extra_cells = -n % candidates  # of a grid with so many columns, whose last row is full
    return int(candidates[np.argmin(extra_cells)])


def _words(n: int, seed: int, epoch: int, count: int) -> NDArray[np.uint64]:
    """Return `count` distinct pseudo-random words of 64 bits, (count,), which (n, seed, epoch) determine.

    They are the keys of a shuffled order. The epoch may be any integer; it is read in limbs of 64 bits.
    """
    limbs = [epoch >> shift & 2**64 - 1 for shift in range(0, max(epoch.bit_length(), 1), 64)]
    state = np.zeros(1, np.uint64)
    for limb in (n, seed, *limbs):  # each number changes all bits of the state
        state = _mix((state + _GOLDEN) ^ np.uint64(limb))
    return _mix(state + _GOLDEN * np.arange(1, count + 1, dtype=np.uint64))


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a bijection of 64-bit words in which each input bit changes half of the output bits; x is not modified.

    It is the finalizer of SplitMix64 (Steele, Lea and Flood 2014), which has these constants.
    """
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return cast(NDArray[np.uint64], x ^ x >> np.uint64(31))


def _check_positions(positions: IntArray, n: int) -> IntArray:
    """Return positions in an order of n samples as contiguous int64 of the same shape, after checks.

    Raises:
        TypeError: if they are not integers.
        IndexError: if one is outside [0, n).
    """
    array = np.asarray(positions)
    if array.dtype.kind not in "iu":
        raise TypeError(f"positions must be integers, got an array of {array.dtype}; use np.int64")
    array = np.ascontiguousarray(array, np.int64).reshape(array.shape)
    # as an unsigned number a negative position is huge: one pass checks both bounds
    if array.size and int(array.view(np.uint64).max()) >= n:
        wrong = array[(array < 0) | (array >= n)].flat[0]
        raise IndexError(f"positions must be in [0, {n}), got {wrong}; there are {n} samples")
    return array
