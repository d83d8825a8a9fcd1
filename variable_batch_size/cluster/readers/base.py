"""What a reader of capacity traces gets and returns."""

from __future__ import annotations

import math
import os
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple, final

from variable_batch_size._validation import MAX_INT, type_error


@final
class Rows(NamedTuple):
    """The arguments of a `CapacityTrace`, as a file has them."""

    seconds: list[float]  # (rows,), as below
    nodes: list[int]
    end: float | None = None
    prices: list[float] | None = None


@final
class Options(NamedTuple):
    """The keyword arguments of `cluster.read` that only some formats have; the defaults change nothing."""

    inverted: int = 0  # number of nodes of the cluster
    max_gap: float | None = None  # seconds


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
            ValueError: if it is empty or not UTF-8.
        """
        if not isinstance(path, (str, os.PathLike)):
            raise type_error("the path of a capacity trace must be a string or a path", path, "pass the path of a file")
        source = str(os.fspath(path))
        try:
            data = Path(source).read_bytes().removeprefix(b"\xef\xbb\xbf")
        except (OSError, ValueError) as error:  # ValueError: a path that cannot be one
            kind = type(error) if isinstance(error, OSError) else ValueError
            found = getattr(error, "strerror", None) or error
            raise kind(
                f'capacity trace ({source}) must be a file that can be read, got "{found}"; pass another path'
            ) from None
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            line = 1 + data.count(b"\n", 0, error.start)
            raise ValueError(
                f"capacity trace ({source}:{line}) must be UTF-8 text, got byte {data[error.start]:#04x}; save it as "
                f"text in UTF-8"
            ) from None
        content = text.replace("\r\n", "\n").replace("\r", "\n")
        # Not splitlines(), for which half a dozen other characters end a line, too: editors number lines by this one.
        numbered = ((number, line.strip()) for number, line in enumerate(content.split("\n"), 1))
        lines = [(number, line) for number, line in numbered if line]
        if not lines:
            raise ValueError(f"capacity trace ({source}) must have at least one row, got an empty file; pass another")
        return cls(source, content, lines)

    def error(self, line: int, requirement: str, found: object, remedy: str) -> ValueError:
        """Return the error for a line; `found` is shown up to 60 characters."""
        return ValueError(f"capacity trace ({self.path}:{line}): {requirement}, got {found!r:.60}; {remedy}")

    def cells(self, line: int, row: str, example: str, separator: str = ",") -> list[str]:
        """Return the cells of a row; raise if there are not as many as in the example of a row."""
        cells = split(row, separator)
        if len(cells) != len(split(example, separator)):
            raise self.error(line, f"a row must have the cells of {example}", row, "correct the row")
        return cells

    def number(self, line: int, name: str, value: object, whole: bool = False, found: object = None) -> float:
        """Return a number of the file as a float; raise if it is not one, or not finite and >= 0.

        Args:
            line: number of its line.
            name: what the error message calls it.
            value: the number, or what stands in its place.
            whole: whether it has to be an integer, of at most 2**53.
            found: what the error message shows; by default, `value`.
        """
        maximum = MAX_INT if whole else sys.float_info.max
        real = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not (real and 0 <= value <= maximum and not (whole and value % 1)):  # type: ignore[operator]
            kind = "an integer in [0, 2**53]" if whole else "a finite number >= 0"
            raise self.error(line, f"{name} must be {kind}", value if found is None else found, "correct it")
        return float(value)  # type: ignore[arg-type]

    def cell(self, line: int, name: str, cell: str, whole: bool = False) -> float:
        """Return the number in a cell; raise as `number` does."""
        return self.number(line, name, as_number(cell), whole, cell)

    def check_order(self, line: int, name: str, times: list[float]) -> None:
        """Raise if the last one of the times is before the one of the row before."""
        if times[-1] < max(times[-2:]):
            requirement = f"{name} must be >= {times[-2]:.15g}, the time of the row before"
            raise self.error(line, requirement, times[-1], "sort the rows by time")


class Reader(ABC):
    """A format of capacity traces.

    Attributes:
        name: name of the format, for `cluster.read(path, format=name)`.
        example: how a file begins, for the message about one that no reader recognizes.
        options: names of the keyword arguments of `cluster.read` that the format has, beside `format`.
    """

    name: ClassVar[str]
    example: ClassVar[str]
    options: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def recognizes(self, text: Text) -> bool:
        """Return whether a file has this format, judged by how it begins; the rest of it may be damaged."""

    @abstractmethod
    def read(self, text: Text, options: Options) -> Rows:
        """Return the rows of a file in ascending order of time; times are relative to the beginning of the trace.

        Raises:
            ValueError: if the file is damaged; the message names file, line and value.
        """

    @final
    def checked(self, text: Text, options: Options) -> Rows:
        """Return the rows of a file; raise as `read` does, and if the trace does not last for a time."""
        rows = self.read(text, options)
        end = rows.seconds[-1] if rows.end is None else rows.end
        if not 0 < end < math.inf:
            requirement = "a trace must end after a finite time > 0"
            raise text.error(text.lines[-1][0], requirement, end, "correct the times, or add a row at its end")
        return rows


def split(row: str, separator: str = ",") -> list[str]:
    """Return the cells of a row of a CSV file without quotes."""
    return [cell.strip() for cell in row.split(separator)]


def as_number(cell: str) -> float:
    """Return the number in a cell; NaN if it is not one."""
    if not cell.isascii() or "_" in cell:  # float("1_0") is 10
        return math.nan
    try:
        return (
            int(cell) if cell.isdigit() and len(cell) < 20 else float(cell)
        )  # an int above 2**53 is not rounded to it
    except ValueError:
        return math.nan


def is_number(cell: str) -> bool:
    """Return whether a cell has a number, which may be negative, infinite or NaN."""
    return not math.isnan(as_number(cell)) or cell.lower() == "nan"
