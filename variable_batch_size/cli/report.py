"""`vbs report`: write the report of the runs that have ended, also while others are training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer
from rich.console import Console

from variable_batch_size._validation import value_error
from variable_batch_size.cli.command import command
from variable_batch_size.cli.options import option
from variable_batch_size.lab.evaluation.metric import Mode

if TYPE_CHECKING:
    from variable_batch_size.lab.evaluation.judgement import Judgement

Parquet = Annotated[bool, option("Write the table of runs as a Parquet file, instead of CSV.", "--parquet")]


@command
def report(
    *,
    records: Annotated[
        Path,
        typer.Argument(
            help="Folder of vbs evaluate, or its file, also compressed.", metavar="FOLDER", show_default=False
        ),
    ],
    metric: Annotated[str, option("What the rules are compared by, at the end of runs.", metavar="METRIC")] = "loss",
    baseline: Annotated[
        str | None,
        option("Rule with which the others are compared.", metavar="RULE", show_default="constant, or the first one"),
    ] = None,
    mode: Annotated[
        Mode | None,
        option(
            "Whether less of the metric is better, or more; by default, by its name.", metavar="|".join(get_args(Mode))
        ),
    ] = None,
    output: Annotated[
        Path | None,
        option(
            "Folder of the report.",
            "--output",
            "-o",
            metavar="FOLDER",
            show_default="that of the evaluation, or NAME beside the file NAME.jsonl.gz",
        ),
    ] = None,
    parquet: Parquet = False,
) -> None:
    """Write the report of an evaluation, and print which rule to use under which trace.

    It may be written while trainings run: it says how many are missing, and claims nothing before all have ended.

    Examples:

    - `vbs report evaluation`
    - `vbs report evaluation --metric accuracy --baseline linear`
    - `vbs report benchmarks/evaluation_large.csv.gz --output runs/large`
    """
    publish(records, metric, baseline, parquet, mode=mode, output=output)


def publish(
    place: Path,
    metric: str = "loss",
    baseline: str | None = None,
    parquet: bool = False,
    mode: Mode | None = None,
    output: Path | None = None,
) -> None:
    """Write the report of an evaluation, in a folder or a file `place`, and print its conclusions, see `report`."""
    from variable_batch_size.lab.evaluation.judgement import judge
    from variable_batch_size.lab.evaluation.records import read
    from variable_batch_size.lab.evaluation.report import write_report

    evaluation = read(place)
    if evaluation.trainings.empty:
        raise value_error(f"{place} must hold a run that has ended", "none", "run vbs evaluate first")
    judgements = judge(evaluation, metric, baseline, mode)
    folder = output or str(place).removesuffix(".gz").removesuffix(".csv").removesuffix(".jsonl")
    page = write_report(evaluation, judgements, folder, parquet)
    ended = sum(len(judgement.trainings) for judgement in judgements)
    waiting = judgements[0].waiting
    typer.echo(f"report: {page} ({ended:,} of {ended + waiting:,} runs)")
    for judgement in judgements:
        _print_judgement(judgement)


def _print_judgement(judgement: Judgement) -> None:
    """Print what an evaluation says about the rules in one task, a paragraph for each trace."""
    from variable_batch_size.lab.evaluation import wording

    lines = ["", judgement.task, f"  {wording.describe_reference(judgement)}"]
    if judgement.choices > 1:
        lines.append(f"  {wording.describe_choices(judgement)}")
    for trace in judgement.traces:
        lines += [f"  {trace.name}", *(f"    {sentence}" for sentence in wording.verdict(judgement, trace))]
        if trace.lost:
            lines.append(f"    lost beside the reference: {wording.describe_loss(judgement, trace)}")
    lines += [f"  {sentence}" for sentence in wording.describe_failures(judgement)]
    Console().print(*lines, sep="\n", markup=False, highlight=False)
