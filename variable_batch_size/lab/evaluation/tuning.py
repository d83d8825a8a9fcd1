"""Each rule at its own learning rate: the seeds on which it is chosen, and the choice.

Rules are compared at learning rates that were chosen for each of them, because one that is right for all does not
exist: what is good for the linear rule is too small for the constant one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from statistics import median
from typing import TypeVar

from variable_batch_size.lab.evaluation.record import Record, status_of

K = TypeVar("K", bound=Hashable)
TUNING = 1000  # the first seed on which learning rates are chosen, and nothing is judged
REFERENCE = "the reference"  # name of the trace of the constant batch size `ref_batchsize`


def nearest_to_one(factors: Iterable[float]) -> float:
    """Return the factor that is nearest to 1, the smaller one of two that are equally near."""
    return min(map(float, factors), key=_distance)


def _distance(factor: float) -> tuple[float, float]:
    return round(abs(math.log(factor)), 9), factor


def best_factor(losses: Mapping[float, Sequence[float]]) -> float:
    """Return the best factor, see `best_of`; of equals the one that is nearest to 1."""
    return best_of({factor: losses[factor] for factor in sorted(losses, key=_distance)})


def best_of(losses: Mapping[K, Sequence[float]]) -> K:
    """Return what had the least median loss and, of several, the least mean loss where it did not fail.

    By the median one failure of three, which is no evidence, does not outweigh what the others say.

    Args:
        losses: final losses, infinite of trainings that failed, at least one of each; the first one of equals is best.
    """

    def order(name: K) -> tuple[float, float]:
        finite = [loss for loss in losses[name] if math.isfinite(loss)]
        return median(losses[name]), sum(finite) / len(finite) if finite else math.inf

    return min(losses, key=order)


def chosen_factors(records: Iterable[Record]) -> dict[tuple[str, str, str], float]:
    """Return the best factor of each task, trace and rule, by the trainings of the tuning seeds."""
    losses: dict[tuple[str, str, str], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        cell = record.cell
        if cell["seed"] >= TUNING:
            curve = record.curve["loss"] or (math.inf,)
            end = curve[-1] if status_of(record) == "finished" else math.inf
            losses[cell["task"], cell["trace"], cell["rule"]][float(cell["lr_factor"])].append(end)
    return {kind: best_factor(own) for kind, own in losses.items()}
