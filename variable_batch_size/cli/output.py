"""What commands print and write: tables, JSON, files and pictures."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from variable_batch_size._extras import import_extra
from variable_batch_size._validation import FloatArray
from variable_batch_size.cli.options import STDOUT, option
from variable_batch_size.lab.cluster.capacity_trace import bin_means

Json = Annotated[bool, option("Print JSON instead of tables.", "--json")]

WIDEST = 10**4  # characters of a table: it is not cut off, even if the terminal has to wrap its lines
MAX_ROWS = 2000  # of a picture in a file, about two a pixel


def print_json(values: object) -> None:
    """Print values as JSON."""
    typer.echo(json.dumps(values, indent=2, allow_nan=False))


def print_facts(facts: Mapping[str, str]) -> None:
    """Print names and values as two columns."""
    table = Table.grid(padding=(0, 3))
    table.add_column(style="dim")
    for name, value in facts.items():
        table.add_row(name, value)
    Console(width=WIDEST).print(table)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table whose first column is aligned to the left and whose others are to the right."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console(width=WIDEST).print(table)


def write(path: Path, save: Callable[[Path], object], text: str = "") -> None:
    """Write a file, and print what is in it; if the file is standard output, print that to standard error.

    Args:
        path: the file.
        save: function that writes a file at the path that it gets.
        text: what is in the file, in words.
    """
    overwritten = path != STDOUT and path.is_file()
    save(path)
    if overwritten:
        typer.echo(f"{path}: overwritten", err=True)
    if text:
        typer.echo(f"{path}: {text}", err=path == STDOUT)


def format_number(value: float) -> str:
    """Format a number with four significant digits or, if it is whole, all of them; thousands are separated.

    >>> format_number(1234567), format_number(0.123456), format_number(12345.678)
    ('1,234,567', '0.1235', '12,346')
    """
    if float(value).is_integer():
        return f"{int(value):,}"
    digits = max(0, 3 - math.floor(math.log10(abs(value))))  # after the point
    return f"{value:,.{digits}f}"


def format_duration(seconds: float) -> str:
    """Format seconds in the unit that reads best.

    >>> format_duration(45), format_duration(5400), format_duration(1209600)
    ('45 s', '1.5 h', '14 days')
    """
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 1.5 * length:
            return f"{seconds / length:.4g} {unit}"
    return f"{seconds:.4g} s"


def save_picture(path: Path, edges: FloatArray, values: FloatArray, xlabel: str, ylabel: str, title: str) -> None:
    """Draw a step function, such as the batch size over the updates, into a file.

    Args:
        path: the file, PNG or SVG.
        edges: where each value begins, and the last one ends, (values + 1,).
        values: (values,).
        xlabel: what `edges` are.
        ylabel: what `values` are.
        title: of the picture.
    """
    if len(values) > MAX_ROWS:
        edges, values = bin_means(edges, values, MAX_ROWS)  # more would not be seen
    figure_class = import_extra("matplotlib.figure", "plot").Figure  # without pyplot, which looks for a screen
    figure = figure_class(figsize=(9, 3), layout="constrained")
    axes = figure.subplots()
    axes.stairs(values, edges, fill=True, color="C0", alpha=0.3)
    axes.stairs(values, edges, color="C0", baseline=None)
    axes.set(xlabel=xlabel, ylabel=ylabel, xlim=(float(edges[0]), float(edges[-1])))
    axes.set_title(title, parse_math=False)
    axes.set_ylim(bottom=0)
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    write(path, lambda file: figure.savefig(file, dpi=150))
