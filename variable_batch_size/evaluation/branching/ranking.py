"""Which candidates are better, from the losses of their branches on the same samples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple, final

import numpy as np

from variable_batch_size._validation import FloatArray
from variable_batch_size.evaluation.statistics import CONFIDENCE, Interval, difference_interval, series_interval


class Pair(NamedTuple):
    """The difference between two candidates: the loss of the first one minus that of the second."""

    first: str
    second: str
    difference: Interval


@final
@dataclass(frozen=True)
class Place:
    """A candidate in a ranking.

    Attributes:
        name: of the candidate.
        rank: 1 + the number of candidates that are better by more than chance; 1 is best, several may have it. None:
            there are no intervals.
        loss: mean of its losses; nan after a divergence.
        to_best: difference of its loss to that of the candidate with the least one, with its interval.
        same: the others from which no difference is seen.
    """

    name: str
    rank: int | None
    loss: float
    to_best: Interval
    same: tuple[str, ...]


def paired_interval(differences: Sequence[FloatArray], confidence: float = CONFIDENCE) -> Interval:
    """Return the mean of differences in time, (updates,) of each order of samples, with an interval.

    It is the wider one of two, or the only one: from the noise within the orders, `series_interval`, and, of two or
    more orders, from their means, `difference_interval`.
    """
    each = [series_interval(one, confidence) for one in differences]
    means = np.array([one.value for one in each])
    halves = np.array([one.high - one.value for one in each])
    value, half = float(means.mean()), float(np.sqrt((halves**2).sum())) / len(each)
    between = difference_interval(means, confidence)
    if not math.isnan(between.high):
        half = max(between.high - between.value, half)  # the first one if the second one is nan
    return Interval(value, value - half, value + half, len(means))


def ranking(
    losses: Mapping[str, Sequence[FloatArray] | None], confidence: float = CONFIDENCE
) -> tuple[tuple[Place, ...], tuple[Pair, ...]]:
    """Return the candidates, the best one first, and the difference of each pair.

    All intervals hold together with the confidence, by Bonferroni's correction over the pairs.

    Args:
        losses: of each candidate, (updates,) for each order of samples, on the same samples; None: it has diverged.
        confidence: probability that all intervals contain the differences.
    """
    finished = {name: values for name, values in losses.items() if values is not None}
    means = {name: float(np.mean([values.mean() for values in found])) for name, found in finished.items()}
    names = sorted(means, key=means.__getitem__)
    pairs = list(combinations(names, 2))
    level = 1 - (1 - confidence) / max(1, len(pairs))
    found = {}
    for first, second in pairs:
        differences = [a - b for a, b in zip(finished[first], finished[second], strict=True)]
        found[first, second] = paired_interval(differences, level)
    places = [_place(name, names, means, found) for name in names]
    missing = Interval(math.nan, math.nan, math.nan, 0)
    places += [Place(name, len(names) + 1, math.nan, missing, ()) for name in losses if name not in finished]
    return tuple(places), tuple(Pair(*pair, interval) for pair, interval in found.items())


def _place(
    name: str, names: Sequence[str], means: Mapping[str, float], found: Mapping[tuple[str, str], Interval]
) -> Place:
    better = sum(found[other, name].decided for other in names[: names.index(name)])
    unknown = any(math.isnan(interval.low) for interval in found.values())
    same = [one for one in names if one != name and not _between(one, name, found).decided and not unknown]
    own = _between(names[0], name, found) if name != names[0] else Interval(0.0, 0.0, 0.0, 0)
    to_best = Interval(0.0 - own.value, 0.0 - own.high, 0.0 - own.low, own.n)
    return Place(name, None if unknown else 1 + better, means[name], to_best, tuple(same))


def _between(one: str, other: str, found: Mapping[tuple[str, str], Interval]) -> Interval:
    return found[one, other] if (one, other) in found else found[other, one]
