"""The commands by name."""

from __future__ import annotations

import importlib
from typing import Annotated

import typer

from variable_batch_size.cli import capacity, checkpoint, evaluate, plan, report, simulate, trace
from variable_batch_size.cli.group import Commands
from variable_batch_size.cli.options import option

app = typer.Typer(
    name="vbs",
    cls=Commands,
    help="Training whose global batch size changes: traces of clusters and batches, simulations, evaluations.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, option("Print the version and exit.", "--version", is_eager=True)] = False) -> None:
    """Training whose global batch size changes: traces of clusters and batches, simulations, evaluations."""
    if show:
        typer.echo(importlib.import_module("variable_batch_size").__version__)
        raise typer.Exit


app.add_typer(capacity.app, name="capacity")
app.add_typer(trace.app, name="trace")
app.add_typer(checkpoint.app, name="checkpoint")
app.command("goodput")(checkpoint.goodput)
app.command("plan")(plan.plan)
app.command("simulate")(simulate.simulate)
app.command("evaluate")(evaluate.evaluate)
app.command("report")(report.report)
