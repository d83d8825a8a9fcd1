"""The commands by name."""

from __future__ import annotations

import importlib
from typing import Annotated

import typer

from variable_batch_size.cli import capacity, checkpoint, evaluate, plan, report, simulate, trace

app = typer.Typer(
    name="vbs",
    help="Trainings whose global batch size changes: traces of clusters and batches, simulations, evaluations.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def version(
    show: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    """Trainings whose global batch size changes: traces of clusters and batches, simulations, evaluations."""
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
