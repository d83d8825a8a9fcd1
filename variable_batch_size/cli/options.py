"""Options that several commands have, each declared once; those that belong together are a dataclass, see `command`."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from variable_batch_size._validation import check_bounds, check_number
from variable_batch_size.adaptive import Controller, Throughput
from variable_batch_size.adaptive.table import parse_policy
from variable_batch_size.cli.command import UsageError, usage
from variable_batch_size.lab.cluster.capacity_trace import CapacityTrace
from variable_batch_size.lab.cluster.reading import READERS, read
from variable_batch_size.lab.cluster.synthesis import synthetic
from variable_batch_size.lab.simulation import Overheads
from variable_batch_size.trace.schedule import Unit

DECADE = 10 * 365 * 86400  # seconds
STDOUT = Path("/dev/stdout")
UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}  # seconds
TRAINING, SYNTHETIC, OVERHEADS = "Instead of what the task says", "Synthetic capacity traces", "Overheads"  # panels


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


def option(help: str, *names: str, **settings: Any) -> Any:
    """Return an option of typer."""
    return typer.Option(*names, help=help, **settings)


duration_option = partial(option, parser=duration, metavar="DURATION")


def prepare_file(path: Path | None) -> Path | None:
    """Return the path of a file to write, after creating its folder; "-" is standard output."""
    if path is None or str(path) == "-":
        return path and STDOUT
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def check_picture(path: Path | None) -> Path | None:
    """Return the path of a picture to write; raise before anything is computed."""
    if path is not None and path.suffix.lower() not in (".png", ".svg"):
        raise typer.BadParameter(f"a picture must be a file that ends in .png or .svg, got {str(path)!r}; rename it")
    if path is not None and not path.parent.is_dir():
        raise typer.BadParameter(f"the folder of a picture must be there, got {str(path.parent)!r}; create it")
    return path


def positive(option: typer.CallbackParam, value: float | None) -> float | None:
    """Return the number of an option that has to be > 0."""
    if value is not None and not 0 < value < math.inf:
        remedy = "pass a positive number, or leave it out"
        raise UsageError(f"{option.opts[0]} must be > 0 and finite, got {value}; {remedy}")
    return value


def each_positive(option: typer.CallbackParam, values: list[float] | None) -> list[float] | None:
    """Return the numbers of an option that have to be > 0."""
    return values and [value for value in values if positive(option, value)]


def check_price(option: typer.CallbackParam, value: float | None) -> float | None:
    """Return the price of an option."""
    with usage():
        return None if value is None else check_number(value, option.opts[0], "pass the price of a node-hour")


def check_bounds_option(option: typer.CallbackParam, value: tuple[int, int] | None) -> tuple[int, int] | None:
    """Return the two batch sizes of an option."""
    with usage():
        return value and check_bounds(value, option.opts[0])


def read_policy(name: str) -> Controller:
    """Return the controller of a --policy."""
    try:
        return parse_policy(name)
    except ValueError as error:
        raise UsageError(f"--policy {name:.60}: {error}") from None


out_option = partial(option, metavar="FILE", callback=prepare_file)
price_option = partial(option, min=0, callback=check_price)
every_option = partial(option, "Updates between two decisions of a policy.", min=1)

Out = Annotated[Path, out_option("The file to write; - is standard output.", "--out", "-o", show_default=False)]
Png = Annotated[
    Path | None, option("Write a picture to this file, PNG or SVG.", "--png", metavar="FILE", callback=check_picture)
]
LogPath = Annotated[
    Path,
    typer.Argument(help="A log in any of the known formats; - is standard input.", show_default=False, metavar="LOG"),
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
UnitOption = Annotated[Unit, option("What a threshold of the schedule counts.")]
SequenceLength = Annotated[int | None, option("Tokens of a sample, with --unit tokens.", min=1)]
Microbatch = Annotated[int | None, option("Rows that a device computes at once.", min=1)]
FixedShape = Annotated[
    bool, option("Each microbatch has exactly --microbatch rows, as with PyTorch/XLA.", "--fixed-shape")
]
DevicesPerNode = Annotated[int, option("Devices of a node.", min=1)]
Bounds = Annotated[
    tuple[int, int] | None,
    option("Least and largest batch size of policies.", metavar="LOW HIGH", callback=check_bounds_option),
]
NoiseFile = Annotated[
    Path | None, option("scalars.csv of a training that measured the gradient noise, for policies and rules.")
]


def _formats() -> list[str]:
    return list(READERS)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How a log is read."""

    format: Annotated[
        str | None,
        option(f"By default, it is recognized; {', '.join(READERS)}.", metavar="NAME", autocompletion=_formats),
    ] = None
    inverted: Annotated[
        int | None, option("Nodes of the cluster, if a SkyPilot file counts those that are not available.", min=1)
    ] = None
    max_gap: Annotated[float | None, duration_option("Time without a row after which there are 0 nodes.")] = None
    cores_per_node: Annotated[
        int, option("Cores of a machine, if the log counts cores: 8 for eth with TPU_cores.", min=1)
    ] = 1

    def read(self, path: Path) -> CapacityTrace:
        """Read a log, and warn of times that look like Unix times."""
        source = Path("/dev/stdin") if str(path) == "-" else path
        capacity = read(source, self.format, inverted=self.inverted or False, max_gap=self.max_gap)
        if capacity.nodes[0] == 0 and len(capacity.nodes) > 1 and capacity.seconds[1] >= DECADE:
            found = f"there are no nodes before second {capacity.seconds[1]:,.0f}, which looks like a Unix time"
            warnings.warn(f"{found}; let the times of {path} begin at 0", stacklevel=2)
        return capacity.machines(self.cores_per_node)


@dataclass(frozen=True, kw_only=True)
class Window:
    """Which part of a capacity trace is used, and how."""

    start: Annotated[float, duration_option("Begin at this time of the log.")] = 0.0
    stop: Annotated[float | None, duration_option("End at this time of the log.")] = None
    min_nodes: Annotated[int, option("Raise smaller numbers of nodes to this one.", min=0)] = 0
    max_nodes: Annotated[int | None, option("Reduce larger numbers of nodes to this one.", min=0)] = None
    scale_time: Annotated[
        float,
        option("Multiply all times of the capacity trace: 0.001 makes 1.44 minutes of a day.", callback=positive),
    ] = 1.0

    def cut(self, capacity: CapacityTrace, every: float | None = None) -> CapacityTrace:
        """Return the part of a trace, sampled at intervals of `every` seconds if given."""
        part = capacity.slice(self.start, self.stop).clip(self.min_nodes, self.max_nodes)
        return (part if every is None else part.resampled(every)).scaled(self.scale_time)


_machines = partial(option, show_default=False, rich_help_panel=SYNTHETIC)
_time_of_machines = partial(_machines, parser=duration, metavar="DURATION")


@dataclass(frozen=True, kw_only=True)
class Machines:
    """The arguments of `cluster.synthetic`, without the seed."""

    nodes: Annotated[int | None, _machines("Number of machines.", min=1)] = None
    mean_up: Annotated[float | None, _time_of_machines("Mean time until a machine is lost.")] = None
    mean_down: Annotated[float | None, _time_of_machines("Mean time until it is back.")] = None
    duration: Annotated[float | None, _time_of_machines("Time of the trace.")] = None
    bulk_every: Annotated[float | None, _time_of_machines("Mean time between losses of many machines at once.")] = None
    bulk_fraction: Annotated[float | None, _machines("Share of the machines that such a loss takes.")] = None

    def trace(self, seed: int) -> CapacityTrace:
        """Return the random capacity trace of a seed."""
        for name in ("nodes", "mean_up", "mean_down", "duration"):
            if getattr(self, name) is None:
                missing = "--" + name.replace("_", "-")
                names = "--nodes, --mean-up, --mean-down and --duration"
                raise UsageError(f"{names} must be given together, got no {missing}; pass all of them")
        return synthetic(seed=seed, **vars(self))


@dataclass(frozen=True, kw_only=True)
class UpdateTime:
    """The seconds of an update."""

    samples_per_second: Annotated[
        float | None, option("Samples that one device computes in a second.", callback=positive)
    ] = None
    communication_seconds: Annotated[
        float, duration_option("Time of the all-reduce of an update; a single device has none.")
    ] = 0.0

    def throughput(self) -> Throughput | None:
        """Return the time model; None without --samples-per-second."""
        if self.samples_per_second is not None:
            return Throughput.simple(self.samples_per_second, self.communication_seconds)
        if self.communication_seconds:
            raise UsageError("--communication-seconds needs the rate of a device, got none; pass --samples-per-second")
        return None


def _overhead(name: str, help: str, kind: Callable[..., Any] = duration_option, **settings: Any) -> Any:
    default = next(field.default for field in fields(Overheads) if field.name == name)
    shown = "only before a stop" if default is None else f"{default:g}"
    return kind(help, show_default=shown, rich_help_panel=OVERHEADS, **settings)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The options of `Overheads`; without any of them, nothing interrupts a training."""

    restart: Annotated[float | None, _overhead("restart", "Time of a start or restart.")] = None
    save: Annotated[float | None, _overhead("save", "Time of writing a checkpoint.")] = None
    save_every: Annotated[
        Any,  # list[float] | None, which typer would take as an option that is given several times
        _overhead(
            "save_every",
            "Time between two checkpoints; several, separated by commas, are compared.",
            parser=durations,
            callback=each_positive,
        ),
    ] = None
    notice: Annotated[
        float | None,
        _overhead("notice", "Warning before nodes leave: the current update and a save have to end in it."),
    ] = None
    least_nodes: Annotated[int | None, _overhead("least_nodes", "Least nodes of the training.", option, min=1)] = None
    grow_every: Annotated[
        float | None, _overhead("grow_every", "Least time between a restart and one with more nodes.")
    ] = None

    def overheads(self, scale_time: float = 1.0) -> dict[str, Overheads | None]:
        """Return the overheads for each --save-every by what is added to the name of a policy."""
        given = {name: value for name, value in vars(self).items() if value is not None and name != "save_every"}
        times = {name: value if name == "least_nodes" else scale_time * value for name, value in given.items()}
        intervals = self.save_every or [None]
        each = [times if interval is None else {**times, "save_every": scale_time * interval} for interval in intervals]
        labels = [f" --save-every {interval:g}" for interval in intervals] if len(intervals) > 1 else [""]
        return {label: Overheads(**values) if values else None for label, values in zip(labels, each, strict=True)}


of_task_option = partial(option, rich_help_panel=TRAINING)


@dataclass(frozen=True, kw_only=True)
class OfTask:
    """What takes the place of the defaults of a task."""

    lr: Annotated[float | None, of_task_option("Learning rate at --ref-batchsize.", callback=positive)] = None
    ref_batchsize: Annotated[int | None, of_task_option("Batch size at which the learning rate was tuned.", min=1)] = (
        None
    )
    microbatch: Annotated[int | None, of_task_option("Rows that are computed at once.", min=1)] = None
    data_dir: Annotated[str | None, of_task_option("Folder of the files of the tasks.", metavar="FOLDER")] = None

    def arguments(self) -> dict[str, Any]:
        """Return them as keyword arguments of the package."""
        values = dict(vars(self))
        return {"minibatch_size": values.pop("microbatch"), **values}
