"""What makes a function a command: dataclasses of options, and errors about what was typed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any, get_type_hints


class UsageError(ValueError):
    """The command line is wrong: the exit status is 2."""


@contextmanager
def usage() -> Iterator[None]:
    """Turn a ValueError of code that parses what was typed into a UsageError."""
    try:
        yield
    except ValueError as error:
        raise UsageError(*error.args) from error


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Return the function as typer reads it: the fields of its dataclass arguments are options of their own."""
    hints: dict[str, Any] = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    parameters: list[Parameter] = []
    for given in signature(function).parameters.values():
        kind = hints[given.name]
        if given.name in groups:
            parts = get_type_hints(kind, include_extras=True)
            parameters += [_keyword(part.name, part.default, parts[part.name]) for part in fields(kind)]
        else:
            parameters.append(_keyword(given.name, given.default, kind))

    @wraps(function)
    def call(**values: Any) -> None:
        for name, kind in groups.items():
            values[name] = kind(**{part.name: values.pop(part.name) for part in fields(kind)})
        function(**values)

    call.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def _keyword(name: str, default: Any, annotation: Any) -> Parameter:
    default = Parameter.empty if default is MISSING else default
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
