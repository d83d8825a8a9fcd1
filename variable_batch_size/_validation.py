"""Numbers that a user passes, checked where they enter, and the one sentence that refuses them."""

from __future__ import annotations

import math
import operator

import numpy as np

LARGEST = 2**53  # the last int up to which float64, JSON and spreadsheets are exact too


def refusal(requirement: str, found: object, remedy: str) -> ValueError:
    """What is required, what was found, and the way out."""
    return ValueError(f"{requirement}, got {found}; {remedy}")


def integer(value: object) -> int | None:
    """The int that `value` is, numpy's included; None for bools and everything else."""
    try:
        return None if isinstance(value, (bool, np.bool_)) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def number(value: object, name: str, remedy: str) -> float:
    """The float that `value` is, if it is a number >= 0 and finite; ValueError otherwise."""
    real = isinstance(value, (int, float, np.number)) and not isinstance(value, (bool, np.complexfloating))
    if not (real and math.isfinite(value) and value >= 0):  # type: ignore[arg-type, operator]
        raise refusal(f"{name} must be a finite number >= 0", f"{value!r:.60}", remedy)
    return float(value)  # type: ignore[arg-type]


def whole(value: object, name: str, least: int = 0, most: int | None = None, remedy: str = "pass such an int") -> int:
    """The int that `value` is, if it is one in [least, most]; ValueError otherwise."""
    number = integer(value)
    if number is None:
        raise refusal(f"{name} must be a whole number >= {least}", f"{value!r:.60} (not an int)", remedy)
    if number < least or (most is not None and number > most):
        limit = f">= {least}" + " and <= 2**53" * (number > least)
        raise refusal(f"{name} must be a whole number {limit}", number, remedy)
    return number
