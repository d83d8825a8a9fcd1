"""Which settings of a trainer are supported: one table for checks, messages and the page."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import Any, NamedTuple, final

from variable_batch_size._validation import in_documentation, value_error


@final
class Setting(NamedTuple):
    """A setting of a trainer that is supported only with some values.

    Attributes:
        name: as users write it.
        supported: the values that are supported, in words.
        value: returns the present value, given the trainer.
        allowed: the supported values, or a function that returns whether a value is supported.
        remedy: what to do instead.
    """

    name: str
    supported: str
    value: Callable[[Any], Any]
    allowed: Container[Any] | Callable[[Any], bool]
    remedy: str


def check_settings(settings: Iterable[Setting], trainer: Any, page: str) -> None:
    """Check that all settings of a trainer are supported, before a training begins.

    Args:
        settings: the table of settings, with the supported values.
        trainer: the trainer, from which the present values are read.
        page: title of the page of the documentation, for the error.

    Raises:
        ValueError: if one is not; it names the setting and a remedy.
    """
    for name, supported, value, allowed, remedy in settings:
        present = value(trainer)
        is_allowed = allowed(present) if callable(allowed) else present in allowed
        if not is_allowed:
            raise value_error(f"{name} must be {supported}", present, f"{remedy} ({in_documentation(page)})")
