"""`vbs simulate`: time, cost and progress of a training under capacity traces, for several policies."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from variable_batch_size._validation import FloatArray
from variable_batch_size.adaptive import Controller, Throughput
from variable_batch_size.adaptive.scalars import updates_in
from variable_batch_size.adaptive.table import FORMS
from variable_batch_size.cli import comparison, options, output
from variable_batch_size.cli.command import UsageError, command
from variable_batch_size.cli.options import count_option, option
from variable_batch_size.cli.trace import describe
from variable_batch_size.lab.cluster.capacity_trace import CapacityTrace
from variable_batch_size.lab.simulation import NoiseCurve, Overheads, Run, plot_runs, sweep
from variable_batch_size.lab.simulation import simulate as simulate_run
from variable_batch_size.rules import RULES
from variable_batch_size.rules.base import Rule, needs_noise
from variable_batch_size.rules.selection import rule_named

SEEDS = 20
EVERY = 100  # updates


@command
def simulate(
    *,
    policy: Annotated[
        list[str], options.list_option(f"{FORMS}; several are compared.", metavar="POLICIES", show_default=False)
    ],
    ref_batchsize: Annotated[
        int, count_option("Batch size at which progress is counted.", metavar="SAMPLES", show_default=False)
    ],
    logs: Annotated[
        list[Path] | None, typer.Argument(help="Logs in any of the known formats.", show_default=False, metavar="LOG")
    ] = None,
    reading: options.Reading,
    window: options.Window,
    machines: options.Machines,
    seeds: Annotated[
        int | None,
        count_option(
            "Number of them, with the seeds 0, 1, ...",
            metavar="SEEDS",
            show_default=str(SEEDS),
            rich_help_panel=options.SYNTHETIC,
        ),
    ] = None,
    time: options.UpdateTime,
    throughput: Annotated[
        Path | None,
        option("scalars.csv of a run, whose measured seconds of updates replace these two.", metavar="FILE"),
    ] = None,
    rule: Annotated[
        str | None,
        option(
            "Learning-rate rule, which defines the progress.",
            metavar="RULE",
            show_default="adascale with --noise, else linear",
        ),
    ] = None,
    noise: options.NoiseFile = None,
    every: Annotated[
        int | None,
        options.every_option(
            show_default=f"{EVERY} if a policy reads the noise, else at the start and with other devices"
        ),
    ] = None,
    bounds: options.Bounds = None,
    devices_per_node: options.DevicesPerNode = 1,
    microbatch: options.Microbatch = None,
    fixed_shape: options.FixedShape = False,
    dataset_size: Annotated[
        int | None, count_option("Samples of an epoch; by default there are none.", metavar="SAMPLES")
    ] = None,
    costs: options.Costs,
    price: Annotated[float | None, options.price_option("Price of a node-hour; by default, that of the log.")] = None,
    on_demand: Annotated[
        float | None, options.price_option("Price on demand, for the cost of the nodes that made progress.")
    ] = None,
    currency: Annotated[str | None, option("Currency of the prices, to be shown with costs.", metavar="NAME")] = None,
    max_progress: Annotated[
        float | None,
        option("Progress at which the training ends.", callback=options.check_positive_option, metavar="UPDATES"),
    ] = None,
    json: output.Json = False,
    trace_out: Annotated[
        Path | None, options.out_option("Write the batch trace of the only policy under the only capacity trace.")
    ] = None,
    png: options.Png = None,
) -> None:
    """Simulate a run under capacity traces: time, cost and progress of each policy.

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
    capacities = _read_traces(logs or [], reading, machines, seeds, scaled=window.scale_time != 1)
    traces = {name: window.cut(trace) for name, trace in capacities.items()}
    policies = {name: options.read_policy(name) for name in policy}
    runs = {
        f"{name}{label}": (controller, overheads)
        for name, controller in policies.items()
        for label, overheads in costs.overheads(window.scale_time).items()
    }
    _check_outputs(json, trace_out, png, len(runs), len(traces))
    rule = _choose_rule(rule, noise, policies)
    model, measured = _read_throughput(time, throughput, microbatch if fixed_shape else None)
    low, high = bounds or (1, ref_batchsize)
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
        "prices": price,
        "on_demand": on_demand,
        "until": max_progress,
    }
    with redirect_stdout(sys.stderr if trace_out == options.STDOUT else sys.stdout):
        shown, farthest = _simulate_and_print(traces, runs, arguments, json, currency, trace_out)
    if not json:
        overheads = next(iter(runs.values()))[1]
        several = len(policies) > 1
        for remark in comparison.collect_remarks(arguments, overheads, measured, traces, farthest, several):
            typer.echo(remark, err=True)
    if png is not None:
        title = ": ".join([Path(next(iter(traces))).name, *(shown if len(shown) == 1 else [])])
        output.write(png, partial(plot_runs(shown, title).savefig, dpi=120))


def _read_traces(
    logs: list[Path], reading: options.Reading, machines: options.Machines, seeds: int | None, *, scaled: bool
) -> dict[str, CapacityTrace]:
    """Return the capacity traces to simulate by name: those of files by their paths, random ones by their seeds."""
    if not logs and reading != options.Reading():
        requirement = "--format, --inverted, --max-gap and --cores-per-node are for a LOG"
        raise UsageError(f"{requirement}, got none; pass one, or leave them out")
    repeated = [str(path) for path, count in Counter(logs).items() if count > 1]
    if repeated:
        raise UsageError(f"LOG must be given once for each file, got {repeated[0]} twice; remove one")
    traces = {str(path): reading.read(path, scaled=scaled) for path in logs}
    if seeds is not None or machines != options.Machines():
        traces |= {f"seed {seed}": machines.trace(seed) for seed in range(SEEDS if seeds is None else seeds)}
    if not traces:
        raise UsageError("LOG or --nodes must give a capacity trace, got neither; pass one of them")
    return traces


def _check_outputs(json: bool, trace_out: Path | None, png: Path | None, policies: int, traces: int) -> None:
    """Raise UsageError if an output does not suit the numbers of policies and traces, or two are standard output.

    Args:
        json: whether JSON is printed.
        trace_out: file for the batch trace of the only run; None: none.
        png: file for a picture; None: none.
        policies: number of policies.
        traces: number of capacity traces.
    """
    if trace_out is not None and (policies, traces) != (1, 1):
        found = f"{policies} and {traces}"
        raise UsageError(f"--trace-out is for one policy and one capacity trace, got {found}; pass one of each")
    if png is not None and traces > 1:
        raise UsageError(f"--png is for one capacity trace, got {traces}; pass one LOG, or draw the numbers of --json")
    if json and trace_out == options.STDOUT:
        raise UsageError("--trace-out must be a file with --json, which is standard output, got -; pass a name")


def _choose_rule(name: str | None, noise: Path | None, policies: Mapping[str, Controller]) -> str:
    """Return the name of the learning-rate rule, and raise UsageError if it is unknown, or does not suit --noise.

    Noise has to be given if the rule or a policy reads it, and only then.
    """
    name = name or ("linear" if noise is None else "adascale")
    rule = _find_rule(name)
    if rule is None:
        named = ", ".join(known for known in RULES if _find_rule(known))
        raise UsageError(f"--rule must be one of {named}, got {name}; pass one of these, or call simulate in Python")
    readers = [f"--rule {name}"] if needs_noise(rule) else []
    readers += [f"--policy {policy}" for policy, controller in policies.items() if needs_noise(controller)]
    if noise is None and readers:
        remedy = "pass --noise FILE, the scalars.csv of a run that measured it"
        raise UsageError(f"{readers[0]} needs the gradient noise, got no --noise; {remedy}")
    if noise is not None and not readers:
        raise UsageError(f"--noise is for a rule that reads the noise, got --rule {name}; pass --rule adascale")
    return name


def _find_rule(name: str) -> Rule | None:
    """Return the rule of a name. None if there is none, or if it lacks its number, such as the 0.75 of power:0.75."""
    try:
        return rule_named(name)
    except ValueError:
        return None


def _read_throughput(
    time: options.UpdateTime, scalars: Path | None, rows: int | None
) -> tuple[Throughput, FloatArray | None]:
    """Return a model of the seconds of an update and, if it is fitted to measured updates, these, (updates, 4).

    Args:
        time: the options that give the time directly.
        scalars: path of the `scalars.csv` of measured updates, to which the model is fitted instead.
        rows: rows of each microbatch. Default: of each batch, as few as its microbatches can have.
    """
    if scalars is None:
        model = time.throughput()
        if model is None:
            requirement = "--samples-per-second or --throughput must give the time of an update"
            raise UsageError(f"{requirement}, got neither; pass one of them")
        return model, None
    if time != options.UpdateTime():
        option = "--communication-seconds" if time.samples_per_second is None else "--samples-per-second"
        raise UsageError(f"--throughput takes the place of {option}, got both; leave out one of them")
    measured = updates_in(scalars, rows)
    return Throughput.fit(measured), measured


def _simulate_and_print(
    traces: Mapping[str, CapacityTrace],
    policies: Mapping[str, tuple[Controller, Overheads | None]],
    arguments: Mapping[str, Any],
    json: bool,
    currency: str | None,
    trace_out: Path | None,
) -> tuple[dict[str, Run], float]:
    """Simulate each policy under each capacity trace, and print the results.

    Args:
        traces: the capacity traces by name.
        policies: by name: the controller that chooses batch sizes, and the costs of restarts and saves.
        arguments: further arguments of `simulate`.
        json: whether to print JSON.
        currency: currency of the costs; None: not known.
        trace_out: file for the batch trace of the only run; None: none.

    Returns:
        The runs by policy, if there is one capacity trace, and the largest progress, in reference updates.
    """
    if len(traces) > 1:
        import pandas as pd

        table = pd.concat(
            sweep(traces, {name: controller}, **{**arguments, "overheads": overheads})
            for name, (controller, overheads) in policies.items()
        )
        comparison.print_sweep(table, json, currency)
        return {}, float(table["progress"].max())
    (capacity,) = traces.values()
    runs = {
        name: simulate_run(capacity, controller, **{**arguments, "overheads": overheads})
        for name, (controller, overheads) in policies.items()
    }
    comparison.print_runs(runs, json, currency)
    if trace_out is not None:
        (run,) = runs.values()
        output.write(trace_out, run.trace.to_csv, describe(run.trace))
    return runs, max(run.summary["progress"] for run in runs.values())
