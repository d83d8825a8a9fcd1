"""`vbs capacity`: capacity traces, the nodes that a cluster had at each time."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from variable_batch_size.cli import options, output
from variable_batch_size.cli.command import UsageError, command
from variable_batch_size.cli.group import Commands
from variable_batch_size.cli.options import option
from variable_batch_size.cli.trace import describe
from variable_batch_size.lab import cluster
from variable_batch_size.lab.cluster.capacity_trace import CapacityTrace
from variable_batch_size.lab.simulation import to_batch_trace
from variable_batch_size.rules.base import needs_noise

app = typer.Typer(
    cls=Commands, help="Capacity traces: the nodes that a cluster had at each time.", no_args_is_help=True
)


@app.command()
@command
def show(
    *,
    log: options.LogPath,
    reading: options.Reading,
    window: options.Window,
    json: output.Json = False,
    png: options.Png = None,
) -> None:
    """Show the duration, nodes and changes of a capacity trace.

    Examples:

    - `vbs capacity show traces/spot_example.json`
    - `vbs capacity show spot.json --png spot.png`
    """
    capacity = window.cut(reading.read(log, scaled=window.scale_time != 1))
    nodes = capacity.nodes
    facts = _capacity_facts(capacity)
    if json:
        output.print_json(facts)
    else:
        interval = f", one in {output.format_duration(capacity.end / capacity.changes)}" if capacity.changes else ""
        texts = {
            "duration": f"{output.format_duration(capacity.end)} ({output.format_number(capacity.end)} s)",
            "nodes": f"{nodes.min():,} to {nodes.max():,}, mean {output.format_number(capacity.mean)}",
            "changes": f"{capacity.changes:,}{interval}",
            "without nodes": f"{facts['seconds_without_nodes'] / capacity.end:.1%} of the time",
        }
        if "mean_price" in facts:
            texts["price"] = f"{facts['mean_price']:.4g} a node-hour, on average"
        output.print_facts(texts)
    if png is not None:
        edges, unit = _edges(capacity)
        output.save_picture(png, edges, nodes.astype(np.float64), unit, "nodes", log.name)


@app.command()
@command
def convert(
    *,
    log: options.LogPath,
    out: options.Out,
    policy: Annotated[
        str | None, option("The global batch size: per-device:SAMPLES or constant:SAMPLES.", metavar="POLICY")
    ] = None,
    time: options.UpdateTime,
    devices_per_node: options.DevicesPerNode = 1,
    microbatch: options.Microbatch = None,
    max_updates: Annotated[
        int | None, options.count_option("Updates after which the training ends.", metavar="UPDATES")
    ] = None,
    window: options.Window,
    resample: Annotated[float | None, options.duration_option("Read the nodes only once in this time.")] = None,
    reading: options.Reading,
) -> None:
    """Write the batch trace of a run under a capacity trace or, without --policy, the capacity as seconds,nodes.

    It is the training that no change interrupts: an update begins when the one before has ended, with the devices of
    that time. It takes the rows of the busiest device / samples-per-second, plus the seconds of the communication.

    Examples:

    - `vbs capacity convert spot.json --policy per-device:64 --samples-per-second 500 --out trace.csv`
    - `vbs capacity convert spot.json --max-nodes 8 --out capacity.csv`
    """
    capacity = window.cut(reading.read(log, scaled=window.scale_time != 1), resample).devices(devices_per_node)
    model = time.throughput()
    if policy is None:
        if model is not None or microbatch is not None or max_updates is not None:
            remedy = "pass it, or leave them out"
            raise UsageError(f"--policy must be given with the options of a run, got none; {remedy}")
        output.write(out, capacity.to_csv, f"{capacity.changes:,} changes in {output.format_duration(capacity.end)}")
        return
    controller = options.read_policy(policy)
    if needs_noise(controller):
        remedy = "pass per-device:64, or use vbs simulate with --noise and --trace-out"
        raise UsageError(f"--policy must need no gradient noise, got {policy}; {remedy}")
    if model is None:
        raise UsageError("--policy needs the time of an update, got none; pass --samples-per-second")
    trace = to_batch_trace(capacity, controller, model, minibatch_size=microbatch, max_updates=max_updates)
    output.write(out, trace.to_csv, describe(trace))


@app.command()
@command
def fetch(
    *,
    name: Annotated[
        str | None, typer.Argument(help="Name of a public trace; without one, all are listed.", metavar="NAME")
    ] = None,
    out: Annotated[Path | None, options.out_option("Write it as seconds,nodes.", "--out", "-o")] = None,
    json: output.Json = False,
) -> None:
    """Download a public capacity trace, or list those that have a name here.

    Examples:

    - `vbs capacity fetch`
    - `vbs capacity fetch parcae/bert-hl --out capacity.csv`
    """
    if name is None:
        if out is not None:
            raise UsageError("--out needs the name of a public trace, got none; pass one of those that are listed")
        if json:
            output.print_json([asdict(trace) for trace in cluster.PUBLIC.values()])
            return
        for trace in cluster.PUBLIC.values():
            typer.echo("\n    ".join([trace.name, f"license: {trace.license}", trace.citation, trace.address]))
        return
    if json and out == options.STDOUT:
        raise UsageError("--out must be a file with --json, which is standard output, got -; pass a name")
    capacity = cluster.fetch(name)
    if json:
        output.print_json(_capacity_facts(capacity))
    elif out is None:
        typer.echo(f"{name}: {capacity!r}")
    if out is not None:
        output.write(out, capacity.to_csv, f"{capacity.changes:,} changes in {output.format_duration(capacity.end)}")


@app.command()
@command
def synthetic(
    *,
    out: options.Out,
    machines: options.Machines,
    seed: Annotated[int, option("Seed of the random numbers.", min=0, metavar="SEED")] = 0,
) -> None:
    """Write a random capacity trace of machines that come and go independently, and optionally in bulk.

    Example: `vbs capacity synthetic --nodes 16 --mean-up 7200 --mean-down 900 --duration 86400 --out capacity.csv`
    """
    capacity = machines.trace(seed)
    mean = output.format_number(capacity.mean)
    output.write(out, capacity.to_csv, f"mean {mean} nodes, {capacity.changes:,} changes")


def _capacity_facts(capacity: CapacityTrace) -> dict[str, float]:
    """Return numbers that describe a capacity trace: its nodes over time, and their mean price if it has prices."""
    nodes, prices, seconds = capacity.nodes, capacity.prices, capacity.lengths  # (rows,) each
    facts = {"seconds": capacity.end, "min": int(nodes.min()), "max": int(nodes.max()), "mean": capacity.mean}
    facts |= {"changes": capacity.changes, "seconds_without_nodes": float(seconds[nodes == 0].sum())}
    if prices is not None:
        facts["mean_price"] = float(prices @ seconds) / capacity.end
    return facts


def _edges(capacity: CapacityTrace) -> tuple[Any, str]:
    """Return the times at which the nodes change, and the end, for a picture, (rows + 1,); and the name of their unit.

    The unit is the largest one, from days to seconds, of which the trace has at least three.
    """
    seconds = np.append(capacity.seconds, capacity.end)
    for unit, seconds_per_unit in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if capacity.end >= 3 * seconds_per_unit:  # so that the axis has some whole numbers
            return seconds / seconds_per_unit, unit
    return seconds, "seconds"
