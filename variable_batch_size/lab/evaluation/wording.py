"""Numbers and intervals as text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final

from variable_batch_size.lab.evaluation.statistics import detectable

UNITS: Final = {"days": 86400, "h": 3600, "min": 60, "s": 1}  # in seconds


def number(value: float, spread: float = 0.0, sign: str = "") -> str:
    """Format a number: with two digits of its spread, or with three significant digits; "-" if it is not finite.

    >>> number(0.123456), number(0.123456, 0.02), number(12345.6), number(0.7), number(3.0), number(math.nan)
    ('0.123', '0.123', '12,346', '0.700', '3', '-')
    >>> number(-1e-9, 1.0), number(1 / 35, 1e-18)
    ('0.0', '0.0286')
    """
    if not math.isfinite(value):
        return "-"
    known = math.isfinite(spread) and spread > 1e-6 * abs(value)
    whole = abs(value - round(value)) < 1e-9 * max(1.0, abs(value))
    scale = spread if known else 0.0 if whole else abs(value) / 10
    digits = min(9, max(0, 1 - math.floor(math.log10(scale)))) if scale else 0
    return f"{round(value, digits) + 0.0:{sign},.{digits}f}"  # + 0.0: no -0.0


def interval(value: float, low: float, high: float, sign: str = "") -> str:
    """Format an estimate and its interval, if there is one.

    >>> interval(0.1234, 0.11, 0.15), interval(0.1234, math.nan, math.nan), interval(-0.02, -0.05, 0.01, "+")
    ('0.123 (0.110 to 0.150)', '0.123', '-0.020 (-0.050 to +0.010)')
    """
    if not math.isfinite(low):
        return number(value, sign=sign)
    texts = [number(one, high - low, sign) for one in (value, low, high)]
    return f"{texts[0]} ({texts[1]} to {texts[2]})"


def power(seeds: int, comparisons: int, failed: bool = False) -> str:
    """Return how large a difference seeds can see, as a clause; nothing without a comparison or of one seed.

    Where trainings `failed`, failures are a family of their own, and half of the level is left.

    >>> power(5, 12).partition(", ")[0]
    'with 5 seeds and 12 comparisons'
    """
    if not comparisons or seeds < 2:
        return ""
    return (
        f"with {seeds} seeds and {comparisons:,} comparisons, a difference is claimed in 80 % of cases if it is "
        f"{detectable(seeds, comparisons * (1 + failed)):.2g} standard deviations (of paired differences) or more"
    )


def listed(names: Sequence[str], last: str = "and") -> str:
    """Join names.

    >>> listed(["a", "b", "c"]), listed(["a"], "or")
    ('a, b and c', 'a')
    """
    return f" {last} ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def duration(seconds: float) -> str:
    """Format seconds.

    >>> duration(45), duration(5400), duration(200000), duration(math.nan)
    ('45 s', '1.50 h', '2.31 days', '-')
    """
    for unit, length in UNITS.items():
        if seconds >= 1.5 * length:
            return f"{number(seconds / length)} {unit}"
    return f"{number(seconds)} s" if math.isfinite(seconds) else "-"


def aligned(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table as lines: the first column is aligned to the left, the others to the right.

    >>> print(aligned(["rule", "loss"], [["root", "0.5"], ["linear", "12"]]))
    rule     loss
    root      0.5
    linear     12
    """
    table = [list(columns), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ("   ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in table)
    return "\n".join(line.rstrip() for line in lines)
