"""The nodes that are there at a time, those of which it is known that they stay, and when they change."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from typing import final

from variable_batch_size.cluster.capacity_trace import CapacityTrace
from variable_batch_size.simulation.rounding import snapped


@final
class Nodes:
    """A step function of the time: numbers of nodes, of which neighbors differ.

    Args:
        times: times of the changes in ascending order; the first one is 0.
        nodes: number of nodes from each time on; rows that change nothing are left out.
    """

    def __init__(self, times: list[float], nodes: list[int]) -> None:
        rows = [row for row, number in enumerate(nodes) if row == 0 or number != nodes[row - 1]]
        self._times = [times[row] for row in rows] + [math.inf]
        self._nodes = [nodes[row] for row in rows]
        self._lower = [len(rows)] * len(rows)  # the next row with fewer nodes
        higher: list[int] = []  # rows that have not found it, with ascending numbers of nodes
        for row, number in enumerate(self._nodes):
            while higher and self._nodes[higher[-1]] > number:
                self._lower[higher.pop()] = row
            higher.append(row)

    def at(self, time: float) -> int:
        """Return the number of nodes at a time."""
        return self._nodes[self._row(time)]

    def below(self, nodes: int, time: float) -> float:
        """Return the first time, from `time` on, with fewer than `nodes` nodes; infinity if there is none."""
        row = self._row(time)
        while row < len(self._nodes) and self._nodes[row] >= nodes:
            row = self._lower[row]
        return max(time, self._times[row])

    def at_least(self, nodes: int, time: float) -> float:
        """Return the first time, from `time` on, with `nodes` nodes or more; infinity if there is none."""
        row = self._row(time)
        while row < len(self._nodes) and self._nodes[row] < nodes:
            row += 1
        return max(time, self._times[row])

    def other_than(self, nodes: int, time: float) -> float:
        """Return the first time, from `time` on, with another number of nodes; infinity if there is none."""
        row = self._row(time)
        return max(time, self._times[row + (self._nodes[row] == nodes)])

    def snapped(self, time: float) -> float:
        """Return the time of the change that a time is equal to up to rounding; or else the time."""
        return snapped(time, self._times)

    def _row(self, time: float) -> int:
        return min(bisect_right(self._times, time), len(self._nodes)) - 1


def present(capacity: CapacityTrace) -> Nodes:
    """Return the nodes that are there."""
    return Nodes(capacity.seconds.tolist(), capacity.nodes.tolist())


def announced(capacity: CapacityTrace, notice: float) -> Nodes:
    """Return the nodes that are there and stay for `notice` seconds: at t, the minimum from t to t + notice.

    The fall of a row is known `notice` seconds before the row begins. The minimum of the rows that are known and not
    over is that of a sliding window, and the time is linear in the number of rows.
    """
    begins, nodes = capacity.seconds.tolist(), capacity.nodes.tolist()
    known = [snapped(max(0.0, begin - notice), begins) for begin in begins]
    times = sorted({*begins, *known})
    window: deque[int] = deque()  # rows with ascending numbers of nodes; the first one is the minimum
    entered, least = 0, []
    for time in times:
        while entered < len(known) and known[entered] <= time:
            while window and nodes[window[-1]] >= nodes[entered]:
                window.pop()
            window.append(entered)
            entered += 1
        while window[0] + 1 < len(begins) and begins[window[0] + 1] <= time:
            window.popleft()
        least.append(nodes[window[0]])
    return Nodes(times, least)
