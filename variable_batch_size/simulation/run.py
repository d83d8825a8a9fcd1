"""The result of a simulation, and what its nodes cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias, final

import numpy as np
import numpy.typing as npt

from variable_batch_size._validation import check_number, type_error, value_error
from variable_batch_size.cluster.capacity_trace import CapacityTrace
from variable_batch_size.simulation.engine import Interval
from variable_batch_size.simulation.picture import plot_runs
from variable_batch_size.trace.batch_trace import BatchTrace

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

Prices: TypeAlias = float | tuple[npt.ArrayLike, npt.ArrayLike]


@final
@dataclass(frozen=True)
class Run:
    """A simulated training.

    Attributes:
        summary: `elapsed`, in seconds, and its parts `productive` (updates that are kept), `redone` (updates that were
            lost, whole or in part), `restarting`, `saving` (the training waits) and `idle` (too few nodes, or the rest
            after the last update); `updates`, `samples` and `progress` that are kept; `goodput`, the progress per
            second; `efficiency`, the progress per sample relative to that at `ref_batchsize`, if there is one;
            `preemptions`, how often nodes left that the training used or restarted with; `restarts`; with prices,
            `cost` of all nodes over the elapsed time, and `cost_per_progress`; with a price on demand, `on_demand_cost`
            of the nodes in the productive seconds.
        capacity: the capacity trace, with the prices.
    """

    summary: Mapping[str, float]
    capacity: CapacityTrace
    _intervals: tuple[Interval, ...] = field(repr=False)
    _runs: tuple[tuple[int, int], ...] = field(repr=False)  # batch size, updates
    _devices_per_node: int = field(repr=False)

    @property
    def trace(self) -> BatchTrace:
        """The batch sizes of the updates that are kept.

        With a dataset, the last update of each epoch has the size before it was shortened; the sampler shortens it.

        Raises:
            ValueError: if no update is kept.
        """
        if not self._runs:
            requirement = "an update must end within the capacity trace"
            raise value_error(requirement, f"none in {self.capacity!r}", "check the nodes and the throughput")
        return BatchTrace.from_runs(*zip(*self._runs, strict=True))

    @property
    def timeline(self) -> pd.DataFrame:
        """One row for each interval of one state, in ascending order and without gaps.

        The columns are `begin` and `end`, in seconds; `state`: productive, redone, restarting, saving or idle; `nodes`
        and `devices`: those that the training uses; `batch_size`; and the `updates`, `samples` and `progress` that end
        in the interval, which are kept if it is productive and lost if it is redone.
        """
        import pandas as pd

        table = pd.DataFrame(self._intervals, columns=list(Interval._fields))
        table.insert(Interval._fields.index("nodes") + 1, "devices", table["nodes"] * self._devices_per_node)
        return table

    def plot(self) -> Figure:
        """Draw nodes, batch size, progress and lost time over the hours, see `plot_runs`.

        Raises:
            ModuleNotFoundError: if matplotlib is not installed.
        """
        return plot_runs({"": self})


def with_prices(capacity: CapacityTrace, prices: Prices | None) -> CapacityTrace:
    """Return the trace with prices.

    Args:
        capacity: seconds -> nodes.
        prices: price of a node-hour: a number; or seconds in ascending order and the price from each on, both (rows,),
            the first of which also holds before; None keeps the prices of the trace.

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
    rows = times.searchsorted(np.maximum(seconds, times[0]), side="right") - 1
    return CapacityTrace(seconds, nodes, capacity.end, costs[rows])


def cost_until(capacity: CapacityTrace, elapsed: float) -> float | None:
    """Return what the nodes cost up to a time, whether the training used them or not; None without prices."""
    if capacity.prices is None:
        return None
    lengths = np.diff(np.minimum(np.append(capacity.seconds, capacity.end), elapsed))  # (rows,), seconds
    return float((capacity.nodes * capacity.prices) @ lengths) / 3600
