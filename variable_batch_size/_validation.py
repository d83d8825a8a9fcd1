"""Checks of the numbers that a user passes, and errors that state the remedy.

A wrong type raises TypeError, and a bool is a wrong type; a wrong value raises ValueError. A message is one sentence in
three parts: the requirement, what was found and where, the remedy. Numbers are checked once, where they enter.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
import re
from collections.abc import Callable, Collection, Iterable, Set
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

if TYPE_CHECKING:  # the index imports this module, and nothing but the standard library
    import numpy as np
    from numpy.typing import NDArray

F = TypeVar("F", bound=Callable[..., Any])
FloatArray: TypeAlias = "NDArray[np.float64]"  # times, prices and measurements, of any shape
IntArray: TypeAlias = "NDArray[np.int64]"  # steps, batch sizes, counts and positions, of any shape

MAX_INT = 2**53  # float64, JSON and spreadsheets represent every integer up to this one exactly


def value_error(requirement: str, found: object, remedy: str) -> ValueError:
    """Return a ValueError that states the requirement, what was found and the remedy.

    >>> value_error("rank must be < 4", 4, "pass a smaller rank")
    ValueError('rank must be < 4, got 4; pass a smaller rank')
    """
    return ValueError(f"{requirement}, got {found}; {remedy}")


def type_error(requirement: str, found: object, remedy: str) -> TypeError:
    """Return a TypeError that states the requirement, what was found with its type, and the remedy.

    >>> type_error("rank must be an integer", 1.5, "pass an int")
    TypeError('rank must be an integer, got 1.5 (float); pass an int')
    """
    text, kind = repr(found), type(found).__name__
    shown = kind if "\n" in text else f"{text:.60} ({kind})"  # the text of an optimizer or a model has several lines
    return TypeError(f"{requirement}, got {shown}; {remedy}")


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return which of `names` is most similar to `name`, as the end of an error's message; "" if none is similar.

    >>> did_you_mean("ref_batch_size", ["sampler", "ref_batchsize"]), did_you_mean("x", ["sampler"])
    ('; did you mean ref_batchsize?', '')
    """
    import difflib

    return "".join(f"; did you mean {close}?" for close in difflib.get_close_matches(name, [*names], 1))


def suggests(init: F) -> F:
    """Decorate an `__init__`, so that the error for wrong arguments names the class, and an argument of similar name.

    Without a similar name the error lists all arguments.
    """

    @functools.wraps(init)
    def checked(self: object, *arguments: object, **named: object) -> None:
        signature = inspect.signature(init)
        try:
            signature.bind(self, *arguments, **named)
        except TypeError as error:
            parameters = [*signature.parameters][1:]  # without self
            hints = [hint for name in named.keys() - parameters if (hint := did_you_mean(name, parameters))]
            hints.append(f"; it takes {', '.join(parameters)}")
            raise TypeError(f"{type(self).__name__}: {error}{hints[0]}") from None
        init(self, *arguments, **named)

    return cast(F, checked)


def as_int(value: object) -> int | None:
    """Return `value` as a Python int, or None if it is not an integer.

    Every type with `__index__` is an integer, such as those of NumPy; a bool, also one in an array or tensor, is not.

    >>> import numpy as np
    >>> as_int(np.int16(5)), as_int(5.0), as_int(True)
    (5, None, None)
    """
    if isinstance(value, bool) or str(getattr(value, "dtype", "")).removeprefix("torch.") == "bool":
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def check_int(
    value: object, name: str, minimum: int = 0, maximum: int | None = None, remedy: str = "pass an int in this range"
) -> int:
    """Return `value` as a Python int in [minimum, maximum].

    Args:
        value: the number to check.
        name: what the error message calls it.
        minimum: the smallest valid integer.
        maximum: the largest valid integer; None for no limit.
        remedy: the last part of the error message.

    Raises:
        TypeError: if `value` is not an integer.
        ValueError: if `value` is not in [minimum, maximum].
    """
    number = as_int(value)
    if number is None:
        raise type_error(f"{name} must be an integer >= {minimum}", value, remedy)
    if number < minimum:
        raise value_error(f"{name} must be an integer >= {minimum}", number, remedy)
    if maximum is not None and number > maximum:
        raise value_error(f"{name} must be an integer >= {minimum} and <= {maximum}", number, remedy)
    return number


def check_bounds(value: object, name: str = "bounds") -> tuple[int, int]:
    """Return a pair of batch sizes, the least and the largest one, in samples, after a check.

    Raises:
        TypeError: if they are not two integers.
        ValueError: if they are not in [1, 2**53] and in this order.
    """
    if not (isinstance(value, Collection) and not isinstance(value, Set) and len(value) == 2):
        raise type_error(f"{name} must be two integers", value, "pass (least, largest)")
    lower, upper = value
    least = check_int(lower, f"the lower one of {name}", 1, MAX_INT)
    return least, check_int(upper, f"the upper one of {name}", least, MAX_INT)


def check_choice(value: object, name: str, choices: tuple[str, ...]) -> None:
    """Raise TypeError if `value` is not a string, and ValueError if it is not one of the `choices`.

    >>> check_choice("held", "on_end", ("error", "hold", "cycle"))
    Traceback (most recent call last):
    ValueError: on_end must be "error", "hold" or "cycle", got 'held'; choose one of these
    """
    *first_choices, last_choice = (f'"{choice}"' for choice in choices)
    requirement = f"{name} must be {', '.join(first_choices)} or {last_choice}"
    if not isinstance(value, str):
        raise type_error(requirement, value, "choose one of these")
    if value not in choices:
        raise value_error(requirement, f"{value!r:.60}", "choose one of these")


def check_number(value: object, name: str, remedy: str) -> float:
    """Return `value` as a finite float >= 0.

    Args:
        value: the number to check: an int, a float or a NumPy scalar.
        name: what the error message calls it.
        remedy: the last part of the error message.

    Raises:
        TypeError: if `value` is not a real number.
        ValueError: if `value` is negative, infinite or nan.
    """
    import numpy as np

    requirement = f"{name} must be a finite number >= 0"
    is_real = isinstance(value, (int, float, np.number)) and not isinstance(value, (bool, np.complexfloating))
    if not is_real:
        raise type_error(requirement, value, remedy)
    try:
        number = float(value)  # type: ignore[arg-type]
    except OverflowError:  # an int that is too large for a float
        number = math.inf
    if not (math.isfinite(number) and number >= 0):
        raise value_error(requirement, repr(value), remedy)
    return number


def check_positive(value: object, name: str, remedy: str) -> float:
    """Return `value` as a finite float > 0; the arguments and errors are those of `check_number`."""
    number = check_number(value, name, remedy)
    if number == 0:
        raise value_error(f"{name} must be > 0", value, remedy)
    return number


def check_interval(every: object, name: str, remedy: str) -> int | timedelta:
    """Return the interval between two events, a time or a number of updates, after a check that it is positive.

    Raises:
        TypeError: if it is neither a timedelta nor an integer.
        ValueError: if it is not positive.
    """
    if not isinstance(every, timedelta):
        return check_int(every, name, 1, remedy="pass a positive int, or a datetime.timedelta")
    if every <= timedelta(0):
        raise value_error(f"{name} must be a positive timedelta", repr(every), remedy)
    return every


def without_addresses(text: str) -> str:
    """Return the text of objects without memory addresses, which differ between ranks and runs."""
    return re.sub(r"(?i) at 0x[0-9a-f]+", "", text)


def in_documentation(title: str) -> str:
    """Return where a message sends its reader: the title of a page or of a section, because a wheel has no docs/."""
    return f'see "{title}" in the documentation'
