"""What the readers share: the text of a file, its errors, JSON, nodes by name, and the interface of a reader."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import ClassVar, NamedTuple, final

import numpy as np

from variable_batch_size._validation import MAX_INT, FloatArray, type_error, value_error

UNIX, MILLISECONDS = 1e9, 1e12  # from there on times are taken for seconds, or milliseconds, since 1970


class LogError(ValueError):
    """A file is damaged, or has no known format; the message names file, line and value."""


@final
class Rows(NamedTuple):
    """The rows of a capacity trace, as a reader found them in a file: the arguments of a `CapacityTrace`."""

    seconds: list[float]  # (rows,), as below
    nodes: list[int]
    end: float | None = None
    prices: list[float] | None = None


@final
class ReaderOptions(NamedTuple):
    """The keyword arguments of `cluster.read` that only some formats have; the defaults change nothing."""

    inverted: int = 0  # number of nodes of the cluster
    max_gap: float | None = None  # seconds
    time_column: str = ""  # names in the header
    nodes_column: str = ""


@final
@dataclass(frozen=True)
class Text:
    """The text of a file.

    Attributes:
        path: path of the file.
        content: all of it, with line feeds at the ends of lines.
        lines: its lines that are not blank, stripped, each with its number from 1.
    """

    path: str
    content: str
    lines: list[tuple[int, str]]

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Text:
        """Read a file in UTF-8, with or without a byte order mark.

        Raises:
            TypeError: if `path` is not a path.
            OSError: if the file cannot be read.
            LogError: if it is empty or not UTF-8.
        """
        if not isinstance(path, (str, os.PathLike)):
            raise type_error("the path of a capacity trace must be a string or a path", path, "pass the path of a file")
        source = str(os.fspath(path))
        try:
            data = Path(source).read_bytes().removeprefix(b"\xef\xbb\xbf")
        except (OSError, ValueError) as error:  # ValueError: a path that cannot be one
            kind = type(error) if isinstance(error, OSError) else ValueError
            found = getattr(error, "strerror", None) or error
            requirement = f"capacity trace ({source}) must be a file that can be read"
            raise kind(f'{requirement}, got "{found}"; pass another path') from None
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            line = 1 + data.count(b"\n", 0, error.start)
            raise LogError(
                f"capacity trace ({source}:{line}) must be UTF-8 text, got byte {data[error.start]:#04x}; save it as "
                f"text in UTF-8"
            ) from None
        content = text.replace("\r\n", "\n").replace("\r", "\n")
        # Not splitlines(), for which half a dozen other characters end a line, too: editors number lines by this one.
        numbered = ((number, line.strip()) for number, line in enumerate(content.split("\n"), 1))
        lines = [(number, line) for number, line in numbered if line]
        if not lines:
            raise LogError(f"capacity trace ({source}) must have at least one row, got an empty file; pass another")
        return cls(source, content, lines)

    def error(self, line: int, requirement: str, found: object, remedy: str) -> LogError:
        """Return an error about a damaged file, which names the file and the line.

        Args:
            line: number of the line.
            requirement: what the file must be there.
            found: what it is there, which is cut to 60 characters.
            remedy: what the user can do.
        """
        return LogError(f"capacity trace ({self.path}:{line}): {requirement}, got {found!r:.60}; {remedy}")

    def cells(self, line: int, row: str, example: str, separator: str = ",") -> list[str]:
        """Split a row of the file into cells; raise LogError if it does not have as many as an example of a row.

        Args:
            line: number of its line, for the error.
            row: the text of the row.
            example: a row with the right number of cells.
            separator: what separates cells.
        """
        cells = split_cells(row, separator)
        if len(cells) != len(split_cells(example, separator)):
            raise self.error(line, f"a row must have the cells of {example}", row, "correct the row")
        return cells

    def number(self, line: int, name: str, value: object, whole: bool = False, found: object = None) -> float:
        """Return a number of the file as a float. Raise LogError if it is not one, or not finite and >= 0.

        Args:
            line: number of its line.
            name: what the error message calls it.
            value: the number, or what stands in its place.
            whole: whether it has to be an integer, of at most 2**53.
            found: what the error message shows; by default, `value`.
        """
        maximum = MAX_INT if whole else sys.float_info.max
        is_real = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not (is_real and 0 <= value <= maximum and not (whole and value % 1)):  # type: ignore[operator]
            kind = "an integer in [0, 2**53]" if whole else "a finite number >= 0"
            raise self.error(line, f"{name} must be {kind}", value if found is None else found, "correct it")
        return float(value)  # type: ignore[arg-type]

    def cell(self, line: int, name: str, cell: str, whole: bool = False) -> float:
        """Return the number in a cell of text; raise LogError if it is not one, or not finite and >= 0.

        Args:
            line: number of its line, for the error.
            name: what the error message calls it.
            cell: the text of the cell.
            whole: whether it has to be an integer, of at most 2**53.
        """
        return self.number(line, name, as_number(cell), whole, cell)

    def moment(self, line: int, requirement: str, cell: str, remedy: str) -> float:
        """Return the Unix time of a cell with a time of ISO 8601, in seconds; raise LogError if it has none.

        Args:
            line: number of its line, for the error.
            requirement: what the cell must be, for the error.
            cell: the text of the cell.
            remedy: what the user can do, for the error.
        """
        moment = unix_seconds(cell)
        if moment is None:
            raise self.error(line, requirement, cell, remedy)
        return moment

    def check_order(self, line: int, name: str, times: list[float]) -> None:
        """Raise LogError if the last one of `times`, which was read from this line, is less than the one before."""
        if times[-1] < max(times[-2:]):
            requirement = f"{name} must be >= {times[-2]:.15g}, the time of the row before"
            raise self.error(line, requirement, times[-1], "sort the rows by time")


class Reader(ABC):
    """A format of capacity traces.

    Attributes:
        name: name of the format, for `cluster.read(path, format=name)`.
        example: how a file begins, for the message about one that no reader recognizes.
        options: names of the keyword arguments of `cluster.read` that the format has, beside `format`.
        begins_at_first_row: whether its times are always those of a clock.
        may_be_hours: whether its times have no unit of their own: seconds, unless somebody wrote hours.
    """

    name: ClassVar[str]
    example: ClassVar[str]
    options: ClassVar[frozenset[str]] = frozenset()
    begins_at_first_row: ClassVar[bool] = False
    may_be_hours: ClassVar[bool] = False

    @abstractmethod
    def recognizes(self, text: Text) -> bool:
        """Return whether a file has this format, judged by how it begins; the rest of it may be damaged."""

    @abstractmethod
    def read(self, text: Text, options: ReaderOptions) -> Rows:
        """Return the rows of a file in ascending order of time, in seconds since the beginning or since 1970.

        Raises:
            LogError: if the file is damaged.
        """

    @final
    def read_checked(self, text: Text, options: ReaderOptions) -> Rows:
        """Return the rows of a file with times since its first row, if they are dates or Unix times, and an end.

        Raises:
            LogError: if the file is damaged, or the trace has no duration.
        """
        rows = self.read(text, options)
        line = text.lines[-1][0]
        end = rows.seconds[-1] if rows.end is None else rows.end
        try:
            seconds, end = from_first_row(np.array(rows.seconds), end, clock=self.begins_at_first_row)
        except ValueError as error:
            raise LogError(f"capacity trace ({text.path}:{line}): {error}") from None
        if not 0 < end < math.inf:
            requirement = "a trace must end after a finite time > 0"
            raise text.error(line, requirement, end, "correct the times, or add a row at its end")
        return rows._replace(seconds=seconds.tolist(), end=end)


def from_first_row(seconds: FloatArray, end: float, clock: bool = False) -> tuple[FloatArray, float]:
    """Return times and end of a trace in seconds since its first row, if they are Unix times; others unchanged.

    Args:
        seconds: times of the rows, (rows,), at least one.
        end: end of the trace.
        clock: whether these are Unix times, however small.

    Raises:
        ValueError: if they are milliseconds, or only some are Unix times.
    """
    first_time, last_time = seconds[0], seconds[-1]
    if MILLISECONDS <= last_time < math.inf:
        found = f"{last_time:.15g}, which looks like Unix milliseconds"
        raise value_error("times must be seconds", found, "divide them by 1000")
    if first_time < UNIX <= last_time < math.inf:
        requirement = "times must all be seconds since the beginning, or all Unix times"
        raise value_error(requirement, f"{first_time:g} and {last_time:.15g}", "correct the rows")
    if (clock or first_time >= UNIX) and end < math.inf:  # to the microsecond, as float64 has the seconds since 1970
        return (seconds - first_time).round(6), round(end - float(first_time), 6)
    return seconds, end


def split_cells(row: str, separator: str = ",") -> list[str]:
    """Split a row of a CSV file into cells without spaces and quotes. Quotes do not protect a separator."""
    return [re.sub('"([^"]*)"', r"\1", cell.strip()) for cell in row.split(separator)]


def as_number(cell: str) -> float:
    """Return the number in a cell; NaN if it is not one."""
    if not cell.isascii() or "_" in cell:  # float("1_0") is 10
        return math.nan
    try:
        return int(cell) if cell.isdigit() and len(cell) < 20 else float(cell)  # an int above 2**53 is not rounded
    except ValueError:
        return math.nan


_MOMENT = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:[0-9]{2}(:[0-9]{2}([.][0-9]+)?)?(Z|[+-][0-9]{2}:[0-9]{2})?"
)


def unix_seconds(cell: str) -> float | None:
    """Return the Unix time of a time of ISO 8601, in UTC without a zone; None if it is none.

    >>> unix_seconds("1970-01-01T01:00:00Z"), unix_seconds("1970-02-30T01:00"), unix_seconds("08:00")
    (3600.0, None, None)
    """
    try:
        if _MOMENT.fullmatch(cell):  # fromisoformat reads more than these, and Z only since Python 3.11
            moment = datetime.fromisoformat(cell.replace("Z", "+00:00"))
            return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()
    except ValueError:  # such as for February 30
        pass
    return None


def is_number(cell: str) -> bool:
    """Return whether a cell has a number, which may be negative, infinite or NaN."""
    return not math.isnan(as_number(cell)) or cell.lower() == "nan"


@final
class Membership:
    """The names of the nodes of a cluster; its `len` is their number."""

    def __init__(self, text: Text) -> None:
        self._text = text
        self._names: set[str] = set()

    def __len__(self) -> int:
        return len(self._names)

    def add(self, line: int, names: Iterable[str]) -> None:
        """Add nodes; raise LogError if the cluster has one of them, or one is named twice."""
        for name in names:
            if name in self._names:
                remedy = "remove it before, or correct its name"
                raise self._text.error(line, "a node that is added must not be in the cluster yet", name, remedy)
            self._names.add(name)

    def remove(self, line: int, names: Iterable[str]) -> None:
        """Remove nodes; raise LogError if the cluster does not have one of them, or one is named twice."""
        for name in names:
            self.check(line, "removed", [name])
            self._names.remove(name)

    def check(self, line: int, event: str, names: Iterable[str]) -> None:
        """Raise LogError if the cluster does not have one of the nodes."""
        for name in names:
            if name not in self._names:
                remedy = "add it before, or correct its name"
                raise self._text.error(line, f"a node that is {event} must be in the cluster", name, remedy)


_BLANKS = re.compile(r"\s*")
# int() raises for more than 4300 digits; as a float the number is out of range, with the line in the message.
_DECODER = json.JSONDecoder(parse_int=lambda digits: int(digits) if len(digits) < 20 else float(digits))


def json_values(text: Text, content: str) -> Iterator[tuple[int, object]]:
    """Yield each JSON value of a text, on one line or several, with the number of its first line.

    NaN and Infinity are read, as in Python; `Text.number` then raises for them.

    Args:
        text: the file, for the error.
        content: its text, in which some lines may have been emptied.

    Raises:
        LogError: if it is not JSON.
    """
    line, start = 1, 0
    while (begin := _BLANKS.match(content, start).end()) < len(content):  # type: ignore[union-attr]
        line += content.count("\n", start, begin)
        try:
            value, start = _DECODER.raw_decode(content, begin)
        except json.JSONDecodeError as error:
            found = content[error.pos : error.pos + 40].split("\n")[0] or "the end"
            requirement = f"the text must be JSON ({error.msg.lower()}, column {error.colno})"
            raise text.error(error.lineno, requirement, found, "download or write it again") from None
        yield line, value
        line += content.count("\n", begin, start)
