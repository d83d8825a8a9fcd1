"""Which settings of a trainer are supported: one table for checks, messages and the page."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import Any, NamedTuple, final

from variable_batch_size._validation import in_documentation, value_error


@final
class Setting(NamedTuple):
    """A setting by the name that users write: what must be true of its value, how to read it, and what else to do."""

    name: str
    supported: str
    value: Callable[[Any], Any]
    allowed: Container[Any] | Callable[[Any], bool]
    remedy: str


def check_settings(settings: Iterable[Setting], trainer: Any, page: str) -> None:
    """Raise ValueError if a setting of a trainer is not supported, which names the page with the title `page`."""
    for name, supported, value, allowed, remedy in settings:
        present = value(trainer)
        if not (allowed(present) if callable(allowed) else present in allowed):
            raise value_error(f"{name} must be {supported}", present, f"{remedy} ({in_documentation(page)})")
