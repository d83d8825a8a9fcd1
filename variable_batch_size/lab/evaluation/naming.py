"""Names of the tasks in a report, which tell apart what cannot be compared."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from variable_batch_size.lab.evaluation.record import Record

COMPARED = {"task", "trace", "rule", "lr", "lr_factor", "seed", "window"}
SIZES = "trace_fingerprint"
WORDS = {"task_version": "version", "task_arguments": "arguments", SIZES: "batch sizes"}
REFERENCE = "reference lr"  # the learning rate that the factors multiply


def task_names(records: Sequence[Record]) -> dict[str, str]:
    """Return key -> name of the task, with what else differs where trainings cannot be compared.

    Trainings of the same task and trace cannot if they differ in more than the rule, the factor on the learning rate
    and the seed, with its part of a log: in the samples, for example, or the batch sizes of a file that has changed.
    Those of different rules may be evaluated at different places. Batch sizes may differ between parts of a log.
    """
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = defaultdict(list)
    cells = {record.key: _with_reference(record.cell) for record in records}
    for cell in cells.values():
        kind = cell["task"], cell["trace"]
        groups[kind].append({name: cell[name] for name in cell if name not in ("between", SIZES)})
        groups[(*kind, cell["rule"])].append({name: cell[name] for name in cell if name != SIZES})
        groups[(*kind, cell["windows"], cell.get("window"))].append({SIZES: cell[SIZES]})
    differs: dict[str, dict[str, None]] = defaultdict(dict)
    for (task, *_), group in groups.items():
        names = dict.fromkeys(name for cell in group for name in cell if name not in COMPARED)
        differs[task] |= dict.fromkeys(name for name in names if len({_text(cell.get(name)) for cell in group}) > 1)
    return {key: _name(cell, list(differs[cell["task"]])) for key, cell in cells.items()}


def _with_reference(cell: Mapping[str, Any]) -> dict[str, Any]:
    return {
        SIZES: None,
        "windows": 1,
        **cell,
        REFERENCE: float(f"{cell['lr'] / cell['lr_factor']:.9g}"),
    }  # without what rounding adds


def _name(cell: Mapping[str, Any], names: Sequence[str]) -> str:
    extra = ", ".join(f"{WORDS.get(name, name)} {_text(cell.get(name))}" for name in names)
    return f"{cell['task']} ({extra})" if extra else str(cell["task"])


def _text(value: object) -> str:
    return value if isinstance(value, str) and value else json.dumps(value, sort_keys=True)
