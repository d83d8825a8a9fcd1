"""The figure of a report: batch sizes, learning rates and the metric along the samples, under each trace."""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from variable_batch_size._extras import import_extra
from variable_batch_size._validation import FloatArray
from variable_batch_size.lab.evaluation.judgement import Judgement
from variable_batch_size.lab.evaluation.records import REFERENCE

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Those of Okabe and Ito (2008) that are seen on white and on black, and then of Tol (2021): they are told apart by
# those who do not see all colors. Neighbors have other dashes, so that both are seen where their lines coincide.
COLORS = (
    *("#808080", "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9"),
    *("#882255", "#999933", "#6655cc", "#44aa99", "#bb5566", "#997700"),
)
CLAIMS = {"better": ("^", "claimed to be better"), "worse": ("v", "claimed to be worse")}
DASHES = ("-", (0, (6, 2)), (0, (2, 2)), (0, (6, 2, 2, 2)), (0, (12, 3)), (0, (1, 2)))
FORMATS = ("png", "pdf", "svg")
INK, FAINT = "#010203", "#040506"  # replaced by the colors of the page
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "variable_batch_size",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9.5,
    "axes.formatter.limits": (-4, 5),
    "text.parse_math": False,
}
THEMED = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("axes.edgecolor", "grid.color"), FAINT),
}


def page_svg(judgement: Judgement) -> str:
    """Return the figure as an SVG element, whose text and lines have the colors of the page."""
    with _drawing_style(THEMED):
        svg = _to_bytes(draw(judgement), "svg", transparent=True).decode()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :].strip(), flags=re.DOTALL)
    # Keep only the ids that the figure itself refers to: a page with several figures must have each id once.
    referenced = set(re.findall(r'(?:href="#|url\(#)([^")]+)', svg))
    svg = re.sub(r' id="([^"]+)"', lambda match: match[0] if match[1] in referenced else "", svg)
    svg = svg.replace(INK, "currentColor").replace(FAINT, "var(--faint)")
    return re.sub(r"font: ([\d.]+px) [^;\"]*", r"font: \1 var(--font)", svg)


def image_files(judgement: Judgement) -> dict[str, bytes]:
    """Return the figure as image files: format, such as "png" -> content."""
    with _drawing_style({}):
        figure = draw(judgement)
        return {kind: _to_bytes(figure, kind, dpi=200) for kind in FORMATS}


def draw(judgement: Judgement) -> Figure:
    """Draw the figure of a task: a column of panels for each trace, with batch sizes, learning rates and the metric.

    There must be a trace. With several factors on the learning rate, a last panel shows the metric along them.

    A line is the median over the seeds, and its band has all of them; a triangle at its end is a claim. A training that
    failed is a thin line up to a cross. Batch sizes and learning rates are those of one seed, means between two
    evaluations.
    """
    traces, rows = judgement.traces, judgement.trainings
    has_factors = rows.loc[rows["trace"] != REFERENCE, "lr_factor"].nunique() > 1
    heights = [1.0, 1.0, 1.8, *([1.5] if has_factors else [])]
    size = (max(4.2, 3.2 * len(traces)), 1.6 * sum(heights) + 0.9)
    figure: Figure = import_extra("matplotlib.figure", "evaluation").Figure(figsize=size, layout="constrained")
    panels: Any = figure.subplots(len(heights), len(traces), squeeze=False, height_ratios=heights)
    styles: dict[str, dict[str, Any]] = {
        rule: {"color": COLORS[index % len(COLORS)], "linestyle": DASHES[index % len(DASHES)]}
        for index, rule in enumerate(judgement.rules)
    }
    for (batch, lr, curves, *response), trace in zip(panels.T, traces, strict=True):
        of_trace = rows[rows["label"] == trace.name]
        for rule, of_rule in of_trace[np.isclose(of_trace["lr_factor"], 1)].groupby("rule"):
            _draw_updates(batch, lr, of_rule, styles[str(rule)])
            _draw_curves(curves, of_rule, judgement.metric, str(rule), styles[str(rule)])
        for row in trace.rows:
            if row.answer in CLAIMS:
                _draw_claim(curves, *CLAIMS[row.answer], row.rule, styles[row.rule]["color"])
        for axes in response:
            _draw_responses(axes, of_trace, styles)
        batch.set_title("\n".join(textwrap.wrap(trace.name, 30, max_lines=3)))
        curves.set_xlabel("samples")
    reference = rows.loc[(rows["trace"] == REFERENCE) & np.isclose(rows["lr_factor"], 1), "value"].median()
    _label_axes(panels, judgement.metric, reference)
    lines = {line.get_label(): line for axes in panels[2] for line in axes.get_lines() if line.get_label()[0] != "_"}
    # The legend has the rules in their order, and then the marks of claims and of the reference.
    names = [*(rule for rule in styles if rule in lines), *sorted(name for name in lines if name not in styles)]
    handles = [lines[name] for name in names]
    figure.legend(handles, names, loc="outside upper center", ncols=min(max(2, 2 * len(traces)), 6), frameon=False)
    return figure


def _draw_updates(batch: Axes, lr: Axes, trainings: pd.DataFrame, style: dict[str, Any]) -> None:
    """Draw the batch sizes and the learning rates of a rule along the samples, those of its longest run."""
    curve = max(trainings.sort_values("seed")["curve"], key=lambda curve: len(curve.get("samples", ())))
    samples = curve.get("samples", [])
    if not samples:
        return
    batch.step(samples, _floats(curve["batch_size"]), where="pre", lw=1.2, **style)
    if "batch_least" in curve:
        least_sizes, largest_sizes = _floats(curve["batch_least"]), _floats(curve["batch_most"])
        batch.fill_between(samples, least_sizes, largest_sizes, step="pre", color=style["color"], alpha=0.08, lw=0)
    lr.step(samples, _floats(curve["lr"]), where="pre", lw=1.2, **style)


def _draw_curves(axes: Axes, trainings: pd.DataFrame, metric: str, rule: str, style: dict[str, Any]) -> None:
    """Draw the metric of a rule along the samples: the median and range over its seeds, and each run that failed."""
    good = trainings[(trainings["status"] == "finished") & ~trainings["failed"]]
    curves = [np.stack([_floats(curve["samples"]), _floats(curve[metric])]) for curve in good["curve"]]  # (2, rows)
    curves = [curve[:, np.isfinite(curve).all(0)] for curve in curves]
    samples = min(curves, key=lambda curve: curve[0, -1])[0] if curves else np.empty(0)  # of the shortest curve
    values = np.stack([np.interp(samples, *curve) for curve in curves]) if curves else np.empty((1, 0))
    axes.plot(samples, np.median(values, axis=0), lw=1.5, label=rule, **style)
    if curves:
        axes.fill_between(samples, values.min(0), values.max(0), color=style["color"], alpha=0.13, lw=0)
    for curve in trainings.loc[trainings["failed"], "curve"]:
        samples, values = _floats(curve["samples"]), _floats(curve.get(metric, []))
        values = values[np.isfinite(values)]
        axes.plot(samples[: len(values)], values, lw=0.7, alpha=0.6, label=f"_{rule}", **style)
        axes.plot(samples[: len(values)][-1:], values[-1:], "x", color=style["color"], ms=5, label="_failed")


def _draw_claim(axes: Axes, marker: str, label: str, rule: str, color: str) -> None:
    """Draw a triangle, the `marker`, at the end of the line of a rule that is claimed to be better, or worse."""
    line = next(line for line in axes.get_lines() if line.get_label() == rule)
    ink = axes.xaxis.label.get_color()
    end = np.asarray(line.get_xydata())[-1:].T
    axes.plot(*end, marker, ms=8, color=color, mec=ink, mew=0.6, clip_on=False, zorder=5, label=f"_{label}")
    axes.plot([], [], marker, ms=8, color=ink, label=label)  # nothing, but an entry of the legend


def _draw_responses(axes: Axes, trainings: pd.DataFrame, styles: dict[str, dict[str, Any]]) -> None:
    """Draw the final metric of each rule along the factors on the learning rate: median and range over the seeds."""
    for rule, of_rule in trainings.groupby("rule"):
        values = of_rule.groupby("lr_factor")["value"].agg(["median", "min", "max"]).dropna()
        axes.plot(values.index, values["median"], marker=".", lw=1.2, **styles[str(rule)])
        color = styles[str(rule)]["color"]
        axes.fill_between(values.index, values["min"], values["max"], color=color, alpha=0.13, lw=0)
    axes.set(xlabel="factor on the learning rate", xscale="log")
    factors = sorted(trainings["lr_factor"].unique())
    axes.set_xticks(factors, labels=[f"{factor:g}" for factor in factors])
    axes.minorticks_off()


def _label_axes(panels: Any, metric: str, reference: float) -> None:
    """Give the panels of a figure their labels, scales and grids, and draw the final metric of the reference as a line.

    Args:
        panels: axes of matplotlib, (rows, traces): batch sizes, learning rates, the metric and, perhaps, its final
            value.
        metric: the name of the metric.
        reference: its final value in the reference's training; nan: not known.
    """
    for axes, name in zip(panels[:, 0], ("batch size", "learning rate", metric, f"final {metric}"), strict=False):
        axes.set_ylabel(name)
    for axes in panels[0]:
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter("{x:g}")
    ticker = import_extra("matplotlib.ticker", "evaluation")
    for axes in panels[2]:
        _limit_metric_axis(axes, reference)
        if np.isfinite(reference):
            color = axes.xaxis.label.get_color()
            axes.axhline(reference, lw=0.9, ls=(0, (1, 1)), color=color, label="the reference, at its end")
    for axes in panels[:3].ravel():
        axes.xaxis.set_major_locator(ticker.MaxNLocator(4))
        axes.xaxis.set_major_formatter(ticker.EngFormatter(sep=""))
    for axes in panels.ravel():
        axes.grid(alpha=0.35, lw=0.5)
        axes.margins(x=0.01)


def _limit_metric_axis(axes: Axes, reference: float) -> None:
    """Limit the vertical axis to the second half of each median line, where the rules can be told apart.

    The cross of a failed run that is outside of the limits moves to the edge.

    Args:
        axes: axes with the lines of the rules.
        reference: a value that is also shown; nan: none.
    """
    lines = [(line, str(line.get_label()), np.asarray(line.get_ydata(), np.float64)) for line in axes.get_lines()]
    medians = [values for _, label, values in lines if not label.startswith("_")]  # other labels are of failed runs
    shown = [values[len(values) // 2 :] for values in medians] or [values[:1] for _, _, values in lines]
    limits = np.array([reference, *np.concatenate([*shown, []])])
    limits = limits[np.isfinite(limits)]
    if len(limits) and limits.max() > limits.min():
        margin = 0.05 * (limits.max() - limits.min())
        axes.set_ylim(limits.min() - margin, limits.max() + margin)
    for line, label, values in lines:
        if label == "_failed":
            line.set(ydata=np.clip(values, *axes.get_ylim()), clip_on=False)


def _floats(values: Sequence[float | None]) -> FloatArray:
    """Return values as an array, with nan for None."""
    return np.array([np.nan if value is None else value for value in values], np.float64)


def _to_bytes(figure: Figure, kind: str, **arguments: Any) -> bytes:
    """Return a figure as an image file of the format `kind`, without dates, so that it is the same each time."""
    file = io.BytesIO()
    metadata = {"png": {"Software": None}, "pdf": {"CreationDate": None}, "svg": {"Date": None, "Creator": None}}
    figure.savefig(file, format=kind, metadata=metadata[kind], **arguments)
    return file.getvalue()


@contextmanager
def _drawing_style(colors: dict[str, str]) -> Iterator[None]:
    """Set matplotlib to STYLE and these colors within a block, and restore the settings of the user after it."""
    matplotlib = import_extra("matplotlib", "evaluation")
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({**STYLE, **colors})
        yield
