"""Rows of JSON values as one file, a gzipped CSV.

A field is JSON, which keeps every number bit for bit; a row does not have what is empty. The members of an object are
columns of their own: `curve.loss` is `row["curve"]["loss"]`.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from variable_batch_size._files import write_bytes
from variable_batch_size._validation import value_error

SUFFIX = ".csv.gz"


def is_table(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is that of a table, which may not be there yet: by its name, and not a folder."""
    return Path(path).name.endswith(SUFFIX) and not Path(path).is_dir()


def write_table(rows: Sequence[Mapping[str, Any]], path: str | os.PathLike[str]) -> None:
    """Write rows, at least one, whose names have no dot; the same rows make the same file.

    Raises:
        OSError: if the file cannot be written.
        ValueError: if its name does not end with ".csv.gz", there is no row, or a number is not finite.
    """
    import pandas as pd

    if not is_table(path):
        raise value_error(f"the name of a table must end with {SUFFIX}", repr(os.fspath(path)), "rename it")
    if not rows:
        raise value_error(f"the table {path} must have at least one row", "none", "pass one")
    lines = [{name: json.dumps(value, allow_nan=False) for name, value in _columns(row)} for row in rows]
    text = pd.DataFrame(lines).to_csv(index=False, lineterminator="\n")
    write_bytes(path, gzip.compress(text.encode(), mtime=0))


def read_table(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read the rows of a table.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it is damaged, or not a table with at least one row.
    """
    import pandas as pd

    content = Path(path).read_bytes()
    try:
        frame = pd.read_csv(io.BytesIO(gzip.decompress(content)), dtype=str, keep_default_na=False)
        rows = [_row(line) for line in frame.to_dict("records")]
        found = "none"
    except (gzip.BadGzipFile, EOFError, zlib.error, ValueError, TypeError) as error:
        rows, found = [], f"{type(error).__name__}: {error}"
    if not rows:
        raise value_error(f"{path} must be a table with rows of JSON", found, "copy or write it again")
    return rows


def _columns(row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        if isinstance(value, Mapping) and value:
            yield from ((f"{name}.{inner}", one) for inner, one in value.items())
        else:
            yield name, value


def _row(line: Mapping[Any, str]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for column, text in line.items():
        if text:
            name, dot, inner = column.partition(".")
            place, key = (row.setdefault(name, {}), inner) if dot else (row, name)
            place[key] = json.loads(text)
    return row
