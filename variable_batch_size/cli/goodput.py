"""`vbs goodput`: which share of the time a training made updates that count."""

from __future__ import annotations

from typing import Annotated

import typer

from variable_batch_size._validation import value_error
from variable_batch_size.cli import output


def goodput(
    folder: Annotated[
        str, typer.Argument(help="Folder or URL of a training's checkpoints.", metavar="FOLDER", show_default=False)
    ],
    json: output.Json = False,
) -> None:
    """Print for how long a training made updates that count, made lost ones again, saved, restored, or was down.

    Beside them, what `vbs simulate` needs for `--restart` and `--save`.

    Example: `vbs goodput runs/a`
    """
    from variable_batch_size.checkpoint.events import FILE, Goodput, read
    from variable_batch_size.checkpoint.object_store import path_of

    if not (events := read(path_of(folder))):
        raise value_error(f"FOLDER must have the {FILE} of a vbs.Checkpoint", folder, "pass its folder")
    spent = Goodput.of(events)
    if json:
        output.print_json({**spent._asdict(), "total": spent.total, "restart": spent.restart, "save": spent.save})
        return
    total = max(spent.total, 1e-9)
    parts = {name: value for name, value in spent._asdict().items() if isinstance(value, float)} | {
        "total": spent.total
    }
    rows = [[name, output.duration(value), f"{100 * value / total:.1f} %"] for name, value in parts.items()]
    output.print_table(["", "time", "share"], rows)
    flags = f"--restart {spent.restart:.1f} --save {spent.save:.2f}"
    typer.echo(f"{spent.runs} runs, {spent.saves} saves; for vbs simulate: {flags}")
