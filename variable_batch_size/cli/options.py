"""Arguments and options that several commands have."""

from __future__ import annotations

import math
import re
import warnings
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from variable_batch_size import cluster
from variable_batch_size._validation import value_error
from variable_batch_size.adaptive import Controller, Throughput
from variable_batch_size.adaptive.table import parse_policy
from variable_batch_size.cluster import CapacityTrace
from variable_batch_size.cluster.readers.table import READERS
from variable_batch_size.trace.schedule import Unit

DECADE = 10 * 365 * 86400  # seconds
STDOUT = Path("/dev/stdout")
UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}  # seconds
TRAINING = "Instead of what the task says"  # a panel of --help


def prepared(path: Path | None) -> Path | None:
    """Return the path of a file to write, after creating its folder; "-" is standard output."""
    if path is None or str(path) == "-":
        return path and STDOUT
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def duration(text: str | float) -> float:
    """Return the seconds of a number with one of the units s, m, h and d, or without one.

    >>> duration("1.5h"), duration("2d"), duration(90)
    (5400.0, 172800.0, 90.0)

    Raises:
        typer.BadParameter: if it is something else.
    """
    found = re.fullmatch(r"((?:[0-9]+[.]?[0-9]*|[.][0-9]+)(?:e[+-]?[0-9]+)?)\s*([smhd]?)", str(text).strip())
    seconds = float(found[1]) * UNITS[found[2]] if found else math.inf
    if math.isinf(seconds):
        raise typer.BadParameter(
            f"a duration must be a time >= 0, got {str(text)!r:.60}; pass 90, 90s, 10m, 1.5h or 2d"
        )
    return seconds


def durations(text: str) -> list[float]:
    """Return the seconds of durations that are separated by commas."""
    return list(map(duration, text.split(",")))


duration_option = partial(typer.Option, parser=duration, metavar="DURATION")


def picture(path: Path | None) -> Path | None:
    """Return the path of a picture to write, before anything is computed."""
    if path is not None and path.suffix.lower() not in (".png", ".svg"):
        raise typer.BadParameter(f"a picture must be a file that ends in .png or .svg, got {str(path)!r}; rename it")
    if path is not None and not path.parent.is_dir():
        raise typer.BadParameter(f"the folder of a picture must be there, got {str(path.parent)!r}; create it")
    return path


def positive(option: typer.CallbackParam, value: float | None) -> float | None:
    """Return the number of an option that has to be > 0."""
    if value is not None and not 0 < value < math.inf:
        remedy = "pass a positive number, or leave it out"
        raise value_error(f"{option.opts[0]} must be > 0 and finite", value, remedy)
    return value


def each_positive(option: typer.CallbackParam, values: list[float] | None) -> list[float] | None:
    """Return the numbers of an option that have to be > 0."""
    return values and [value for value in values if positive(option, value)]


def policy_of(name: str) -> Controller:
    """Return the controller of a --policy."""
    try:
        return parse_policy(name)
    except ValueError as error:
        raise ValueError(f"--policy {name:.60}: {error}") from None


Out = Annotated[
    Path,
    typer.Option(
        "--out",
        "-o",
        help="The file to write; - is standard output.",
        show_default=False,
        metavar="FILE",
        callback=prepared,
    ),
]
Png = Annotated[
    Path | None,
    typer.Option("--png", help="Write a picture to this file, PNG or SVG.", metavar="FILE.png|svg", callback=picture),
]
TraceSource = Annotated[
    str,
    typer.Argument(
        help='A CSV file with the columns step and batchsize, a schedule such as "0:128 2000:256", or a number.',
        show_default=False,
        metavar="TRACE",
    ),
]
TASK = typer.Argument(
    help="mnist-cnn, fashion-cnn, char-gpt, cifar10-resnet, or a task of your own: package.module:name.",
    show_default=False,
    metavar="TASK",
)
LearningRate = Annotated[
    float | None, typer.Option(help="Learning rate at --ref-batchsize.", rich_help_panel=TRAINING, callback=positive)
]
RefBatchsize = Annotated[
    int | None,
    typer.Option(help="Batch size at which the learning rate was tuned.", min=1, rich_help_panel=TRAINING),
]
Microbatch = Annotated[
    int | None, typer.Option(help="Rows that are computed at once.", min=1, rich_help_panel=TRAINING)
]
DataDir = Annotated[
    str | None, typer.Option(help="Folder of the files of the tasks.", metavar="FOLDER", rich_help_panel=TRAINING)
]
UnitOption = Annotated[Unit, typer.Option(help="What a threshold of the schedule counts.")]
SequenceLength = Annotated[int | None, typer.Option(help="Tokens of a sample, with --unit tokens.", min=1)]
SamplesPerSecond = Annotated[
    float | None, typer.Option(help="Samples that one device computes in a second.", callback=positive)
]
CommunicationSeconds = Annotated[float, duration_option(help="Time of the all-reduce of an update.")]
ScaleTime = Annotated[
    float,
    typer.Option(
        help="Multiply all times of the capacity trace: 0.001 makes 1.44 minutes of a day.", callback=positive
    ),
]

Format = Annotated[
    str | None, typer.Option(help=f"By default, it is recognized; {', '.join(READERS)}.", metavar="NAME")
]
Inverted = Annotated[
    int | None,
    typer.Option(help="Nodes of the cluster, if a SkyPilot file counts those that are not available.", min=1),
]
MaxGap = Annotated[float | None, duration_option(help="Time without a row after which there are 0 nodes.")]
MinNodes = Annotated[int, typer.Option(help="Raise smaller numbers of nodes to this one.", min=0)]
MaxNodes = Annotated[int | None, typer.Option(help="Reduce larger numbers of nodes to this one.", min=0)]
Start = Annotated[float, duration_option(help="Begin at this time of the log.")]
Stop = Annotated[float | None, duration_option(help="End at this time of the log.")]

SYNTHETIC = "Synthetic capacity traces"  # the panel of --help
NODES = typer.Option(help="Number of machines.", min=1, show_default=False, rich_help_panel=SYNTHETIC)
MEAN_UP = duration_option(help="Mean time until a machine is lost.", show_default=False, rich_help_panel=SYNTHETIC)
MEAN_DOWN = duration_option(help="Mean time until it is back.", show_default=False, rich_help_panel=SYNTHETIC)
DURATION = duration_option(help="Time of the trace.", show_default=False, rich_help_panel=SYNTHETIC)
BulkEvery = Annotated[
    float | None,
    duration_option(help="Mean time between losses of many machines at once.", rich_help_panel=SYNTHETIC),
]
BulkFraction = Annotated[
    float | None, typer.Option(help="Share of the machines that such a loss takes.", rich_help_panel=SYNTHETIC)
]


def read_log(
    path: Path, format: str | None = None, inverted: int | None = None, max_gap: float | None = None
) -> CapacityTrace:
    """Read a log; a warning tells of times that look like Unix times."""
    capacity = cluster.read(path, format, inverted=inverted or False, max_gap=max_gap)
    if capacity.nodes[0] == 0 and len(capacity.nodes) > 1 and capacity.seconds[1] >= DECADE:
        found = f"there are no nodes before second {capacity.seconds[1]:,.0f}, which looks like a Unix time"
        warnings.warn(f"{found}; let the times of {path} begin at 0", stacklevel=2)
    return capacity


def throughput(samples_per_second: float | None, communication_seconds: float) -> Throughput | None:
    """Return the time model of the options; None without --samples-per-second."""
    if samples_per_second is None:
        if communication_seconds:
            raise ValueError("--communication-seconds needs the rate of a device, got none; pass --samples-per-second")
        return None
    return Throughput.simple(samples_per_second, communication_seconds)


def say(path: Path, text: str) -> None:
    """Print what was written to a file; to standard error if the file is standard output."""
    typer.echo(f"{path}: {text}", err=path == STDOUT)
