"""The price of nodes over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from variable_batch_size._validation import check_number, type_error, value_error
from variable_batch_size.cluster.capacity_trace import CapacityTrace

Prices: TypeAlias = float | tuple[npt.ArrayLike, npt.ArrayLike]


def priced(capacity: CapacityTrace, prices: Prices | None) -> CapacityTrace:
    """Return the trace with the prices of a node, per hour.

    Args:
        capacity: seconds -> nodes.
        prices: a number; or seconds in ascending order and the price from each on, both (rows,), of which the first
            one also holds before; None keeps the prices of the trace.

    Raises:
        TypeError: if `prices` has another type.
        ValueError: if a price or a time is not finite and >= 0, the times do not ascend, or the shapes differ.
    """
    if prices is None:
        return capacity
    if isinstance(prices, Sequence) and len(prices) == 2 and not isinstance(prices, str):
        times = np.asarray(prices[0], np.float64)
        if times.ndim != 1 or len(times) == 0 or not np.isfinite(times).all() or (np.diff(times) < 0).any():
            raise value_error("the seconds of prices must be finite and ascend", prices[0], "pass (seconds, prices)")
        costs = np.asarray(prices[1], np.float64)
        if costs.shape != times.shape:
            raise value_error(f"prices must have the shape {times.shape} of seconds", costs.shape, "pass a row each")
        if not (np.isfinite(costs) & (costs >= 0)).all():
            raise value_error("each price must be finite and >= 0", prices[1], "pass the prices of a node-hour")
    elif isinstance(prices, (int, float, np.number)):
        times, costs = np.zeros(1), np.array([check_number(prices, "prices", "pass the price of a node-hour")])
    else:
        raise type_error("prices must be a number, or (seconds, prices)", prices, "pass the price of a node-hour")
    seconds = np.unique(np.concatenate([capacity.seconds, times[times < capacity.end]]))  # (rows,), as all below
    nodes = capacity.nodes[capacity.seconds.searchsorted(seconds, side="right") - 1]
    rows = np.maximum(times.searchsorted(seconds, side="right") - 1, 0)
    return CapacityTrace(seconds, nodes, capacity.end, costs[rows])


def cost_until(capacity: CapacityTrace, elapsed: float) -> float | None:
    """Return what the nodes cost up to a time, whether the training used them or not; None without prices."""
    if capacity.prices is None:
        return None
    lengths = np.diff(np.minimum(np.append(capacity.seconds, capacity.end), elapsed))  # (rows,), seconds
    return float((capacity.nodes * capacity.prices) @ lengths) / 3600
