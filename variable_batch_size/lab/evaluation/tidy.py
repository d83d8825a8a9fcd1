"""Records as one table, with a row for each evaluation of each training; and its rows as curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from variable_batch_size._validation import FloatArray
from variable_batch_size.lab.evaluation.metric import possible
from variable_batch_size.lab.evaluation.naming import task_names
from variable_batch_size.lab.evaluation.record import Record, status_of
from variable_batch_size.lab.evaluation.statistics import mean_interval

if TYPE_CHECKING:
    import pandas as pd

PLACES = ("updates", "samples", "progress", "seconds", "cost")  # what a curve can be drawn along


def tidy(records: Sequence[Record]) -> pd.DataFrame:
    """Return a row for each evaluation of each record: its cell, its status, and the values of its curve."""
    import pandas as pd

    names = task_names(records)
    tables = [
        pd.DataFrame({**_cell_columns(record, names[record.key]), **_columns(record.curve)})
        for record in sorted(records, key=lambda record: record.key)
    ]
    return pd.concat(tables, ignore_index=True)


def along(cells: pd.DataFrame, place: str, metric: str) -> tuple[FloatArray, FloatArray]:
    """Return places, (evaluations,), and mean, low and high of the metric, (3, evaluations), of one rule's trainings.

    Only those that finished count. The evaluations of different seeds belong together by their number, as they are made
    after equal samples. Where their numbers differ, as with parts of a log or equal time, values are taken from the
    lines between them, at equal places that all trainings have; what they have after these is `beyond`. There is none
    if the place is not known.
    """
    curves = _finished(cells, place, metric)
    if not curves:
        return np.empty(0), np.empty((3, 0))
    if _belong_together(curves):
        places, values = np.stack(curves, axis=1)
        places = places.mean(axis=0)
    else:
        first, last = max(curve[0, 0] for curve in curves), min(curve[0, -1] for curve in curves)
        places = np.linspace(first, last, max(curve.shape[1] for curve in curves))
        values = np.stack([np.interp(places, *curve) for curve in curves])
    limits = possible(metric, np.concatenate([curve[1] for curve in curves]))
    intervals = [mean_interval(own, **limits)[:3] for own in values.T]
    return places, np.array(intervals).reshape(-1, 3).T


def beyond(cells: pd.DataFrame, place: str, metric: str) -> list[FloatArray]:
    """Return the curve, (2, evaluations), of each training that goes on where the shortest one ends, from there on."""
    curves = _finished(cells, place, metric)
    if _belong_together(curves):
        return []
    last = min(curve[0, -1] for curve in curves)
    longer = [curve for curve in curves if curve[0, -1] > last]
    starts = [np.array([[last], [np.interp(last, *curve)]]) for curve in longer]
    return [np.hstack([start, curve[:, curve[0] > last]]) for start, curve in zip(starts, longer, strict=True)]


def _finished(cells: pd.DataFrame, place: str, metric: str) -> list[FloatArray]:
    """Return places and values, (2, evaluations), of each training that finished."""
    rows = cells[cells["status"] == "finished"].dropna(subset=[place, metric])
    return [own[[place, metric]].to_numpy(np.float64).T for _, own in rows.groupby("key")]


def _belong_together(curves: Sequence[FloatArray]) -> bool:
    return len({curve.shape for curve in curves}) <= 1


def _cell_columns(record: Record, task: str) -> dict[str, Any]:
    cell = record.cell
    return {
        "key": record.key,
        "task": task,
        "task_name": cell["task"],
        "trace": cell["trace"],
        "rule": cell["rule"],
        "lr": float(cell["lr"]),
        "lr_factor": float(cell["lr_factor"]),
        "seed": cell["seed"],
        "ref_batchsize": cell.get("ref_batchsize"),
        "planned_samples": cell["samples"],
        "status": status_of(record),
        "wall_seconds": record.wall_seconds,
    }


def _columns(curve: Mapping[str, Sequence[float | None] | None]) -> dict[str, FloatArray]:
    """Return the values of a curve as columns of equal length, nan where there is none; `lr` is the effective one."""
    length = len(curve["samples"] or ())
    columns = {}
    for name in dict.fromkeys([*PLACES, *curve]):
        column = np.full(length, np.nan)
        values = np.asarray([np.nan if value is None else value for value in curve.get(name) or ()], np.float64)
        column[: len(values)] = values
        columns["effective_lr" if name == "lr" else name] = column
    return columns
