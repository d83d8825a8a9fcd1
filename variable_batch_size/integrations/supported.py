"""Which settings of a trainer are supported: one table, of which checks, messages and the page's table are made."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from operator import attrgetter
from typing import Any, NamedTuple, final

from variable_batch_size._validation import value_error


@final
class Setting(NamedTuple):
    """A setting, and what is supported of it; everything else is refused by its name.

    Attributes:
        name: what the user wrote, such as `gradient_accumulation_steps`.
        supported: its supported values, in words that follow "must be".
        value: where the value is: an attribute of the trainer, such as "args.fp16", or a function of the trainer.
        allowed: the supported values, or a function that returns whether a value is one.
        remedy: what to do instead.
    """

    name: str
    supported: str
    value: str | Callable[[Any], Any]
    allowed: Container[Any] | Callable[[Any], bool]
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
    for each in settings:
        value = attrgetter(each.value)(trainer) if isinstance(each.value, str) else each.value(trainer)
        if not (each.allowed(value) if callable(each.allowed) else value in each.allowed):
            remedy = f"{each.remedy} (see docs/trainers/{page}.md)"
            raise value_error(f"{each.name} must be {each.supported}", value, remedy)


def table(settings: Iterable[Setting]) -> str:
    """Return the table of the page, in Markdown."""
    rows = (f"| {each.name} | {each.supported} | {each.remedy} |" for each in settings)
    return "\n".join(("| setting | supported | otherwise |", "|---|---|---|", *rows))
