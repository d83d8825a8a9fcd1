"""Tables of mistakes: a call, the error that it raises, and what the message says, in the shape of law 8."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import pytest

FOUND = re.compile(r"\b(got|but)\b")


class Mistake(NamedTuple):
    """A call, the exact type of its error, and a pattern that the message contains."""

    call: Callable[[], object]
    exception: type[Exception]
    pattern: str
    foreign: bool = False  # the message of another library, which has another shape


def check(mistake: Mistake) -> None:
    """Call, and compare the error."""
    with pytest.raises(mistake.exception, match=mistake.pattern) as caught:
        mistake.call()
    assert caught.type is mistake.exception
    if not mistake.foreign:
        check_shape(str(caught.value))


def check_shape(message: str) -> None:
    """Check for one sentence with the requirement, what was found and the way out, and at most one more sentence."""
    first, *others = re.split(r"\. (?=[A-Z])", message)
    cause, _, remedy = first.rpartition("; ")
    assert FOUND.search(cause), f"does not say what was found: {message}"
    assert remedy, f"does not say what to do: {message}"
    assert len(others) <= 1, f"has more than two sentences: {message}"
    assert "\n" not in message
