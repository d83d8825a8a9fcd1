"""Check the numbers that a user passes, once, where they enter, and raise errors that say what to do.

One behaviour everywhere: TypeError for a wrong type (bools included), ValueError for a wrong value. An error is one
sentence in three parts: the requirement, what was found and where, the remedy.
"""

from __future__ import annotations

import math
import operator
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

IntArray: TypeAlias = NDArray[np.int64]  # steps, sizes, counts and positions, throughout the package

MAX_INT = 2**53  # the last int up to which float64, JSON and spreadsheets are exact too


def value_error(requirement: str, found: object, remedy: str) -> ValueError:
    """Return the ValueError that states the requirement, what was found, and the remedy."""
    return ValueError(f"{requirement}, got {found}; {remedy}")


def type_error(requirement: str, found: object, remedy: str) -> TypeError:
    """Return the TypeError that states the requirement, what was found with its type, and the remedy."""
    return TypeError(f"{requirement}, got {found!r:.60} ({type(found).__name__}); {remedy}")


def as_int(value: object) -> int | None:
    """Return `value` as a Python int, or None if it is no integer; NumPy integers are, bools are not."""
    try:
        return None if isinstance(value, (bool, np.bool_)) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def check_int(
    value: object, name: str, minimum: int = 0, maximum: int | None = None, remedy: str = "pass such an int"
) -> int:
    """Return `value` as a Python int in [minimum, maximum].

    Raises:
        TypeError: for anything but an integer.
        ValueError: for an integer out of range.
    """
    number = as_int(value)
    if number is None:
        raise type_error(f"{name} must be an integer >= {minimum}", value, remedy)
    if number < minimum:
        raise value_error(f"{name} must be an integer >= {minimum}", number, remedy)
    if maximum is not None and number > maximum:
        raise value_error(f"{name} must be an integer >= {minimum} and <= {_power(maximum)}", number, remedy)
    return number


def check_number(value: object, name: str, remedy: str) -> float:
    """Return `value` as a finite float >= 0.

    Raises:
        TypeError: for anything but a real number.
        ValueError: for a negative, infinite or nan one.
    """
    requirement = f"{name} must be a finite number >= 0"
    real = isinstance(value, (int, float, np.number)) and not isinstance(value, (bool, np.complexfloating))
    if not real:
        raise type_error(requirement, value, remedy)
    if not (math.isfinite(value) and value >= 0):  # type: ignore[arg-type, operator]
        raise value_error(requirement, repr(value), remedy)
    return float(value)  # type: ignore[arg-type]


def _power(number: int) -> str:
    """Return a large power of two, or one less than it, in that form."""
    for base, suffix in ((number, ""), (number + 1, " - 1")):
        if base >= 2**32 and base & (base - 1) == 0:
            return f"2**{base.bit_length() - 1}{suffix}"
    return str(number)
