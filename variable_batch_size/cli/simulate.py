"""`vbs simulate`: time, cost and progress of a training under capacity traces, for several policies."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from variable_batch_size import cluster
from variable_batch_size._validation import check_bounds
from variable_batch_size.adaptive import Throughput
from variable_batch_size.adaptive.table import FORMS, parse_policy
from variable_batch_size.cli import comparison, output
from variable_batch_size.cli.options import (
    DURATION,
    MEAN_DOWN,
    MEAN_UP,
    NODES,
    SYNTHETIC,
    BulkEvery,
    BulkFraction,
    CommunicationSeconds,
    Png,
    ScaleTime,
    Start,
    Stop,
    prepared,
    read_log,
    say,
)
from variable_batch_size.cli.trace import describe
from variable_batch_size.cluster import CapacityTrace
from variable_batch_size.rules.base import needs_noise
from variable_batch_size.rules.selection import rules_for_groups
from variable_batch_size.simulation import NoiseCurve, Overheads, plot_runs, plot_sweep, sweep
from variable_batch_size.simulation import simulate as simulate_run

SEEDS = 20
EVERY = 100  # updates


def simulate(
    policy: Annotated[list[str], typer.Option(help=f"{FORMS}; several are compared.", show_default=False)],
    samples_per_second: Annotated[
        float, typer.Option(help="Samples that a device computes in a second.", show_default=False)
    ],
    ref_batchsize: Annotated[
        int, typer.Option(help="Batch size at which progress is counted.", min=1, show_default=False)
    ],
    logs: Annotated[
        list[Path] | None,
        typer.Argument(help="Logs in any of the known formats.", show_default=False, metavar="LOG"),
    ] = None,
    nodes: Annotated[int | None, NODES] = None,
    mean_up: Annotated[float | None, MEAN_UP] = None,
    mean_down: Annotated[float | None, MEAN_DOWN] = None,
    duration: Annotated[float | None, DURATION] = None,
    bulk_every: BulkEvery = None,
    bulk_fraction: BulkFraction = None,
    start: Start = 0.0,
    stop: Stop = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            help="Number of them, with the seeds 0, 1, ...", min=1, show_default=str(SEEDS), rich_help_panel=SYNTHETIC
        ),
    ] = None,
    scale_time: ScaleTime = 1.0,
    communication_seconds: CommunicationSeconds = 0.0,
    rule: Annotated[
        str | None,
        typer.Option(
            help="Learning-rate rule, which defines the progress.", show_default="adascale with --noise, else linear"
        ),
    ] = None,
    noise: Annotated[
        Path | None,
        typer.Option(help="scalars.csv of a training that measured the gradient noise, for rules and policies."),
    ] = None,
    every: Annotated[
        int | None,
        typer.Option(
            help="Updates between two questions to a policy.",
            min=1,
            show_default=f"{EVERY} if a policy reads the noise, else it is asked at starts",
        ),
    ] = None,
    bounds: Annotated[
        tuple[int, int] | None, typer.Option(help="Least and largest batch size.", metavar="LOW HIGH")
    ] = None,
    devices_per_node: Annotated[int, typer.Option(help="Devices of a node.", min=1)] = 1,
    microbatch: Annotated[int | None, typer.Option(help="Rows that a device computes at once.", min=1)] = None,
    dataset_size: Annotated[
        int | None, typer.Option(help="Samples of an epoch; by default there are none.", min=1)
    ] = None,
    restart: Annotated[float, typer.Option(help="Seconds of a restart.", min=0)] = 0.0,
    save: Annotated[float, typer.Option(help="Seconds of writing a checkpoint.", min=0)] = 0.0,
    save_every: Annotated[
        float | None, typer.Option(help="Seconds between two checkpoints.", show_default="only before a stop")
    ] = None,
    notice: Annotated[
        float,
        typer.Option(
            help="Seconds of warning before nodes leave, in which the update under way and a save have to end; 0: they "
            "are killed.",
            min=0,
        ),
    ] = 0.0,
    least_nodes: Annotated[int, typer.Option(help="Least nodes with which the training runs.", min=1)] = 1,
    grow_every: Annotated[
        float, typer.Option(help="Least seconds between a restart and one with more nodes.", min=0)
    ] = 0.0,
    price: Annotated[
        float | None, typer.Option(help="Price of a node-hour; by default, that of the log.", min=0)
    ] = None,
    on_demand: Annotated[
        float | None, typer.Option(help="Price on demand, for the cost of the nodes that made progress.", min=0)
    ] = None,
    max_progress: Annotated[float | None, typer.Option(help="Progress at which the training ends.")] = None,
    json: output.Json = False,
    trace_out: Annotated[
        Path | None,
        typer.Option(
            help="Write the batch trace of the only policy under the only capacity trace.",
            metavar="FILE",
            callback=prepared,
        ),
    ] = None,
    png: Png = None,
) -> None:
    """Simulate a training under capacity traces: time, cost and progress of each policy.

    Nodes that leave interrupt the training, which restarts from its last checkpoint. Progress is counted in updates at
    --ref-batchsize, by the rule and, for adascale, the noise: it is a model, and no loss is simulated. The policies
    noise-scale, norm-test and goodput read the noise, too, and start from --ref-batchsize.

    With several traces (logs, or the options of `vbs capacity synthetic`), it prints the mean over the traces and its
    95% t interval: rates and shares of time, in which each trace counts once, however long it is. Policies are compared
    by their differences under each trace.

    Examples:

    - `vbs simulate traces/spot_example.json --policy per-device:64 --policy constant:512 --samples-per-second 150
      --ref-batchsize 256 --restart 90 --save 20 --save-every 1800 --price 0.9`
    - `vbs simulate --nodes 16 --mean-up 7200 --mean-down 900 --duration 86400 --seeds 20 --policy per-device:64
      --policy constant:1024 --samples-per-second 150 --ref-batchsize 256 --restart 90`
    """
    traces = _read(logs or []) | _synthetic(seeds, nodes, mean_up, mean_down, duration, bulk_every, bulk_fraction)
    if not traces:
        raise ValueError("a simulation needs a capacity trace, got none; pass a LOG, or --nodes with its options")
    if trace_out is not None and (len(traces), len(policy)) != (1, 1):
        found = f"{len(policy)} and {len(traces)}"
        raise ValueError(f"--trace-out is for one policy and one capacity trace, got {found}; pass one of each")
    traces = {name: capacity.slice(start, stop).scaled(scale_time) for name, capacity in traces.items()}
    rule = rule or ("linear" if noise is None else "adascale")
    policies = {name: parse_policy(name) for name in policy}
    reads_noise = any(map(needs_noise, policies.values()))
    if noise is not None and not (reads_noise or needs_noise(rules_for_groups(rule, 1)[0])):
        raise ValueError(f"--noise is for a rule that reads the noise, got --rule {rule}; pass --rule adascale")
    if every is None and reads_noise:
        every = EVERY
    low, high = (1, ref_batchsize) if bounds is None else check_bounds(bounds)
    curve = None if noise is None else NoiseCurve.from_csv(noise)
    arguments: dict[str, Any] = {
        "throughput": Throughput.simple(samples_per_second, communication_seconds),
        "ref_batchsize": ref_batchsize,
        "rule": rule,
        "noise": curve,
        "start": min(max(ref_batchsize, low), high),
        "bounds": bounds,
        "every": every,
        "minibatch_size": microbatch,
        "dataset_size": dataset_size,
        "devices_per_node": devices_per_node,
        "overheads": Overheads(
            scale_time * restart,
            None if save_every is None else scale_time * save_every,
            scale_time * save,
            notice=scale_time * notice,
            least_nodes=least_nodes,
            grow_every=scale_time * grow_every,
        ),
        "prices": price,
        "on_demand": on_demand,
        "until": max_progress,
    }
    if png is not None:
        output.check_png(png)
    if json and trace_out == Path("/dev/stdout"):
        raise ValueError("--trace-out must be a file with --json, which is standard output, got -; pass a name")
    if len(traces) > 1:
        table = sweep(traces, policies, **arguments)
        farthest = float(table["progress"].max())
        comparison.print_sweep(table, json)
        draw = partial(plot_sweep, table)
    else:
        (capacity,) = traces.values()
        runs = {name: simulate_run(capacity, controller, **arguments) for name, controller in policies.items()}
        comparison.print_runs(runs, json)
        farthest = max(run.summary["progress"] for run in runs.values())
        draw = partial(plot_runs, runs)
        if trace_out is not None:
            trace = runs[policy[0]].trace
            trace.to_csv(trace_out)
            say(trace_out, describe(trace))
    notes = []
    if curve is not None and len(curve.progress) > 1 and farthest > curve.progress[-1]:
        last = f"{curve.progress[-1]:.6g} updates"
        notes.append(f"{noise} ends at a progress of {last}; its last row holds up to {farthest:.6g}.")
    if save_every is None and not notice:
        notes.append("No --save-every and no --notice: a preemption loses everything since the last stop.")
    if noise is None and len(policies) > 1:
        notes.append(f"Progress by the rule {rule}, whatever the noise; --noise FILE takes AdaScale's gain.")
    if notes and not json:
        typer.echo("\n".join(notes), err=True)
    if png is not None:
        draw().savefig(png, dpi=120)


def _read(logs: list[Path]) -> dict[str, CapacityTrace]:
    """Return the capacity traces of files by their paths."""
    twice = [str(path) for path, times in Counter(logs).items() if times > 1]
    if twice:
        raise ValueError(f"each LOG must be given once, got {twice[0]} twice; remove one")
    return {str(path): read_log(path) for path in logs}


def _synthetic(
    seeds: int | None,
    nodes: int | None,
    mean_up: float | None,
    mean_down: float | None,
    duration: float | None,
    *bulks: float | None,
) -> dict[str, CapacityTrace]:
    """Return random capacity traces by their seeds; none if no option is given."""
    if all(value is None for value in (seeds, nodes, mean_up, mean_down, duration, *bulks)):
        return {}
    if nodes is None or mean_up is None or mean_down is None or duration is None:
        needed = {"--nodes": nodes, "--mean-up": mean_up, "--mean-down": mean_down, "--duration": duration}
        missing = next(name for name, value in needed.items() if value is None)
        names = "--nodes, --mean-up, --mean-down and --duration"
        raise ValueError(f"synthetic traces need {names}, got no {missing}; pass all of them, or none")
    every, fraction = bulks
    return {
        f"seed {seed}": cluster.synthetic(
            nodes, mean_up, mean_down, duration, seed, bulk_every=every, bulk_fraction=fraction
        )
        for seed in range(SEEDS if seeds is None else seeds)
    }
