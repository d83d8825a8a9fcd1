"""What `vbs simulate` prints: runs under one capacity trace, and means and differences over several."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import typer

from variable_batch_size._validation import FloatArray
from variable_batch_size.cli import output
from variable_batch_size.lab.cluster.capacity_trace import CapacityTrace
from variable_batch_size.lab.simulation import Overheads, Run, compare, means
from variable_batch_size.lab.simulation.sweep import SHARES

if TYPE_CHECKING:
    import pandas as pd

NAMES = {"on_demand_cost": "on demand cost of the productive time"}
DECISIVE = ("progress_per_hour", "progress_per_node_hour", "cost_per_hour", "cost_per_progress")


def print_runs(runs: Mapping[str, Run], json: bool, currency: str | None) -> None:
    """Print the runs under one capacity trace: a row for each fact, and a column for each policy."""
    if json:
        output.print_json({name: dict(run.summary) for name, run in runs.items()})
        return
    summaries = [run.summary for run in runs.values()]
    rows = [["elapsed", *(output.format_duration(summary["elapsed"]) for summary in summaries)]]
    for name in SHARES:  # of the elapsed time
        rows.append([f"  {name}", *(f"{summary[name] / (summary['elapsed'] or 1):.1%}" for summary in summaries)])
    counts = ("updates", "samples", "progress", "preemptions", "restarts", "efficiency")
    for name in (*counts, "cost", "cost_per_progress", "on_demand_cost"):
        if any(name in summary for summary in summaries):
            numbers = (_format_number(summary.get(name, math.nan)) for summary in summaries)
            rows.append([_label(name, currency), *numbers])
    output.print_table(["", *runs], rows)


def print_sweep(table: pd.DataFrame, json: bool, currency: str | None) -> None:
    """Print the means over several capacity traces of each fact and policy and, of several policies, the differences.

    Args:
        table: the result of `sweep`: a row for each capacity trace and policy, and a column for each fact.
        json: whether to print JSON instead.
        currency: currency of the costs; None: not known.
    """
    if json:
        output.print_json(_as_json(table))
        return
    policies, traces = table.index.unique("policy"), table.index.unique("trace")
    intervals = means(table)  # a row (mean, low, high) for each policy and fact
    facts = intervals.index.unique("fact")
    rows = [
        [_label(fact, currency), *(_format_interval(fact, *intervals.loc[(policy, fact)]) for policy in policies)]
        for fact in facts
    ]
    traces_without_update = (table["updates"] == 0).groupby("policy").sum()[policies]  # (policies,)
    if traces_without_update.any():
        rows.append(["traces without an update", *map(str, traces_without_update)])
    typer.echo(f"Means of {len(traces)} capacity traces, each counted once, with 95% t intervals:\n")
    output.print_table(["", *policies], rows)
    if len(policies) > 1:
        first, *others = policies
        means_of_first = intervals.loc[first, "mean"].replace(0, math.nan)  # no percentage of 0
        percent = compare(table).div(means_of_first, axis=0, level="fact") * 100
        typer.echo(f"\nPaired differences to {first}, in percent of its means:\n")
        rows = [
            [_label(fact, currency), *(_format_percent(*percent.loc[(policy, fact)]) for policy in others)]
            for fact in DECISIVE
            if fact in facts
        ]
        output.print_table(["", *others], rows)


def collect_remarks(
    arguments: Mapping[str, Any],
    overheads: Overheads | None,
    measured: FloatArray | None,
    traces: Mapping[str, CapacityTrace],
    farthest: float,
    several: bool,
) -> list[str]:
    """Return remarks that tell the reader of a simulation what in its numbers is fitted, extrapolated or assumed.

    Args:
        arguments: of `simulate`, by name.
        overheads: costs of restarts and saves, or None if changes of the nodes cost nothing.
        measured: the updates to which the throughput was fitted, (updates, 4), with rows in column 1.
        traces: the capacity traces, by name.
        farthest: the largest progress of all runs, in reference updates.
        several: whether several policies are compared.
    """
    remarks = []
    curve, model = arguments["noise"], arguments["throughput"]
    most_nodes = max(int(capacity.nodes.max()) for capacity in traces.values())
    if measured is not None:
        devices = _describe_devices(measured, arguments["devices_per_node"] * most_nodes)
        remarks.append(f"--throughput: the seconds are fitted to {model.error(measured):.1%} (rms), on {devices}.")
        if arguments["minibatch_size"] is None:
            rows = int(measured[:, 1].max())
            remarks.append(f"No --microbatch: a device computes its share at once, not the {rows} rows measured.")
    if curve is not None and len(curve.progress) > 1 and farthest > curve.progress[-1]:
        last = f"{curve.progress[-1]:.6g} updates"
        remarks.append(f"--noise ends at a progress of {last}; its last row holds up to {farthest:.6g}.")
    if not farthest:
        least = (overheads or Overheads()).least_nodes
        too_few = f"it has at most {most_nodes} of {least} nodes"
        reason = too_few if most_nodes < least else "none ends before a loss or the log does"
        remarks.append(f"The training makes no update: {reason}.")
    if overheads is None:
        remarks.append("No overheads such as --restart: changes of the nodes lose no update and cost no time.")
    elif overheads.save_every is None and not overheads.notice:
        remarks.append("No --save-every and no --notice: a preemption loses everything since the last stop.")
    if curve is None and several:
        rule = arguments["rule"]
        remarks.append(f"Progress is counted by the rule {rule}. For AdaScale's gain, pass --noise FILE.")
    return remarks


def _describe_devices(measured: FloatArray, simulated: int) -> str:
    """Return in words the numbers of devices that were measured, and that of the simulation if it has more.

    Args:
        measured: a row for each measured update; column 0 is its number of devices.
        simulated: the largest number of devices in the simulation.
    """
    min_devices, max_devices = int(measured[:, 0].min()), int(measured[:, 0].max())
    devices = "1 device" if max_devices == 1 else f"{max_devices} devices"
    words = f"{min_devices} to {devices}" if min_devices < max_devices else devices
    return f"{words}; the simulation has up to {simulated}" if simulated > max_devices else words


def _as_json(table: pd.DataFrame) -> dict[str, object]:
    """Return the runs of a sweep, their means and their differences, as values of JSON."""
    runs = {trace: _nested(rows.droplevel("trace")) for trace, rows in table.groupby("trace", sort=False)}
    aggregates = {
        name: {policy: _nested(rows.droplevel("policy")) for policy, rows in frame.groupby("policy", sort=False)}
        for name, frame in (("means", means(table)), ("differences", compare(table)))
    }
    return {"runs": runs, **aggregates}


def _nested(rows: pd.DataFrame) -> dict[str, dict[str, float | None]]:
    """Return a table as nested dicts, row -> column -> number, or None if it is not finite, which JSON cannot say."""
    return {
        str(name): {str(column): value if math.isfinite(value) else None for column, value in row.items()}
        for name, row in rows.to_dict("index").items()
    }


def _label(fact: str, currency: str | None) -> str:
    """Return the name of a fact as a table shows it, with its unit if it is a cost.

    >>> _label("restarting_share", None), _label("cost_per_hour", "USD")
    ('  restarting', 'cost per hour (USD)')
    """
    if fact.endswith("_share"):
        return f"  {fact.removesuffix('_share')}"
    name = NAMES.get(fact, fact.replace("_", " ").replace("node hour", "node-hour"))
    unit = currency or ("in the unit of --price" if fact in ("cost", "cost_per_hour") else None)
    return f"{name} ({unit})" if unit and "cost" in fact else name


def _format_interval(fact: str, *values: float) -> str:
    """Return the mean, low and high end of a confidence interval as text: "12.5% (10.0 to 15.0)"."""
    is_share = fact.endswith("_share")
    largest = 1.0 if is_share else math.inf  # no fact is negative, but an interval of few traces may be
    clipped = [min(largest, max(0.0, value)) if math.isfinite(value) else value for value in values]
    mean, low, high = (f"{100 * value:.1f}" if is_share else _format_number(value) for value in clipped)
    has_interval = math.isfinite(clipped[1])
    return mean + ("%" if is_share else "") + (f" ({low} to {high})" if has_interval else "")


def _format_percent(mean: float, low: float, high: float) -> str:
    """Return a difference in percent with its confidence interval as text: "+1.5% (-0.5 to +3.5)"."""
    if not math.isfinite(mean):
        return "-"
    return f"{mean:+.1f}%" + (f" ({low:+.1f} to {high:+.1f})" if math.isfinite(low) else "")


def _format_number(value: float) -> str:
    return output.format_number(value) if math.isfinite(value) else "-"
