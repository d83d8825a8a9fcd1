"""A group of commands, and how it differs from typer's."""

from __future__ import annotations

from typing import Any

from typer.core import TyperArgument, TyperGroup

from variable_batch_size.cli.command import UsageError


class Commands(TyperGroup):
    """Commands whose help shows no types of Python; an unknown one is looked for in other groups."""

    def get_params(self, context: Any) -> Any:
        """Return the options of the group itself, which the help shows without types of Python."""
        return _without_types(super().get_params(context))

    def get_command(self, context: Any, name: str) -> Any:
        """Return the command of a name, after removing the types of Python from its help, or None if there is none."""
        command = super().get_command(context, name)
        if command:
            _without_types(command.get_params(context))
        return command

    def resolve_command(self, context: Any, args: list[str]) -> Any:
        """Return the command that the first word names. If only a group has it, raise UsageError and name the group."""
        for group, command in self.commands.items():
            if args[0] not in self.commands and args[0] in getattr(command, "commands", {}):
                requirement = f"the command must be one of vbs --help, got {args[0]}"
                raise UsageError(f"{requirement}; use vbs {group} {args[0]}")
        return super().resolve_command(context, args)


def _without_types(parameters: list[Any]) -> list[Any]:
    """Change parameters so that the help shows flags without <bool> and arguments without <str>; return them.

    typer prints these types since it has its own copy of click, and has no option against it.
    """
    for parameter in parameters:
        if isinstance(parameter, TyperArgument):
            parameter.display_type_rich = lambda ctx: None  # type: ignore[method-assign]
        elif getattr(parameter, "is_flag", False):
            parameter.metavar = " "
    return parameters
