"""Tables of mistakes: a call, the error that it raises, and what the message says, in the shape of law 8."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

import pytest

FOUND = re.compile(r"\b(got|but)\b")


class Mistake(NamedTuple):
    """A call, the exact type of its error, and a pattern that the message contains."""

    call: Callable[[], object]
    exception: type[Exception]
    pattern: str
    free: bool = False  # whether the message has another shape, as that of another library


def check(mistake: Mistake) -> None:
    """Call, and compare the error."""
    with pytest.raises(mistake.exception, match=mistake.pattern) as caught:
        mistake.call()
    assert caught.type is mistake.exception
    if not mistake.free:
        check_shape(str(caught.value))


def check_shape(message: str) -> None:
    """Check for one sentence with the requirement, what was found and the way out, and at most one more sentence."""
    first, *others = re.split(r"\. (?=[A-Z])", message)
    cause, _, remedy = first.rpartition("; ")
    assert FOUND.search(cause), f"does not say what was found: {message}"
    assert remedy, f"does not say what to do: {message}"
    assert len(others) <= 1, f"has more than two sentences: {message}"
    assert "\n" not in message


class OnEveryRank:
    """Mistakes that the ranks of a job make, each with a pattern of what every rank must say.

    Used as a decorator of the functions, which are called one after another.
    """

    def __init__(self) -> None:
        self.patterns: dict[str, str] = {}
        self._functions: dict[str, Callable[..., object]] = {}

    def __call__(self, pattern: str) -> Callable[[Callable[..., object]], Callable[..., object]]:
        """Return a decorator that adds a mistake."""

        def add(function: Callable[..., object]) -> Callable[..., object]:
            self.add(**{function.__name__.lstrip("_"): (pattern, function)})
            return function

        return add

    def add(self, **mistakes: tuple[str, Callable[..., object]]) -> None:
        """Add mistakes by name: a pattern and a function."""
        for name, (pattern, function) in mistakes.items():
            self.patterns[name], self._functions[name] = pattern, function

    def messages(self, *arguments: object) -> dict[str, str]:
        """Make the mistakes, and return what is said."""
        found = {}
        for name, function in self._functions.items():
            try:
                function(*arguments)
            except (RuntimeError, TypeError, ValueError) as error:
                found[name] = str(error)
        return found

    def check(self, name: str, ranks: Iterable[dict[str, str]]) -> None:
        """Check what the ranks have said of a mistake."""
        for found in ranks:
            message = found.get(name, "no error")
            assert re.search(self.patterns[name], message), message
