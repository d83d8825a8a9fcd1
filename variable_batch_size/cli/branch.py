"""`vbs branch`: from one checkpoint, which rule trains best, or up to which batch size?"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from variable_batch_size.cli import options, output
from variable_batch_size.cli.command import UsageError, command, usage
from variable_batch_size.cli.options import option

if TYPE_CHECKING:
    from variable_batch_size.evaluation.branching.branch import Branches
    from variable_batch_size.evaluation.branching.critical import BatchSizes

critical_option = partial(option, rich_help_panel="The critical batch size")


@command
def branch(
    *,
    task: Annotated[str, options.TASK],
    batch_sizes: Annotated[
        list[int],
        option(
            "Samples of an update; with --critical several, the smallest first.", "--batch-size", show_default=False
        ),
    ],
    checkpoint: Annotated[
        Path | None,
        option(
            "Folder of a vbs.Checkpoint, which is only read; without it branches begin with the untrained model.",
            metavar="FOLDER",
        ),
    ] = None,
    candidates: Annotated[
        list[str] | None,
        option("A rule, and a factor on the learning rate: `root`, `root*0.5`, `power:0.75*2`.", "--candidate"),
    ] = None,
    updates: Annotated[int | None, option("Updates of each branch.", min=2)] = None,
    critical: Annotated[bool, critical_option("Find the critical batch size.", "--critical")] = False,
    rule: Annotated[str, critical_option("root for Adam, linear for SGD.")] = "root",
    samples: Annotated[int | None, critical_option("Samples of each branch.", min=1)] = None,
    tolerance: Annotated[float, critical_option("By how much the loss may be larger.", min=0)] = 0.01,
    orders: Annotated[int, option("Orders of samples that each branch trains on.", min=1)] = 1,
    last: Annotated[float, option("Share of the updates that are compared, the last ones.")] = 0.5,
    decay: Annotated[
        float, option("Share of the updates, the last ones, in which the learning rate falls to 0.")
    ] = 0.0,
    by: Annotated[str, option("What is compared: the losses of training, or of the evaluation.")] = "training",
    total: Annotated[int | None, options.of_task_option("Samples of a full training, for the schedule.", min=1)] = None,
    hold_lr: Annotated[bool, options.of_task_option("Keep the learning rate, without schedule.", "--hold-lr")] = False,
    of_task: options.OfTask,
    seed: Annotated[int | None, options.of_task_option("Seed, without a checkpoint.", min=0, show_default="0")] = None,
    threads: Annotated[int, option("Threads of torch.", min=1)] = 1,
    json: output.Json = False,
    out: Annotated[Path | None, options.out_option("Write everything to this file, as JSON.", "--out", "-o")] = None,
    dry_run: Annotated[bool, option("Print the cost, without training.", "--dry-run")] = False,
) -> None:
    """Train candidates from one checkpoint on the very same samples, and rank them by their training losses.

    It first prints what that costs. With --critical it trains the same samples in larger and larger batches, and finds
    the largest one of which all smaller ones lose no more than a tolerance.

    Examples:

    - `vbs branch mnist-cnn --checkpoint runs/a --batch-size 512 --candidate root --candidate "linear*0.5" --updates 60`
    - `vbs branch char-gpt --critical --batch-size 16 --batch-size 32 --batch-size 64 --samples 2048`
    """
    from variable_batch_size.evaluation.branching.start import Start

    branches: Branches | BatchSizes
    try:
        start = Start.read(checkpoint, task, seed=seed, samples=total, schedule=not hold_lr, **of_task.arguments())
    except ValueError as error:
        raise ValueError(re.sub("^path(?= must)", "--checkpoint", str(error))) from error
    others = {"orders": orders, "last": last, "threads": threads}
    if critical:
        if (decay, by) != (0.0, "training"):
            raise UsageError("--decay and --by must be left out with --critical; omit them")
        branches = _critical(start, batch_sizes, candidates, updates, rule, samples, tolerance, others)
    else:
        branches = _compared(start, batch_sizes, candidates, updates, samples, others | {"decay": decay, "by": by})
    branches.check()
    typer.echo(f"cost: {branches.cost}", err=json)
    if dry_run:
        return
    found = branches.run(progress=True)
    if json:
        output.print_json(found.as_json())
    else:
        output.print_table(*found.table())
        typer.echo(found.conclusion())
    if out is not None:
        output.write(out, lambda path: output.save_json(path, found.as_json()))


def _compared(
    start: Any, sizes: list[int], texts: list[str] | None, updates: int | None, samples: int | None, others: Any
) -> Branches:
    from variable_batch_size.evaluation.branching.branch import Branches
    from variable_batch_size.evaluation.branching.candidate import Candidate

    if len(sizes) > 1:
        raise UsageError(f"--batch-size must be given once, got {len(sizes)} of them; pass one, or --critical")
    if samples is not None:
        raise UsageError(f"--samples needs --critical, got {samples} without it; pass --updates")
    if not texts or updates is None:
        missing = "--updates" if texts else "--candidate"
        raise UsageError(
            f"--candidate and --updates must be given for branches, got no {missing}; pass it, or --critical"
        )
    with usage():
        return Branches(start, sizes[0], tuple(map(Candidate.of, texts)), updates, **others)


def _critical(
    start: Any,
    sizes: list[int],
    texts: list[str] | None,
    updates: int | None,
    rule: str,
    samples: int | None,
    tolerance: float,
    others: Any,
) -> BatchSizes:
    from variable_batch_size.evaluation.branching.candidate import Candidate
    from variable_batch_size.evaluation.branching.critical import BatchSizes

    if texts or updates is not None:
        given = "--candidate" if texts else "--updates"
        raise UsageError(f"--critical compares batch sizes of one rule, got {given}; pass --rule and --samples")
    if samples is None:
        raise UsageError("--critical needs --samples, got none; pass the samples of each branch")
    with usage():
        return BatchSizes(start, tuple(sizes), Candidate.of(rule), samples, tolerance, **others)
