"""What a cell of an evaluation has measured, as a JSON file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from variable_batch_size._validation import value_error

FORMAT = 1


@dataclass(frozen=True)
class Record:
    """The result of one training.

    Attributes:
        key: name of the cell, a hash of what determines it.
        cell: what was trained: task, trace, rule, lr, seed, ...
        status: "finished" or "diverged".
        curve: one value an evaluation: updates, samples, progress, seconds, cost, batch_size, lr, train_loss and each
            metric of the task; None for what is not known. The first one is the untrained model's.
        wall_seconds: what the training took.
        environment: versions, commit and hardware.
    """

    key: str
    cell: Mapping[str, Any]
    status: str
    curve: Mapping[str, Sequence[float | None] | None]
    wall_seconds: float
    environment: Mapping[str, Any]


def read_records(folder: str | os.PathLike[str]) -> list[Record]:
    """Return the records of a folder, in the order of their keys.

    Raises:
        ValueError: if a file is not a record of this format.
    """
    return [_read(path) for path in sorted(Path(folder).glob("[0-9a-f]*.json"))]


def _read(path: Path) -> Record:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        found = content.pop("format")
        if found == FORMAT:
            return Record(**content)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        found = f"{type(error).__name__}: {error}"
    raise value_error(f"{path} must be a record of format {FORMAT}", found, "remove it, and its cell is trained again")
