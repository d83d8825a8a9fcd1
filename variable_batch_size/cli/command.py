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
    """Turn each ValueError of the block, which parses what was typed, into a UsageError: the exit status is then 2."""
    try:
        yield
    except ValueError as error:
        raise UsageError(*error.args) from error


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Make a function a command of typer, in which each field of a dataclass argument is an option of its own.

    So commands can share a group of options as an argument of one dataclass, which typer alone does not support.
    """
    hints: dict[str, Any] = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[Parameter] = []
    for argument in signature(function).parameters.values():
        hint = hints[argument.name]
        if argument.name in groups:
            field_hints = get_type_hints(hint, include_extras=True)
            parameters += [_keyword(field.name, field.default, field_hints[field.name]) for field in fields(hint)]
        else:
            parameters.append(_keyword(argument.name, argument.default, hint))

    @wraps(function)
    def call(**values: Any) -> None:
        """Join the options of each group to its dataclass, and call the function."""
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        function(**values)

    # What typer reads instead of the signature of `function`.
    call.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def _keyword(name: str, default: Any, annotation: Any) -> Parameter:
    """Return a parameter of a command's signature, which typer makes an option; one without a default is required."""
    default = Parameter.empty if default is MISSING else default
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
