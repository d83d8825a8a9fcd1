"""What an evaluation is to train, and which commands said so: how complete its records are can be told at any time."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from variable_batch_size._files import written
from variable_batch_size._validation import value_error

FORMAT = 1
NAME = "plan.json"


@final
@dataclass(frozen=True)
class Plan:
    """What was asked of a folder of records.

    Attributes:
        commands: command line, "" if it was Python's `run` -> keys of the cells that it asked for, in this order.
        tuning: command lines that will ask for more, the trainings that judge, after those of the tuning seeds.
    """

    commands: Mapping[str, Sequence[str]]
    tuning: Sequence[str] = field(default_factory=list)

    @property
    def keys(self) -> set[str]:
        """The keys of all cells."""
        return {key for keys in self.commands.values() for key in keys}

    @property
    def command(self) -> str:
        """The command lines that together ask for all cells, one a line."""
        return "\n".join(filter(None, self.commands))

    def extended(self, keys: Sequence[str], command: str = "", tuning: bool = False) -> Plan:
        """Return the plan with what another command asks for, without commands that ask for nothing else.

        Args:
            keys: of the cells that it asks for.
            command: the command line.
            tuning: whether it will ask for more after these.
        """
        new = set(keys)
        waiting = [line for line in self.tuning if line != command] + [command] * tuning
        if command not in self.commands and new < self.keys:
            return Plan(self.commands, waiting)
        before = {line: old for line, old in self.commands.items() if line != command and not new.issuperset(old)}
        own = [] if command else [key for key in self.commands.get("", ()) if key not in new]  # of any call from Python
        after = {**before, command: [*own, *keys]}
        return Plan(after, [line for line in waiting if line in after or line not in self.commands])

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> Plan:
        """Read the plan of a folder, an empty one if there is none.

        Raises:
            OSError: if the file cannot be read.
            ValueError: if it is not a plan of this format.
        """
        path = Path(folder) / NAME
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["format"] == FORMAT:
                commands = {str(line): [*map(str, keys)] for line, keys in content["commands"].items()}
                return cls(commands, [*map(str, content.get("tuning", ()))])
            found = f"format {content['format']}"
        except (FileNotFoundError, NotADirectoryError):
            return cls({})
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            found = f"{type(error).__name__}: {error}"
        remedy = "delete it, no training is lost by that"
        raise value_error(f"{path} must be a plan of format {FORMAT}", found, remedy)

    def write(self, folder: str | os.PathLike[str]) -> None:
        """Write it into a folder."""
        with written(Path(folder) / NAME) as file:
            json.dump({"format": FORMAT, "commands": dict(self.commands), "tuning": list(self.tuning)}, file)


def extend_plan(folder: str | os.PathLike[str], keys: Sequence[str], command: str = "", tuning: bool = False) -> None:
    """Write down which cells a command asks for, beside those that were asked for before, see `Plan.extended`."""
    before = Plan.read(folder)
    after = before.extended(keys, command, tuning)
    if after != before:
        after.write(folder)
