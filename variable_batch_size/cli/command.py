"""What makes a function a command: dataclasses of options, and errors that name options instead of arguments."""

from __future__ import annotations

import re
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
    """Return the function as typer reads it: the fields of its dataclass arguments are options of their own.

    An error of the package about an argument becomes one about the option of the same name, and a UsageError.
    """
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
    options = {parameter.name: _option(parameter) for parameter in parameters if not _is_argument(parameter)}

    @wraps(function)
    def call(**values: Any) -> None:
        for name, kind in groups.items():
            values[name] = kind(**{part.name: values.pop(part.name) for part in fields(kind)})
        try:
            function(**values)
        except (ValueError, TypeError, OSError) as error:
            if len(error.args) != 1 or not isinstance(error.args[0], str):
                raise
            message, about_option = _name_options(error.args[0], options)
            error.args = (message,)
            if about_option:
                raise UsageError(message) from error
            raise

    call.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def _keyword(name: str, default: Any, annotation: Any) -> Parameter:
    default = Parameter.empty if default is MISSING else default
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _is_argument(parameter: Parameter) -> bool:
    from typer.models import ArgumentInfo

    return any(isinstance(info, ArgumentInfo) for info in getattr(parameter.annotation, "__metadata__", ()))


def _option(parameter: Parameter) -> str:
    infos = getattr(parameter.annotation, "__metadata__", ())
    declared = [name for info in infos for name in (info.default, *(info.param_decls or ()))]  # the first is `default`
    named = [name for name in declared if isinstance(name, str) and name.startswith("--")]
    return named[0] if named else "--" + parameter.name.replace("_", "-")


def _name_options(message: str, options: dict[str, str]) -> tuple[str, bool]:
    """Return a message with the options of a command instead of arguments, and whether it is about one of them."""

    def option(match: re.Match[str]) -> str:
        return options.get(match[0].rstrip("="), match[0])

    first = re.match(r"(?:the (?:lower|upper) one of )?(\w+)(?= must )", message)
    about_option = first is not None and first[1] in options
    if first and about_option:
        message = message[: first.start(1)] + options[first[1]] + message[first.end(1) :]
    message = re.sub(r'\b[a-z_]+=(?=")', lambda match: option(match) + " " * (match[0] != option(match)), message)
    return re.sub(r"\b[a-z_]+=(?=[,;.]|$)", option, message), about_option  # "limit it with bounds="
