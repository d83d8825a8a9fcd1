"""A picture of simulated trainings, side by side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import cycle
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from variable_batch_size._extras import import_extra
from variable_batch_size._validation import FloatArray, value_error
from variable_batch_size.cluster.capacity_trace import CapacityTrace, bin_means

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOST = {"redone": "tab:red", "restarting": "tab:orange", "saving": "gold", "idle": "silver"}  # state -> color
COLORS = ("tab:blue", "tab:green", "tab:purple", "tab:brown", "tab:pink", "tab:cyan", "tab:olive")  # of the runs
COLUMNS = 300  # of the shares: a restart of 90 s in two days is less than a pixel wide


class Simulated(Protocol):
    """The attributes of a `Run` that are drawn."""

    @property
    def capacity(self) -> CapacityTrace: ...  # noqa: D102
    @property
    def timeline(self) -> pd.DataFrame: ...  # noqa: D102


def plot_runs(runs: Mapping[str, Simulated], title: str | None = None) -> Figure:
    """Draw trainings under one capacity trace over the hours, and return the figure.

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
    figure, panels = plt.subplots(
        len(heights), sharex=True, figsize=(9, sum(heights) + 1), height_ratios=heights, layout="constrained"
    )
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
    figure.legend(**_entries([nodes, *losses]), loc="outside upper center", ncols=6)
    if len(runs) > 1:
        progress.legend(loc="upper left")
    result: Figure = figure
    return result


def _draw_capacity(axes: Axes, runs: list[Simulated]) -> None:
    axes.set_prop_cycle(color=["steelblue"])
    runs[0].capacity.plot(axes).patches[0].set_label("there")
    if len(runs) == 1:
        axes.stairs(runs[0].timeline["nodes"], _hours(runs[0].timeline), color="black", baseline=None, label="used")


def _draw_training(batch: Axes, progress: Axes, timeline: pd.DataFrame, **style: Any) -> None:
    hours = _hours(timeline)
    held = timeline["batch_size"].where(timeline["batch_size"] > 0).ffill().where(timeline["nodes"] > 0)
    batch.stairs(held, hours, baseline=None, **style)
    made = timeline["progress"].where(timeline["state"] == "productive", 0.0)
    progress.plot(hours, np.append(0.0, made.cumsum()), **style)


def _draw_losses(axes: Axes, timeline: pd.DataFrame) -> None:
    below = np.zeros(COLUMNS)
    for state, color in LOST.items():
        spent = (timeline["state"] == state).to_numpy().astype(np.float64)
        borders, share = bin_means(_hours(timeline), spent, COLUMNS)
        if share.any():
            axes.stairs(below + share, borders, baseline=below, fill=True, color=color, label=state)
            below = below + share
    axes.set(ylim=(0, 1), yticks=[0, 1], yticklabels=["0%", "100%"])


def _hours(timeline: pd.DataFrame) -> FloatArray:
    """Return when each interval begins, and the last one ends, (rows + 1,)."""
    hours: FloatArray = np.append(timeline["begin"], timeline["end"].iloc[-1]) / 3600
    return hours


def _entries(panels: Iterable[Axes]) -> dict[str, list[Any]]:
    """Return the entries of a legend: the first one of each label."""
    found: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    return {"handles": list(found.values()), "labels": list(found)}
