"""`vbs plan`: what a training will compute on any number of ranks, without running it."""

from __future__ import annotations

import re
from typing import Annotated, Any, get_args

import typer

from variable_batch_size.adaptive import Throughput
from variable_batch_size.cli import output
from variable_batch_size.cli.command import UsageError, command
from variable_batch_size.cli.dry_run import DryRun, Load, dry_run
from variable_batch_size.cli.options import FixedShape, TraceSource, UpdateTime, count_option, list_option, option
from variable_batch_size.data.plan.plan import Plan
from variable_batch_size.trace import BatchTrace, OnEnd

MAX_WORLD = 4096
MAX_ROWS = 2**20


def parse_worlds(text: str) -> range:
    """Return the numbers of ranks that a text such as 8 or 1-64 names.

    >>> [*parse_worlds("8")], [*parse_worlds("1-3")]
    ([8], [1, 2, 3])
    """
    match = re.fullmatch(r"([0-9]{1,9})(?:\s*-\s*([0-9]{1,9}))?", text, re.ASCII)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)  # (0, 0) is refused below
    if not 1 <= first <= last <= MAX_WORLD:
        requirement = f"they must be numbers of ranks from 1 to {MAX_WORLD}"
        raise typer.BadParameter(f"{requirement}, got {text!r:.60}; pass 8, or 1,2,8, or 1-4096")
    return range(first, last + 1)


@command
def plan(
    *,
    trace: TraceSource,
    dataset_size: Annotated[int, count_option("Samples of an epoch.", metavar="SAMPLES", show_default=False)],
    microbatch: Annotated[
        int, count_option("Rows that a rank computes at once.", most=MAX_ROWS, metavar="ROWS", show_default=False)
    ],
    world: Annotated[
        list[Any] | None,
        list_option(
            f"Numbers of ranks up to {MAX_WORLD}: 8, or 1,2,8, or 1-4096.",
            of=parse_worlds,
            metavar="RANKS",
            show_default="1",
        ),
    ] = None,
    epochs: Annotated[
        int | None, count_option("Number of epochs; by default, all of the trace.", metavar="EPOCHS")
    ] = None,
    max_updates: Annotated[
        int | None, count_option("Updates after which the training ends.", metavar="UPDATES")
    ] = None,
    max_samples: Annotated[int | None, count_option("Samples after which it ends.", metavar="SAMPLES")] = None,
    on_end: Annotated[
        OnEnd, option("What follows the last step of the trace.", metavar="|".join(get_args(OnEnd)))
    ] = "stop",
    drop_last: Annotated[bool, option("Drop the rest of an epoch that is shorter than a step.", "--drop-last")] = False,
    fixed_shape: FixedShape = False,
    noise: Annotated[
        bool, option("The gradient noise is measured (AdaScale), or the model has batch normalization.", "--noise")
    ] = False,
    time: UpdateTime,
    json: output.Json = False,
) -> None:
    """Print what a run will do: its epochs and updates, and what any number of ranks computes.

    Of an update, "rounds" are the microbatches of the busiest rank, "idle ranks" have none of their own (mean), "busy"
    is the share of the ranks' microbatches that is not waiting, and "repeated rows" are computed beyond the samples.

    Examples:

    - `vbs plan traces/test_trace.csv --dataset-size 50000 --world 8 --microbatch 32`
    - `vbs plan "0:256 1000:1024" --dataset-size 50000 --world 1-64 --microbatch 32 --epochs 10`
    """
    batches = BatchTrace.of(trace, dataset_size=dataset_size, drop_last=drop_last)
    batches = batches if batches.steps is None else batches.with_on_end(on_end)
    if batches.steps is None and epochs is None and max_updates is None and max_samples is None:
        requirement = "--epochs, --max-updates or --max-samples must be given for a trace that never ends"
        raise UsageError(f"{requirement}, got none; pass one")
    training = Plan(batches, dataset_size, microbatch, drop_last, fixed_shape, None, max_updates, max_samples)
    run = dry_run(training, epochs)
    model = time.throughput()
    world_sizes = sorted({size for sizes in world or [range(1, 2)] for size in sizes})
    loads = [run.load(size, spread=not noise) for size in world_sizes]
    if json:
        output.print_json({**_training_facts(run), "worlds": [_load_facts(run, load, model) for load in loads]})
    else:
        _print_plan(run, loads, model)


def _training_facts(run: DryRun) -> dict[str, Any]:
    """Return what a training will do on any number of ranks, as values of JSON."""
    return {
        "epochs": sum(num_alike for _, num_alike in run.epochs) - run.ends_early,  # complete ones
        "updates": int(run.updates.sum()),
        "samples": run.samples,
        "batch_sizes": {"min": int(run.sizes.min()), "max": int(run.sizes.max()), "different": len(run.sizes)},
        "ends_within_epoch": run.last.number if run.ends_early else None,
        "samples_of_last_epoch": run.last.samples,
        "updates_per_epoch": [{"updates": epoch.updates, "epochs": num_alike} for epoch, num_alike in run.epochs],
    }


def _load_facts(run: DryRun, load: Load, model: Throughput | None) -> dict[str, Any]:
    """Return what a world will compute, as values of JSON, with its seconds if their model is known."""
    world, updates = load.world_size, run.updates  # (sizes,)
    slots = world * int(updates @ load.rounds)  # microbatches that all ranks could compute in the same time
    facts = {
        "ranks": world,
        "microbatches": int(updates @ load.microbatches),
        "rounds": {"min": int(load.rounds.min()), "max": int(load.rounds.max()), "total": int(updates @ load.rounds)},
        "idle_ranks": {"max": int(load.idle.max()), "mean": float(updates @ load.idle / updates.sum())},
        "busy": int(updates @ load.microbatches) / slots,
        "repeated_rows": int(updates @ load.repeated),
        "shapes": list(load.shapes),
    }
    if model is not None:
        facts["seconds"] = float(updates @ model.of_rounds(load.busiest, load.rows, load.rounds, world))
    return facts


def _print_plan(run: DryRun, loads: list[Load], model: Throughput | None) -> None:
    """Print what a training does, and a table with a row for each number of ranks.

    Args:
        run: the updates of the training.
        loads: what each number of ranks computes.
        model: the seconds of an update; None: not known.
    """
    facts = _training_facts(run)
    per_epoch = [epochs["updates"] for epochs in facts["updates_per_epoch"]]
    share = run.last.samples / run.plan.dataset_size
    incomplete = f", then {share:.1%} of epoch {run.last.number}" if run.ends_early else ""
    output.print_facts(
        {
            "epochs": f"{facts['epochs']:,}{incomplete}",
            "updates": f"{facts['updates']:,}, per epoch {min(per_epoch):,} to {max(per_epoch):,}",
            "samples": f"{run.samples:,}",
            "batch size": f"{run.sizes.min():,} to {run.sizes.max():,}, {len(run.sizes):,} different ones",
        }
    )
    typer.echo()
    columns = ["ranks", "micro\nbatches", "rounds", "idle\nranks", "busy", "repeated\nrows", "shapes\n(rows)"]
    rows = []
    for load in loads:
        numbers = _load_facts(run, load, model)
        rounds, shapes = numbers["rounds"], numbers["shapes"]
        row = [
            f"{numbers['ranks']:,}",
            f"{numbers['microbatches']:,}",
            f"{rounds['min']:,}" + (f" to {rounds['max']:,}" if rounds["max"] > rounds["min"] else ""),
            f"{numbers['idle_ranks']['mean']:,.1f}",
            f"{numbers['busy']:.1%}",
            f"{numbers['repeated_rows']:,}",
            str(shapes[0]) if len(shapes) == 1 else f"{len(shapes)} ({shapes[0]} to {shapes[-1]})",
        ]
        rows.append(row if model is None else [*row, output.format_duration(numbers["seconds"])])
    output.print_table(columns if model is None else [*columns, "time"], rows)
