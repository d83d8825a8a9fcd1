"""Traces: the global batch size of every update of a training, read, checked, queried and written."""

from __future__ import annotations

import hashlib
import os
import re
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, final

import numpy as np
import numpy.typing as npt

from variable_batch_size._validation import MAX_INT, IntArray, as_int, check_int, type_error, value_error
from variable_batch_size.trace.csv_file import EXAMPLE, read_sizes

OnEnd = Literal["error", "hold", "cycle"]

_ENTRY = re.compile(r"([0-9]{1,20})([kKmM]?):([0-9]{1,20})([kKmM]?)")


class TraceEndError(IndexError, ValueError):
    """A step or sample beyond the last one of a trace with `on_end="error"` was asked for."""


@final
@dataclass(frozen=True)
class BatchTrace:
    """The global batch size, in samples, of every step (update, counted from 0) of a training: a hashable value.

    Made by `from_csv`, `from_sizes`, `constant`, `parse` or `of`. `steps` is the number of steps; None is a trace
    without end, whose last size goes on for ever. `on_end` is what follows step `steps - 1`: "hold" (its size goes on
    for ever), "cycle" (the trace starts again) or "error" (TraceEndError). `fingerprint`, a sha256 in hex, is the same
    for equal traces, however they were written and wherever.
    """

    # Runs of equal sizes: the first step of each, its size, its number of steps and the samples before it.
    _first: IntArray = field(repr=False, compare=False)
    _size: IntArray = field(repr=False, compare=False)
    _length: IntArray = field(init=False, repr=False, compare=False)
    _before: IntArray = field(init=False, repr=False, compare=False)
    steps: int | None = field(compare=False)
    on_end: OnEnd = field(default="error", compare=False)
    fingerprint: str = field(init=False, repr=False)
    _source: str = field(default="", repr=False, compare=False)

    def __post_init__(self) -> None:
        """Bring the runs into their one form, in which neighbours differ in size, and count and hash them."""
        if self.on_end not in ("error", "hold", "cycle"):
            raise value_error('on_end must be "error", "hold" or "cycle"', repr(self.on_end), "choose one of these")
        differs = np.diff(self._size, prepend=0) != 0
        first, size = self._first[differs], self._size[differs]
        length = np.diff(first, append=self.steps or int(first[-1]) + 1)
        end = np.cumsum(size * length)
        # The first sum that is too large is below 2**64, and so turns up as a negative int64.
        over = (length > (2**63 - 1) // size) | (end < 0)
        if over.any():
            found = f"more in the run from step {first[over.argmax()]} on"
            raise value_error(f"{self._name}: all samples together must be <= 2**63 - 1", found, "shorten the trace")
        meaning = f"BatchTrace 1 {self.steps} {self.on_end if self.steps else 'hold'} ".encode()
        digest = hashlib.sha256(meaning + np.stack([first, size]).astype("<i8").tobytes()).hexdigest()
        before = np.concatenate([[0], end[:-1]])
        derived = {"_first": first, "_size": size, "_length": length, "_before": before, "fingerprint": digest}
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    @classmethod
    def from_csv(cls, path: str | os.PathLike[str], *, renumber: bool = False, on_end: OnEnd = "error") -> BatchTrace:
        """Read a CSV file with the columns `step` (0, 1, 2, ...) and `batchsize` (samples), among others or alone.

        `renumber=True` ignores what stands in the step column. Raises FileNotFoundError or IsADirectoryError where
        there is no file, and ValueError, with file, line and value, where it is not such a table.
        """
        sizes = read_sizes(os.fspath(path), renumber)
        return cls(np.arange(len(sizes)), sizes, len(sizes), on_end, os.fspath(path))

    @classmethod
    def from_sizes(cls, sizes: Iterable[int] | npt.NDArray[np.integer], *, on_end: OnEnd = "error") -> BatchTrace:
        """Take the sizes (samples) of steps 0, 1, 2, ... as they come; ValueError names the first that is wrong."""
        array = sizes if isinstance(sizes, np.ndarray) and sizes.dtype.kind in "iu" and sizes.ndim == 1 else None
        if array is None or not ((array >= 1) & (array <= MAX_INT)).all():
            named = ((size, f"trace step {i} (sizes[{i}]): batchsize") for i, size in enumerate(sizes))
            array = np.array([check_int(size, name, 1, MAX_INT) for size, name in named])
        if len(array) == 0:
            raise value_error("a trace must have at least one step", "no sizes", "give at least one")
        return cls(np.arange(len(array)), array.astype(np.int64), len(array), on_end)

    @classmethod
    def constant(cls, size: int, steps: int | None = None, *, on_end: OnEnd = "error") -> BatchTrace:
        """Give `steps` steps, or without end, the same `size` (samples); ValueError unless both are >= 1."""
        end = None if steps is None else check_int(steps, "steps", 1, MAX_INT)
        return cls(np.array([0]), np.array([check_int(size, "batchsize", 1, MAX_INT)]), end, on_end)

    @classmethod
    def parse(cls, schedule: str, steps: int | None = None, *, on_end: OnEnd = "error") -> BatchTrace:
        """Read a schedule like "0:128 2000:256 10K:1024" (first step:size in samples; K = 1000, M = 10^6).

        Spaces or commas separate entries. It has `steps` steps, the last entry among them, or no end. ValueError for
        an entry of another form, and for starts that are not 0 first and then increasing.
        """
        first, size = zip(*_entries(schedule), strict=True)
        end = None if steps is None else check_int(steps, "steps", 1, MAX_INT)
        if end is not None and end <= first[-1]:
            required = f"steps must be > {first[-1]}, the start of the last entry of {schedule!r:.60}"
            raise value_error(required, end, "raise it, or drop the entries that are not reached")
        return cls(np.array(first), np.array(size), end, on_end, f"{schedule!r:.60}")

    @classmethod
    def of(cls, source: object, *, on_end: OnEnd | None = None) -> BatchTrace:
        """Make a trace of a BatchTrace, a path, a schedule, an int (constant), or a sequence or array of ints.

        `on_end=None` leaves a BatchTrace as it is and means "error" for the rest. TypeError for any other type.
        """
        if isinstance(source, BatchTrace):
            return source if on_end is None else source.with_on_end(on_end)
        end: OnEnd = "error" if on_end is None else on_end
        if isinstance(source, str) and re.match(r"\s*[0-9]+[kKmM]?\s*:", source):
            return cls.parse(source, on_end=end)
        if isinstance(source, (str, os.PathLike)):
            return cls.from_csv(source, on_end=end)
        number = as_int(source)
        if number is not None:
            return cls.constant(number, on_end=end)
        if isinstance(source, (Sequence, np.ndarray)) and not isinstance(source, (bytes, bytearray, memoryview)):
            return cls.from_sizes(source, on_end=end)
        required = "trace must be a path, a BatchTrace, a sequence of ints, an int or a schedule string"
        raise type_error(required, source, "pass one of these")

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write the file that `from_csv` reads, whole or not at all; ValueError for a trace without end."""
        import pandas as pd  # takes longer than the rest of the package

        steps, target = np.arange(self._end("to_csv")), Path(path)
        part = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
        try:
            with part.open("x", encoding="utf-8", newline="") as file:
                table = pd.DataFrame({"step": steps, "batchsize": self.batch_sizes(steps)})
                table.to_csv(file, index=False, lineterminator="\n")
            os.replace(part, target)  # noqa: PTH105 - the same, but says that it overwrites
        finally:
            part.unlink(missing_ok=True)

    def batch_size(self, step: int) -> int:
        """Return the global batch size (samples) of `step`; TraceEndError beyond the end, ValueError below 0."""
        _, inside = self._fold(check_int(step, "step"), self.steps, "step")
        return int(self._size[_run(self._first, inside)])

    def batch_sizes(self, steps: npt.ArrayLike) -> IntArray:
        """Return `batch_size` of every element of an array of ints, in its shape, as int64."""
        # As objects, since numpy makes floats of a list that mixes ints below and above 2**63.
        array = steps if isinstance(steps, np.ndarray) else np.asarray(steps, object)
        if array.dtype.kind not in "iu" or array.dtype == np.uint64 or array.size == 0:
            return np.array([self.batch_size(step) for step in array.flat], np.int64).reshape(array.shape)
        for extreme in (array.min(), array.max()):
            self.batch_size(extreme)  # refuses what is out of range
        inside = array.astype(np.int64) % self.steps if self.on_end == "cycle" and self.steps else array
        return self._size[self._first.searchsorted(inside, side="right") - 1]

    def offset(self, step: int) -> int:
        """Return the number of samples in all steps before `step`, which may be the one after the last."""
        step = check_int(step, "step")
        laps, inside = (0, step) if step == self.steps else self._fold(step, self.steps, "step")
        run = _run(self._first, inside)
        done = int(self._before[run]) + (inside - int(self._first[run])) * int(self._size[run])
        return laps * self.total_samples + done if laps else done

    def step_at(self, sample: int) -> int:
        """Return the step that holds sample number `sample`: offset(step) <= sample < offset(step + 1)."""
        steps, total = (self.steps, self.total_samples) if self.steps else (0, None)
        laps, inside = self._fold(check_int(sample, "sample"), total, "sample")
        run = _run(self._before, inside)
        return laps * steps + int(self._first[run]) + (inside - int(self._before[run])) // int(self._size[run])

    def __len__(self) -> int:
        """Return the number of steps; TypeError for a trace without end."""
        return self._end("len", TypeError)

    def __bool__(self) -> bool:
        """Return True, also for a trace without end, which has no len to ask for."""
        return True

    @property
    def total_samples(self) -> int:
        """The samples of all steps, once through the trace; ValueError for a trace without end."""
        self._end("total_samples")
        return int(self._before[-1]) + int(self._length[-1]) * int(self._size[-1])

    @property
    def max_batch_size(self) -> int:
        """The largest global batch size (samples) of any step."""
        return int(self._size.max())

    def round_to(self, multiple: int) -> BatchTrace:
        """Return a trace of multiples of `multiple` (samples) that goes through the samples as fast as this one.

        Its offset(t) is this one's, rounded to the nearest multiple, for every t up to the number of steps; held or
        started again, it goes on by its own sizes. ValueError for a size below `multiple`, and without an end for a
        last size that is no multiple, because no size that goes on for ever keeps up with it.
        """
        multiple = check_int(multiple, "multiple", 1, MAX_INT)
        small, exact = self._size < multiple, self._size % multiple == 0
        if small.any():
            run = small.argmax()
            where = f"{self._name} step {self._first[run]}: batchsize must be >= {multiple} to be rounded to it"
            raise value_error(where, self._size[run], "raise it, or round to a smaller multiple")
        if self.steps is None and not exact[-1]:
            where = f"{self._name}: the last size of a trace without end must be a multiple of {multiple}"
            raise value_error(where, self._size[-1], "change it, or give the number of steps by steps=")
        # A run of multiples stays one piece; in the others every step becomes a piece of its own.
        pieces, span = np.where(exact, 1, self._length), np.where(exact, self._length, 1)
        span, size = np.repeat(span, pieces), np.repeat(self._size, pieces)
        end = np.cumsum(size * span)
        rounded = (end // multiple + (end % multiple * 2 >= multiple)) * multiple
        return replace(self, _first=np.cumsum(span) - span, _size=np.diff(rounded, prepend=0) // span)

    def with_on_end(self, on_end: OnEnd) -> BatchTrace:
        """Return the same sizes with another `on_end`; ValueError if there is no such."""
        return replace(self, on_end=on_end)

    @property
    def _name(self) -> str:
        return f"trace {self._source}" if self._source else "trace"

    def _end(self, asker: str, error: type[Exception] = ValueError) -> int:
        if self.steps is None:
            raise error(f"{asker} needs a trace that has an end, got {self!r}; give the number of its steps by steps=")
        return self.steps

    def _fold(self, position: int, end: int | None, unit: str) -> tuple[int, int]:
        """How often the trace has started again before `position`, and where inside it that is."""
        if end is None or position < end or self.on_end == "hold":
            return 0, position
        if self.on_end == "cycle":
            return divmod(position, end)
        required = f"{unit} must be < {end}, as {self._name} has {self.steps} steps ({self.total_samples} samples)"
        raise TraceEndError(f'{required}, got {position}; use a longer trace, or on_end="hold" or on_end="cycle"')


def _run(starts: IntArray, position: int) -> int:
    """Index of the last run that starts at or before `position`, which may be beyond int64."""
    return int(starts.searchsorted(min(position, int(starts[-1])), side="right")) - 1


def _entries(schedule: str) -> Iterator[tuple[int, int]]:
    """First step and size of every entry of a schedule."""
    words, least = schedule.replace(",", " ").split(), 0
    if not words:
        raise value_error("a schedule must have an entry", repr(schedule), f"write it like {EXAMPLE}")
    for place, word in enumerate(words, 1):
        where, match = f"schedule entry {place} ({word!r:.60})", _ENTRY.fullmatch(word)
        if match is None:
            required = f"schedule entry {place} must be first step:size in whole numbers, K = 1000 and M = 10^6 allowed"
            raise value_error(required, f"{word!r:.60}", f"write the schedule like {EXAMPLE}")
        start, size = (int(match[i]) * 1000 ** " km".index(match[i + 1].lower() or " ") for i in (1, 3))
        if place == 1 and start != 0:
            raise value_error(f"{where} must start at step 0", start, "begin the schedule with 0:size")
        least = 1 + check_int(start, f"{where}: first step", least, MAX_INT, "order the entries by increasing step")
        yield start, check_int(size, f"{where}: batchsize", 1, MAX_INT, "fix the entry, or drop it")
