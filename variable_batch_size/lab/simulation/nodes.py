"""The nodes of a capacity trace over time, with and without those that are about to leave."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from typing import final

from variable_batch_size.lab.cluster.capacity_trace import CapacityTrace

ROUNDING = 1e-12  # relative: sums of times or of progress have smaller rounding errors


def snap(time: float, events: Sequence[float]) -> float:
    """Return the event that is equal to `time` up to rounding; `time` itself if there is none.

    `events` are times in ascending order.

    >>> snap(0.1 + 0.2, [0.1, 0.3]), snap(0.2, [0.1, 0.3])
    (0.3, 0.2)
    """
    row = bisect_left(events, time)
    return next((event for event in events[max(0, row - 1) : row + 1] if abs(time - event) <= ROUNDING * time), time)


def reached(now: float, time: float) -> bool:
    """Return whether the time `now` is `time` or later, or earlier by no more than a rounding error."""
    return now >= time * (1 - ROUNDING)


@final
class Nodes:
    """The number of nodes as a step function of time.

    Args:
        times: times of the changes in ascending order; the first one is 0.
        nodes: number of nodes from each time on; equal neighbors are merged.
    """

    def __init__(self, times: list[float], nodes: list[int]) -> None:
        """Merge equal neighbors, and find for each row the next one with fewer nodes, for `time_below`."""
        rows = [row for row, count in enumerate(nodes) if row == 0 or count != nodes[row - 1]]
        self._times = [times[row] for row in rows] + [math.inf]
        self._nodes = [nodes[row] for row in rows]
        # For each row the next row with fewer nodes. `stack` has the rows for which none was found yet: they have
        # ascending numbers of nodes.
        self._lower = [len(rows)] * len(rows)
        stack: list[int] = []
        for row, count in enumerate(self._nodes):
            while stack and self._nodes[stack[-1]] > count:
                self._lower[stack.pop()] = row
            stack.append(row)

    def at(self, time: float) -> int:
        """Return the number of nodes at a time."""
        return self._nodes[self._row(time)]

    def time_below(self, nodes: int, time: float) -> float:
        """Return the first time, from `time` on, with fewer than `nodes` nodes; infinity if there is none.

        It jumps from each row to the next row with fewer nodes, so that it need not look at all rows.
        """
        row = self._row(time)
        while row < len(self._nodes) and self._nodes[row] >= nodes:
            row = self._lower[row]
        return max(time, self._times[row])

    def time_at_least(self, nodes: int, time: float) -> float:
        """Return the first time, from `time` on, with `nodes` nodes or more; infinity if there is none."""
        row = self._row(time)
        while row < len(self._nodes) and self._nodes[row] < nodes:
            row += 1
        return max(time, self._times[row])

    def time_other_than(self, nodes: int, time: float) -> float:
        """Return the first time, from `time` on, with another number of nodes; infinity if there is none."""
        row = self._row(time)
        if self._nodes[row] == nodes:
            row += 1  # neighbors have different numbers
        return max(time, self._times[row])

    def snap(self, time: float) -> float:
        """Return the time at which the nodes change if `time` is equal to it up to rounding, otherwise `time`."""
        return snap(time, self._times)

    def _row(self, time: float) -> int:
        """Return the index of the row that holds at a time, which may be infinity."""
        return min(bisect_right(self._times, time), len(self._nodes)) - 1


def present_nodes(capacity: CapacityTrace) -> Nodes:
    """Return the number of nodes of a capacity trace at each time."""
    return Nodes(capacity.seconds.tolist(), capacity.nodes.tolist())


def staying_nodes(capacity: CapacityTrace, notice: float) -> Nodes:
    """Return how many nodes stay for at least `notice` seconds more: at time t, the minimum from t to t + notice.

    These are the nodes that a training can use when it knows of a preemption `notice` seconds before.
    """
    begins, nodes = capacity.seconds.tolist(), capacity.nodes.tolist()
    # A row is announced `notice` seconds before it begins. The result is the minimum over the rows that are announced
    # and not over, by the method of a sliding window: it keeps rows with ascending numbers of nodes, so that the first
    # one is the minimum; a row that a later one with as few nodes follows cannot be the minimum any more.
    announced = [snap(max(0.0, begin - notice), begins) for begin in begins]
    times = sorted({*begins, *announced})
    window: deque[int] = deque()
    next_row, minima = 0, []
    for time in times:
        while next_row < len(announced) and announced[next_row] <= time:
            while window and nodes[window[-1]] >= nodes[next_row]:
                window.pop()
            window.append(next_row)
            next_row += 1
        while window[0] + 1 < len(begins) and begins[window[0] + 1] <= time:  # the first row is over
            window.popleft()
        minima.append(nodes[window[0]])
    return Nodes(times, minima)
