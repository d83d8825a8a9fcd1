"""Options that several commands have, each declared once; those that belong together are a dataclass, see `command`."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from variable_batch_size._validation import MAX_INT, check_bounds, check_number
from variable_batch_size.adaptive import Controller, Throughput
from variable_batch_size.adaptive.table import parse_policy
from variable_batch_size.cli.command import UsageError, usage
from variable_batch_size.lab.cluster.capacity_trace import CapacityTrace
from variable_batch_size.lab.cluster.reading import READERS, UnitWarning, read
from variable_batch_size.lab.cluster.synthesis import synthetic
from variable_batch_size.lab.simulation import Overheads
from variable_batch_size.trace.schedule import Unit, parse_count

STDOUT = Path("/dev/stdout")
UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}  # seconds
_DECIMAL = r"(?:[0-9]+[.]?[0-9]*|[.][0-9]+)(?:e[+-]?[0-9]+)?"
TRAINING, SYNTHETIC, OVERHEADS = "Instead of what the task says", "Synthetic capacity traces", "Overheads"  # panels


def option(help: str, *names: str, **settings: Any) -> Any:
    """Return a `typer.Option` whose help comes first, as it stands in the annotation of an argument."""
    return typer.Option(*names, help=help, **settings)


def parse_duration(text: str | float) -> float:
    """Return the seconds of a text such as 1h30m, with the units s, m, h and d, or of a number without a unit.

    Raises:
        typer.BadParameter: if it is something else.

    >>> parse_duration("1h30m"), parse_duration("1.5h"), parse_duration("2d"), parse_duration(90)
    (5400.0, 5400.0, 172800.0, 90.0)
    """
    parts = re.findall(rf"({_DECIMAL})\s*([smhd]?)\s*", str(text))
    joined = "".join(number + unit for number, unit in parts)
    units = [unit for _, unit in parts]
    seconds = sum(float(number) * UNITS[unit] for number, unit in parts)
    is_whole_text = bool(joined) and joined == re.sub(r"\s", "", str(text))
    descend = units == sorted(set(units), key=UNITS.__getitem__, reverse=True)  # from days to seconds, each once
    is_unambiguous = "" not in units or len(units) == 1  # not "1h30", where 30 may be minutes or seconds
    if not (is_whole_text and descend and is_unambiguous and seconds < math.inf):
        requirement = "a duration must be a time >= 0 with the largest unit first"
        raise typer.BadParameter(f"{requirement}, got {str(text)!r:.60}; pass 90, 90s, 10m, 1h30m or 2d")
    return seconds


def check_count(text: str | int, least: int = 1, most: int = MAX_INT) -> int:
    """Return the integer of a text such as 60k, which is 60,000, in [least, most]. Raise typer.BadParameter otherwise.

    >>> check_count("60k"), check_count("1.5M"), check_count(7)
    (60000, 1500000, 7)
    """
    number = parse_count(str(text).strip())
    if number is None or not least <= number <= most:
        limits = f">= {least}" if most == MAX_INT else f"in [{least}, {most}]"
        raise typer.BadParameter(f"it must be an integer {limits}, got {str(text)!r:.60}; pass one such as 512 or 60k")
    return number


def parse_float(text: str) -> float:
    """Return the number of a text; raise typer.BadParameter if it is something else."""
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"it must be a number, got {text!r:.60}; pass one such as 0.5") from None


def list_option(help: str, *names: str, of: Callable[[str], Any] = str, metavar: str, **settings: Any) -> Any:
    """Return an option with several values: it may be repeated, and each time have values with commas between them.

    Args:
        help: the text in the help.
        *names: names of the option; by default, that of the argument.
        of: makes a value of the text between two commas.
        metavar: what the help calls the values.
        **settings: further arguments of `typer.Option`; a `callback` gets all values.
    """

    def parse(text: str) -> list[Any]:
        return [of(part.strip()) for part in text.split(",")]

    def join(option: typer.CallbackParam, lists: list[Any] | None) -> list[Any] | None:
        joined = lists and [value for values in lists for value in values]  # None if the option is not given
        return callback(option, joined) if callback else joined

    callback = settings.pop("callback", None)
    return option(help, *names, parser=parse, callback=join, metavar=metavar, **settings)


duration_option = partial(option, parser=parse_duration, metavar="DURATION")


def count_option(help: str, *names: str, least: int = 1, most: int = MAX_INT, metavar: str, **settings: Any) -> Any:
    """Return an option for an integer, which may be written such as 60k.

    Args:
        help: the text in the help.
        *names: names of the option; by default, that of the argument.
        least: the least integer that is allowed.
        most: the largest one.
        metavar: what the integer counts, for the help.
        **settings: further arguments of `typer.Option`.
    """

    def parse(text: str) -> int:
        return check_count(text, least, most)

    return option(help, *names, parser=parse, metavar=metavar, **settings)


def prepare_file(path: Path | None) -> Path | None:
    """Return the path of a file to write, after creating its folder; "-" is standard output."""
    if path is None:
        return None
    if str(path) == "-":
        return STDOUT
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def check_picture(path: Path | None) -> Path | None:
    """Return the path of a picture, and raise if it cannot be written, before a long computation."""
    if path is not None and path.suffix.lower() not in (".png", ".svg"):
        raise typer.BadParameter(f"a picture must be a file that ends in .png or .svg, got {str(path)!r}; rename it")
    if path is not None and not path.parent.is_dir():
        raise typer.BadParameter(f"the folder of a picture must be there, got {str(path.parent)!r}; create it")
    return path


def check_positive_option(option: typer.CallbackParam, value: float | None) -> float | None:
    """Return the number of an option, or None without it, and raise UsageError unless it is > 0 and finite."""
    if value is not None and not 0 < value < math.inf:
        remedy = "pass a positive number, or leave it out"
        raise UsageError(f"{option.opts[0]} must be > 0 and finite, got {value}; {remedy}")
    return value


def check_each_positive(option: typer.CallbackParam, values: list[float] | None) -> list[float] | None:
    """Return the numbers of an option, and raise UsageError unless each is > 0 and finite."""
    return values and [value for value in values if check_positive_option(option, value)]


def check_price(option: typer.CallbackParam, value: float | None) -> float | None:
    """Return the price of a node-hour that an option gives, and raise UsageError if it is no finite number >= 0."""
    with usage():
        return None if value is None else check_number(value, option.opts[0], "pass the price of a node-hour")


def check_bounds_option(option: typer.CallbackParam, value: tuple[int, int] | None) -> tuple[int, int] | None:
    """Return the least and the largest batch size of an option, and raise UsageError unless 1 <= low <= high."""
    with usage():
        return value and check_bounds(value, option.opts[0])


def read_policy(name: str) -> Controller:
    """Return the function that chooses batch sizes, named by --policy, such as "per-device:64"."""
    try:
        return parse_policy(name)
    except ValueError as error:
        raise UsageError(f"--policy {name:.60}: {error}") from None


out_option = partial(option, metavar="FILE", callback=prepare_file)
price_option = partial(option, min=0, callback=check_price, metavar="PRICE")
every_option = partial(count_option, "Updates between two decisions of a policy.", metavar="UPDATES")

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
    help="mnist-cnn, char-gpt, or a task of your own: package.module:name.", show_default=False, metavar="TASK"
)
UnitOption = Annotated[Unit, option("What a threshold of the schedule counts.", metavar="|".join(get_args(Unit)))]
SequenceLength = Annotated[int | None, count_option("Tokens of a sample, with --unit tokens.", metavar="TOKENS")]
Microbatch = Annotated[int | None, count_option("Rows that a device computes at once.", metavar="ROWS")]
FixedShape = Annotated[
    bool, option("Each microbatch has exactly --microbatch rows, as with PyTorch/XLA.", "--fixed-shape")
]
DevicesPerNode = Annotated[int, count_option("Devices of a node.", metavar="DEVICES")]
Bounds = Annotated[
    tuple[int, int] | None,
    option(
        "Least and largest batch size of policies.",
        parser=check_count,
        metavar="LOW HIGH",
        callback=check_bounds_option,
    ),
]
NoiseFile = Annotated[
    Path | None,
    option("scalars.csv of a run that measured the gradient noise, for policies and rules.", metavar="FILE"),
]


def _formats() -> list[str]:
    """Return the names that a shell completes."""
    return list(READERS)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How a log is read."""

    format: Annotated[
        str | None,
        option(f"By default, it is recognized; {', '.join(READERS)}.", metavar="NAME", autocompletion=_formats),
    ] = None
    inverted: Annotated[
        int | None,
        count_option("Nodes of the cluster, if a SkyPilot file counts those that are not available.", metavar="NODES"),
    ] = None
    max_gap: Annotated[float | None, duration_option("Time without a row after which there are 0 nodes.")] = None
    cores_per_node: Annotated[
        int, count_option("Cores of a machine, if the log counts cores: 8 for eth with TPU_cores.", metavar="CORES")
    ] = 1

    time_column: Annotated[str, option("Column of the times in a CSV file.", metavar="NAME")] = ""
    nodes_column: Annotated[str, option("Column of the nodes in a CSV file.", metavar="NAME")] = ""

    def read(self, path: Path, *, scaled: bool) -> CapacityTrace:
        """Read the capacity trace of a log, where the path "-" is standard input.

        `scaled`: whether its times get another unit, so that no warning has to ask for it.
        """
        options = {name: value for name, value in vars(self).items() if value is not None and name != "cores_per_node"}
        with warnings.catch_warnings():
            if scaled:
                warnings.simplefilter("ignore", UnitWarning)
            capacity = read(Path("/dev/stdin") if str(path) == "-" else path, **options)
        return capacity.machines(self.cores_per_node)


@dataclass(frozen=True, kw_only=True)
class Window:
    """Which part of a capacity trace is used, and how."""

    start: Annotated[float, duration_option("Begin at this time of the log, before --scale-time.")] = 0.0
    stop: Annotated[float | None, duration_option("End at this time of the log, before --scale-time.")] = None
    min_nodes: Annotated[int, count_option("Raise smaller numbers of nodes to this one.", least=0, metavar="NODES")] = 0
    max_nodes: Annotated[
        int | None, count_option("Reduce larger numbers of nodes to this one.", least=0, metavar="NODES")
    ] = None
    scale_time: Annotated[
        float,
        option(
            "Multiply all times of the capacity trace, and of overheads: 0.001 makes 1.44 minutes of a day.",
            callback=check_positive_option,
            metavar="FACTOR",
        ),
    ] = 1.0

    def cut(self, capacity: CapacityTrace, every: float | None = None) -> CapacityTrace:
        """Return the chosen part of a capacity trace, with its nodes read only once in `every` seconds, if given."""
        part = capacity.slice(self.start, self.stop).clip(self.min_nodes, self.max_nodes)
        sampled = part if every is None else part.resampled(every)
        return sampled.scaled(self.scale_time)


_machines: dict[str, Any] = {"show_default": False, "rich_help_panel": SYNTHETIC}
_time_of_machines = partial(duration_option, **_machines)


@dataclass(frozen=True, kw_only=True)
class Machines:
    """The arguments of `cluster.synthetic`, without the seed."""

    nodes: Annotated[int | None, count_option("Number of machines.", metavar="NODES", **_machines)] = None
    mean_up: Annotated[float | None, _time_of_machines("Mean time until a machine is lost.")] = None
    mean_down: Annotated[float | None, _time_of_machines("Mean time until it is back.")] = None
    duration: Annotated[float | None, _time_of_machines("Time of the trace.")] = None
    bulk_every: Annotated[float | None, _time_of_machines("Mean time between losses of many machines at once.")] = None
    bulk_fraction: Annotated[
        float | None, option("Share of the machines that such a loss takes.", metavar="SHARE", **_machines)
    ] = None

    def trace(self, seed: int) -> CapacityTrace:
        """Return the random capacity trace of a seed, and raise UsageError if one of its options is missing."""
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
        float | None,
        option("Samples that one device computes in a second.", callback=check_positive_option, metavar="SAMPLES"),
    ] = None
    communication_seconds: Annotated[
        float, duration_option("Time of the all-reduce of an update; a single device has none.")
    ] = 0.0

    def throughput(self) -> Throughput | None:
        """Return a model of the seconds that an update takes, or None without --samples-per-second."""
        if self.samples_per_second is not None:
            return Throughput.simple(self.samples_per_second, self.communication_seconds)
        if self.communication_seconds:
            raise UsageError("--communication-seconds needs the rate of a device, got none; pass --samples-per-second")
        return None


def _overhead_option(name: str, help: str, kind: Callable[..., Any] = duration_option, **settings: Any) -> Any:
    """Return the option of a field of `Overheads`, made by `kind`, such as `count_option`, with its default shown."""
    default = next(field.default for field in fields(Overheads) if field.name == name)
    shown_default = "only before a stop" if default is None else f"{default:g}"
    return kind(help, show_default=shown_default, rich_help_panel=OVERHEADS, **settings)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The options of `Overheads`; without any of them, nothing interrupts a training."""

    restart: Annotated[float | None, _overhead_option("restart", "Time of a start or restart.")] = None
    save: Annotated[float | None, _overhead_option("save", "Time of writing a checkpoint.")] = None
    save_every: Annotated[
        list[float] | None,
        _overhead_option(
            "save_every",
            "Time between two checkpoints; several are compared.",
            list_option,
            of=parse_duration,
            metavar="DURATIONS",
            callback=check_each_positive,
        ),
    ] = None
    notice: Annotated[
        float | None,
        _overhead_option("notice", "Warning before nodes leave: the current update and a save have to end in it."),
    ] = None
    least_nodes: Annotated[
        int | None, _overhead_option("least_nodes", "Least nodes of the training.", count_option, metavar="NODES")
    ] = None
    grow_every: Annotated[
        float | None, _overhead_option("grow_every", "Least time between a restart and one with more nodes.")
    ] = None

    def overheads(self, scale_time: float = 1.0) -> dict[str, Overheads | None]:
        """Return the costs of restarts and saves for each --save-every, by what is added to a policy's name.

        Args:
            scale_time: factor on all times, as on the times of the capacity trace.

        Returns:
            Label -> overheads; None if no option of them was given.
        """
        numbers = {name: value for name, value in vars(self).items() if value is not None and name != "save_every"}
        times = {name: value if name == "least_nodes" else scale_time * value for name, value in numbers.items()}
        intervals: Sequence[float | None] = self.save_every or [None]
        by_label: dict[str, Overheads | None] = {}
        for interval in intervals:
            values = times if interval is None else {**times, "save_every": scale_time * interval}
            label = f" --save-every {interval:g}" if len(intervals) > 1 else ""
            by_label[label] = Overheads(**values) if values else None
        return by_label


of_task: dict[str, Any] = {"rich_help_panel": TRAINING}


@dataclass(frozen=True, kw_only=True)
class OfTask:
    """What takes the place of the defaults of a task."""

    lr: Annotated[
        float | None,
        option("Learning rate at --ref-batchsize.", callback=check_positive_option, metavar="RATE", **of_task),
    ] = None
    ref_batchsize: Annotated[
        int | None, count_option("Batch size at which the learning rate was tuned.", metavar="SAMPLES", **of_task)
    ] = None
    microbatch: Annotated[int | None, count_option("Rows that are computed at once.", metavar="ROWS", **of_task)] = None
    data_dir: Annotated[str | None, option("Folder of the files of the tasks.", metavar="FOLDER", **of_task)] = None

    def arguments(self) -> dict[str, Any]:
        """Return the options as keyword arguments of `Experiment`."""
        values = dict(vars(self))
        return {"minibatch_size": values.pop("microbatch"), **values}
