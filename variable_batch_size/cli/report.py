"""`vbs report`: the report of the trainings that are there, also while others run."""

from __future__ import annotations

import json
import warnings
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer
from rich.console import Console

from variable_batch_size._validation import value_error
from variable_batch_size.cli.command import command
from variable_batch_size.cli.options import option
from variable_batch_size.cli.output import print_table
from variable_batch_size.lab.evaluation.metric import Mode

if TYPE_CHECKING:
    from variable_batch_size.lab.evaluation.analysis import Analysis
    from variable_batch_size.lab.evaluation.record import Record
    from variable_batch_size.lab.evaluation.report import TableFormat


Parquet = Annotated[bool, option("Write the tables as Parquet files, instead of CSV.", "--parquet")]
Recommend = Annotated[
    bool, option("Print which rule to use for each task and trace, and how sure that is.", "--recommend")
]


@command
def report(
    *,
    records: Annotated[
        Path,
        typer.Argument(
            help="Folder of the records, --folder of vbs evaluate, or a table of them, *.csv.gz.",
            metavar="FOLDER",
            show_default=False,
        ),
    ],
    metric: Annotated[
        str, option("What the rules are compared by, at the end of their samples.", metavar="METRIC")
    ] = "loss",
    baseline: Annotated[str, option("Rule with which the others are compared.", metavar="RULE")] = "constant",
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
            show_default="that of the records, or NAME beside the table NAME.csv.gz",
        ),
    ] = None,
    parquet: Parquet = False,
    recommend: Recommend = False,
) -> None:
    """Write the report of the trainings in a folder, of all commands of `vbs evaluate` in its plan.json, or in a table.

    It may be written while others run: it says how many of the trainings are there.

    Examples:

    - `vbs report evaluation`
    - `vbs report evaluation --metric accuracy --baseline linear --recommend`
    - `vbs report benchmarks/evaluation_large.csv.gz --output runs/large`
    """
    from variable_batch_size.lab.evaluation.table import SUFFIX, is_table

    there = records.is_file() if is_table(records) else records.is_dir()
    if not there or not publish(
        records, metric, baseline, "parquet" if parquet else "csv", recommend, mode=mode, output=output
    ):
        found = "none" if there else "no such file" if is_table(records) else "no such folder"
        remedy = f"pass --folder of vbs evaluate, or a table, *{SUFFIX}"
        raise value_error(f"{records} must hold the record of a training", found, remedy)


def publish(
    place: Path,
    metric: str = "loss",
    baseline: str = "constant",
    table: TableFormat = "csv",
    recommend: bool = False,
    data_dir: str | None = None,
    mode: Mode | None = None,
    output: Path | None = None,
) -> int:
    """Write the report of a folder's records and plan, or of a table, print it, and return the number of records."""
    from variable_batch_size.lab.evaluation.analysis import Analysis
    from variable_batch_size.lab.evaluation.plan import Plan
    from variable_batch_size.lab.evaluation.record import read_records
    from variable_batch_size.lab.evaluation.report import write_analysis
    from variable_batch_size.lab.evaluation.table import SUFFIX

    records, plan = read_records(place), Plan.read(place)
    planned = [record for record in records if record.key in plan.keys] if plan.keys else records
    if not planned:
        return 0
    analysis = Analysis(planned, metric, baseline, _targets(planned, data_dir), mode)
    _warn_of_sources(planned)
    folder = output or str(place).removesuffix(SUFFIX)
    number, all_planned, others = len(planned), len(plan.keys) or len(records), len(records) - len(planned)
    path = write_analysis(analysis, folder, plan.command, all_planned, table, bool(plan.tuning))
    left_out = f"; {others:,} others in the folder are not in its plan.json" if others else ""
    typer.echo(f"report: {path} ({number:,} of {'at least ' * bool(plan.tuning)}{all_planned:,} trainings{left_out})")
    if recommend:
        _print_recommendations(analysis)
        coming = [f"{all_planned - number:,} trainings"] if number < all_planned else []
        coming += ["those that judge at the learning rates that are chosen"] if plan.tuning else []
        if coming:
            typer.echo(f"\n{' and then '.join(coming)} are still to come: all of this may change.")
    return number


def _warn_of_sources(records: Sequence[Record]) -> None:
    """Warn of each task whose source was not the same for all of its records."""
    from variable_batch_size.lab.evaluation.training import SOURCE

    sources = defaultdict(set)
    for record in records:
        if (source := record.environment.get(SOURCE)) is not None:
            sources[record.cell["task"], record.cell.get("task_version", "")].add(source)
    for (task, _), found in sources.items():
        if len(found) > 1:
            remedy = "if trainings differ by that, give the task another version, or train in another folder"
            message = f"the records of the task {task} are of {len(found)} versions of its source; {remedy}"
            warnings.warn(message, stacklevel=2)


def _targets(records: Sequence[Record], data_dir: str | None) -> dict[str, tuple[str, float]]:
    """Return the target of each task that has one, and can be loaded here."""
    from variable_batch_size.lab.evaluation.task import Defaults, load_task

    found = {}
    cells = [record.cell for record in records]
    for cell in {(one["task"], json.dumps(one["task_arguments"], sort_keys=True)): one for one in cells}.values():
        name = cell["task"]
        try:
            target = Defaults.of(load_task(name, cell["task_arguments"], data_dir), name).target
        except Exception as error:  # the code of a user
            warnings.warn(f"the target of the task {name} is not known: {error}", stacklevel=2)
            continue
        if target is not None:
            found[name] = target
    return found


def _print_recommendations(analysis: Analysis) -> None:
    from variable_batch_size.lab.evaluation.recommendation import recommend

    found = recommend(analysis)
    for task in analysis.tasks:
        if own := [one for one in found if one.task == task]:
            typer.echo()
            print_table([*own[0].row], [[*one.row.values()] for one in own])
            Console().print("", *map(str, own), sep="\n", markup=False, highlight=False)
