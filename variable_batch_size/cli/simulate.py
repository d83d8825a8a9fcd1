"""`vbs simulate`: time, cost and progress of a training under capacity traces, for several policies."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from variable_batch_size import cluster
from variable_batch_size._validation import FloatArray, check_bounds, check_number, value_error
from variable_batch_size.adaptive import Controller, Throughput
from variable_batch_size.adaptive.scalars import updates_in
from variable_batch_size.adaptive.table import FORMS
from variable_batch_size.cli import comparison, output
from variable_batch_size.cli.options import (
    DURATION,
    MEAN_DOWN,
    MEAN_UP,
    NODES,
    STDOUT,
    SYNTHETIC,
    BulkEvery,
    BulkFraction,
    CommunicationSeconds,
    Format,
    Inverted,
    MaxGap,
    MaxNodes,
    MinNodes,
    Png,
    SamplesPerSecond,
    ScaleTime,
    Start,
    Stop,
    duration_option,
    durations,
    each_positive,
    policy_of,
    positive,
    prepared,
    read_log,
    say,
)
from variable_batch_size.cli.options import throughput as throughput_of_rates
from variable_batch_size.cli.trace import describe
from variable_batch_size.cluster import CapacityTrace
from variable_batch_size.rules import RULES
from variable_batch_size.rules.base import Rule, needs_noise
from variable_batch_size.rules.selection import rules_for_groups
from variable_batch_size.simulation import NoiseCurve, Overheads, plot_runs, plot_sweep, sweep
from variable_batch_size.simulation import simulate as simulate_run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SEEDS = 20
EVERY = 100  # updates
OVERHEADS = "Overheads"  # the panel of --help


def simulate(
    policy: Annotated[list[str], typer.Option(help=f"{FORMS}; several are compared.", show_default=False)],
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
    format: Format = None,
    inverted: Inverted = None,
    max_gap: MaxGap = None,
    min_nodes: MinNodes = 0,
    max_nodes: MaxNodes = None,
    samples_per_second: SamplesPerSecond = None,
    communication_seconds: CommunicationSeconds = 0.0,
    throughput: Annotated[
        Path | None,
        typer.Option(
            help="scalars.csv of a training, whose seconds of updates take the place of these two.", metavar="FILE"
        ),
    ] = None,
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
            show_default=f"{EVERY} if a policy reads the noise, else at the start and with other devices",
        ),
    ] = None,
    bounds: Annotated[
        tuple[int, int] | None, typer.Option(help="Least and largest batch size.", metavar="LOW HIGH")
    ] = None,
    devices_per_node: Annotated[int, typer.Option(help="Devices of a node.", min=1)] = 1,
    microbatch: Annotated[int | None, typer.Option(help="Rows that a device computes at once.", min=1)] = None,
    fixed_shape: Annotated[
        bool, typer.Option("--fixed-shape", help="Each microbatch has exactly --microbatch rows, as with PyTorch/XLA.")
    ] = False,
    dataset_size: Annotated[
        int | None, typer.Option(help="Samples of an epoch; by default there are none.", min=1)
    ] = None,
    restart: Annotated[
        float | None,
        duration_option(help="Time of a restart.", show_default="0", rich_help_panel=OVERHEADS),
    ] = None,
    save: Annotated[
        float | None,
        duration_option(help="Time of writing a checkpoint.", show_default="0", rich_help_panel=OVERHEADS),
    ] = None,
    save_every: Annotated[
        Any,  # list[float] | None, which typer would take as an option that is given several times
        duration_option(
            help="Time between two checkpoints; several, separated by commas, are compared.",
            parser=durations,
            show_default="only before a stop",
            rich_help_panel=OVERHEADS,
            callback=each_positive,
        ),
    ] = None,
    notice: Annotated[
        float | None,
        duration_option(
            help="Warning before nodes leave, in which the update under way and a save have to end; 0: none.",
            show_default="0",
            rich_help_panel=OVERHEADS,
        ),
    ] = None,
    least_nodes: Annotated[
        int | None,
        typer.Option(
            help="Least nodes with which the training runs.", min=1, show_default="1", rich_help_panel=OVERHEADS
        ),
    ] = None,
    grow_every: Annotated[
        float | None,
        duration_option(
            help="Least time between a restart and one with more nodes.",
            show_default="0",
            rich_help_panel=OVERHEADS,
        ),
    ] = None,
    price: Annotated[
        float | None, typer.Option(help="Price of a node-hour; by default, that of the log.", min=0)
    ] = None,
    on_demand: Annotated[
        float | None, typer.Option(help="Price on demand, for the cost of the nodes that made progress.", min=0)
    ] = None,
    max_progress: Annotated[
        float | None, typer.Option(help="Progress at which the training ends.", callback=positive)
    ] = None,
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

    The time of an update is that of --samples-per-second and --communication-seconds or, with --throughput, that of a
    training. With any of the overheads, nodes that leave interrupt the training, which restarts from its last
    checkpoint; without them nothing does. Progress is counted in updates at --ref-batchsize, by the rule and, for
    adascale, the noise: it is a model, and no loss is simulated. The policies noise-scale, norm-test and goodput read
    the noise, too, and start from --ref-batchsize.

    With several traces (logs, or the options of `vbs capacity synthetic`), it prints the mean over the traces and its
    95% t interval: rates and shares of time, in which each trace counts once, however long it is. Policies are compared
    by their differences under each trace.

    Examples:

    - `vbs simulate traces/spot_example.json --policy per-device:64 --policy constant:512 --samples-per-second 150
      --ref-batchsize 256 --restart 90 --save 20 --save-every 1800 --price 0.9`
    - `vbs simulate --nodes 16 --mean-up 7200 --mean-down 900 --duration 86400 --seeds 20 --policy per-device:64
      --policy constant:1024 --samples-per-second 150 --ref-batchsize 256 --restart 90`
    """
    reading = format, inverted, max_gap
    if not logs and reading != (None, None, None):
        raise ValueError("--format, --inverted and --max-gap are for a LOG, got none; pass one, or leave them out")
    traces = _read(logs or [], *reading) | _synthetic(
        seeds, nodes, mean_up, mean_down, duration, bulk_every, bulk_fraction
    )
    if not traces:
        raise ValueError("LOG or --nodes must give a capacity trace, got neither; pass one of them")
    _check_outputs(json, trace_out, len(policy) * len(save_every or [None]), len(traces))
    traces = {
        name: capacity.slice(start, stop).clip(min_nodes, max_nodes).scaled(scale_time)
        for name, capacity in traces.items()
    }
    policies = {name: policy_of(name) for name in policy}
    rule = _rule(rule, noise, policies)
    model, fitted = _throughput(
        samples_per_second, communication_seconds, throughput, microbatch if fixed_shape else None
    )
    intervals = save_every or [None]
    given = {"restart": restart, "save": save, "notice": notice, "least_nodes": least_nodes, "grow_every": grow_every}
    runs = {
        name if len(intervals) == 1 else f"{name} --save-every {interval:g}": (
            controller,
            _overheads(scale_time, **given, save_every=interval),
        )
        for name, controller in policies.items()
        for interval in intervals
    }
    low, high = (1, ref_batchsize) if bounds is None else check_bounds(bounds, "--bounds")
    arguments: dict[str, Any] = {
        "throughput": model,
        "ref_batchsize": ref_batchsize,
        "rule": rule,
        "noise": None if noise is None else NoiseCurve.from_csv(noise),
        "start": min(max(ref_batchsize, low), high),
        "bounds": bounds,
        "every": EVERY if every is None and any(map(needs_noise, policies.values())) else every,
        "minibatch_size": microbatch,
        "fixed_shape": fixed_shape,
        "dataset_size": dataset_size,
        "devices_per_node": devices_per_node,
        "overheads": next(iter(runs.values()))[1],
        "prices": None if price is None else check_number(price, "--price", "pass the price of a node-hour"),
        "on_demand": on_demand,
        "until": max_progress,
    }
    with redirect_stdout(sys.stderr if trace_out == STDOUT else sys.stdout):
        draw, farthest = _compare(traces, runs, arguments, json, trace_out)
    if not json:
        for note in comparison.notes(arguments, fitted, traces, farthest, several=len(policies) > 1):
            typer.echo(note, err=True)
    if png is not None:
        draw().savefig(png, dpi=120)


def _check_outputs(json: bool, trace_out: Path | None, policies: int, traces: int) -> None:
    """Raise a ValueError if the options of what is written do not fit."""
    if trace_out is not None and (policies, traces) != (1, 1):
        found = f"{policies} and {traces}"
        raise ValueError(f"--trace-out is for one policy and one capacity trace, got {found}; pass one of each")
    if json and trace_out == STDOUT:
        raise ValueError("--trace-out must be a file with --json, which is standard output, got -; pass a name")


def _rule(name: str | None, noise: Path | None, policies: Mapping[str, Controller]) -> str:
    """Return the name of the rule; raise a ValueError if it or a policy needs noise that is not there, or none does."""
    name = name or ("linear" if noise is None else "adascale")
    rule = _rule_of(name)
    if rule is None:
        named = ", ".join(known for known in RULES if _rule_of(known))
        raise value_error(f"--rule must be one of {named}", name, "pass one of these, or call simulate in Python")
    readers = [f"--rule {name}"] if needs_noise(rule) else []
    readers += [f"--policy {policy}" for policy, controller in policies.items() if needs_noise(controller)]
    if noise is None and readers:
        remedy = "pass --noise FILE, the scalars.csv of a training that measured it"
        raise value_error(f"{readers[0]} needs the gradient noise", "no --noise", remedy)
    if noise is not None and not readers:
        raise ValueError(f"--noise is for a rule that reads the noise, got --rule {name}; pass --rule adascale")
    return name


def _rule_of(name: str) -> Rule | None:
    """Return the rule of a name; None if there is none, or if it takes arguments."""
    try:
        return rules_for_groups(name, 1)[0]
    except ValueError:
        return None


def _throughput(
    samples_per_second: float | None, communication_seconds: float, scalars: Path | None, rows: int | None
) -> tuple[Throughput, FloatArray | None]:
    """Return the time of an update and, if it is fitted to measured updates, these, (updates, 4).

    `rows` are those of each microbatch; None: of each batch, as few as its microbatches can have.
    """
    if scalars is None:
        model = throughput_of_rates(samples_per_second, communication_seconds)
        if model is None:
            requirement = "--samples-per-second or --throughput must give the time of an update"
            raise value_error(requirement, "neither", "pass one of them")
        return model, None
    if samples_per_second is not None or communication_seconds:
        option = "--communication-seconds" if samples_per_second is None else "--samples-per-second"
        raise ValueError(f"--throughput takes the place of {option}, got both; leave out one of them")
    measured = updates_in(scalars, rows)
    return Throughput.fit(measured), measured


def _overheads(scale_time: float, **given: float | None) -> Overheads | None:
    """Return what interruptions cost; None, which is that there are none, without any of the options."""
    values: dict[str, Any] = {
        name: value if name == "least_nodes" else scale_time * value
        for name, value in given.items()
        if value is not None
    }
    return Overheads(**values) if values else None


def _compare(
    traces: Mapping[str, CapacityTrace],
    policies: Mapping[str, tuple[Controller, Overheads | None]],
    arguments: Mapping[str, Any],
    json: bool,
    trace_out: Path | None,
) -> tuple[Callable[[], Figure], float]:
    """Simulate and print; return what draws it, and the largest progress."""
    if len(traces) > 1:
        import pandas as pd

        table = pd.concat(
            sweep(traces, {name: controller}, **{**arguments, "overheads": costs})
            for name, (controller, costs) in policies.items()
        )
        comparison.print_sweep(table, json)
        return partial(plot_sweep, table), float(table["progress"].max())
    ((name, capacity),) = traces.items()
    title = ": ".join([Path(name).name, *(policies if len(policies) == 1 else [])])
    runs = {
        name: simulate_run(capacity, controller, **{**arguments, "overheads": costs})
        for name, (controller, costs) in policies.items()
    }
    comparison.print_runs(runs, json)
    if trace_out is not None:
        (run,) = runs.values()
        run.trace.to_csv(trace_out)
        say(trace_out, describe(run.trace))
    return partial(plot_runs, runs, title), max(run.summary["progress"] for run in runs.values())


def _read(
    logs: list[Path], format: str | None, inverted: int | None, max_gap: float | None
) -> dict[str, CapacityTrace]:
    """Return the capacity traces of files by their paths."""
    twice = [str(path) for path, times in Counter(logs).items() if times > 1]
    if twice:
        raise ValueError(f"LOG must be given once for each file, got {twice[0]} twice; remove one")
    return {str(path): read_log(path, format, inverted, max_gap) for path in logs}


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
        raise ValueError(f"{names} must be given together, got no {missing}; pass all of them, or none")
    every, fraction = bulks
    return {
        f"seed {seed}": cluster.synthetic(
            nodes, mean_up, mean_down, duration, seed, bulk_every=every, bulk_fraction=fraction
        )
        for seed in range(SEEDS if seeds is None else seeds)
    }
