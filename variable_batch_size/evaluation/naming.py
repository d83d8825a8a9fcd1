"""Names of the tasks in a report, which tell apart what cannot be compared."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from variable_batch_size.evaluation.record import Record

COMPARED = {"task", "trace", "rule", "lr", "lr_factor", "seed"}


def task_names(records: Sequence[Record]) -> dict[str, str]:
    """Return key -> name of the task, with what else differs where trainings cannot be compared.

    Trainings of the same task and trace with different numbers of samples cannot, and those of the same task, trace and
    rule that differ in more than the learning rate and the seed.
    """
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = defaultdict(list)
    for record in records:
        cell = record.cell
        groups[cell["task"], cell["trace"]].append({"samples": cell.get("samples")})
        groups[cell["task"], cell["trace"], cell["rule"]].append(cell)
    differs: dict[str, dict[str, None]] = defaultdict(dict)
    for (task, *_), cells in groups.items():
        names = dict.fromkeys(name for cell in cells for name in cell if name not in COMPARED)
        differs[task] |= dict.fromkeys(name for name in names if len({_text(cell.get(name)) for cell in cells}) > 1)
    return {record.key: _name(record.cell, list(differs[record.cell["task"]])) for record in records}


def _name(cell: Mapping[str, Any], names: Sequence[str]) -> str:
    extra = ", ".join(f"{name} {_text(cell.get(name))}" for name in names)
    return f"{cell['task']} ({extra})" if extra else str(cell["task"])


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)
