"""`vbs capacity`: capacity traces, the nodes that a cluster had at each time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from variable_batch_size import cluster
from variable_batch_size._validation import value_error
from variable_batch_size.cli import output
from variable_batch_size.cli.options import (
    DURATION,
    MEAN_DOWN,
    MEAN_UP,
    NODES,
    BulkEvery,
    BulkFraction,
    CommunicationSeconds,
    Format,
    Inverted,
    MaxGap,
    MaxNodes,
    MinNodes,
    Out,
    Png,
    SamplesPerSecond,
    ScaleTime,
    Start,
    Stop,
    duration_option,
    policy_of,
    prepared,
    read_log,
    say,
    throughput,
)
from variable_batch_size.cli.trace import describe
from variable_batch_size.cluster import CapacityTrace
from variable_batch_size.rules.base import needs_noise
from variable_batch_size.simulation import to_batch_trace

app = typer.Typer(help="Capacity traces: how many nodes a cluster had at each time.", no_args_is_help=True)

Log = Annotated[Path, typer.Argument(help="A log in any of the known formats.", show_default=False, metavar="LOG")]


@app.command()
def show(
    log: Log,
    format: Format = None,
    inverted: Inverted = None,
    max_gap: MaxGap = None,
    json: output.Json = False,
    png: Png = None,
    picture: output.Picture = True,
) -> None:
    """Show the duration, nodes and changes of a capacity trace, with a picture.

    Examples:

    - `vbs capacity show traces/spot_example.json`
    - `vbs capacity show spot.json --png spot.png`
    """
    capacity = read_log(log, format, inverted, max_gap)
    nodes, prices = capacity.nodes, capacity.prices
    unavailable = float(capacity.lengths[nodes == 0].sum())
    price = None if prices is None else float(prices @ capacity.lengths) / capacity.end
    if json:
        facts = {"seconds": capacity.end, "min": int(nodes.min()), "max": int(nodes.max()), "mean": capacity.mean}
        facts |= {"changes": capacity.changes, "seconds_without_nodes": unavailable}
        output.print_json(facts | ({} if price is None else {"mean_price": price}))
    else:
        facts_of_rows = {
            "duration": f"{output.duration(capacity.end)} ({output.number(capacity.end)} s)",
            "nodes": f"{nodes.min():,} to {nodes.max():,}, mean {output.number(capacity.mean)}",
            "changes": f"{capacity.changes:,}" + _every(capacity),
            "without nodes": f"{unavailable / capacity.end:.1%} of the time",
        }
        output.print_facts(facts_of_rows | ({} if price is None else {"price": f"{price:.4g} a node-hour, on average"}))
    edges, unit = _edges(capacity)
    if picture and not json:
        output.draw(edges, nodes.astype(np.float64), unit, "nodes")
    if png is not None:
        output.save_picture(png, edges, nodes.astype(np.float64), unit, "nodes")


@app.command()
def convert(
    log: Log,
    out: Out,
    policy: Annotated[
        str | None, typer.Option(help="The global batch size: per-device:SAMPLES or constant:SAMPLES.")
    ] = None,
    samples_per_second: SamplesPerSecond = None,
    communication_seconds: CommunicationSeconds = 0.0,
    devices_per_node: Annotated[int, typer.Option(help="Devices of a node.", min=1)] = 1,
    microbatch: Annotated[int | None, typer.Option(help="Rows that a device computes at once.", min=1)] = None,
    max_updates: Annotated[int | None, typer.Option(help="Updates after which the training ends.", min=1)] = None,
    scale_time: ScaleTime = 1.0,
    start: Start = 0.0,
    stop: Stop = None,
    min_nodes: MinNodes = 0,
    max_nodes: MaxNodes = None,
    every: Annotated[float | None, duration_option(help="Read the nodes only once in so long.")] = None,
    format: Format = None,
    inverted: Inverted = None,
    max_gap: MaxGap = None,
) -> None:
    """Write the batch trace of a training under a capacity trace or, without --policy, the capacity as seconds,nodes.

    It is the training that no change interrupts: an update begins when the one before has ended, with the devices of
    that time. It takes the rows of the busiest device / samples-per-second, plus the seconds of the communication.

    Examples:

    - `vbs capacity convert spot.json --policy per-device:64 --samples-per-second 500 --out trace.csv`
    - `vbs capacity convert spot.json --max-nodes 8 --out capacity.csv`
    """
    capacity = read_log(log, format, inverted, max_gap).slice(start, stop).clip(min_nodes, max_nodes)
    capacity = (capacity if every is None else capacity.resampled(every)).scaled(scale_time).devices(devices_per_node)
    model = throughput(samples_per_second, communication_seconds)
    if policy is None:
        if model is not None or microbatch is not None or max_updates is not None:
            raise ValueError(
                "--policy must be given with the options of a training, got none; pass it, or leave them out"
            )
        capacity.to_csv(out)
        say(out, f"{capacity.changes:,} changes in {output.duration(capacity.end)}")
        return
    controller = policy_of(policy)
    if needs_noise(controller):
        remedy = "pass per-device:64, or use vbs simulate with --noise and --trace-out"
        raise value_error("--policy must need no gradient noise", policy, remedy)
    if model is None:
        raise ValueError("--policy needs the time of an update, got none; pass --samples-per-second")
    trace = to_batch_trace(capacity, controller, model, minibatch_size=microbatch, max_updates=max_updates)
    trace.to_csv(out)
    say(out, describe(trace))


@app.command()
def fetch(
    name: Annotated[
        str | None, typer.Argument(help="Name of a public trace; without one, all are listed.", metavar="NAME")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Write it as seconds,nodes.", metavar="FILE", callback=prepared),
    ] = None,
) -> None:
    """Download a public capacity trace, or list those that have a name here.

    Examples:

    - `vbs capacity fetch`
    - `vbs capacity fetch parcae/bert-hl --out capacity.csv`
    """
    if name is None:
        if out is not None:
            raise ValueError("--out needs the name of a public trace, got none; pass one of those that are listed")
        for trace in cluster.PUBLIC.values():
            facts = [f"license: {trace.license}", trace.citation, trace.address]
            typer.echo("\n    ".join([trace.name, *facts]))
        return
    capacity = cluster.fetch(name)
    if out is None:
        typer.echo(f"{name}: {capacity!r}")
    else:
        capacity.to_csv(out)
        say(out, f"{capacity.changes:,} changes in {output.duration(capacity.end)}")


@app.command()
def synthetic(
    out: Out,
    nodes: Annotated[int, NODES],
    mean_up: Annotated[float, MEAN_UP],
    mean_down: Annotated[float, MEAN_DOWN],
    duration: Annotated[float, DURATION],
    seed: Annotated[int, typer.Option(help="Seed of the random numbers.", min=0)] = 0,
    bulk_every: BulkEvery = None,
    bulk_fraction: BulkFraction = None,
) -> None:
    """Write a capacity trace of machines that come and go independently of one another or, if wanted, in bulk.

    Example: `vbs capacity synthetic --nodes 16 --mean-up 7200 --mean-down 900 --duration 86400 --out capacity.csv`
    """
    capacity = cluster.synthetic(
        nodes, mean_up, mean_down, duration, seed, bulk_every=bulk_every, bulk_fraction=bulk_fraction
    )
    capacity.to_csv(out)
    say(out, f"mean {output.number(capacity.mean)} nodes, {capacity.changes:,} changes")


def _edges(capacity: CapacityTrace) -> tuple[Any, str]:
    """Return the times of the rows and of the end, and their unit."""
    seconds = np.append(capacity.seconds, capacity.end)
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if capacity.end >= 3 * length:
            return seconds / length, unit
    return seconds, "seconds"


def _every(capacity: CapacityTrace) -> str:
    return f", one in {output.duration(capacity.end / capacity.changes)}" if capacity.changes else ""
