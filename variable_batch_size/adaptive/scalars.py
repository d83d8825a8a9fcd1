"""What a training has written down in the `scalars.csv` of its `Tracker`: columns of numbers, and measured updates."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from variable_batch_size._validation import FloatArray, value_error

SIZES = ("vbs/world_size", "vbs/global_batch_size", "vbs/num_microbatches")
RATE, SAMPLE_RATE = "vbs/updates_per_second", "vbs/samples_per_second"
MIXED = 0.1  # relative: so far the mean batch size behind a rate may be from the batch size of its row


def read_columns(
    path: str | os.PathLike[str], names: Sequence[str], remedy: str, optional: Sequence[str] = ()
) -> dict[str, FloatArray]:
    """Return columns by their names, (rows,) each; nan for an empty cell.

    A row with fewer cells than the header, which a killed process may leave, is left out.

    Args:
        path: the CSV file, with or without a byte order mark.
        names: the columns that it must have.
        remedy: what to do if one is missing.
        optional: further columns, which are left out if they are missing.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if a column is missing, or a cell is not a number.
    """
    with Path(path).open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        header = set(reader.fieldnames or ())
        if missing := sorted(set(names) - header):
            raise value_error(f"{path} must have the columns {', '.join(names)}", f"none called {missing[0]}", remedy)
        found: dict[str, list[float]] = {name: [] for name in (*names, *optional) if name in header}
        for row in reader:
            if None not in row.values():
                for name, numbers in found.items():
                    numbers.append(_number(path, reader.line_num, name, row[name]))
    return {name: np.array(numbers, np.float64) for name, numbers in found.items()}


def updates_in(path: str | os.PathLike[str], minibatch_size: int | None = None) -> FloatArray:
    """Return the updates that a training has measured, as `Throughput.fit` takes them, (kinds of updates, 4).

    A kind is a number of ranks, a batch size and a number of microbatches. Its seconds are the median of its rows, each
    of which is the mean since the row before: a row that includes an evaluation or a save does not count, as long as
    most rows do not. No row includes the first update of a run, which begins with what a process does once. Rows
    between which the batch size has changed are left out.

    Args:
        path: the `scalars.csv`.
        minibatch_size: rows of a microbatch; None: ceil(batch size / microbatches).

    Raises:
        OSError: if the file cannot be read.
        ValueError: if a column is missing, a cell is not a number, or no row has the seconds of an update.
    """
    remedy = "pass the scalars.csv of a training with tracker=vbs.Tracker(...)"
    columns = read_columns(path, [*SIZES, RATE], remedy, optional=[SAMPLE_RATE])
    values = np.stack([columns[name] for name in (*SIZES, RATE)], axis=1)  # (rows, 4)
    usable = (np.isfinite(values) & (values > 0)).all(axis=1)  # (rows,)
    if SAMPLE_RATE in columns:
        with np.errstate(all="ignore"):  # rows that are not usable
            mean = columns[SAMPLE_RATE] / values[:, 3]  # (rows,), samples of an update
            usable &= np.abs(mean / values[:, 1] - 1) <= MIXED
    if not usable.any():
        requirement = f"{path} must have a row with the seconds of updates of one batch size"
        raise value_error(requirement, f"none in {len(values)} rows", "train for longer, or pass a smaller log_steps=")
    kinds, kind = np.unique(values[usable, :3], axis=0, return_inverse=True)  # (kinds, 3), (usable rows,)
    each = 1 / values[usable, 3]
    seconds = [np.median(each[kind.ravel() == number]) for number in range(len(kinds))]
    world, batch_size, microbatches = kinds.T  # (kinds,) each
    rows = np.ceil(batch_size / microbatches) if minibatch_size is None else np.full(len(kinds), minibatch_size)
    return np.stack([world, rows, np.ceil(microbatches / world), seconds], axis=1)


def _number(path: str | os.PathLike[str], line: int, name: str, cell: str) -> float:
    try:
        return float(cell or math.nan)
    except ValueError:
        raise value_error(f"{path}: {name} in line {line} must be a number", f"{cell!r:.60}", "correct it") from None
