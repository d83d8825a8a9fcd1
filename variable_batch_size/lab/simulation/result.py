"""The result of a simulation, what its nodes cost, and a picture of several."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import TYPE_CHECKING, Any, TypeAlias, final

import numpy as np
import numpy.typing as npt

from variable_batch_size._extras import import_extra
from variable_batch_size._validation import FloatArray, check_number, type_error, value_error
from variable_batch_size.lab.cluster.capacity_trace import CapacityTrace, bin_means
from variable_batch_size.lab.cluster.readers.base import UNIX
from variable_batch_size.lab.simulation.engine import Interval
from variable_batch_size.trace.batch_trace import BatchTrace

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Prices: TypeAlias = float | tuple[npt.ArrayLike, npt.ArrayLike]
LOST = {"redone": "tab:red", "restarting": "tab:orange", "saving": "gold", "idle": "silver"}  # state -> color
COLORS = ("tab:blue", "tab:green", "tab:purple", "tab:brown", "tab:pink", "tab:cyan", "tab:olive")  # of the runs
COLUMNS = 300  # of the shares: a restart of 90 s in two days is less than a pixel wide


@final
@dataclass(frozen=True)
class Run:
    """The result of `simulate`: time, cost, progress and batch sizes of a simulated training.

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
    """Return a capacity trace with other prices of its nodes.

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
    price_seconds, price_values = _check_prices(prices)
    within = price_seconds[price_seconds < capacity.end]
    seconds = np.unique(np.concatenate([capacity.seconds, within]))  # (rows,), as all below: nodes or price change
    nodes = capacity.nodes[capacity.seconds.searchsorted(seconds, side="right") - 1]
    price_rows = price_seconds.searchsorted(np.maximum(seconds, price_seconds[0]), side="right") - 1
    return CapacityTrace(seconds, nodes, capacity.end, price_values[price_rows])


def _check_prices(prices: Prices) -> tuple[FloatArray, FloatArray]:
    """Return the seconds from which each price of a node-hour holds, and the prices, (rows,) both, after checks."""
    if isinstance(prices, Sequence) and len(prices) == 2 and not isinstance(prices, str):
        times = np.asarray(prices[0], np.float64)
        if times.ndim != 1 or len(times) == 0 or not np.isfinite(times).all() or (np.diff(times) < 0).any():
            raise value_error("the seconds of prices must be finite and ascend", prices[0], "pass (seconds, prices)")
        if times[-1] >= UNIX:  # a capacity trace begins at 0, also one that had such times
            requirement = "the seconds of prices must be those since the beginning of the capacity trace"
            raise value_error(requirement, f"a Unix time, {times[-1]:.15g}", "subtract the time of its first row")
        costs = np.asarray(prices[1], np.float64)
        if costs.shape != times.shape:
            raise value_error(f"prices must have the shape {times.shape} of seconds", costs.shape, "pass a row each")
        if not (np.isfinite(costs) & (costs >= 0)).all():
            raise value_error("each price must be finite and >= 0", prices[1], "pass the prices of a node-hour")
        return times, costs
    if isinstance(prices, (int, float, np.number)):
        return np.zeros(1), np.array([check_number(prices, "prices", "pass the price of a node-hour")])
    raise type_error("prices must be a number, or (seconds, prices)", prices, "pass the price of a node-hour")


def cost_until(capacity: CapacityTrace, elapsed: float) -> float | None:
    """Return the cost of all nodes, used or not, up to a time in seconds, or None without prices."""
    if capacity.prices is None:
        return None
    lengths = np.diff(np.minimum(np.append(capacity.seconds, capacity.end), elapsed))  # (rows,), seconds
    return float((capacity.nodes * capacity.prices) @ lengths) / 3600


def plot_runs(runs: Mapping[str, Run], title: str | None = None) -> Figure:
    """Draw runs under one capacity trace over the hours, and return the figure.

    The panels show the nodes, the batch sizes, the modelled progress and, for each training, the shares of its time
    that are not productive.

    Args:
        runs: name -> `Run`, at least one.
        title: what stands above the nodes.

    Raises:
        ValueError: if there is no run.
        ModuleNotFoundError: if matplotlib is not installed.
    """
    if not runs:
        raise value_error("runs must have at least one run", "none", "pass {name: run}")
    plt = import_extra("matplotlib.pyplot", "plot")
    heights = [1.8, 1.8, 2.6, *[0.7] * len(runs)]  # inches
    settings = {"figsize": (9, sum(heights) + 1), "height_ratios": heights, "layout": "constrained"}
    figure, panels = plt.subplots(len(heights), sharex=True, **settings)
    nodes, batch, progress, *losses = panels
    _draw_capacity(nodes, list(runs.values()))
    widths = np.linspace(2.6 if len(runs) > 1 else 1.3, 1.3, len(runs))  # a line shows below a thinner one
    for (name, run), color, width, axes in zip(runs.items(), cycle(COLORS), widths, losses, strict=False):
        _draw_training(batch, progress, run.timeline, color=color, lw=width, label=name)
        _draw_losses(axes, run.timeline)
        if len(runs) > 1:
            axes.set_ylabel(name, color=color, rotation="horizontal", ha="right", va="center")
    end = max(run.timeline["end"].iloc[-1] for run in runs.values())
    nodes.set(xlabel="", xlim=(0, end / 3600))
    batch.set(ylabel="batch size\n(samples)", ylim=(0, None))
    progress.set(ylabel="modelled progress\n(updates at the reference)", ylim=(0, None))
    progress.yaxis.set_major_formatter("{x:,.0f}" if progress.get_ylim()[1] > 10 else "{x:g}")
    losses[0].set_title("time that is not productive", loc="left", fontsize="medium")
    losses[-1].set_xlabel("time (hours)")
    if title is not None:
        nodes.set_title(title, parse_math=False)
    figure.align_ylabels(panels[:3])
    figure.legend(**_legend_entries([nodes, *losses]), loc="outside upper center", ncols=6)
    if len(runs) > 1:
        progress.legend(loc="upper left")
    result: Figure = figure
    return result


def _draw_capacity(axes: Axes, runs: list[Run]) -> None:
    """Draw how many nodes there were and, if there is one run, how many it used. Several would hide one another."""
    axes.set_prop_cycle(color=["steelblue"])
    runs[0].capacity.plot(axes).patches[0].set_label("there")
    if len(runs) == 1:
        axes.stairs(runs[0].timeline["nodes"], _hours(runs[0].timeline), color="black", baseline=None, label="used")


def _draw_training(batch: Axes, progress: Axes, timeline: pd.DataFrame, **style: Any) -> None:
    """Draw the batch size and the progress of a training over the hours; between updates it is the last batch size.

    Args:
        batch: axes for the batch size.
        progress: axes for the progress.
        timeline: `Run.timeline` of the training.
        style: color, width and label of the lines.
    """
    hours = _hours(timeline)
    size_held = timeline["batch_size"].where(timeline["batch_size"] > 0).ffill().where(timeline["nodes"] > 0)
    batch.stairs(size_held, hours, baseline=None, **style)
    progress_made = timeline["progress"].where(timeline["state"] == "productive", 0.0)
    progress.plot(hours, np.append(0.0, progress_made.cumsum()), **style)


def _draw_losses(axes: Axes, timeline: pd.DataFrame) -> None:
    """Draw which shares of the time were lost over the hours: an area for each state, such as restarting, stacked."""
    below = np.zeros(COLUMNS)
    for state, color in LOST.items():
        spent = (timeline["state"] == state).to_numpy().astype(np.float64)
        borders, share = bin_means(_hours(timeline), spent, COLUMNS)
        if share.any():
            axes.stairs(below + share, borders, baseline=below, fill=True, color=color, label=state)
            below = below + share
    axes.set(ylim=(0, 1), yticks=[0, 1], yticklabels=["0%", "100%"])


def _hours(timeline: pd.DataFrame) -> FloatArray:
    """Return the hours at which the intervals of a timeline begin, and the last one ends, (rows + 1,)."""
    hours: FloatArray = np.append(timeline["begin"], timeline["end"].iloc[-1]) / 3600
    return hours


def _legend_entries(panels: Iterable[Axes]) -> dict[str, list[Any]]:
    """Return the entries of a legend for several panels, as arguments of `legend`: each label once."""
    by_label: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            by_label.setdefault(label, handle)
    return {"handles": list(by_label.values()), "labels": list(by_label)}
