"""Which settings of a trainer are supported: one table, of which checks, messages and the page's table are made."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, final

from variable_batch_size._validation import value_error


@final
class Setting(NamedTuple):
    """A setting, and what is supported of it; everything else is refused by its name.

    Attributes:
        name: what the user wrote, such as `gradient_accumulation_steps`.
        supported: its supported values, in words that follow "must be".
        value: function of the trainer that returns the value.
        allows: function that returns whether the value is supported.
        remedy: what to do instead.
    """

    name: str
    supported: str
    value: Callable[[Any], Any]
    allows: Callable[[Any], bool]
    remedy: str


def check(settings: Iterable[Setting], trainer: Any, page: str) -> None:
    """Check the settings of a trainer.

    Args:
        settings: the table.
        trainer: what the functions of the table get.
        page: the name of its page in docs/trainers.

    Raises:
        ValueError: if one is not supported; the message names it and has the page's address.
    """
    for setting in settings:
        if not setting.allows(value := setting.value(trainer)):
            remedy = f"{setting.remedy} (see docs/trainers/{page}.md)"
            raise value_error(f"{setting.name} must be {setting.supported}", value, remedy)


def table(settings: Iterable[Setting]) -> str:
    """Return the table of the page, in Markdown."""
    rows = (f"| {each.name} | {each.supported} | {each.remedy} |" for each in settings)
    return "\n".join(("| setting | supported | otherwise |", "|---|---|---|", *rows))
