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
    """Return how ranks of these speeds share the samples of a step; None if all are equally fast.

    The speeds become the smallest whole numbers in the same ratio, which are rounded if their sum is large: ranks take
    turns that repeat after as many samples as this sum, and a table of one period is stored.

    Args:
        speeds: what the user has passed: a number for each rank, such as its samples a second.
        world_size: number of ranks.

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
    exact_speeds = [Fraction(check_positive(speed, f"speeds[{rank}]", remedy)) for rank, speed in enumerate(speeds)]
    common_denominator = math.lcm(*(speed.denominator for speed in exact_speeds))
    whole_speeds = _reduce_ratio([int(speed * common_denominator) for speed in exact_speeds])
    max_period, period = max(PERIOD, RESOLUTION * world_size), sum(whole_speeds)
    if period > max_period:
        whole_speeds = _reduce_ratio([max(1, round(Fraction(speed * max_period, period))) for speed in whole_speeds])
    return None if len(set(whole_speeds)) == 1 else BySpeed(whole_speeds)


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
        """Return how many of the first `units` samples, or microbatches, of a step this rank takes.

        The turns of the ranks repeat after a period: it counts whole periods, and looks the rest up in a table.
        """
        periods, remaining_units = np.divmod(units, len(self.counts))
        return periods * len(self.own_units) + self.counts[remaining_units]

    def count_of_lower(self, units: Any) -> Any:
        """Return how many of the first `units` samples, or microbatches, of a step are taken by ranks below this one.

        The turns of the ranks repeat after a period: it counts whole periods, and looks the rest up in a table.
        """
        periods, remaining_units = np.divmod(units, len(self.counts))
        return periods * self.lower_speeds + self.lower[remaining_units]

    def number(self, index: Any) -> Any:
        """Return which unit of a step, a sample or a microbatch, is this rank's unit `index`; both count from 0.

        The turns of the ranks repeat after a period: it counts whole periods, and looks the rest up in a table.
        """
        periods, rest = np.divmod(index, len(self.own_units))
        return periods * len(self.counts) + self.own_units[rest]


@lru_cache(maxsize=4)
def owners(speeds: Speeds) -> IntArray:
    """Return which rank takes each sample of a step if ranks take turns by speed, for one period of turns, (period,).

    The turns repeat after sum(speeds) samples. Rank r would finish its sample k = 0, 1, ... at time (k + 1) / speed_r,
    and the order of these times is the order of the turns; at equal times the lower rank comes first.

    >>> owners((3, 2)).tolist()
    [0, 1, 0, 0, 1]
    """
    # All samples of a period, rank after rank: the rank that takes each one, and its k + 1 on that rank.
    ranks = np.repeat(np.arange(len(speeds)), speeds)  # (period,)
    units = np.concatenate([np.arange(1, speed + 1) for speed in speeds])  # (period,)
    finish_times = units / np.array(speeds)[ranks]  # (period,)
    return ranks[np.argsort(finish_times, kind="stable")]


@lru_cache(maxsize=16)
def turns(speeds: Speeds, rank: int) -> Turns:
    """Return tables that tell which samples of a step a rank takes, if ranks take turns by speed.

    Args:
        speeds: speed of each rank, whole numbers without a common divisor.
        rank: the rank.
    """
    owner_of_unit = owners(speeds)  # (period,)
    # Exclusive cumulative sums: how many units before each one belong to the rank, and to lower ones.
    is_own, is_lower = owner_of_unit == rank, owner_of_unit < rank  # (period,) each
    counts, lower = (np.concatenate(([0], np.cumsum(owned)[:-1])) for owned in (is_own, is_lower))
    return Turns(np.flatnonzero(is_own), counts, lower, sum(speeds[:rank]))


def share(speeds: Speeds, rank: int, batch_sizes: Any, minibatch_size: int, *, padded: bool) -> Share:
    """Return the part of one rank in steps whose ranks differ in speed: its samples, and its number of microbatches.

    The n_r samples of rank r make ceil(n_r / m) microbatches of at most m rows. With `padded` every rank computes
    ceil(max_r n_r / m) microbatches, and a rank with too few begins with replays, which repeat one with weight 0.

    Args:
        speeds: speed of each rank, whole numbers without a common divisor.
        rank: the rank.
        batch_sizes: samples of a step over all ranks: a number, or an array, (steps,).
        minibatch_size: m, maximum number of rows of a microbatch.
        padded: whether all ranks compute equally many microbatches.

    >>> tuple(map(int, share((3, 1), 1, 100, 32, padded=True)))
    (75, 25, 3, 0)
    """
    rank_turns = turns(speeds, rank)
    samples = rank_turns.count(batch_sizes)
    start = np.minimum(rank_turns.count_of_lower(batch_sizes), batch_sizes - 1)  # the shares lie in the order of ranks
    most_samples = turns(speeds, speeds.index(max(speeds))).count(batch_sizes)  # samples of the fastest rank
    rounds = -(-most_samples // minibatch_size) if padded else 1  # rounded up
    microbatches = count_microbatches(samples, minibatch_size, fixed_shape=False, multiple_of=rounds)
    return Share(start, samples, microbatches, np.maximum(rounds - microbatches, 0))


def count_of_all(speeds: Speeds, batch_size: int, minibatch_size: int, *, padded: bool) -> int:
    """Return how many microbatches all ranks together compute in a step, without replays, if ranks differ in speed.

    Args:
        speeds: speed of each rank, whole numbers without a common divisor.
        batch_size: samples of the step over all ranks.
        minibatch_size: maximum number of rows of a microbatch.
        padded: whether all ranks compute equally many microbatches.
    """
    periods, remaining_samples = divmod(batch_size, sum(speeds))
    samples_in_rest = np.bincount(owners(speeds)[:remaining_samples], minlength=len(speeds))  # (ranks,)
    samples = periods * np.array(speeds) + samples_in_rest  # (ranks,)
    rounds = -(-int(samples.max()) // minibatch_size) if padded else 1  # rounded up
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
        slowest_speed = min(self.speeds)
        return max(rank for rank, speed in enumerate(self.speeds) if speed == slowest_speed)
