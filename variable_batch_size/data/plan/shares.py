"""Shares of ranks of unequal speed: ranks take the units of a step, samples or microbatches, in turns.

Each next unit goes to the rank that would finish it first, so that the slowest rank of a step finishes as early as
possible: no other shares n_r with sum_r n_r = n have a smaller max_r n_r / speed_r (the greedy rule is optimal for
units of equal work on machines of unequal speed; as an apportionment it is that of Jefferson and D'Hondt). For speeds
that are whole numbers the turns repeat after sum_r speed_r units, so that a table of one period answers for a step of
any size.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple, final

import numpy as np

from variable_batch_size._validation import IntArray, check_positive, type_error, value_error
from variable_batch_size.data.plan.deal import Share
from variable_batch_size.microbatching import count_microbatches

PERIOD = 2**18  # largest number of units before the turns repeat, unless that is less than RESOLUTION for each rank
RESOLUTION = 2**10

Speeds = tuple[int, ...]  # of each rank, without a common divisor


def by_speed(speeds: object, world_size: int) -> BySpeed | None:
    """Return how ranks of these speeds take their shares; None if all speeds are equal.

    The speeds become the smallest whole numbers in the same ratio, which are rounded if their sum is large.

    >>> by_speed((1.5, 0.5), 2), by_speed([7, 7], 2)
    (BySpeed(speeds=(3, 1)), None)

    Raises:
        TypeError: if they are not numbers in a sequence.
        ValueError: if there is not one for each rank, or one is not positive and finite.
    """
    remedy = "pass a number for each rank, such as its samples a second"
    if not isinstance(speeds, (Sequence, np.ndarray)) or isinstance(speeds, (str, bytes)):
        raise type_error("speeds must be a sequence of numbers", speeds, remedy)
    if len(speeds) != world_size:
        raise value_error(f"speeds must have a number for each of {world_size} ranks", f"{len(speeds)} numbers", remedy)
    exact = [Fraction(check_positive(speed, f"speeds[{rank}]", remedy)) for rank, speed in enumerate(speeds)]
    common_denominator = math.lcm(*(speed.denominator for speed in exact))
    whole = _reduce_ratio([int(speed * common_denominator) for speed in exact])
    most, total = max(PERIOD, RESOLUTION * world_size), sum(whole)
    if total > most:
        whole = _reduce_ratio([max(1, round(Fraction(speed * most, total))) for speed in whole])
    return None if len(set(whole)) == 1 else BySpeed(whole)


def _reduce_ratio(numbers: Collection[int]) -> Speeds:
    """Return the smallest whole numbers in the same ratio."""
    divisor = math.gcd(*numbers)
    return tuple(number // divisor for number in numbers)


@final
@dataclass(frozen=True, slots=True, eq=False)
class Turns:
    """The turns of one rank. Methods take and return a number, or an array of any shape."""

    own_units: IntArray  # (speed,): which units of a period are the rank's
    # A unit is a sample or a microbatch of a step; the turns of all ranks repeat after a period of units.
    counts: IntArray  # (period,): number of the rank's units before each unit of a period
    lower: IntArray  # (period,): number of units of lower ranks before each unit of a period
    lower_speeds: int  # sum of the speeds of lower ranks, which is the number of their units in a period

    def count(self, units: Any) -> Any:
        """Return how many of the first `units` units are the rank's."""
        periods, rest = np.divmod(units, len(self.counts))
        return periods * len(self.own_units) + self.counts[rest]

    def count_of_lower(self, units: Any) -> Any:
        """Return how many of the first `units` units belong to lower ranks."""
        periods, rest = np.divmod(units, len(self.counts))
        return periods * self.lower_speeds + self.lower[rest]

    def number(self, index: Any) -> Any:
        """Return the number, among the units of all ranks, of the rank's unit `index` = 0, 1, ..."""
        periods, rest = np.divmod(index, len(self.own_units))
        return periods * len(self.counts) + self.own_units[rest]


@lru_cache(maxsize=4)
def owners(speeds: Speeds) -> IntArray:
    """Return the rank that takes each unit of a period, (period,).

    Rank r finishes its unit k = 0, 1, ... at time (k + 1) / speed_r, and units are in the order of these times; at
    equal times the lower rank comes first.

    >>> owners((3, 2)).tolist()
    [0, 1, 0, 0, 1]
    """
    ranks = np.repeat(np.arange(len(speeds)), speeds)  # (period,), as below
    units = np.concatenate([np.arange(1, speed + 1) for speed in speeds])  # k + 1
    return ranks[np.argsort(units / np.array(speeds)[ranks], kind="stable")]


@lru_cache(maxsize=16)
def turns(speeds: Speeds, rank: int) -> Turns:
    """Return the turns of a rank: which units of a step it takes, as tables of one period."""
    owner = owners(speeds)  # (period,)
    # Exclusive cumulative sums: how many units before each one belong to the rank, and to lower ones.
    counts, lower = (np.concatenate(([0], np.cumsum(owned)[:-1])) for owned in (owner == rank, owner < rank))
    return Turns(np.flatnonzero(owner == rank), counts, lower, sum(speeds[:rank]))


def share(speeds: Speeds, rank: int, batch_sizes: Any, minibatch_size: int, *, padded: bool) -> Share:
    """Return the share of a rank in steps of these sizes: its n_r samples in ceil(n_r / m) microbatches.

    With `padded` every rank computes ceil(max_r n_r / m) rounds, and a rank with fewer samples begins with replays,
    which repeat a microbatch with weight 0.

    >>> tuple(map(int, share((3, 1), 1, 100, 32, padded=True)))
    (75, 25, 3, 0)
    """
    rank_turns = turns(speeds, rank)
    samples = rank_turns.count(batch_sizes)
    start = np.minimum(rank_turns.count_of_lower(batch_sizes), batch_sizes - 1)  # the shares lie in the order of ranks
    most = turns(speeds, speeds.index(max(speeds))).count(batch_sizes)  # samples of the fastest rank
    rounds = -(-most // minibatch_size) if padded else 1  # rounded up
    microbatches = count_microbatches(samples, minibatch_size, fixed_shape=False, multiple_of=rounds)
    return Share(start, samples, microbatches, np.maximum(rounds - microbatches, 0))


def count_of_all(speeds: Speeds, batch_size: int, minibatch_size: int, *, padded: bool) -> int:
    """Return the number of microbatches of a step over all ranks, without replays; the arguments are as for `share`."""
    periods, rest = divmod(batch_size, sum(speeds))
    samples = periods * np.array(speeds) + np.bincount(owners(speeds)[:rest], minlength=len(speeds))  # (ranks,)
    rounds = -(-int(samples.max()) // minibatch_size) if padded else 1
    return int(count_microbatches(samples, minibatch_size, fixed_shape=False, multiple_of=rounds).sum())


class BySpeed(NamedTuple):
    """Ranks that take their shares by speed, see `Dealing` and `UnequalRanks`.

    Attributes:
        speeds: the relative speed of each rank.
    """

    speeds: Speeds

    def share(self, rank: int, batch_sizes: Any, minibatch_size: int, *, padded: bool) -> Share:
        """Return the share of a rank in steps of these sizes."""
        return share(self.speeds, rank, batch_sizes, minibatch_size, padded=padded)

    def count_of_all(self, batch_size: int, minibatch_size: int, *, padded: bool) -> int:
        """Return the number of microbatches of a step over all ranks, without replays."""
        return count_of_all(self.speeds, batch_size, minibatch_size, padded=padded)

    def count_dealt(self, rank: int, microbatches: Any) -> Any:
        """Return how many of the microbatches of a step, or of each of several, a rank takes."""
        return turns(self.speeds, rank).count(microbatches)

    def number_in_step(self, rank: int, index: Any) -> Any:
        """Return which microbatch of the step is the rank's microbatch `index`; both count from 0, or are arrays."""
        return turns(self.speeds, rank).number(index)

    @property
    def slowest(self) -> int:
        """The last one of the slowest ranks: no rank has a smaller share."""
        return max(rank for rank, speed in enumerate(self.speeds) if speed == min(self.speeds))
