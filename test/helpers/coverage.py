"""How often an interval contains the truth, for noise of several kinds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from variable_batch_size.lab.evaluation.statistics import regret_interval

Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]
NOISES: dict[str, Draw] = {  # of mean 0
    "normal": lambda rng, shape: rng.normal(size=shape),
    "gamma": lambda rng, shape: rng.gamma(4, size=shape) - 4,
    "log-normal": lambda rng, shape: np.exp(0.5 * rng.normal(size=shape)) - np.exp(0.125),
    "exponential": lambda rng, shape: rng.exponential(size=shape) - 1,
}


def coverage(
    interval: Callable[[np.ndarray], tuple[float, float]],
    draw: Draw,
    n: int,
    repeats: int,
    pairs: bool = False,
    failing: float = 0.0,
) -> float:
    """Return the share of samples of n values, or differences of two values, whose interval contains 0.

    Each value fails with a probability of `failing`, and is left out; of fewer than two there is no interval.
    """
    rng = np.random.default_rng(n)
    values = draw(rng, (repeats, n)) - (draw(rng, (repeats, n)) if pairs else 0.0)
    if failing:
        lost = rng.random((2 if pairs else 1, repeats, n)).min(axis=0) < failing
        kept = [sample[~out] for sample, out in zip(values, lost, strict=True) if (~out).sum() > 1]
    bounds = np.array([interval(sample) for sample in (kept if failing else values)])  # (repeats, 2)
    return float(((bounds[:, 0] <= 0) & (bounds[:, 1] >= 0)).mean())


def regret_coverage(draw: Draw, n: int, flat: float, rule: str, repeats: int) -> float:
    """Return the same of the regret to five learning rates; half of the variance is what a seed does to all of them.

    Args:
        draw: the noise.
        n: seeds.
        flat: by how much the two next to the best one are worse; the outer ones are four times as bad.
        rule: "other" for one that is worse by 1, "second" for the learning rate next to the best.
        repeats: samples.
    """
    rng = np.random.default_rng(n)
    means = flat * (np.arange(5) - 2.0) ** 2
    hits = 0
    for _ in range(repeats):
        shared = draw(rng, (n,))
        grid = means[:, None] + 0.7 * (shared + draw(rng, (5, n)))
        values, truth = (grid[1], flat) if rule == "second" else (1 + 0.7 * (shared + draw(rng, (n,))), 1.0)
        found = regret_interval(values, grid)
        hits += found.low <= truth <= found.high
    return hits / repeats
