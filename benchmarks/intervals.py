"""How often do the intervals of 95% of an evaluation contain the truth? Of simulated seeds, whose means are known.

    PYTHONPATH=test python benchmarks/intervals.py

Noise is normal, or skewed: of a gamma distribution of shape 4 (skewness 1), a log-normal one of sigma 0.5 (1.75) or an
exponential one (2). A difference is between two rules with this noise each. Trainings that fail are left out. The
regret is to a grid of five learning rates, of which the middle one is best by 0, 0.02, 0.1, 0.5 or 3 standard
deviations times the squared distance; the rule is another one, or the constant one at the second-best rate, and what is
recorded is the least coverage of these. SciPy's bootstrap is what one would use instead.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from itertools import product

import numpy as np
from scipy.stats import bootstrap

from helpers.coverage import NOISES, coverage, regret_coverage
from results import record
from variable_batch_size.lab.evaluation.statistics import difference_interval, mean_interval, rate_interval

QUESTION = "coverage of 95% intervals"
SEEDS = (3, 5, 10, 20)
FLAT = (0.0, 0.02, 0.1, 0.5, 3.0)


def scipy_bootstrap(values: np.ndarray, method: str) -> tuple[float, float]:
    """Return the bounds of a bootstrap of the mean."""
    found = bootstrap((values,), np.mean, n_resamples=999, method=method, rng=0).confidence_interval
    return found.low, found.high


def rate_coverage(n: int) -> float:
    """Return the least probability over the rates of divergence that the interval contains the rate, exactly."""
    rates = np.linspace(0.001, 0.999, 999)
    bounds = [rate_interval(count, n)[1:3] for count in range(n + 1)]
    counts = np.arange(n + 1)
    ways = np.array([float(np.prod([(n - i) / (i + 1) for i in range(count)])) for count in counts])
    likely = ways * rates[:, None] ** counts * (1 - rates[:, None]) ** (n - counts)  # (rates, counts)
    inside = np.array([[low <= rate <= high for low, high in bounds] for rate in rates])
    return float((likely * inside).sum(axis=1).min())


def main(flags: argparse.Namespace) -> None:
    """Measure all."""

    def put(what: str, on: str, case: str, found: float, note: str = "") -> None:
        record(QUESTION, what, round(100 * found, 1), "%", on=on, case=case, note=note)

    methods: dict[str, Callable[[np.ndarray], tuple[float, float]]] = {
        "mean": lambda values: mean_interval(values)[1:3],
        "mean, Student's t alone": lambda values: difference_interval(values)[1:3],
    }
    for what, (noise, draw), n in product(methods, NOISES.items(), SEEDS):
        put(what, noise, f"{n} seeds", coverage(methods[what], draw, n, flags.repeats))
    for method, n in product(("percentile", "BCa"), SEEDS):
        interval = partial(scipy_bootstrap, method=method)
        found = coverage(interval, NOISES["normal"], n, flags.repeats // 10)
        put(f"mean, SciPy's bootstrap ({method})", "normal", f"{n} seeds", found)
    for (noise, draw), n in product(NOISES.items(), SEEDS):
        found = coverage(lambda values: difference_interval(values)[1:3], draw, n, flags.repeats, pairs=True)
        put("paired difference", noise, f"{n} seeds", found)
    for noise, failing, n in product(("normal", "exponential"), (0.05, 0.1, 0.2), SEEDS):
        for what, pairs in ("mean", False), ("paired difference", True):
            interval = methods["mean, Student's t alone" if pairs else "mean"]
            found = coverage(interval, NOISES[noise], n, flags.repeats, pairs, failing)
            put(f"{what}, {failing:.0%} of trainings fail", noise, f"{n} seeds", found)
    for noise, n in product(("normal", "exponential"), SEEDS):
        cases = product(FLAT, ("other", "second"))
        least = min(regret_coverage(NOISES[noise], n, flat, rule, flags.repeats // 4) for flat, rule in cases)
        put("regret", noise, f"{n} seeds", least, "the least of ten cases")
    for n in SEEDS:
        put("rate of divergence", "any rate", f"{n} seeds", rate_coverage(n), "the least of all rates")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20_000, help="simulated evaluations of each kind")
    main(parser.parse_args())
