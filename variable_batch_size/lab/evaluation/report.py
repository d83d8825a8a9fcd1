"""The report of an evaluation: one HTML file that needs no other one, with a table of the runs and the figure."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from inspect import getdoc
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from variable_batch_size._extras import import_extra
from variable_batch_size._files import write_bytes
from variable_batch_size.lab.evaluation import figures, wording
from variable_batch_size.lab.evaluation.failures import reference_trainings
from variable_batch_size.lab.evaluation.judgement import Judgement, Trace
from variable_batch_size.lab.evaluation.records import REFERENCE, Evaluation
from variable_batch_size.lab.evaluation.statistics import mean_interval
from variable_batch_size.rules import RULES

if TYPE_CHECKING:
    import pandas as pd

TEMPLATE = Path(__file__).with_name("report.html")


def write_report(
    evaluation: Evaluation, judgements: Sequence[Judgement], folder: str | os.PathLike[str], parquet: bool = False
) -> Path:
    """Write the HTML report of an evaluation, and return its path.

    Beside `report.html` are `report.csv`, with a row for each training, and `report-TASK.png`, `.pdf` and `.svg`. Those
    of an earlier report are replaced.

    Args:
        evaluation: the evaluation.
        judgements: what `judge` says of it.
        folder: where the files are written.
        parquet: whether the table is a Parquet file, instead of CSV.

    Raises:
        OSError: if a file cannot be written.
        ModuleNotFoundError: if jinja2, matplotlib or scipy is not installed, or pyarrow, which Parquet needs.
    """
    if parquet:
        import_extra("pyarrow", "parquet")
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    files = {"report.html": render(evaluation, judgements).encode()}
    trainings = _trainings_table(judgements)
    if parquet:
        files["report.parquet"] = trainings.to_parquet()
    else:
        files["report.csv"] = trainings.to_csv(index=False).encode()
    for judgement in judgements:
        images = figures.image_files(judgement) if judgement.traces else {}
        files |= {f"report-{_file_name(judgement.task)}.{kind}": content for kind, content in images.items()}
    for kind in ("png", "pdf", "svg", "csv", "parquet"):
        for path in list(target.glob(f"report*.{kind}")):
            if path.name not in files:  # it is of an earlier report
                path.unlink()
    for name, content in files.items():
        write_bytes(target / name, content)
    return target / "report.html"


def check_libraries() -> None:
    """Raise ModuleNotFoundError if a library that reports need is missing, before anything is trained."""
    for module in ("jinja2", "matplotlib.figure", "scipy.stats"):
        import_extra(module, "evaluation")


def render(evaluation: Evaluation, judgements: Sequence[Judgement]) -> str:
    """Return the report as an HTML page. The arguments are those of `write_report`."""
    jinja2 = import_extra("jinja2", "evaluation")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    html: str = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        tasks=[_task_section(judgement) for judgement in judgements],
        metric=judgements[0].metric,
        seeds=_describe_seeds(judgements),
        rules=_rule_definitions(judgements),
        facts=_evaluation_facts(evaluation, judgements),
    )
    return html


def _rule_definitions(judgements: Sequence[Judgement]) -> dict[str, str]:
    """Return what each rule does: its name -> the first line of the docstring of its class."""
    rules = dict.fromkeys(rule for judgement in judgements for rule in judgement.rules)
    classes = {rule: RULES.get(rule.partition(":")[0]) for rule in rules}  # a name may be "NAME:ARGUMENTS"
    return {rule: (getdoc(kind) or "").partition("\n")[0] for rule, kind in classes.items() if kind is not None}


def _describe_seeds(judgements: Sequence[Judgement]) -> str:
    """Return with how many seeds the rules were trained, as text: "5 seeds", or "3 to 5 seeds" if they differ."""
    rows = [row for judgement in judgements for trace in judgement.traces for row in trace.rows]
    counts = sorted({row.trained for row in rows} - {0}) or [0]
    return f"{counts[0]} to {counts[-1]} seeds" if len(counts) > 1 else f"{counts[0]} seeds"


def _task_section(judgement: Judgement) -> dict[str, Any]:
    """Return the values that the HTML template shows in the section of one task."""
    reference, rows = judgement.reference, judgement.trainings
    has_factors = rows.loc[rows["trace"] != REFERENCE, "lr_factor"].nunique() > 1
    svg = figures.page_svg(judgement) if judgement.traces else ""
    return {
        "name": judgement.task,
        "baseline": judgement.baseline,
        "reference": wording.describe_reference(judgement),
        "most": wording.format_number(reference.most, reference.most) if reference.most > 0 else "",
        "notes": _notes(judgement),
        "failures": wording.describe_failures(judgement),
        "at_reference": wording.format_number(*_reference_moments(rows)).removesuffix("-"),
        "beside": f"{reference.batchsize:g}" if np.isfinite(reference.batchsize) else "",
        "traces": [
            {
                "name": trace.name,
                "verdict": wording.verdict(judgement, trace),
                "lost": wording.describe_loss(judgement, trace),
                "table": _rule_rows(trace),
                "failed": any(row.failed for row in trace.rows),
                "response": _response(judgement, trace) if has_factors else None,
            }
            for trace in judgement.traces
        ],
        "figure": import_extra("markupsafe", "evaluation").Markup(svg),
    }


def _notes(judgement: Judgement) -> list[str]:
    """Return warnings for the reader of a task's section: runs that are missing, left out or from other sources."""
    rows, notes = judgement.trainings, list[str]()
    if judgement.waiting:
        notes.append(f"{judgement.waiting:,} runs of the plan have not ended: nothing is claimed yet.")
    if judgement.earlier_seeds:
        seeds = wording.join_names([*map(str, judgement.earlier_seeds)])
        notes.append(f"An earlier plan judged the seeds {seeds}: they are left out here, all is of the new ones.")
    if judgement.choices > 1:
        notes.append(wording.describe_choices(judgement))
    if judgement.killed:
        notes.append(f"Killed, and in no number: {'; '.join(judgement.killed)}.")
    sources = {environment.get("source of the task") for environment in rows["environment"]} - {None}
    if len(sources) > 1:
        notes.append(f"The runs have {len(sources)} versions of the file of the task; give it another version.")
    starts = [start for start in rows["start"].unique() if start]
    if starts:
        notes.append(f"All runs start at {wording.join_names(starts)}: what is claimed holds for this checkpoint.")
    return notes


def _reference_moments(rows: pd.DataFrame) -> tuple[float, float]:
    """Return mean and standard deviation over the seeds of the final metric of the reference, at its learning rate."""
    final_values = reference_trainings(rows)["value"]  # nan where a training failed
    return float(final_values.mean()), float(final_values.std())


def _rule_rows(trace: Trace) -> list[dict[str, str]]:
    """Return the table of a trace as text: for each rule its mean, and its difference from the baseline."""
    words = {"baseline": "", "same": "the same runs"}  # instead of a difference
    return [
        {
            "rule": row.rule,
            "claim": row.answer if row.answer in ("better", "worse") else "",
            "mean": wording.format_interval(*row.mean),
            "difference": words.get(row.answer, wording.format_interval(*row.difference, sign="+")),
            "failed": f"{row.failed} of {row.trained}" if row.failed else "",
        }
        for row in trace.rows
    ]


def _response(judgement: Judgement, trace: Trace) -> dict[str, Any]:
    """Return the final metric of each rule at each learning rate under a trace, as the template shows it.

    Returns:
        "factors": the factors on the learning rate that were tried, as text; "rows": for each rule its name, and for
        each factor the mean of the metric in words.
    """
    rows = judgement.trainings[judgement.trainings["label"] == trace.name]
    factors = sorted(rows["lr_factor"].unique())
    table = []
    for rule in judgement.rules:
        of_rule = rows[rows["rule"] == rule]
        if len(of_rule):
            means = [_describe_trainings(of_rule[of_rule["lr_factor"] == factor]) for factor in factors]
            table.append((rule, means))
    return {"factors": [f"{factor:g}" for factor in factors], "rows": table}


def _describe_trainings(trainings: pd.DataFrame) -> str:
    """Return the mean of the metric over some runs with its interval, and how many of them failed, as text."""
    failed = f", {trainings['failed'].sum()} of {len(trainings)} failed" if trainings["failed"].any() else ""
    return wording.format_interval(*mean_interval(trainings["value"].to_numpy(np.float64))) + failed


def _evaluation_facts(evaluation: Evaluation, judgements: Sequence[Judgement]) -> dict[str, str]:
    """Return how the runs of an evaluation were made, such as command, seeds and versions: name -> text."""
    import pandas as pd

    rows = pd.concat([judgement.trainings for judgement in judgements], ignore_index=True)
    seconds = rows["wall_seconds"].sum()
    facts = {"runs": f"{len(rows):,}, {rows['failed'].sum():,} of them failed; {seconds:,.0f} s in all"}
    if evaluation.plans:
        facts["command"] = evaluation.plans[-1].command
    for task, of_task in rows.groupby("task"):
        rates = _join_distinct(f"{rate:.6g}" for rate in of_task["lr"] / of_task["lr_factor"])
        sizes = _join_distinct("unknown" if np.isnan(size) else f"{size:g}" for size in of_task["ref_batchsize"])
        seeds = wording.join_names([*map(str, sorted(of_task["seed"].unique()))])
        samples = _join_distinct(f"{number:,}" for number in of_task["samples"])
        facts[str(task)] = f"reference batch size {sizes}, learning rate {rates}, {samples} samples, seeds {seeds}"
    environments = list(rows["environment"])
    names = dict.fromkeys(name for environment in environments for name in environment)
    for name in names:
        if not name.startswith("seed of"):
            facts[name] = _join_distinct(str(environment.get(name, "unknown")) for environment in environments)
    if "-dirty" in facts.get("commit", ""):
        facts["commit"] += " (with changes that are in no commit)"
    return facts


def _trainings_table(judgements: Sequence[Judgement]) -> pd.DataFrame:
    """Return a table with a row for each training run: its settings and its final metrics."""
    import pandas as pd

    rows = pd.concat([judgement.trainings for judgement in judgements], ignore_index=True)
    finals = pd.DataFrame([{name: values[-1] for name, values in curve.items() if values} for curve in rows["curve"]])
    facts = rows.drop(columns=["curve", "environment", "loss", "value"])
    return facts.join(finals.drop(columns=[name for name in finals if name in facts]))


def _join_distinct(values: Iterable[str]) -> str:
    """Return the distinct values in their order, separated by "|"."""
    return " | ".join(dict.fromkeys(values))


def _file_name(task: str) -> str:
    """Return the name of a task as a part of a file name: other characters than letters and digits become "-"."""
    return re.sub(r"[^A-Za-z0-9]+", "-", task).strip("-")[:100]
