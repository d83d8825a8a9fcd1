"""The report of an evaluation: one HTML file that needs no other one, with a CSV and pictures for papers beside it."""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np

from variable_batch_size._extras import import_extra
from variable_batch_size._files import write_bytes
from variable_batch_size._validation import check_choice
from variable_batch_size.lab.evaluation import figures, wording
from variable_batch_size.lab.evaluation.analysis import BASELINE, Analysis
from variable_batch_size.lab.evaluation.metric import Mode, possible
from variable_batch_size.lab.evaluation.recommendation import Recommendation, recommend, reference_of
from variable_batch_size.lab.evaluation.record import Record, status_of
from variable_batch_size.lab.evaluation.statistics import mean_interval
from variable_batch_size.lab.evaluation.tuning import TUNING

if TYPE_CHECKING:
    import pandas as pd

TableFormat: TypeAlias = Literal["csv", "parquet"]
TEMPLATE = Path(__file__).with_name("report.html")


def write_report(
    records: Sequence[Record],
    folder: str | os.PathLike[str],
    *,
    metric: str = "loss",
    baseline: str = BASELINE,
    targets: Mapping[str, tuple[str, float]] | None = None,
    command: str = "",
    planned: int | None = None,
    table: TableFormat = "csv",
    mode: Mode | None = None,
) -> Path:
    """Write the report of an evaluation, complete or not, and return the path of the page.

    Beside `report.html` are `report.csv`, with a row for each evaluation of each training; `report-table.csv`, with the
    numbers of the tables; and `report-TASK.png`, `.pdf` and `.svg` for each task. Those of an earlier report are
    replaced, whatever the format of its tables.

    Args:
        records: what the trainings brought, at least one.
        folder: where the files are written.
        metric: what the rules are compared by, at the end of the samples.
        baseline: rule with which the others are compared.
        targets: task -> (metric, value) to reach.
        command: what was typed.
        planned: number of trainings of the complete evaluation.
        table: format of the tables, "csv" or "parquet".
        mode: "min" if less of the metric is better, "max" if more is; None: its name tells.

    Raises:
        ValueError: if there is no record, or none has the metric or the baseline, or the name of the metric does not
            tell whether less of it is better.
        OSError: if a file cannot be written.
        ModuleNotFoundError: if jinja2, matplotlib or scipy is not installed, or pyarrow, which Parquet needs.
    """
    return write_analysis(Analysis(records, metric, baseline, targets, mode), folder, command, planned, table)


def write_analysis(
    analysis: Analysis,
    folder: str | os.PathLike[str],
    command: str = "",
    planned: int | None = None,
    table: TableFormat = "csv",
    tuning: bool = False,
) -> Path:
    """Write the report of an analysis; the other arguments are those of `write_report`, and `tuning` of `render`."""
    check_choice(table, "table", get_args(TableFormat))
    if table == "parquet":
        import_extra("pyarrow", "parquet")
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    pictures = set()
    for task in analysis.tasks:
        for kind, content in figures.paper(analysis, task).items():
            pictures.add(path := target / f"report-{_file_name(task)}.{kind}")
            write_bytes(path, content)
    for kind in figures.FORMATS:
        for path in set(target.glob(f"report-*.{kind}")) - pictures:
            path.unlink()
    _write_table(target / "report", analysis.tidy, table)
    _write_table(target / "report-table", analysis.summary.reset_index(), table)
    page = target / "report.html"
    write_bytes(page, render(analysis, command, planned, tuning).encode())
    return page


def render(analysis: Analysis, command: str = "", planned: int | None = None, tuning: bool = False) -> str:
    """Return the report as HTML; the arguments are those of `write_report`."""
    jinja2 = import_extra("jinja2", "evaluation")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    found = recommend(analysis)
    html: str = template.render(
        markup=jinja2.utils.markupsafe.Markup,
        metric=analysis.metric,
        baseline=analysis.baseline,
        pairing=wording.number(analysis.pairing) if math.isfinite(analysis.pairing) else "",
        power=wording.power(analysis.seeds, analysis.comparisons, analysis.any_failed),
        tasks=[_task(analysis, task, found) for task in analysis.tasks],
        facts=_facts(analysis, command, planned, tuning),
    )
    return html


def _task(analysis: Analysis, task: str, recommendations: Sequence[Recommendation]) -> dict[str, Any]:
    """Return what the template shows of a task."""
    traces, rules, looks = analysis.traces(task), analysis.rules_of(task), figures.look(analysis.rules)
    size = (max(3.2, 1.25 + 0.8 * len(traces)), 1.4 + 0.34 * len(rules))
    return {
        "name": task,
        "looks": {rule: looks[rule] for rule in rules},
        "images": [f"report-{_file_name(task)}.{kind}" for kind in figures.FORMATS],
        "recommendations": [found for found in recommendations if found.task == task],
        "heat": figures.svg(partial(figures.draw_regret, analysis=analysis, task=task), size),
        "reference": reference_of(analysis, task),
        "traces": [
            {
                "name": trace,
                "table": _table(analysis, task, trace),
                "factors": _factors(analysis, task, trace),
                "panels": _panels(analysis, task, trace),
            }
            for trace in traces
        ],
        "target": _target(analysis, task),
    }


def _panels(analysis: Analysis, task: str, trace: str) -> list[tuple[str, str]]:
    """Return the caption and the SVG of each picture of a trace."""
    rows, looks = analysis.rows(task, trace), figures.look(analysis.rules)
    panels = [
        ("batch size", figures.svg(partial(figures.draw_batch_sizes, rows=rows, looks=looks))),
        ("learning rate", figures.svg(partial(figures.draw_lr, rows=rows, looks=looks))),
    ]
    places = [(analysis.metric, place) for place in figures.AXES]
    places[1:1] = [(metric, "samples") for metric in analysis.metrics if metric != analysis.metric]
    for metric, place in places:
        if rows[place].notna().any() and rows[metric].notna().any():
            draw = partial(figures.draw_curves, rows=rows, metric=metric, place=place, looks=looks)
            panels.append((f"{metric} along {figures.AXES[place]}", figures.svg(draw)))
    return panels


def _table(analysis: Analysis, task: str, trace: str) -> dict[str, Any]:
    """Return the columns of a table and its rows, each a rule and its cells; columns without a number are left out."""
    facts = analysis.facts(task, trace)
    facts = facts.sort_values("failed", key=lambda rate: rate > 0, kind="stable")  # which is no claim
    interval = partial(_interval, seeds=int(facts["failed_n"].max()))  # a rule may have trained with fewer
    columns = {
        "failed": [_failures(row) for row in _rows(facts)],
        f"{analysis.metric}": [interval(row, "value") for row in _rows(facts)],
        "by Student's t": [interval(row, "value_t") for row in _rows(facts)],
        f"difference to {analysis.baseline}": [interval(row, "difference", "+") for row in _rows(facts)],
    }
    if facts["factor"].ne(1).any() or len(analysis.factors(task, trace)) > 1:
        columns = {
            "factor": [f"{row['factor']:g}{' (edge)' if row['edge'] else ''}" for row in _rows(facts)],
            **columns,
        }
    columns |= {
        f"{analysis.metric} at the reference's rate": [interval(row, "untuned") for row in _rows(facts)],
        "regret": [interval(row, "regret", "+") for row in _rows(facts)],
    }
    for name in analysis.metrics:
        if name != analysis.metric:
            columns[name] = [interval(row, f"end_{name}") for row in _rows(facts)]
    columns |= {
        name: [interval(row, f"end_{name}") for row in _rows(facts)] for name in ("samples", "updates", "progress")
    }
    if facts["end_samples"].nunique() <= 1:
        del columns["samples"]
    columns["simulated time"] = [interval(row, "end_seconds", timed=True) for row in _rows(facts)]
    columns["cost"] = [interval(row, "end_cost") for row in _rows(facts)]
    if "reached" in facts and facts["reached"].notna().any():
        columns["reached the target"] = [f"{row['reached']:.0f} of {row['target_n']:.0f}" for row in _rows(facts)]
        for name in ("samples", "seconds", "cost"):
            columns[f"{name} to it"] = [_to_target(row, name) for row in _rows(facts)]
    shown = {name: texts for name, texts in columns.items() if any(text != "-" for text in texts)}
    rows = zip(map(str, facts.index), facts["difference_decided"], zip(*shown.values(), strict=True), strict=True)
    return {"columns": list(shown), "rows": list(rows)}


def _factors(analysis: Analysis, task: str, trace: str) -> dict[str, Any] | None:
    """Return a table rule x factor of what was tried, and which factor was chosen; None if there is only one."""
    cells = analysis.tried(task, trace)
    factors = sorted(map(float, cells["lr_factor"].unique()))
    if len(factors) < 2:
        return None
    rows, chosen = [], analysis.facts(task, trace)["factor"]
    for rule in analysis.rules_of(task):
        own = cells[cells["rule"] == rule]
        texts = [_tried(own[own["lr_factor"] == factor], analysis.metric) for factor in factors]
        if any(text != "-" for text in texts):
            rows.append(
                (rule, [(text, chosen.get(rule) == factor) for text, factor in zip(texts, factors, strict=True)])
            )
    return {
        "factors": [f"{factor:g}" for factor in factors],
        "rows": rows,
        "optimistic": analysis.is_optimistic(task, trace),
    }


def _tried(cells: pd.DataFrame, metric: str) -> str:
    """Format the mean of some trainings, and how many of them failed."""
    values, failed = cells.loc[~cells["failed"], metric].dropna().to_numpy(np.float64), int(cells["failed"].sum())
    text = wording.interval(*mean_interval(values, **possible(metric, values))[:3])
    return f"{text}, {failed} of {len(cells)} failed" if failed else text


def _rows(facts: Any) -> list[dict[str, float]]:
    rows: list[dict[str, float]] = facts.to_dict("records")
    return rows


def _interval(row: Mapping[str, float], name: str, sign: str = "", *, seeds: int, timed: bool = False) -> str:
    """Format a number, its interval, and of how many seeds it is if these are not all `seeds` of its trace."""
    value, low, high = (row[f"{name}{bound}"] for bound in ("", "_low", "_high"))
    exact = math.isclose(low, high) or not math.isfinite(low)
    if timed:
        text = wording.duration(value) if exact else _time_interval(value, low, high)
    else:
        text = wording.number(value, sign=sign) if exact else wording.interval(value, low, high, sign)
    few = row[f"{name}_n"] < seeds and text != "-"
    return f"{text}, {row[f'{name}_n']:.0f} of {seeds} seeds" if few else text


def _time_interval(value: float, low: float, high: float) -> str:
    """Format seconds and their interval, in one unit.

    >>> _time_interval(7200, 6120, 9000), _time_interval(36000, 35990, 36020)
    ('2.00 h (1.70 to 2.50)', '10.0000 h (9.9972 to 10.0056)')
    """
    unit = wording.duration(value).rpartition(" ")[2]
    size = wording.UNITS[unit]
    number, _, bounds = wording.interval(value / size, low / size, high / size).partition(" (")
    return f"{number} {unit} ({bounds}"


def _failures(row: Mapping[str, float]) -> str:
    low, high = row["failed_low"], row["failed_high"]
    count = row["failed"] * row["failed_n"]
    short = f", {row['short']:.0f} short of the end" if row["short"] else ""
    return f"{count:.0f} of {row['failed_n']:.0f} ({low:.0%} to {high:.0%}){short}"


def _to_target(row: Mapping[str, float], name: str) -> str:
    """Format what reaching the target took; it is a lower bound if some trainings have not reached it."""
    value, low, high = (row[f"target_{name}{bound}"] for bound in ("", "_low", "_high"))
    if not np.isfinite(value):
        return "-"
    text = wording.interval(value, low, high)
    return text if row["reached"] == row["target_n"] else f"\u2265 {text}"


def _target(analysis: Analysis, task: str) -> str:
    target = next((found for name, found in (analysis.targets or {}).items() if task.split(" (")[0] == name), None)
    return f"{target[0]} {target[1]:g}" if target else ""


def _facts(analysis: Analysis, command: str, planned: int | None, tuning: bool) -> dict[str, str]:
    """Return what the evaluation was, and on what it ran."""
    total, failed = len(analysis.records), sum(status_of(record) != "finished" for record in analysis.records)
    of = f" of {planned:,}" if planned is not None and planned != total else ""
    if planned is not None and tuning:
        of = f" of at least {planned:,} (those that judge are planned when the learning rates are chosen)"
    facts = {"trainings": f"{total:,}{of}, {failed:,} of them failed"}
    facts["computed in"] = wording.duration(sum(record.wall_seconds for record in analysis.records))
    if command:
        facts["command"] = command
    facts |= {task: _plan(analysis, task) for task in analysis.tasks}
    environments = [record.environment for record in analysis.records]
    every = dict.fromkeys(name for environment in environments for name in environment)
    names = [name for name in every if not name.startswith("seed of")]  # which `_plan` has
    facts |= {name: _distinct(environment.get(name) for environment in environments) for name in names}
    if "-dirty" in facts.get("commit", ""):
        facts["commit"] += " (-dirty: with changes that are in no commit)"
    return facts


def _plan(analysis: Analysis, task: str) -> str:
    """Return what a task was trained with."""
    keys = set(analysis.ends.loc[analysis.ends["task"] == task, "key"])
    cells = [record.cell for record in analysis.records if record.key in keys]
    parts = [
        f"reference batch size {_distinct(cell.get('ref_batchsize') for cell in cells)}",
        f"learning rate {_distinct(format(cell['lr'] / cell['lr_factor'], '.6g') for cell in cells)}",
        f"microbatches of {_distinct(cell.get('minibatch_size') for cell in cells)} samples",
        f"{_distinct(format(cell['samples'], ',') for cell in cells)} samples",
        f"ends: {_distinct(cell.get('end', 'samples') for cell in cells)}",
    ]
    seeds = sorted({cell["seed"] for cell in cells})
    judging = [str(seed) for seed in seeds if seed < TUNING]
    choosing = [str(seed) for seed in seeds if seed >= TUNING]
    parts += [f"seeds of model and of order {wording.listed(judging)}"] if judging else []
    return "; ".join(parts + ([f"tuning seeds {wording.listed(choosing)}"] if choosing else []))


def _distinct(values: Iterable[object]) -> str:
    return " | ".join(dict.fromkeys("unknown" if value is None else str(value) for value in values))


def _file_name(task: str) -> str:
    name = re.sub(r"[^A-Za-z0-9]+", "-", task).strip("-")
    return name if len(name) < 100 else f"{name[:80]}-{hashlib.sha256(task.encode()).hexdigest()[:8]}"


def _write_table(path: Path, rows: pd.DataFrame, table: TableFormat) -> None:
    """Write a table to a file with the suffix of its format, and remove that of another one, which is older."""
    content = rows.to_csv(index=False).encode() if table == "csv" else rows.to_parquet(index=False)
    write_bytes(path.with_suffix(f".{table}"), content)
    for other in set(get_args(TableFormat)) - {table}:
        path.with_suffix(f".{other}").unlink(missing_ok=True)
