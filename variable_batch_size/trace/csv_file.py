"""The CSV form of a trace: a fast reader for files that are right, and an exact one that finds what is wrong."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from variable_batch_size._validation import MAX_INT, IntArray, check_int, value_error

EXAMPLE = '"0:128 2000:256 10K:1024"'
_SMALL = 1 << 18  # bytes, which are read line by line before pandas is imported: a training starts again often
_INTEGER = re.compile(r"[+-]?[0-9]{1,25}")


def read_sizes(name: str, renumber: bool) -> IntArray:
    """The sizes in a CSV file; refuses the first fault by line and value."""
    data = _bytes_of(name)
    lines = _lines(data, name)
    at, header = next(lines, (1, []))
    for column in ("step", "batchsize"):
        if header.count(column) != 1:
            found = repr(",".join(header))[:60] if header else "an empty file"
            raise value_error(
                f"trace header ({name}:{at}) must have one column {column}", found, "add or rename columns"
            )
    step, size = (header.index(column) for column in ("step", "batchsize"))
    fast = _read_fast(data, None if renumber else step, size, len(header)) if len(data) > _SMALL else None
    if fast is not None:
        return fast
    sizes: list[int] = []
    for at, cells in lines:
        try:
            if len(cells) != len(header):
                raise value_error(f"it must have {len(header)} cells, as the header has", len(cells), "fix the row")
            if not renumber:
                _check_step(cells[step], len(sizes))
            sizes.append(
                check_int(_parsed(cells[size]), "batchsize", 1, MAX_INT, "fix the row, or drop it and renumber")
            )
        except (TypeError, ValueError) as error:
            raise ValueError(f"trace row {len(sizes) + 1} ({name}:{at}): {error}") from None
    if not sizes:
        raise value_error(f"trace {name} must have at least one step", f"only the header ({name}:{at})", "add rows")
    return np.array(sizes)


def _check_step(cell: str, due: int) -> None:
    if _parsed(cell) != due:
        remedy = "fix the column, or ignore it by renumber=True"
        raise value_error(f"step must count 0, 1, 2, ... and be {due} here", f"{_parsed(cell)!r:.60}", remedy)


def _bytes_of(name: str) -> bytes:
    """The file's text in UTF-8, without byte order mark and blank last lines."""
    try:
        data = Path(name).read_bytes().removeprefix(b"\xef\xbb\xbf").rstrip()
    except OSError as error:
        remedy = f"correct the path, or give a schedule like {EXAMPLE}"
        raise type(error)(f"trace must be a CSV file, got {name!r} ({error.strerror}); {remedy}") from None
    try:
        data.decode()
    except UnicodeDecodeError as error:
        where = f"{name}:{1 + data.count(10, 0, error.start)}"
        found = f"byte {data[error.start]:#04x}"
        raise value_error(f"trace ({where}) must be text in UTF-8", found, "save it as CSV in UTF-8") from None
    return data


def _lines(data: bytes, name: str) -> Iterator[tuple[int, list[str]]]:
    """Line number in the file, and stripped cells, of every line that is not blank."""
    reader = csv.reader(io.StringIO(data.decode(), newline=None), skipinitialspace=True)
    try:
        for row in reader:
            cells = [cell.strip() for cell in row]
            if len(cells) > 1 or any(cells):
                yield reader.line_num, cells
    except csv.Error as error:
        raise value_error(f"trace line ({name}:{reader.line_num}) must be CSV", error, "fix the line") from None


def _read_fast(data: bytes, step: int | None, size: int, cells: int) -> IntArray | None:
    """The sizes of a file that is plain and right; None for any other."""
    import pandas as pd

    if b'"' in data or b"\0" in data or data.count(b"\r") != data.count(b"\r\n"):
        return None
    text = np.frombuffer(data + b"\n", np.uint8)
    commas, ends = np.flatnonzero(text == ord(",")), np.flatnonzero(text == ord("\n"))
    # Pandas drops surplus cells and fills in missing ones without a word.
    if (np.diff(np.searchsorted(commas, ends), prepend=0) != cells - 1).any():
        return None
    columns = [size] if step is None else [step, size]
    try:  # without dtype=, because with it 128.0 and 1e3 pass for ints
        table = pd.read_csv(io.BytesIO(data), header=None, skiprows=1, usecols=columns, low_memory=False)
    except (ValueError, OverflowError):
        return None
    if any(dtype != np.int64 for dtype in table.dtypes):
        return None
    sizes = table[size].to_numpy()
    counts = step is None or np.array_equal(table[step].to_numpy(), np.arange(len(sizes)))
    return sizes if counts and ((sizes >= 1) & (sizes <= MAX_INT)).all() else None


def _parsed(cell: str) -> int | str:
    return int(cell) if _INTEGER.fullmatch(cell) else cell
