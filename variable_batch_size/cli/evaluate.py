"""`vbs evaluate`: which rule, under which trace? Trainings of tasks, and a report."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import typer

from variable_batch_size._validation import check_bounds
from variable_batch_size.cli import report
from variable_batch_size.cli.options import (
    TASK,
    TRAINING,
    CommunicationSeconds,
    DataDir,
    LearningRate,
    Microbatch,
    RefBatchsize,
    SamplesPerSecond,
    duration_option,
    positive,
    throughput,
)
from variable_batch_size.trace import OnEnd

if TYPE_CHECKING:
    from variable_batch_size.evaluation.cell import Cell
    from variable_batch_size.evaluation.courses import TraceOptions, UnderCapacity

EngineName: TypeAlias = Literal["joblib", "ray"]  # as in evaluation.engines, which is imported when it is needed
TIME = "Simulated time"
MACHINE = "Processes and machines"


def evaluate(
    context: typer.Context,
    tasks: Annotated[
        list[str],
        TASK,
    ],
    traces: Annotated[
        list[str],
        typer.Option(
            "--trace",
            help='Batch sizes: 256, "0:128 2000:256", a CSV file, a policy such as noise-scale:1, or a policy under a '
            "capacity trace, per-device:64@LOG; several are compared.",
            show_default=False,
        ),
    ],
    rules: Annotated[
        list[str],
        typer.Option(
            "--rule",
            help="Learning-rate rules, with a number where they need one: power:0.75, legw:100 (updates of warm-up); "
            "several are compared.",
            show_default=False,
        ),
    ],
    folder: Annotated[
        Path, typer.Option("--folder", "-f", help="Folder of the records; what is there is not trained again.")
    ] = Path("evaluation"),
    seeds: Annotated[int, typer.Option(help="Number of seeds, 0, 1, ...", min=1)] = 3,
    lr_factor: Annotated[
        list[float] | None, typer.Option(help="Factors on the learning rate, for every rule.", show_default="1")
    ] = None,
    retune: Annotated[
        list[float] | None,
        typer.Option(help="Further factors for the rule constant only, to find the best learning rate of each trace."),
    ] = None,
    budget: Annotated[
        int | None, typer.Option("--samples", help="Samples of a training.", min=1, rich_help_panel=TRAINING)
    ] = None,
    lr: LearningRate = None,
    ref_batchsize: RefBatchsize = None,
    microbatch: Microbatch = None,
    between: Annotated[
        int | None, typer.Option(help="Samples between two evaluations.", min=1, rich_help_panel=TRAINING)
    ] = None,
    data_dir: DataDir = None,
    on_end: Annotated[
        OnEnd | None, typer.Option(help="What follows the last step of a trace that ends; by default, an error.")
    ] = None,
    bounds: Annotated[
        tuple[int, int] | None, typer.Option(help="Least and largest batch size of policies.", metavar="LOW HIGH")
    ] = None,
    every: Annotated[
        int | None, typer.Option(help="Updates between two questions to a policy.", min=1, show_default="50")
    ] = None,
    samples_per_second: SamplesPerSecond = None,
    communication_seconds: CommunicationSeconds = 0.0,
    number: Annotated[
        int,
        typer.Option(
            "--devices", help="Devices of traces that are not under a capacity trace.", min=1, rich_help_panel=TIME
        ),
    ] = 1,
    price: Annotated[
        float | None,
        typer.Option(help="Price of a node-hour, or of a device-hour without nodes.", min=0, rich_help_panel=TIME),
    ] = None,
    restart: Annotated[
        float | None,
        duration_option(
            help="Time of a start, and of a restart after a change of the nodes.",
            rich_help_panel=TIME,
        ),
    ] = None,
    save_every: Annotated[
        float | None,
        duration_option(help="Time between two simulated checkpoints.", rich_help_panel=TIME, callback=positive),
    ] = None,
    noise: Annotated[
        Path | None,
        typer.Option(help="scalars.csv with the gradient noise, for policies under a LOG.", rich_help_panel=TIME),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs",
            "-j",
            help="Trainings at the same time.",
            min=1,
            show_default="1, or the CPUs of Ray",
            rich_help_panel=MACHINE,
        ),
    ] = None,
    threads: Annotated[int, typer.Option(help="Threads of a training.", min=1, rich_help_panel=MACHINE)] = 1,
    engine: Annotated[
        EngineName, typer.Option(help="What distributes the trainings.", rich_help_panel=MACHINE)
    ] = "joblib",
    address: Annotated[
        str | None,
        typer.Option(
            help="A running Ray: HOST:PORT, ray://HOST:PORT or auto; by default, one is found or started here.",
            rich_help_panel=MACHINE,
            metavar="ADDRESS",
        ),
    ] = None,
    parquet: report.Parquet = False,
    recommend: report.Recommend = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the number of trainings, and check them, without training.")
    ] = False,
) -> None:
    """Train tasks under traces, with rules and seeds, and write a report of what each rule has brought.

    Each training writes a record when it ends. Run the command again to continue after an interruption, or with more
    seeds, traces or rules: only what has no record yet is trained. `vbs report` writes the report at any time.

    Examples:

    - `vbs evaluate mnist-cnn --trace 32 --trace "0:32 1000:256" --rule constant --rule linear --jobs 2`
    - `vbs evaluate mnist-cnn --trace per-device:16@traces/spot_example.json --samples-per-second 2 --rule linear`
    """
    from variable_batch_size.evaluation import Experiment, ModelTime, engines

    model = throughput(samples_per_second, communication_seconds)
    experiment = Experiment(
        tasks=tasks,
        traces=traces,
        rules=rules,
        seeds=seeds,
        lr_factors=lr_factor or [1.0],
        retune=retune or [],
        samples=budget,
        lr=lr,
        ref_batchsize=ref_batchsize,
        minibatch_size=microbatch,
        between=between,
        options=_options(on_end, bounds, every, _under(model, price, restart, save_every, noise)),
        time=None if model is None else ModelTime(model, number, price),
        data_dir=data_dir,
    )
    with _failed():
        cells = experiment.cells()
        if dry_run:
            _print_plan(cells, folder)
            return
        command = shlex.join(context.obj)
        with _interrupted(cells, folder, command):
            records = engines.run(
                cells, folder, jobs=jobs, threads=threads, engine=engine, address=address, command=command
            )
            diverged = sum(record.status == "diverged" for record in records)
            typer.echo(f"{folder}: {len(records):,} trainings, {diverged:,} of which diverged")
            report.publish(folder, table=report.table_of(parquet), recommend=recommend, data_dir=data_dir)


@contextmanager
def _interrupted(cells: list[Cell], folder: Path, command: str) -> Iterator[None]:
    """Say after Ctrl-C what is done, and how to continue."""
    from variable_batch_size.evaluation.engines import without_record

    try:
        yield
    except KeyboardInterrupt:
        keys = {cell.key for cell in cells}
        done = len(keys) - len(without_record(cells, folder))
        typer.echo(f"\nvbs: interrupted after {done:,} of {len(keys):,} trainings", err=True)
        typer.echo(f"to continue: {command}", err=True)
        if done:
            typer.echo(f"for a report: {shlex.join(['vbs', 'report', str(folder)])}", err=True)
        raise typer.Exit(130) from None


@contextmanager
def _failed() -> Iterator[None]:
    """Print the error of a task or a training as one line: it is not one of this package."""
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


def _options(
    on_end: OnEnd | None, bounds: tuple[int, int] | None, every: int | None, under: UnderCapacity | None
) -> TraceOptions:
    from variable_batch_size.evaluation.courses import TraceOptions

    return TraceOptions(on_end, None if bounds is None else check_bounds(bounds, "--bounds"), every, under)


def _under(
    model: Any, price: float | None, restart: float | None, save_every: float | None, noise: Path | None
) -> UnderCapacity | None:
    """Return what policies under a capacity trace have in common; None without the time of an update."""
    from variable_batch_size.evaluation.courses import UnderCapacity
    from variable_batch_size.simulation import NoiseCurve, Overheads

    if model is None:
        return None
    costs = None
    if (restart, save_every) != (None, None):
        costs = Overheads(restart=restart or 0.0, save_every=save_every)
    curve = None if noise is None else NoiseCurve.from_csv(noise)
    return UnderCapacity("", "", model, overheads=costs, noise=curve, price=price)


def _print_plan(cells: list[Cell], folder: Path) -> None:
    """Print how many trainings the command would make, after checking them."""
    from variable_batch_size.evaluation.engines import without_record
    from variable_batch_size.evaluation.experiment import check

    left = without_record(cells, folder)
    check(left.values())
    samples = sum(cell.samples for cell in left.values())
    typer.echo(f"{folder}: {len(cells):,} trainings, {len(left):,} to make, of {samples:,} samples in all")
