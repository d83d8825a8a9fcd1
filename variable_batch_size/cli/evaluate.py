"""`vbs evaluate`: train tasks with several rules and traces, and write a report."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias, get_args

import typer

from variable_batch_size.cli import options, report
from variable_batch_size.cli.command import UsageError, command, usage
from variable_batch_size.cli.options import count_option, list_option, option, parse_float
from variable_batch_size.trace import OnEnd

if TYPE_CHECKING:
    from variable_batch_size.lab.evaluation.cell import Cell
    from variable_batch_size.lab.simulation import Overheads

EngineName: TypeAlias = Literal["joblib", "ray"]  # as in evaluation.engine, which is imported when it is needed
TIME = "Simulated time"
machine_option = partial(option, rich_help_panel="Processes and machines")


@command
def evaluate(
    *,
    context: typer.Context,
    tasks: Annotated[list[str], options.TASK],
    traces: Annotated[
        list[str],
        option(
            'Batch sizes: 256, "0:128 2000:256", a CSV file, a policy such as noise-scale:1, or a policy under a '
            "capacity trace, per-device:64@LOG; several are compared.",
            "--trace",
            metavar="TRACE",
            show_default=False,
        ),
    ],
    rules: Annotated[
        list[str],
        list_option(
            "Learning-rate rules, with a number where they need one: power:0.75, legw:100 (updates of warm-up); "
            "several are compared.",
            "--rule",
            metavar="RULES",
            show_default=False,
        ),
    ],
    names: Annotated[
        list[str] | None,
        option("What the report calls the traces: once for each.", "--name", metavar="NAME", show_default=False),
    ] = None,
    folder: Annotated[
        Path, option("Folder of the runs; runs that it contains are not repeated.", "--folder", "-f", metavar="FOLDER")
    ] = Path("evaluation"),
    seeds: Annotated[int, count_option("Number of seeds, 0, 1, ...", metavar="SEEDS")] = 5,
    baseline: Annotated[str, option("Rule against which the others are judged.", metavar="RULE")] = "constant",
    lr_factor: Annotated[
        list[float] | None,
        list_option(
            "Factors on the learning rate, for a curve of each rule; rules are judged at 1.",
            of=parse_float,
            metavar="FACTORS",
            show_default="1",
        ),
    ] = None,
    start: Annotated[
        Path | None,
        option(
            "Folder of a vbs.Checkpoint of the task, from which all runs continue.",
            "--from",
            metavar="FOLDER",
            show_default=False,
        ),
    ] = None,
    end: Annotated[
        list[str] | None,
        list_option(
            "What is equal in runs that are compared: samples, progress, progress:UPDATES, seconds:SECONDS or "
            "cost:PRICE; several are compared apart.",
            metavar="ENDS",
            show_default="samples",
        ),
    ] = None,
    samples: Annotated[int | None, count_option("Samples of a run.", metavar="SAMPLES", **options.of_task)] = None,
    of_task: options.OfTask,
    between: Annotated[
        int | None, count_option("Samples between two evaluations.", metavar="SAMPLES", **options.of_task)
    ] = None,
    warmup: Annotated[
        int | None,
        count_option("Samples over which the learning rate rises.", least=0, metavar="SAMPLES", **options.of_task),
    ] = None,
    on_end: Annotated[
        OnEnd | None,
        option(
            "What follows the last step of a trace that ends; by default, an error.", metavar="|".join(get_args(OnEnd))
        ),
    ] = None,
    bounds: options.Bounds = None,
    every: Annotated[int | None, options.every_option(show_default="50")] = None,
    time: options.UpdateTime,
    devices: Annotated[
        int,
        count_option("Devices of traces that are not under a capacity trace.", metavar="DEVICES", rich_help_panel=TIME),
    ] = 1,
    price: Annotated[
        float | None,
        options.price_option("Price of a node-hour, or of a device-hour without nodes.", rich_help_panel=TIME),
    ] = None,
    costs: options.Costs,
    noise: options.NoiseFile = None,
    jobs: Annotated[
        int | None,
        machine_option(
            "Runs at the same time.", "--jobs", "-j", min=1, metavar="JOBS", show_default="1, or the CPUs of Ray"
        ),
    ] = None,
    threads: Annotated[int, machine_option("Threads of a run.", min=1, metavar="THREADS")] = 1,
    engine: Annotated[
        EngineName, machine_option("What distributes the runs.", metavar="|".join(get_args(EngineName)))
    ] = "joblib",
    address: Annotated[
        str | None,
        machine_option(
            "A running Ray: HOST:PORT, ray://HOST:PORT or auto; by default, one is found or started here.",
            metavar="ADDRESS",
        ),
    ] = None,
    dry_run: Annotated[
        bool, option("Print the number of runs, and check them, without training.", "--dry-run")
    ] = False,
) -> None:
    """Train tasks under traces, with rules and seeds, and write a report: which rule loses least?

    Each training is written to the folder when it ends. Run the command again to continue after an interruption. What
    it wants is its plan, which the report judges when all of it has ended; with more seeds, traces or rules it is
    another plan, and only what is new in it is trained.

    Examples:

    - `vbs evaluate mnist-cnn --trace "0:32 1000:256" --rule linear --rule root --jobs 2`
    - `vbs evaluate mnist-cnn --trace per-device:16@traces/spot_example.json --samples-per-second 2 --rule linear`
    - `vbs evaluate own:Task --from runs/a --trace 512 --rule linear --rule root`
    """
    from variable_batch_size.lab.evaluation.engine import cells_without_line, run
    from variable_batch_size.lab.evaluation.experiment import Experiment
    from variable_batch_size.lab.evaluation.report import check_libraries
    from variable_batch_size.lab.evaluation.simulated_time import ModelTime
    from variable_batch_size.lab.evaluation.timed_trace import TraceOptions, UnderCapacity
    from variable_batch_size.lab.simulation import NoiseCurve

    model, under, overheads = time.throughput(), None, _only_overheads(costs)
    under_log = {"--noise": noise, "a cost of restarts or saves": overheads}
    if not any("@" in trace for trace in traces):
        _check_unused(under_log, "a trace POLICY@LOG", "pass one")
    if model is None:
        timed = under_log | {"--devices": None if devices == 1 else devices, "--price": price}
        _check_unused(timed, "the time of an update", "pass --samples-per-second")
    else:
        curve = None if noise is None else NoiseCurve.from_csv(noise)
        under = UnderCapacity("", "", model, overheads=overheads, noise=curve, price=price)
    with usage():
        experiment = Experiment(
            tasks=tasks,
            traces=_name_traces(traces, names),
            rules=rules,
            baseline=baseline,
            seeds=seeds,
            lr_factors=lr_factor or [1.0],
            ends=end or ["samples"],
            samples=samples,
            between=between,
            warmup=warmup,
            options=TraceOptions(on_end, bounds, every, under),
            time=None if model is None else ModelTime(model, devices, price),
            start=start,
            **of_task.arguments(),
        )
    check_libraries()
    with _task_errors():
        cells = experiment.cells()
        if dry_run:
            _check_without_training(cells, folder)
            return
        command = shlex.join(context.obj)
        try:
            run(
                cells,
                folder,
                jobs=jobs,
                threads=threads,
                engine=engine,
                address=address,
                command=command,
                baseline=baseline,
            )
        except KeyboardInterrupt:
            done = len({cell.key for cell in cells}) - len(cells_without_line(cells, folder))
            typer.echo(f"\nvbs: interrupted after {done:,} of {len(cells):,} runs", err=True)
            typer.echo(f"to continue: {command}", err=True)
            raise typer.Exit(130) from None
        report.publish(folder, baseline=baseline)


def _check_without_training(cells: list[Cell], folder: Path) -> None:
    """Check the training runs (cells) that a folder has no results of, and print how many they and their samples are.

    It is what `vbs evaluate --dry-run` does.
    """
    from variable_batch_size.lab.evaluation.engine import cells_without_line
    from variable_batch_size.lab.evaluation.experiment import check_cells

    cells_left = cells_without_line(cells, folder).values()
    check_cells(cells_left)
    max_samples = sum(cell.timed.end.max_samples(cell.samples) for cell in cells_left)
    up_to = "up to " if any(cell.end != "samples" for cell in cells_left) else ""
    count = f"{len(cells):,} runs, {len(cells_left):,} to make"
    typer.echo(f"{folder}: {count}, of {up_to}{max_samples:,} samples in all")


@contextmanager
def _task_errors() -> Iterator[None]:
    """Print a RuntimeError of the block, as the code of a task raises it, as one line, and exit with 1."""
    try:
        yield
    except typer.Exit:  # which is a RuntimeError, too
        raise
    except RuntimeError as error:
        if os.environ.get("VBS_TRACEBACK"):
            raise
        remedy = "" if ";" in str(error) else "; mend it and run the command again, or set VBS_TRACEBACK=1 to see where"
        typer.echo(f"vbs: error: {' '.join(str(error).split())}{remedy}", err=True)
        raise typer.Exit(1) from None


def _name_traces(traces: list[str], names: list[str] | None) -> list[str] | dict[str, str]:
    """Return the traces by the names that --name gives them, in the same order, or the list itself without names."""
    if names is None:
        return traces
    if len(names) != len(traces) or len(set(names)) != len(names):
        raise UsageError(f"--name must be given once for each --trace, each another one, got {len(names)}: {names}")
    return dict(zip(names, traces, strict=True))


def _check_unused(options: Mapping[str, object], needed: str, remedy: str) -> None:
    """Raise UsageError if one of these options was given; None: it was not."""
    given = next((name for name, value in options.items() if value is not None), None)
    if given is not None:
        raise UsageError(f"{given} needs {needed}, got none; {remedy}")


def _only_overheads(costs: options.Costs) -> Overheads | None:
    """Return the costs of restarts and saves, None without any. Raise UsageError if --save-every has several times."""
    choices = list(costs.overheads().values())  # one for each time of --save-every
    if len(choices) > 1:
        raise UsageError(f"--save-every must be one time, got {len(choices)}; compare them with vbs simulate")
    return choices[0]
