"""`vbs trace`: batch traces, the batch size of every update."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from variable_batch_size._validation import value_error
from variable_batch_size.cli import output
from variable_batch_size.cli.command import command
from variable_batch_size.cli.group import Commands
from variable_batch_size.cli.options import Out, Png, SequenceLength, TraceSource, UnitOption, count_option
from variable_batch_size.lab.cluster.reading import recognized_format
from variable_batch_size.lab.simulation.simulate import MAX_STEPS
from variable_batch_size.trace import BatchTrace
from variable_batch_size.trace.schedule import is_schedule

app = typer.Typer(cls=Commands, help="Batch traces: the global batch size of every update.", no_args_is_help=True)


@app.command()
@command
def make(
    schedule: Annotated[
        str,
        typer.Argument(help='Thresholds and sizes: "0:128 2000:256 10K:1024".', show_default=False, metavar="SCHEDULE"),
    ],
    out: Out,
    steps: Annotated[int, count_option("Number of updates.", most=MAX_STEPS, metavar="UPDATES", show_default=False)],
    unit: UnitOption = "steps",
    sequence_length: SequenceLength = None,
    round_to: Annotated[
        int | None, count_option("Round the sizes to multiples of this number.", metavar="SAMPLES")
    ] = None,
) -> None:
    """Write the batch trace of a schedule as a CSV file, a row per update.

    Examples:

    - `vbs trace make "0:128 2000:256 10K:1024" --steps 20000 --out trace.csv`
    - `vbs trace make "0:768 250B:1536" --unit tokens --sequence-length 4096 --steps 100000 --out trace.csv`
    """
    trace = BatchTrace.parse(schedule, steps, unit=unit, sequence_length=sequence_length)
    trace = trace if round_to is None else trace.round_to(round_to)
    output.write(out, trace.to_csv, describe(trace))


@app.command()
@command
def show(
    trace: TraceSource,
    unit: UnitOption = "steps",
    sequence_length: SequenceLength = None,
    json: output.Json = False,
    png: Png = None,
) -> None:
    """Show the steps, samples and sizes of a batch trace.

    Examples:

    - `vbs trace show traces/test_trace.csv`
    - `vbs trace show "0:128 2000:256 10K:1024"`
    """
    by_schedule = is_schedule(trace)
    batches = BatchTrace.parse(trace, unit=unit, sequence_length=sequence_length) if by_schedule else _read(trace)
    first_step, sizes = batches.runs  # (runs,) both
    shown_steps = batches.steps or int(first_step[-1]) * 5 // 4 + 1  # of an infinite trace, also some of the last size
    edges = np.append(first_step, shown_steps).astype(np.float64)
    infinite = batches.steps is None
    if json:
        total = None if infinite else batches.total_samples
        facts = {"steps": batches.steps, "samples": total, "min": int(sizes.min()), "max": batches.max_batch_size}
        output.print_json({**facts, "changes": len(sizes) - 1, "fingerprint": batches.fingerprint})
    else:
        mean = float(sizes @ np.diff(edges)) / shown_steps
        size_text = f", at last {sizes[-1]:,}" if infinite else f", mean {output.format_number(mean)}"
        texts = {
            "steps": "infinite" if infinite else output.format_number(shown_steps),
            "samples": "infinite" if infinite else output.format_number(batches.total_samples),
            "batch size": f"{sizes.min():,} to {sizes.max():,}{size_text}",
            "changes": output.format_number(len(sizes) - 1),
        }
        output.print_facts(texts)
    if png is not None:
        output.save_picture(png, edges, sizes.astype(np.float64), "update", "global batch size", Path(trace).name)


def _read(trace: str) -> BatchTrace:
    """Return the batch trace of a file or number. For a capacity trace, the ValueError names the command to use."""
    try:
        return BatchTrace.of(trace)
    except ValueError as error:
        format = recognized_format(trace)
        if format is None:
            raise
        found = f"what looks like a capacity trace of the format {format} ({error})"
        raise value_error("TRACE must be a batch trace", found, "use vbs capacity show for that") from None


def describe(trace: BatchTrace) -> str:
    """Describe a batch trace that ends in a line: its updates, samples and largest batch size."""
    return f"{len(trace):,} updates, {trace.total_samples:,} samples, batch size at most {trace.max_batch_size:,}"
