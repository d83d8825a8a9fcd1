"""Read a capacity trace from a file of any known format: a new one is a file in `readers/`, and a line here."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Final

from variable_batch_size._validation import (
    MAX_INT,
    check_choice,
    check_int,
    check_number,
    in_documentation,
    value_error,
)
from variable_batch_size.lab.cluster.capacity_trace import CapacityTrace
from variable_batch_size.lab.cluster.readers.bamboo import BambooCountsReader, BambooEventsReader
from variable_batch_size.lab.cluster.readers.base import Reader, ReaderOptions, Text, split_cells
from variable_batch_size.lab.cluster.readers.csv_table import OwnReader
from variable_batch_size.lab.cluster.readers.eth import EthReader
from variable_batch_size.lab.cluster.readers.gcloud import GcloudReader
from variable_batch_size.lab.cluster.readers.parcae import ParcaeReader
from variable_batch_size.lab.cluster.readers.sacct import SacctReader
from variable_batch_size.lab.cluster.readers.skypilot import SkyPilotReader
from variable_batch_size.trace.csv_file import SIZE_COLUMNS

READERS: Final[Mapping[str, Reader]] = {
    "csv": OwnReader(),
    "skypilot": SkyPilotReader(),
    "bamboo-events": BambooEventsReader(),
    "bamboo-counts": BambooCountsReader(),
    "gcloud": GcloudReader(),
    "parcae": ParcaeReader(),
    "eth": EthReader(),
    "sacct": SacctReader(),
}
"""The readers by the names of their formats; no two recognize the same file."""


def read(
    path: str | os.PathLike[str],
    format: str | None = None,
    *,
    inverted: bool | int = False,
    max_gap: float | None = None,
    time_column: str = "",
    nodes_column: str = "",
) -> CapacityTrace:
    """Read a capacity trace from a file, whose format is recognized by its beginning.

    FORMATS

    The docstring of each reader says where a trace of its format ends. Dates, and Unix times (10^9 s or more), begin at
    the first row. Times since the beginning stay as they are: before the first row there are 0 nodes. Of rows at one
    time the last one counts. Times from 10^12 on look like milliseconds since 1970, and raise; milliseconds since the
    beginning cannot be seen.

    Args:
        path: path of the file.
        format: name of the format; by default, it is recognized.
        inverted: the number of nodes of the cluster, if the file counts those that are not available; True for one
            node. Only for skypilot, whose files do not say which ones they count.
        max_gap: seconds, > 0, for which a row holds at most, with 0 nodes from then on until the next row. Only for
            gcloud. By default, a row holds up to the next one.
        time_column: name of the column of the times, in any case. Only for csv.
        nodes_column: name of the column of the nodes. Only for csv.

    Raises:
        TypeError: if an argument has the wrong type.
        OSError: if the file cannot be read.
        ValueError: if there is no format of this name, or it does not have the option.
        LogError: a ValueError, if the format is not recognized or the file is damaged; it names file, line and value.

    Warns:
        UserWarning: if rows of gcloud go back in time; they are sorted. Or if the times of csv or bamboo-counts are
            fractions, less than five seconds apart, as hours are.
    """
    options = _check_options(inverted, max_gap)._replace(time_column=time_column, nodes_column=nodes_column)
    if format is None and (time_column or nodes_column):
        format = OwnReader.name
    if format is not None:
        check_choice(format, "format", tuple(READERS))
    text = Text.load(path)
    reader = READERS[format] if format is not None else _recognize(text)
    for option, value, default in zip(ReaderOptions._fields, options, ReaderOptions(), strict=True):
        if value != default and option not in reader.options:
            formats = ", ".join(name for name, other_reader in READERS.items() if option in other_reader.options)
            found = f"the format {reader.name} ({text.path})"
            raise value_error(f"{option} must be left out except for the format {formats}", found, f"remove {option}=")
    trace = CapacityTrace(*reader.read_checked(text, options))
    if reader.may_be_hours:
        _warn_of_hours(trace, text.path)
    return trace


_FORMATS = "\n".join(f"    - `{name}`: `{reader.example}`" for name, reader in READERS.items())
read.__doc__ = read.__doc__ and read.__doc__.replace("    FORMATS", _FORMATS)


class UnitWarning(UserWarning):
    """The times of a capacity trace look like another unit than seconds."""


def _warn_of_hours(trace: CapacityTrace, path: str) -> None:
    """Warn if the times of a trace, which must be seconds, look like hours: fractions that are close together."""
    is_whole = bool((trace.seconds % 1 == 0).all())
    if not is_whole and trace.changes > 1 and trace.end < 5 * trace.changes:  # less than 5 s apart, on average
        warnings.warn(
            f"capacity trace ({path}) changes {trace.changes} times in {trace.end:g} seconds, as if its times were "
            f"hours; if they are, pass --scale-time 3600, or use read(...).scaled(3600)",
            UnitWarning,
            stacklevel=3,
        )


def _check_options(inverted: bool | int, max_gap: float | None) -> ReaderOptions:
    """Return the options of `read` after checks.

    Args:
        inverted: number of nodes of a cluster whose file counts those that are not available; True: 1, False: 0.
        max_gap: seconds for which a row holds at most; None: up to the next row.
    """
    remedy = "pass True for a cluster of one node, or the number of its nodes"
    size = int(inverted) if isinstance(inverted, bool) else check_int(inverted, "inverted", 1, MAX_INT, remedy)
    if max_gap is None:
        return ReaderOptions(size)
    seconds = check_number(max_gap, "max_gap", "pass seconds > 0")
    if seconds == 0:
        raise value_error("max_gap must be > 0", max_gap, "pass seconds > 0, or None for gaps of any length")
    return ReaderOptions(size, seconds)


def recognized_format(path: str | os.PathLike[str]) -> str | None:
    """Return the name of the format of a capacity trace, or None if it is not recognized, or cannot be read."""
    try:
        return _recognize(Text.load(path)).name
    except (OSError, ValueError):
        return None


def _recognize(text: Text) -> Reader:
    """Find the reader for the format of a file, by its beginning. Raise LogError if no reader recognizes it."""
    for reader in READERS.values():
        if reader.recognizes(text):
            return reader
    line, first = text.lines[0]
    if set(SIZE_COLUMNS) & set(split_cells(first)):
        requirement = "a capacity trace must have numbers of nodes, not the batch sizes of a batch trace"
        raise text.error(line, requirement, first, "pass a log, or show this file with vbs trace show")
    forms = " or ".join(f"{reader.example} ({name})" for name, reader in READERS.items())
    remedy = (
        "pass time_column= (--time-column) and nodes_column= (--nodes-column) for another table, "
        f"{in_documentation('Any other log')}"
    )
    raise text.error(line, f"a file must begin like {forms}", first, remedy)
