"""What an evaluation has brought: a row for each training, and the plans that asked for them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from variable_batch_size.lab.evaluation import plan
from variable_batch_size.lab.evaluation.record import Record, read_records

if TYPE_CHECKING:
    import pandas as pd

REFERENCE = "the reference"  # name of the trace of the constant batch size `ref_batchsize`


@dataclass(frozen=True)
class Plan:
    """What one command of `vbs evaluate` asks for, fixed before anything is trained.

    Attributes:
        command: as a user would type it.
        keys: of all trainings that judge it.
    """

    command: str
    keys: tuple[str, ...]


@dataclass(frozen=True)
class Evaluation:
    """The trainings that have ended, and the plans.

    Attributes:
        trainings: one row a training.
        plans: in the order in which they were made; none for a table.
    """

    trainings: pd.DataFrame
    plans: tuple[Plan, ...]


def read(place: str | os.PathLike[str]) -> Evaluation:
    """Read a folder, or a table `*.csv.gz`."""
    import pandas as pd

    records = read_records(place)
    commands = plan.Plan.read(place).commands if Path(place).is_dir() else {}
    plans = tuple(Plan(command, tuple(keys)) for command, keys in commands.items())
    first = {key: number for number, one in reversed(list(enumerate(plans))) for key in one.keys}
    return Evaluation(pd.DataFrame([_row(record, first) for record in records]), plans)


def tidy(trainings: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each row of each curve, with the training's columns."""
    import pandas as pd

    tables = [
        pd.DataFrame(
            {**row, **{"effective_lr" if name == "lr" else name: values for name, values in curve.items() if values}}
        )
        for row, curve in zip(
            trainings.drop(columns=["curve", "environment"]).to_dict("records"), trainings["curve"], strict=True
        )
    ]
    return pd.concat(tables, ignore_index=True)


def _row(record: Record, first: dict[str, int]) -> dict[str, Any]:
    cell = record.cell
    same = "task", "trace", "rule", "seed", "samples"
    return {name: cell[name] for name in same} | {
        "key": record.key,
        "plan": first.get(record.key, 0),
        "task_version": cell.get("task_version", ""),
        "end": cell.get("end", "samples"),
        "lr": float(cell["lr"]),
        "lr_factor": float(cell["lr_factor"]),
        "ref_batchsize": cell.get("ref_batchsize") or np.nan,
        "start": "",
        "status": record.status,
        "wall_seconds": record.wall_seconds,
        "curve": {name: values for name, values in record.curve.items() if values is not None},
        "untrained": (record.curve.get("loss") or [np.nan])[0],
        "environment": dict(record.environment),
    }
