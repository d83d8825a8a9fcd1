"""What a training has written down in the `scalars.csv` of its `Tracker`: columns of numbers, and measured updates."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from variable_batch_size._validation import FloatArray, value_error

SIZES = ("vbs/world_size", "vbs/global_batch_size", "vbs/num_microbatches")
RATES = ("vbs/updates_per_second", "vbs/samples_per_second")
MIXED = 0.1  # how much the mean batch size of the updates behind a rate may differ from that of the row, relative


def read_columns(path: str | os.PathLike[str], names: Sequence[str], remedy: str) -> FloatArray:
    """Return the numbers of columns, (names, rows); nan for an empty cell.

    A row with fewer cells than the header, which a killed process may leave, is left out.

    Args:
        path: the CSV file, with or without a byte order mark.
        names: the columns.
        remedy: what to do if one is missing.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if a column is missing, or a cell is not a number.
    """
    with Path(path).open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        rows = [row for row in reader if None not in row.values()]
    if missing := sorted(set(names) - set(reader.fieldnames or ())):
        raise value_error(f"{path} must have the columns {', '.join(names)}", f"none called {missing[0]}", remedy)
    try:
        return np.array([[float(row[name] or "nan") for row in rows] for name in names])
    except ValueError as error:
        cell = str(error).rpartition(": ")[2]
        raise value_error(f"{path} must have numbers in {', '.join(names)}", f"{cell:.60}", "correct it") from None


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
    columns = read_columns(path, (*SIZES, *RATES), "pass the scalars.csv of a run with tracker=vbs.Tracker(...)")
    usable = (np.isfinite(columns) & (columns > 0)).all(axis=0)  # (rows,)
    world, size, microbatches, rate, sample_rate = columns[:, usable]
    mean_size = sample_rate / rate  # (usable rows,): samples per update since the row before
    steady = np.abs(mean_size / size - 1) <= MIXED  # (usable rows,): the batch size has not changed
    if not steady.any():
        requirement = f"{path} must have a row with the seconds of updates of one batch size"
        found = f"none in {columns.shape[1]} rows"
        raise value_error(requirement, found, "train for longer, or pass a smaller log_steps=")
    steady_rows = [world[steady], size[steady], microbatches[steady]]
    kinds, kind_of_row = np.unique(steady_rows, axis=1, return_inverse=True)  # (3, kinds), and an index for each row
    seconds = [np.median(1 / rate[steady][kind_of_row.ravel() == kind]) for kind in range(kinds.shape[1])]
    world, size, microbatches = kinds  # (kinds,) each, from here on
    rows = np.ceil(size / microbatches) if minibatch_size is None else np.full(len(size), minibatch_size)
    return np.stack([world, rows, np.ceil(microbatches / world), seconds], axis=1)
