"""Reads a capacity trace from a file of any known format."""

from __future__ import annotations

import os

from variable_batch_size._validation import MAX_INT, check_choice, check_int, check_number, value_error
from variable_batch_size.cluster.capacity_trace import CapacityTrace
from variable_batch_size.cluster.readers.base import Options, Reader, Text, split
from variable_batch_size.cluster.readers.table import READERS
from variable_batch_size.trace.csv_file import SIZE_COLUMNS


def read(
    path: str | os.PathLike[str],
    format: str | None = None,
    *,
    inverted: bool | int = False,
    max_gap: float | None = None,
) -> CapacityTrace:
    """Read a capacity trace from a file, whose format is recognized by how it begins.

    - `csv`: `seconds,nodes` or `seconds,nodes,price`, or times of ISO 8601; it ends at the last row.
    - `skypilot`: `{"metadata": {"gap_seconds": 300}, "data": [0, 3]}`; it ends `gap_seconds` after the last tick.
    - `bamboo-events`: `480000,add,node1`; it ends at the last row.
    - `bamboo-counts`: `21529,4`; it ends at the last row.
    - `gcloud`: `2021-12-10, 13:07:45, 80`; it ends at the latest row.
    - `parcae`: `[0, "add", {"nodes": ["node-0"], "duration": 60000}]`; it ends at the last row plus its duration.
    - `eth`: `,Time,GPUs` or `,Time,TPU_cores`; it ends at the last row, and counts devices.

    Dates and Unix times (`gcloud`, `eth`, ISO 8601) begin at the first row. Times since the beginning (the others) stay
    as they are: before the first row there are 0 nodes. Of rows at one time the last one counts.

    Args:
        path: path of the file.
        format: name of the format; by default, it is recognized.
        inverted: whether 1 means that the only node is not available; for a larger cluster, its number of nodes if
            the file counts those that are not available. Only for skypilot, in which copies of both kinds exist and
            nothing in the file tells.
        max_gap: seconds, > 0, for which a row holds at most; from then on there are 0 nodes until the next row. Only
            for gcloud. By default, a row holds up to the next one.

    Raises:
        TypeError: if an argument has the wrong type.
        OSError: if the file cannot be read.
        ValueError: if no format or none of this name is known, the format does not have the option, or the file is
            damaged; the message names file, line and value.

    Warns:
        UserWarning: if rows of gcloud go back in time; they are sorted.
    """
    options = _checked(inverted, max_gap)
    if format is not None:
        check_choice(format, "format", tuple(READERS))
    text = Text.load(path)
    reader = READERS[format] if format is not None else _recognize(text)
    for option, value, default in zip(Options._fields, options, Options(), strict=True):
        if value != default and option not in reader.options:
            able = ", ".join(name for name, other in READERS.items() if option in other.options)
            found = f"the format {reader.name} ({text.path})"
            raise value_error(f"{option} must be left out except for the format {able}", found, f"remove {option}=")
    return CapacityTrace(*reader.checked(text, options))


def _checked(inverted: bool | int, max_gap: float | None) -> Options:
    remedy = "pass True for a cluster of one node, or the number of its nodes"
    size = int(inverted) if isinstance(inverted, bool) else check_int(inverted, "inverted", 1, MAX_INT, remedy)
    if max_gap is None:
        return Options(size)
    seconds = check_number(max_gap, "max_gap", "pass seconds > 0")
    if seconds == 0:
        raise value_error("max_gap must be > 0", max_gap, "pass seconds > 0, or None for gaps of any length")
    return Options(size, seconds)


def format_of(path: str | os.PathLike[str]) -> str | None:
    """Return the name of the format by which a file begins; None if it is none of those, or cannot be read."""
    try:
        return _recognize(Text.load(path)).name
    except (OSError, ValueError):
        return None


def _recognize(text: Text) -> Reader:
    for reader in READERS.values():
        if reader.recognizes(text):
            return reader
    line, first = text.lines[0]
    if set(SIZE_COLUMNS) & set(split(first)):
        requirement = "a capacity trace must have numbers of nodes, not the batch sizes of a batch trace"
        raise text.error(line, requirement, first, "pass a log, or show this file with vbs trace show")
    known = " or ".join(f"{reader.example} ({name})" for name, reader in READERS.items())
    remedy = "write it as seconds,nodes, as in docs/capacity.md under Any other log, or pass format="
    raise text.error(line, f"a file must begin like {known}", first, remedy)
