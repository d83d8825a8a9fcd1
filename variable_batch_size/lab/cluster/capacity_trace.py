"""The value of a capacity trace: an immutable step function of time."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal, TypeVar, final, overload

import numpy as np
import numpy.typing as npt

from variable_batch_size._extras import import_extra
from variable_batch_size._validation import (
    MAX_INT,
    FloatArray,
    IntArray,
    check_int,
    check_number,
    check_positive,
    type_error,
    value_error,
)
from variable_batch_size.lab.cluster.readers import csv_table
from variable_batch_size.lab.cluster.readers.base import from_first_row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Scalar = TypeVar("Scalar", bound=np.generic)


@final
class CapacityTrace:
    """The number of nodes, or of devices, that a cluster had at each time: a step function, immutable and hashable.

    >>> trace = CapacityTrace(seconds=[0, 60, 300], nodes=[4, 2, 8], end=600)
    >>> trace.at([59, 60]).tolist(), trace.mean, trace.changes
    ([4, 2], 5.2, 2)

    Args:
        seconds: times in ascending order, finite and >= 0, (rows,). Of several rows at one time the last one counts.
            Before the first row there are 0 nodes; Unix times (10^9 s or more) begin at it.
        nodes: number of nodes from each time on, integers in [0, 2**53], (rows,).
        end: end of the trace in seconds, > 0 and >= every time; by default the last time.
        prices: price of a node from each time on, per hour, finite and >= 0, (rows,); None if they are not known.

    Raises:
        TypeError: if `end` is not a number, or `nodes` are not integers.
        ValueError: if a value is not in its range, the arrays have other shapes, or times are milliseconds since 1970.
    """

    __slots__ = ("_end", "_nodes", "_prices", "_seconds")

    def __init__(
        self,
        seconds: npt.ArrayLike,
        nodes: npt.ArrayLike,
        end: float | None = None,
        prices: npt.ArrayLike | None = None,
    ) -> None:
        """Check the arguments, and keep a row only where the number of nodes or the price changes.

        Unix times become seconds since the first row. Of several rows at one time, the last one counts.
        """
        times = _check_numbers(seconds, "seconds")  # (rows,), as all below
        counts = _check_nodes(nodes)
        costs = None if prices is None else _check_numbers(prices, "prices")
        _check_rows(times, counts, costs)
        stop = float(times[-1]) if end is None else check_number(end, "end", "pass seconds")
        since_start, self._end = from_first_row(times, stop)
        if not (stop >= times[-1] and self._end > 0):
            requirement = f"end must be > {times[0] - since_start[0]:.15g} and >= {times[-1]}, the time of the last row"
            raise value_error(requirement, stop, "pass a later end=")
        times = since_start
        if times[0] > 0:  # before the first row there are no nodes
            times, counts = np.insert(times, 0, 0.0), np.insert(counts, 0, 0)
            costs = None if costs is None else np.insert(costs, 0, costs[0])
        is_last = np.diff(times, append=np.inf) > 0  # of the rows at one time
        times = times[is_last]
        counts = counts[is_last]
        costs = None if costs is None else costs[is_last]
        is_change = np.diff(counts, prepend=-1) != 0
        if costs is not None:
            is_change |= np.diff(costs, prepend=-1) != 0
        self._seconds, self._nodes = _freeze(times[is_change]), _freeze(counts[is_change])
        self._prices = None if costs is None else _freeze(costs[is_change])

    @property
    def seconds(self) -> FloatArray:
        """Times at which the number of nodes or the price changes, from 0 in ascending order, (rows,), read-only."""
        return self._seconds

    @property
    def nodes(self) -> IntArray:
        """Number of nodes from each of `seconds` on, (rows,), read-only."""
        return self._nodes

    @property
    def prices(self) -> FloatArray | None:
        """Price of a node from each of `seconds` on, per hour, (rows,), read-only; None if it is not known."""
        return self._prices

    @property
    def end(self) -> float:
        """End of the trace, in seconds."""
        return self._end

    @property
    def duration(self) -> float:
        """Seconds from the beginning to the end; the same as `end`, because a trace begins at 0."""
        return self._end

    @property
    def lengths(self) -> FloatArray:
        """Seconds for which each of `nodes` holds, (rows,). The last one is 0 if the trace ends with a change."""
        return np.diff(self._seconds, append=self._end)

    @property
    def mean(self) -> float:
        """Mean number of nodes over time."""
        return float(self._nodes @ self.lengths) / self._end

    @property
    def changes(self) -> int:
        """How often the number of nodes changes."""
        return int(np.count_nonzero(np.diff(self._nodes)))

    @overload
    def at(self, seconds: float) -> int: ...
    @overload
    def at(self, seconds: npt.ArrayLike) -> IntArray: ...
    def at(self, seconds: npt.ArrayLike) -> IntArray | int:
        """Return the number of nodes at each time, of the shape of `seconds`; an int for a number.

        At the time of a change it is the number after the change.

        Args:
            seconds: times in [0, end], of any shape.

        Raises:
            ValueError: if a time is not in [0, end].
        """
        times = np.asarray(seconds, np.float64)
        is_inside = (times >= 0) & (times <= self._end)
        if not is_inside.all():
            found = times if times.ndim == 0 else times[~is_inside][0]
            raise value_error(f"seconds must be in [0, {self._end}]", found, "pass times within the trace")
        rows = self._seconds.searchsorted(times, side="right") - 1  # the last change at or before each time
        nodes = self._nodes[rows]
        return int(nodes) if times.ndim == 0 else nodes

    def slice(self, start: float = 0.0, stop: float | None = None) -> CapacityTrace:
        """Cut out the part of the trace from `start` to `stop`, in seconds. Its times begin at 0.

        Args:
            start: beginning, in [0, end).
            stop: end, > start; by default, and at the latest, the end of this trace.

        Raises:
            TypeError: if `start` or `stop` is not a number.
            ValueError: if they are not in this order within the trace.
        """
        first = check_number(start, "start", "pass seconds")
        last = self._end if stop is None else min(self._end, check_number(stop, "stop", "pass seconds"))
        if not first < last:
            requirement = f"start must be < stop, within the {self._end} seconds of the trace"
            raise value_error(requirement, f"start={first}, stop={last}", "pass others")
        side: Literal["left", "right"] = "right" if last == self._end else "left"  # a change at the end stays there
        rows = slice(self._row(first), int(self._seconds.searchsorted(last, side)))
        seconds = np.maximum(self._seconds[rows] - first, 0)
        prices = None if self._prices is None else self._prices[rows]
        return CapacityTrace(seconds, self._nodes[rows], last - first, prices)

    def clip(self, min: int = 0, max: int | None = None) -> CapacityTrace:
        """Return the trace with its numbers of nodes limited to [min, max].

        Raises:
            TypeError, ValueError: if a limit is not an integer >= 0, or `max` < `min`.
        """
        low = check_int(min, "min", 0, MAX_INT)
        high = MAX_INT if max is None else check_int(max, "max", 0, MAX_INT)
        if high < low:
            raise value_error("the least number of nodes must be <= the largest", f"{low} and {high}", "exchange them")
        return CapacityTrace(self._seconds, self._nodes.clip(low, high), self._end, self._prices)

    def devices(self, per_node: int) -> CapacityTrace:
        """Return the trace of devices, such as GPUs, from a trace of nodes; prices become prices of a device.

        >>> CapacityTrace([0, 60], [15, 2], end=90).devices(per_node=8).nodes.tolist()
        [120, 16]

        Args:
            per_node: number of devices of each node.

        Raises:
            TypeError, ValueError: if `per_node` is not an integer >= 1.
        """
        number = check_int(per_node, "per_node", 1, MAX_INT // max(1, int(self._nodes.max())))
        prices = None if self._prices is None else self._prices / number
        return CapacityTrace(self._seconds, self._nodes * number, self._end, prices)

    def machines(self, devices: int) -> CapacityTrace:
        """Return the whole machines of a trace that counts devices; the inverse of `devices`.

        >>> CapacityTrace([0, 60], [120, 20], end=90).machines(8).nodes.tolist()
        [15, 2]

        Raises:
            TypeError, ValueError: if `devices`, the number of a machine, is not an integer >= 1.
        """
        number = check_int(devices, "devices", 1, MAX_INT)
        prices = None if self._prices is None else self._prices * number
        return CapacityTrace(self._seconds, self._nodes // number, self._end, prices)

    def resampled(self, every: float) -> CapacityTrace:
        """Return the trace as a log would have it that reads the number of nodes at 0, `every`, 2 `every`, ... seconds.

        Changes between two readings appear at the later one, or not at all.

        Raises:
            TypeError, ValueError: if `every` is not a number > 0.
        """
        interval = check_positive(every, "every", "pass seconds")
        # Only readings next to a change matter, as all others repeat the one before.
        first = np.ceil(self._seconds / interval)  # (rows,): number of the first reading after a change, up to rounding
        readings = np.unique(np.concatenate([first - 1, first, first + 1]))  # (readings,), as below
        times = readings[readings >= 0] * interval
        times = times[times <= self._end]
        rows = self._seconds.searchsorted(times, side="right") - 1  # of this trace, at each of the times
        prices = None if self._prices is None else self._prices[rows]
        return CapacityTrace(times, self._nodes[rows], self._end, prices)

    def scaled(self, factor: float) -> CapacityTrace:
        """Return the trace with all times multiplied by `factor`: 1 / 1440 makes a minute of a day.

        Prices per hour stay, so that the cost changes with the times.

        Raises:
            TypeError, ValueError: if `factor` is not a finite number > 0.
        """
        factor = check_positive(factor, "factor", "pass a positive number")
        return CapacityTrace(self._seconds * factor, self._nodes, self._end * factor, self._prices)

    @classmethod
    def from_csv(cls, path: str | os.PathLike[str]) -> CapacityTrace:
        """Read a CSV file with the columns `seconds`, `nodes` and perhaps `price`; it ends at the last row.

        Raises:
            OSError: if the file cannot be read.
            LogError: if it is not a trace; the message names file, line and value.
        """
        return cls(*csv_table.read_csv(path))

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write the trace atomically as a CSV file with the columns `seconds`, `nodes` and, if known, `price`.

        The last row is at the end of the trace, so that `from_csv` returns an equal trace.
        """
        csv_table.write_csv(path, np.append(self._seconds, self._end), self._nodes, self._prices)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the nodes over the hours, and return the axes.

        Args:
            ax: axes of matplotlib; by default, in a new figure.

        Raises:
            ModuleNotFoundError: if matplotlib is not installed.
        """
        if ax is None:
            ax = import_extra("matplotlib.pyplot", "plot").subplots()[1]
        axes: Axes = ax
        hours = np.append(self._seconds, self._end) / 3600  # (rows + 1,)
        filled = axes.stairs(self._nodes, hours, fill=True, alpha=0.3, baseline=0)
        axes.stairs(self._nodes, hours, color=filled.get_facecolor(), alpha=1.0, baseline=None)
        axes.set(xlabel="time (hours)", ylabel="nodes", xlim=(0, self._end / 3600))
        axes.set_ylim(bottom=0)
        return axes

    def _row(self, second: float) -> int:
        """Return the index of the row that holds at a time."""
        return int(self._seconds.searchsorted(second, side="right")) - 1

    def _key(self) -> tuple[object, ...]:
        """Return what determines whether two traces are equal, as hashable values."""
        prices = None if self._prices is None else self._prices.tobytes()
        return self._seconds.tobytes(), self._nodes.tobytes(), prices, self._end

    def __eq__(self, other: object) -> bool:
        return self._key() == other._key() if isinstance(other, CapacityTrace) else NotImplemented

    def __reduce__(self) -> tuple[type[CapacityTrace], tuple[object, ...]]:
        return CapacityTrace, (self._seconds, self._nodes, self._end, self._prices)

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        low, high = self._nodes.min(), self._nodes.max()
        return f"CapacityTrace({low} to {high} nodes, mean {self.mean:.4g}, {self.changes} changes, {self._end:g} s)"


def bin_means(edges: FloatArray, values: FloatArray, columns: int) -> tuple[FloatArray, FloatArray]:
    """Average a step function over columns of equal width, so that a plot shows also what is narrower than a pixel.

    >>> bin_means(np.array([0.0, 1.0, 4.0]), np.array([1.0, 0.0]), 2)
    (array([0., 2., 4.]), array([0.5, 0. ]))

    Args:
        edges: where each value begins, and the last one ends, (values + 1,).
        values: the values of the function, (values,).
        columns: number of columns.

    Returns:
        Where each column begins, and the last one ends, (columns + 1,); the means, (columns,).
    """
    integral = np.concatenate([[0.0], np.cumsum(values * np.diff(edges))])  # (values + 1,)
    borders = np.linspace(edges[0], edges[-1], columns + 1)  # (columns + 1,)
    return borders, np.diff(np.interp(borders, edges, integral)) / np.diff(borders)


def _check_numbers(values: npt.ArrayLike, name: str) -> FloatArray:
    """Return a copy of numbers in [0, 2**53] as float64, (rows,). Raise TypeError or ValueError for anything else."""
    try:
        array = np.ma.filled(np.asanyarray(values, np.float64), np.nan)  # masked times and prices are missing
    except (TypeError, ValueError):
        raise type_error(f"{name} must be numbers", values, "pass an array of them") from None
    if array.ndim != 1:
        raise value_error(f"{name} must have one dimension", f"the shape {array.shape}", "pass an array (rows,)")
    wrong = ~((array >= 0) & (array <= MAX_INT))
    if wrong.any():
        row = int(wrong.argmax())
        raise value_error(f"{name}[{row}] must be in [0, 2**53]", array[row], "correct it")
    return array + 0.0  # a copy, without -0.0, so that equal traces have equal bytes


def _check_nodes(values: npt.ArrayLike) -> IntArray:
    """Return a copy of integers in [0, 2**53] as int64. Raise TypeError or ValueError for anything else."""
    array = np.asanyarray(values)
    # Values of other types are checked one by one, so that the error names the first row that is not an integer.
    if array.dtype.kind not in "iu" or np.ma.is_masked(array):
        array = np.array([check_int(value, f"nodes[{row}]", 0, MAX_INT) for row, value in enumerate(array.flat)])
        array = array.astype(np.int64).reshape(np.shape(values))
    wrong = (array < 0) | (array > MAX_INT)
    if array.ndim == 1 and wrong.any():
        row = int(wrong.argmax())
        raise value_error(f"nodes[{row}] must be an integer in [0, 2**53]", array[row], "correct it")
    return array.astype(np.int64)


def _check_rows(times: FloatArray, counts: IntArray, costs: FloatArray | None) -> None:
    """Check that a capacity trace has at least one row, and that times ascend.

    Args:
        times: seconds of each row, (rows,).
        counts: number of nodes from each time on; its shape has to be that of `times`.
        costs: price of a node from each time on, of the same shape; None: not known.

    Raises:
        ValueError: if not.
    """
    for name, rows in (("nodes", counts), ("prices", times if costs is None else costs)):
        if rows.shape != times.shape:
            raise value_error(f"{name} must have the shape {times.shape} of seconds", rows.shape, "pass a row each")
    if len(times) == 0:
        raise value_error("a capacity trace must have at least one row", "no rows", "pass at least one")
    if (np.diff(times) < 0).any():
        row = int((np.diff(times) < 0).argmax()) + 1
        requirement = f"seconds must be in ascending order, and seconds[{row}] >= {times[row - 1]}"
        raise value_error(requirement, times[row], "sort the rows by time")


def _freeze(array: npt.NDArray[Scalar]) -> npt.NDArray[Scalar]:
    """Make an array read-only, and return it."""
    array.flags.writeable = False
    return array
