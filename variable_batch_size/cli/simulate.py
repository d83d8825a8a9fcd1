"""`vbs simulate`: time, cost and progress of a training under a capacity trace, for several policies."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from variable_batch_size import cluster
from variable_batch_size.adaptive import Throughput
from variable_batch_size.adaptive.table import POLICIES, parse_policy
from variable_batch_size.cli import output
from variable_batch_size.cli.options import CommunicationSeconds, Png, prepared, say
from variable_batch_size.cli.trace import describe
from variable_batch_size.simulation import NoiseCurve, Overheads, Run
from variable_batch_size.simulation import simulate as simulate_run

SECONDS = ("productive", "redone", "restarting", "saving", "idle")
POLICY = " or ".join(f"{name}:SAMPLES" for name in POLICIES)


def simulate(
    capacity: Annotated[
        Path, typer.Argument(help="A log in any of the known formats.", show_default=False, metavar="LOG")
    ],
    policy: Annotated[list[str], typer.Option(help=f"{POLICY}; several are compared.", show_default=False)],
    samples_per_second: Annotated[
        float, typer.Option(help="Samples that a device computes in a second.", show_default=False)
    ],
    ref_batchsize: Annotated[
        int, typer.Option(help="Batch size at which progress is counted.", min=1, show_default=False)
    ],
    communication_seconds: CommunicationSeconds = 0.0,
    rule: Annotated[str, typer.Option(help="Learning-rate rule, which defines the progress of an update.")] = "linear",
    noise: Annotated[
        Path | None, typer.Option(help="scalars.csv of a training that measured the gradient noise.")
    ] = None,
    devices_per_node: Annotated[int, typer.Option(help="Devices of a node.", min=1)] = 1,
    microbatch: Annotated[int | None, typer.Option(help="Rows that a device computes at once.", min=1)] = None,
    dataset_size: Annotated[
        int | None, typer.Option(help="Samples of an epoch; by default there are none.", min=1)
    ] = None,
    restart: Annotated[float, typer.Option(help="Seconds of a restart.", min=0)] = 0.0,
    save: Annotated[float, typer.Option(help="Seconds of writing a checkpoint.", min=0)] = 0.0,
    save_every: Annotated[float | None, typer.Option(help="Seconds between two checkpoints.")] = None,
    notice: Annotated[
        float, typer.Option(help="Seconds of warning before nodes leave; 0: they are killed.", min=0)
    ] = 0.0,
    least_nodes: Annotated[int, typer.Option(help="Least nodes with which the training runs.", min=1)] = 1,
    grow_every: Annotated[
        float, typer.Option(help="Least seconds between a restart and one with more nodes.", min=0)
    ] = 0.0,
    price: Annotated[
        float | None, typer.Option(help="Price of a node-hour; by default, that of the log.", min=0)
    ] = None,
    max_progress: Annotated[float | None, typer.Option(help="Progress at which the training ends.")] = None,
    json: output.Json = False,
    trace_out: Annotated[
        Path | None, typer.Option(help="Write the batch trace of the only policy.", metavar="FILE", callback=prepared)
    ] = None,
    png: Png = None,
) -> None:
    """Simulate a training under a capacity trace: time, cost and progress of each policy.

    Nodes that leave interrupt the training, which restarts from its last checkpoint. Progress is counted in updates at
    --ref-batchsize, by the rule and, for adascale, the noise: it is a model, and no loss is simulated.

    Example: `vbs simulate traces/spot_example.json --policy per-device:64 --policy constant:512
    --samples-per-second 150 --ref-batchsize 256 --restart 90 --save 20 --save-every 1800 --price 0.9`
    """
    if len(policy) > 1 and (trace_out or png):
        raise ValueError(f"--trace-out and --png are for one policy, got {len(policy)}; pass one --policy")
    log = cluster.read(capacity)
    model = Throughput.simple(samples_per_second, communication_seconds)
    curve = None if noise is None else NoiseCurve.from_csv(noise)
    overheads = Overheads(restart, save_every, save, notice=notice, least_nodes=least_nodes, grow_every=grow_every)
    runs = {
        name: simulate_run(
            log,
            parse_policy(name),
            throughput=model,
            ref_batchsize=ref_batchsize,
            rule=rule,
            noise=curve,
            minibatch_size=microbatch,
            dataset_size=dataset_size,
            devices_per_node=devices_per_node,
            overheads=overheads,
            prices=price,
            until=max_progress,
        )
        for name in policy
    }
    if json:
        output.print_json({name: dict(run.summary) for name, run in runs.items()})
    else:
        columns = ["", *runs]
        output.print_table(columns, _rows(list(runs.values())))
    if trace_out is not None:
        trace = runs[policy[0]].trace
        trace.to_csv(trace_out)
        say(trace_out, describe(trace))
    if png is not None:
        output.check_png(png)
        runs[policy[0]].plot().savefig(png, dpi=120)


def _rows(runs: list[Run]) -> list[list[str]]:
    """Return a row for each fact, and a column for each run."""
    summaries = [run.summary for run in runs]
    rows = [["elapsed", *(output.duration(summary["elapsed"]) for summary in summaries)]]
    rows += [
        [f"  {name}", *(f"{summary[name] / (summary['elapsed'] or 1):.1%}" for summary in summaries)]
        for name in SECONDS
    ]
    for name in ("updates", "samples", "progress", "preemptions", "restarts", "efficiency", "cost"):
        if name in summaries[0]:
            rows.append([name, *(output.number(summary.get(name, 0.0)) for summary in summaries)])
    return rows
