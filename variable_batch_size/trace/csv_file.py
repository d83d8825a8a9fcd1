"""The CSV form of a trace: whole columns of a valid file at once, row by row to locate an error; and the writer."""

from __future__ import annotations

import csv
import io
import re
import warnings
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np

from variable_batch_size._files import written
from variable_batch_size._validation import MAX_INT, IntArray, check_int, value_error
from variable_batch_size.trace.schedule import EXAMPLE

SIZE_COLUMNS = ("batchsize", "batch_size")  # a file has one of them; `write_csv` writes the first one
_INTEGER = re.compile(r"([+-]?[0-9]{1,25})([.]0?)?")  # 32, 32. and 32.0; not 1.000, which may be 1 or 1000
Every: TypeAlias = Literal["step", "change"]
_ORDER = "let the first row be step 0, and sort the others by increasing steps"


def read_csv(path: str, renumber: bool = False, every: Every = "step") -> tuple[IntArray, IntArray]:
    """Return the steps of the rows of a CSV file, and their batch sizes (samples), int64 of shape (rows,).

    Args:
        path: the file.
        renumber: whether to ignore the values in the column `step`.
        every: what has a row: each step, or those where the batch size changes.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if the file is not a trace; the message names the first wrong row, its line and its value. Steps
            that are numbered from 0 again, as in each epoch, are read on with a warning.
    """
    data = _read_bytes(path)
    lines = _read_lines(data, path)
    line, header = next(lines, (1, []))
    where = f"{path}:{line}"
    step_column: int | None = _find_column(header, ("step",), where)
    size_column = _find_column(header, SIZE_COLUMNS, where)
    if renumber:
        step_column = None
    rows: list[tuple[int, list[str]]] = []
    read_row_by_row = partial(_read_rows, rows, header, step_column, size_column, path, every)
    try:
        rows.extend(lines)
    except ValueError:  # no valid CSV; if an earlier row is wrong, too, the error names that row
        read_row_by_row()
        raise
    sizes = None if every == "change" else _read_columns(rows, step_column, size_column, len(header))
    if sizes is not None:
        return np.arange(len(sizes)), sizes
    steps, sizes = np.array(read_row_by_row(), np.int64).reshape(-1, 2).T  # (rows,) each
    if not len(sizes):
        raise value_error(f"trace {path} must have at least one step", f"only the header ({where})", "add rows")
    return steps, sizes


def write_csv(path: Path, sizes: IntArray) -> None:
    """Write the batch sizes of steps 0, 1, 2, ... atomically: a failure leaves the old file as it was.

    Args:
        path: the file; an existing one is replaced.
        sizes: batch sizes (samples), int64 of shape (steps,).
    """
    with written(path) as file:
        file.write(f"step,{SIZE_COLUMNS[0]}\n")
        file.writelines(f"{step},{size}\n" for step, size in enumerate(sizes.tolist()))


def _read_bytes(path: str) -> bytes:
    """Return the UTF-8 text of a file without the byte order mark and without trailing white space."""
    try:
        data = Path(path).read_bytes().removeprefix(b"\xef\xbb\xbf").rstrip()
    except OSError as error:
        remedy = f"correct the path, pass a schedule like {EXAMPLE}, or a controller in an AdaptiveTrace"
        raise type(error)(f"trace must be a CSV file, got {path!r} ({error.strerror}); {remedy}") from None
    try:
        data.decode()
    except UnicodeDecodeError as error:
        where = f"{path}:{1 + data.count(10, 0, error.start)}"  # 10 is the byte of a line feed
        found = f"byte {data[error.start]:#04x}"
        raise value_error(f"trace ({where}) must be UTF-8 text", found, "save it as CSV in UTF-8") from None
    return data


def _read_lines(data: bytes, path: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the line number in the file and the stripped cells of every line that is not empty.

    The first one is the header, in lower case and with underscores for spaces.
    """
    text = io.StringIO(data.decode(), newline=None)
    delimiter = separator_of(next((line for line in text if line.strip()), ""))
    text.seek(0)
    reader = csv.reader(text, delimiter=delimiter, skipinitialspace=True, strict=True)
    header = True
    try:
        for row in reader:
            cells = [cell.strip() for cell in row]
            if any(cells):
                yield reader.line_num, [cell.lower().replace(" ", "_") for cell in cells] if header else cells
                header = False
    except csv.Error as error:
        raise value_error(f"trace line ({path}:{reader.line_num}) must be valid CSV", error, "fix the line") from None


def separator_of(header: str) -> str:
    """Return the character that separates the cells of a header: the first of a comma, `;` and a tab that it has."""
    return next((character for character in ",;\t" if character in header), ",")


def _find_column(header: list[str], names: tuple[str, ...], where: str) -> int:
    """Return the index of the only column with one of these names.

    Args:
        header: names of the columns of the file.
        names: the allowed names.
        where: file and line, for the error.

    Raises:
        ValueError: if there are none or several.
    """
    names_in_header = [name for name in names if name in header]
    if len(names_in_header) > 1:
        requirement = f"trace header ({where}) must have only one of the columns {' and '.join(names)}"
        raise value_error(requirement, "both", f"drop the column {names_in_header[-1]}")
    if not names_in_header:
        requirement = f"trace header ({where}) must have one column {' or '.join(names)}"
        remedy = (
            "run vbs capacity convert --policy on a capacity trace" if "nodes" in header else "add or rename a column"
        )
        raise value_error(requirement, _describe_header(header), remedy)
    if header.count(names_in_header[0]) > 1:
        requirement = f"trace header ({where}) must have one column {names_in_header[0]}"
        raise value_error(requirement, _describe_header(header), "drop or rename the duplicates")
    return header.index(names_in_header[0])


def _describe_header(header: list[str]) -> str:
    """Return the header for an error message."""
    return f"{','.join(header)!r:.60}" if header else "an empty file"


def _read_columns(
    rows: list[tuple[int, list[str]]], step_column: int | None, size_column: int, cells: int
) -> IntArray | None:
    """Return the batch sizes of all rows at once, (rows,), which is fast; None if the rows must be read one by one.

    That is so for wrong rows, whose error has to name the first one, and for numbers such as 32.0.

    Args:
        rows: line number and cells of each row.
        step_column: index of the column with the step; None: it is ignored.
        size_column: index of the column with the batch size.
        cells: number of columns.
    """
    if not rows or any(len(row) != cells for _, row in rows):
        return None
    size_cells = [row[size_column] for _, row in rows]
    all_cells = "".join(size_cells)  # one test for all cells
    if not (all_cells.isascii() and all_cells.isdecimal()):
        return None
    if step_column is not None and [row[step_column] for _, row in rows] != [*map(str, range(len(rows)))]:
        return None
    try:
        sizes = np.array([*map(int, size_cells)], np.int64)  # (steps,)
    except (OverflowError, ValueError):  # an empty cell
        return None
    return sizes if ((sizes >= 1) & (sizes <= MAX_INT)).all() else None


def _read_rows(
    lines: Iterable[tuple[int, list[str]]],
    header: list[str],
    step_column: int | None,
    size_column: int,
    path: str,
    every: Every,
) -> list[tuple[int, int]]:
    """Return step and batch size of each row, read one by one; raise ValueError at the first wrong row.

    Warn if each step has a row, and they are numbered from 0 again in a later row.

    Args:
        lines: line number and cells of each row.
        header: names of the columns.
        step_column: index of the column with the step; None: rows are numbered.
        size_column: index of the column with the batch size.
        path: the file, for the error.
        every: what has a row: each "step", or each "change" of the batch size.
    """
    rows: list[tuple[int, int]] = []
    restart_row = 0  # number of the row at which the numbering of the steps has last begun
    for line, cells in lines:
        try:
            if len(cells) != len(header):
                raise value_error(f"it must have {len(header)} cells, like the header", len(cells), "fix the row")
            step = len(rows)
            if step_column is not None and every == "change":
                min_step = rows[-1][0] + 1 if rows else 0
                name = "step" if rows else "the first step"
                step = check_int(_parse_integer(cells[step_column]), name, min_step, MAX_INT if rows else 0, _ORDER)
            elif step_column is not None:
                if step - restart_row > 1 and _parse_integer(cells[step_column]) == 0:  # not a row that is there twice
                    if not restart_row:
                        _warn_of_restart(step + 1, f"{path}:{line}")
                    restart_row = step
                _check_step(cells[step_column], cells[size_column], rows, restart_row)
            rows.append((step, _parse_size(cells[size_column], header[size_column])))
        except (TypeError, ValueError) as error:
            raise ValueError(f"trace row {len(rows) + 1} ({path}:{line}): {error}") from None
    return rows


def _warn_of_restart(row: int, where: str) -> None:
    """Warn that the steps of a file begin again at 0."""
    warnings.warn(
        f"The column step begins again at 0 in row {row} ({where}), for example with each epoch; all rows are taken in "
        f"their order, as with renumber=True",
        UserWarning,
        stacklevel=2,
    )


def _check_step(cell: str, size: str, rows: list[tuple[int, int]], restart_row: int) -> None:
    """Raise ValueError unless the step in a cell is the next one.

    Args:
        cell: the cell with the step.
        size: the cell with the batch size, for the message.
        rows: step and batch size of the rows before it.
        restart_row: number of the row in which step 0 is.
    """
    step = _parse_integer(cell)
    expected_step = len(rows) - restart_row
    if step == expected_step:
        return
    requirement = f"step must be {expected_step}, because each update has a row and they are numbered 0, 1, 2, ..."
    remedy = "fix the column, or ignore it with renumber=True in BatchTrace.from_csv"
    if isinstance(step, int) and step > expected_step > 0:
        remedy += '; if a row is where the batch size changes, pass every="change" instead'
        if 0 < expected_step < 3:  # the steps jump in one of the first rows: probably a file of changes
            points = [*rows[restart_row:], (step, f"{_parse_integer(size)!s:.20}")]
            remedy += f', or the schedule "{" ".join(f"{number}:{size}" for number, size in points)} ..."'
    raise value_error(requirement, f"{step!r:.60}", remedy)


def _parse_size(cell: str, column: str) -> int:
    """Return the batch size in a cell; raise ValueError if it is no integer in [1, 2**53]."""
    size = _parse_integer(cell)
    remedy = "fix the row, or drop it and renumber"
    if isinstance(size, str):  # the value of a cell is wrong, not its type
        why = ", which may be thousands" if re.search("[0-9][., '][0-9]{3}", size) else ""
        raise value_error(f"{column} must be an integer >= 1", f"{size!r:.60}{why}", remedy)
    return check_int(size, column, 1, MAX_INT, remedy)


def _parse_integer(cell: str) -> int | str:
    """Return the integer in a cell, such as 32 or 32.0, or the cell itself if it holds anything else."""
    match = _INTEGER.fullmatch(cell)
    return int(match[1]) if match else cell
