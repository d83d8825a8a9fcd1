"""Record measurements in records.csv, and generate RESULTS.md from it: the newest value of each question.

    python benchmarks/results.py

A script calls `record` for each number that it has measured: it appends a row to records.csv and generates RESULTS.md
again. docs/measurements.py shows the same rows, with their quartiles, in docs/performance.md.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from datetime import date
from itertools import groupby
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from records import Measured, Record, append, newest, read

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "RESULTS.md"


def record(
    question: str,
    what: str,
    measured: Measured | float,
    unit: str = "ratio",
    *,
    on: str = "",
    where: str = "",
    case: str = "",
    note: str = "",
    libraries: str = "",
) -> None:
    """Print a measurement, append it to records.csv, and generate RESULTS.md.

    Args:
        question: see `Record`, as for all others.
        what: who is measured.
        measured: a value, or `spread(values)`.
        unit: "ratio", or the unit.
        on: the model, dataset or number of samples.
        where: the device and the number of ranks.
        case: one of several in a cell of a table.
        note: what else is to be said.
        libraries: further versions than those of Python, torch and numpy.
    """
    import torch  # here, because resume.py measures its import

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=FOLDER, capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--", "../variable_batch_size")
    path = ["PYTHONPATH=test"] if "helpers" in sys.modules else []
    spreads = measured if isinstance(measured, Measured) else Measured(measured)
    rounded = {
        name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in spreads._asdict().items()
    }
    own = [f"Python {platform.python_version()}", f"torch {torch.__version__}", f"numpy {np.__version__}"]
    row = Record(
        date=str(date.today()),
        question=question,
        what=what,
        on=on,
        where=where,
        case=case,
        unit=unit,
        command=" ".join([*path, "python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        commit=os.environ.get("COMMIT") or git("rev-parse", "--short", "HEAD") + (" with changes" if changed else ""),
        versions=", ".join([*own, *filter(None, [libraries])]),
        note=note,
        **rounded,
    )
    print(f"{', '.join(filter(None, row.key()))}: {cell([row], full=True)}", flush=True)
    append([row])
    write_results()


# Tables ---------------------------------------------------------------------------------------------------------------


def table(
    rows: Sequence[Record],
    title: str,
    lines: Sequence[str],
    columns: Sequence[str],
    *,
    full: bool = False,
    cases: Literal["", "lines", "columns"] = "",
) -> str:
    """Return a table in Markdown.

    Args:
        rows: newest rows; those of the same line and column share a cell.
        title: what the first column holds.
        lines: names of the attributes that differ between lines.
        columns: names of the attributes that differ between columns.
        full: whether to show quartiles, deviations and notes; otherwise the table ends with scripts and commits.
        cases: whether the names of lines or of columns list the cases in the cells.
    """

    def group(names: Sequence[str]) -> dict[tuple[str, ...], list[Record]]:
        """Sort rows by numbers in what is not the first of several attributes, then by their first appearance."""
        found: dict[tuple[str, ...], list[Record]] = {}
        for row in rows:
            found.setdefault(tuple(getattr(row, name) for name in names), []).append(row)
        first = list(dict.fromkeys(key[0] for key in found))
        by_size = names[0] == "on"
        order = {key: (size(key[0]) if by_size else first.index(key[0]), *map(size, key[1:])) for key in found}
        return {key: found[key] for key in sorted(found, key=lambda key: order[key])}

    def name(key: tuple[str, ...], own: Sequence[Record], list_cases: bool) -> str:
        several = list(dict.fromkeys(row.case for row in own if row.case))
        return ", ".join(filter(None, key)) + (f" ({', '.join(several)})" if list_cases and len(several) > 1 else "")

    heads = group(columns)
    head = [title, *(name(key, own, cases == "columns") for key, own in heads.items()), *([] if full else ["from"])]
    text = [head, ["---"] * len(head)]
    for key, own in group(lines).items():
        cells = [cell([row for row in own if row in others], full) for others in heads.values()]
        text.append([name(key, own, cases == "lines"), *cells, *([] if full else [sources(own)])])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in text)


def sources(rows: Iterable[Record]) -> str:
    """Return the scripts and commits that rows are from."""
    commits: dict[str, list[str]] = {}
    for row in rows:
        commits.setdefault(row.command.split("benchmarks/")[1].split()[0], []).append(row.commit)
    return "; ".join(f"{script} {', '.join(dict.fromkeys(found))}" for script, found in commits.items())


def size(text: str) -> float:
    """Return the number of parameters, samples, cores and so on in a text, by which tables are sorted; -1 without."""
    found = re.search(r"(\d+(e\+\d+)?)(M|x$| samples| core| microbatch)", text)
    return float(found[1]) if found else -1.0


def cell(rows: Iterable[Record], full: bool) -> str:
    """Return the values of rows, with their units."""
    parts = []
    for unit, same in groupby(rows, lambda row: row.unit):
        parts.append(", ".join(shown(row, full) for row in same) + ("" if unit == "ratio" else f" {unit}"))
    return "; ".join(parts)


def shown(row: Record, full: bool) -> str:
    """Return the value of a row as text, without its unit."""

    def number(value: float) -> str:
        if row.unit in ("%", "x the samples"):
            return f"{value:.{2 if full else 1}f}"
        if row.unit in ("ratio", "s") or (abs(value) < 10 and value != int(value)):
            return f"{value:.2f}"
        return f"{value:,.0f}"

    text = number(row.value)
    if full and row.low is not None and row.high is not None:
        text += f" ({number(row.low)} to {number(row.high)})"
    if full and row.deviation is not None:
        text += f" ± {number(row.deviation)}"
    if not full and row.unit == "ratio" and row.low is not None and row.high is not None and row.low <= 1 <= row.high:
        text = f"({text})"
    return f"{text} ({row.note})" if row.note and (full or row.unit == "%") else text


class Table(NamedTuple):
    """A table of RESULTS.md, see `table`: the rows of these questions whose place begins with `where`.

    What `only_on_the_page` says is in docs/performance.md only.
    """

    title: str
    questions: tuple[str, ...]
    lines: tuple[str, ...]
    columns: tuple[str, ...]
    where: str = ""
    cases: Literal["", "lines", "columns"] = ""


REPEATED = "updates repeated, a checkpoint every 3 updates"
SAVED_TO_S3 = ", saved to S3"
KILLS, SAVED = "kills", "time from the signal to the checkpoint"
SIMULATED = "simulated / measured"
LOST = "lost updates of a kill, largest difference to the simulation"
CONTROLLED = "controller / the same trace"
TRAINER = "time of an update in a trainer"
COST, STAGED = "cost of a save", "torch.distributed.checkpoint.async_save / a copy of the state"
ARRIVE = "time of an update of batches that arrive"
CYCLES, CYCLES_SHOWN = "estimated cycles on a TPU, ratio", ("linear / by hand", "AdaScale / linear")
OWN = "own seconds"  # the case of a simulation that has the seconds of the training with which it is compared
HEAD = """# Measurements

Newest medians, on 2 cores of a Xeon, or on the GPU that is named. Of a / b, below 1 a is faster than b, and in
parentheses the quartiles lie on both sides of 1: no difference was found. Quartiles: records.csv; more:
docs/performance.md, NOTEBOOK.md.\
"""
TABLES = [
    Table(
        "time of an update of 1, 4 and 16 microbatches",
        ("time of an update", ARRIVE),
        ("where", "what"),
        ("on",),
        "CPU",
    ),
    Table(
        "time of an update of 1, 4 and 16 microbatches", ("time of an update",), ("where", "what"), ("on",), "NVIDIA"
    ),
    Table("time of an update of 1 and 4 microbatches", ("time of an update",), ("what",), ("on", "where"), "XLA"),
    Table(
        "cycles that a TPU's compiler estimates (kernels; on v5e:2x2 with all-reduces, too); no TPU was run",
        (CYCLES,),
        ("what",),
        ("on", "where"),
    ),
    Table(
        "communication hidden by backward, 1 and 4 microbatches",
        ("share of the communication that is hidden",),
        ("on", "where"),
        ("what",),
    ),
    Table(
        "to draw microbatches of 1e7, 1e8 and 1e9 samples",
        ("time to the first microbatch", "time per sample", "memory to iterate", "memory of sampler and trace"),
        ("what",),
        ("question",),
    ),
    Table(
        "memory and checkpoints",
        (
            "peak memory",
            "time to the first update after a restore",
            "time that a save blocks",
            "time of an update beside a save",
            "time of a save",
            COST,
        ),
        ("question", "what"),
        ("on",),
        cases="lines",
    ),
    Table(
        "losses of the whole batch",
        (
            "time of an update of a contrastive loss",
            "memory of an update of a contrastive loss",
            "recall of the nearest pair",
        ),
        ("question", "what"),
        ("case",),
    ),
    Table("operations that an update dispatches", ("operations of an update",), ("what",), ("where", "case")),
    Table("ended by", (REPEATED, KILLS, SAVED, SIMULATED, LOST), ("on",), ("question",), cases="columns"),
    Table("test accuracy by batch size / 32 (1, 4, 16, 64)", ("test accuracy", "samples of a run"), ("on",), ("what",)),
]


def only_on_the_page(row: Record) -> bool:
    """Return whether RESULTS.md, which is one screen, leaves a row to docs/performance.md."""
    if row.question == COST and row.where == "CPU, 1 process":
        return True
    if row.question == CYCLES and row.what not in CYCLES_SHOWN:
        return True
    if row.question == ARRIVE and row.what != "ArrivingBatches / CustomSampler":
        return True
    if row.question == TRAINER or row.what in (CONTROLLED, STAGED):
        return True
    return row.case.endswith(OWN) or row.on.endswith(("PerDevice", SAVED_TO_S3))


def results(rows: Iterable[Record]) -> str:
    """Return the text of RESULTS.md."""
    current, parts = [row for row in newest(rows) if not only_on_the_page(row)], [HEAD]
    for title, questions, lines, columns, where, cases in TABLES:
        own = [row for row in current if row.question in questions and row.where.startswith(where)]
        parts.append(table(own, title, lines, columns, cases=cases))
    return "\n\n".join(parts) + "\n"


def write_results() -> None:
    """Generate RESULTS.md."""
    RESULTS.write_text(results(read()))


if __name__ == "__main__":
    write_results()
