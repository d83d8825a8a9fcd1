"""The slow twin of the order of an epoch: in Python integers, one position at a time, forwards and backwards."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

GOLDEN = 0x9E3779B97F4A7C15
Key: TypeAlias = tuple[int, int, int]


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


def mix(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31
