"""The pictures of a report, as SVG that takes its colors from the page, and as PNG, PDF and SVG for papers."""

from __future__ import annotations

import hashlib
import io
import math
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from variable_batch_size._extras import import_extra
from variable_batch_size._validation import FloatArray
from variable_batch_size.lab.evaluation.analysis import Analysis
from variable_batch_size.lab.evaluation.tidy import along, beyond

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

AXES = {
    "samples": "samples",
    "updates": "updates",
    "progress": "progress (updates at the reference)",
    "seconds": "simulated time (s)",
}
# Of Okabe and Ito (2008), which are told apart by those who do not see all colors: those that are seen on white and on
# black. A rule has the same one in all pictures. Neighbors have other dashes, so that both are seen where their lines
# coincide; 7 and 6 have no common divisor, so that the first 42 rules differ.
COLORS = ("#808080", "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9")
DASHES = ("", "6 2", "2 2", "6 2 2 2", "12 3", "1 2")
FORMATS = ("png", "pdf", "svg")
INK, FAINT = "#010203", "#040506"  # replaced by the colors of the page
PANEL = (4.2, 2.7)  # inches
MARGINS = {"left": 0.18, "right": 0.97, "bottom": 0.17, "top": 0.97}  # shares of a panel
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "variable_batch_size",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.formatter.limits": (-4, 5),
    "text.parse_math": False,
}
THEMED = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("axes.edgecolor", "grid.color"), FAINT),
}


def look(rules: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return the color and the dashes, as an SVG dash array, of each rule."""
    return {rule: (COLORS[number % len(COLORS)], DASHES[number % len(DASHES)]) for number, rule in enumerate(rules)}


def svg(draw: Callable[[Axes], object], size: tuple[float, float] | None = None) -> str:
    """Return a picture of one panel as SVG, whose text and lines have the colors of the page.

    Its layout is fixed, which is fast, and the same for all, or follows the texts if the `size` (inches) is given.
    """
    with _style(THEMED):
        figure = _figure(PANEL, MARGINS) if size is None else _figure(size)
        draw(figure.subplots())
        file = io.StringIO()
        box = None if size is None else "tight"  # rotated names of traces may begin left of the panel
        metadata = {"Date": None, "Creator": None}
        figure.savefig(file, format="svg", bbox_inches=box, transparent=True, metadata=metadata)
    return _inline(file.getvalue())


def paper(analysis: Analysis, task: str) -> dict[str, bytes]:
    """Return a picture for a paper, in each of FORMATS: of each trace batch sizes, rates and curves; and the regret."""
    traces = analysis.traces(task)
    with _style({}):
        figure = _figure((max(7.0, 2.6 * len(traces)), 9.0))
        parts: Any = figure.subfigures(2, height_ratios=[3, 1.25])
        above, below = parts
        panels = above.subplots(3, len(traces), squeeze=False, sharey="row", height_ratios=[1, 1, 1.6])
        looks, limits = look(analysis.rules), []
        for (batch, lr, curve), trace in zip(panels.T, traces, strict=True):
            rows = analysis.rows(task, trace)
            draw_batch_sizes(batch, rows, looks)
            draw_lr(lr, rows, looks)
            _draw_curves(curve, rows, analysis.metric, "samples", looks)
            limits.append(curve.get_ylim())
            batch.set(title=wrapped_trace(trace), xlabel="")
            lr.set(xlabel="")
        panels[2, 0].set_ylim(min(low for low, _ in limits), max(high for _, high in limits))  # of all traces
        for axes in panels[2]:
            _mark_outside(axes)
        for axes in panels[:, 1:].ravel():
            axes.set_ylabel("")
        draw_regret(below.subplots(), analysis, task, across=True)
        handles, labels = panels[2, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=min(6, max(1, len(labels))), frameon=False)
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # the layout is made, and the same in each format
        without = {"png": {"Software": None}, "pdf": {"CreationDate": None}, "svg": {"Date": None}}
        files = {name: io.BytesIO() for name in FORMATS}
        for name, file in files.items():
            figure.savefig(file, format=name, dpi=200, metadata=without[name])
    return {name: file.getvalue() for name, file in files.items()}


def draw_batch_sizes(axes: Axes, rows: pd.DataFrame, looks: Mapping[str, tuple[str, str]]) -> None:
    """Draw the batch sizes along the samples, of each rule's first seed: in the color of text if they coincide.

    The line is their mean between two evaluations, and the band has the smallest and the largest one, if it is known.
    """
    bands, cells = set(), dict(_first_seeds(rows))
    neutral = {"color": axes.xaxis.label.get_color(), "linestyle": "-"} if _coincide(list(cells.values())) else None
    for rule, cell in cells.items():
        style = neutral or _line(looks[rule])
        axes.step(cell["samples"], cell["batch_size"], where="pre", lw=1.3, alpha=0.8, **style)
        if "batch_least" in cell and (band := cell[["batch_least", "batch_most"]].to_numpy().tobytes()) not in bands:
            bands.add(band)
            least, most = cell["batch_least"], cell["batch_most"]
            axes.fill_between(cell["samples"], least, most, step="pre", color=style["color"], alpha=0.2, lw=0)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")
    axes.set(xlabel="samples", ylabel="mean batch size")
    _grid(axes)


def draw_lr(axes: Axes, rows: pd.DataFrame, looks: Mapping[str, tuple[str, str]]) -> None:
    """Draw the effective learning rate of each rule along the samples, of its first seed."""
    for rule, cell in _first_seeds(rows):
        rates = [float(f"{rate:.12g}") for rate in cell["effective_lr"]]  # those that differ by rounding are no range
        axes.step(cell["samples"], rates, where="pre", label=rule, lw=1.3, **_line(looks[rule]))
    if ((known := rows["effective_lr"].dropna()) > 0).all():
        wide = len(known) and known.max() > 50 * known.min()
        axes.set_yscale("log", subs=range(2, 10))  # short labels: those of powers of two are wider than the margin
        locator = import_extra("matplotlib.ticker", "evaluation").LogLocator(subs=(1.0,) if wide else (1.0, 2.0, 5.0))
        axes.yaxis.set_major_locator(locator)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
    axes.set(xlabel="samples", ylabel="mean learning rate")
    _grid(axes)


def draw_curves(axes: Axes, rows: pd.DataFrame, metric: str, place: str, looks: Mapping[str, tuple[str, str]]) -> None:
    """Draw the mean of a metric over the seeds along a place, with its 95% interval at each evaluation as a band.

    It ends with the shortest training of a rule; the others go on as thin lines.
    A training that failed is a thin line to a cross, or to a triangle at the edge if it ends outside of what is shown.
    """
    _draw_curves(axes, rows, metric, place, looks)
    _mark_outside(axes)


def _draw_curves(axes: Axes, rows: pd.DataFrame, metric: str, place: str, looks: Mapping[str, tuple[str, str]]) -> None:
    later, alpha = [], min(0.15, 0.3 / rows["rule"].nunique())
    for rule, cells in rows.groupby("rule", sort=False):
        x, (mean, low, high) = along(cells, place, metric)
        style = _line(looks[str(rule)])
        axes.plot(x, mean, label=rule, lw=1.4, **style)
        axes.fill_between(x, low, high, color=style["color"], alpha=alpha, lw=0)
        lines = [np.stack([x, mean]), *beyond(cells, place, metric)]
        for line in lines[1:]:
            axes.plot(*line, lw=0.7, alpha=0.6, **style)
        ends = [line[0, -1] for line in lines if line.size]
        later += [line[1, line[0] >= x[0] + (max(ends) - x[0]) / 5] for line in lines if ends]
        for _, cell in cells[cells["status"] != "finished"].groupby("key"):
            stable = cell.dropna(subset=[place, metric])
            axes.plot(stable[place], stable[metric], lw=0.7, alpha=0.6, **style)
            axes.plot(stable[place].iloc[-1:], stable[metric].iloc[-1:], "x", color=style["color"], ms=5)
    _focus(axes, np.concatenate(later) if later else np.empty(0), rows[metric].dropna())
    axes.set(xlabel=AXES[place], ylabel=metric)
    _grid(axes)


def _focus(axes: Axes, values: FloatArray, drawn: pd.Series[float]) -> None:
    """Show where the lines are after the first fifth: bands of few seeds are wide, and all curves begin alike.

    Where all trainings failed there are none, and the values that are `drawn` have any size.
    """
    if not len(values) and len(drawn) and (drawn > 0).all():
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
    if len(values) and values.max() > values.min():
        margin = 0.1 * (values.max() - values.min())
        axes.set_ylim(values.min() - margin, values.max() + margin)


def _mark_outside(axes: Axes) -> None:
    """Mark at the edge a failed training whose cross is outside of what is shown; all other lines end inside."""
    low, high = axes.get_ylim()
    for line in axes.get_lines():
        x, y = (np.asarray(data, np.float64) for data in line.get_data())
        if line.get_marker() == "x" and len(y) and not low <= y[-1] <= high:
            edge, marker = (high, "^") if y[-1] > high else (low, "v")
            axes.plot(x[-1:], [edge], marker, color=line.get_color(), ms=6, clip_on=False)


def draw_regret(axes: Axes, analysis: Analysis, task: str, across: bool = False) -> None:
    """Draw the regret as a heat map, rules x traces, or traces x rules."""
    traces, rules = analysis.traces(task), analysis.rules_of(task)
    facts = analysis.summary.reindex([(task, trace, rule) for trace in traces for rule in rules])
    values = facts["regret"].to_numpy(np.float64).reshape(len(traces), len(rules))
    finite = np.abs(values[np.isfinite(values)])
    limit = float(finite.max(initial=0.0)) or 1.0
    digits = max(0, 2 - math.floor(math.log10(limit)))  # three of the largest
    shown = np.ma.masked_invalid(values if across else values.T)
    axes.pcolormesh(shown, cmap="RdBu_r", vmin=-limit, vmax=limit, edgecolors="face", linewidth=0.2)
    for (trace, rule), fact in zip(np.ndindex(values.shape), facts.to_dict("records"), strict=True):
        strong = abs(fact["regret"]) > 0.6 * limit
        color = ("white" if strong else "black") if np.isfinite(fact["regret"]) else axes.xaxis.label.get_color()
        x, y = (rule, trace) if across else (trace, rule)
        axes.text(x + 0.5, y + 0.5, _regret_text(fact, digits), ha="center", va="center", fontsize=8, color=color)
    named = [wrapped_trace(trace) for trace in traces]
    columns, lines = (rules, named) if across else (named, rules)
    tilted: dict[str, Any] = (
        {"rotation": 30, "ha": "right", "rotation_mode": "anchor"} if max(map(len, columns)) > 6 else {}
    )
    axes.set_xticks(np.arange(len(columns)) + 0.5, columns, **tilted)
    axes.set_yticks(np.arange(len(lines)) + 0.5, lines)
    axes.invert_yaxis()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    title = f"regret in {analysis.metric} at the reference's learning rate"
    axes.set_title("\n".join(textwrap.wrap(title, 80 if across else max(22, 12 * len(traces)))))


def _regret_text(fact: Mapping[Any, float], digits: int) -> str:
    failed, n = fact["untuned_failed"] * fact["untuned_failed_n"], fact["untuned_failed_n"]  # of which the regret is
    lines = [f"{fact['regret']:+.{digits}f}"] if np.isfinite(fact["regret"]) else [] if failed > 0 else ["-"]
    return "\n".join([*lines, *([f"{failed:.0f} of {n:.0f} failed"] if failed > 0 else [])])


def _first_seeds(rows: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    for rule, cells in rows.groupby("rule", sort=False):
        yield str(rule), cells[cells["key"] == cells.sort_values("seed")["key"].iloc[0]]


def _coincide(cells: Sequence[pd.DataFrame]) -> bool:
    """Return whether batch sizes are the same as far as trainings go; the last row may be of a part of its updates."""
    longest = max(cells, key=len)
    columns = ["samples", "batch_size"]
    pairs = [(cell[columns].to_numpy(np.float64)[:-1], longest[columns].to_numpy(np.float64)) for cell in cells]
    return all(np.allclose(own, other[: len(own)], equal_nan=True) for own, other in pairs)


def _line(looks: tuple[str, str]) -> dict[str, Any]:
    color, dashes = looks
    return {"color": color, "linestyle": (0, tuple(map(float, dashes.split()))) if dashes else "-"}


def _grid(axes: Axes) -> None:
    ticker = import_extra("matplotlib.ticker", "evaluation")
    axes.xaxis.set_major_locator(ticker.MaxNLocator(5))
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: _compact(value)))
    axes.grid(alpha=0.35, lw=0.5)
    axes.set_axisbelow(True)
    axes.margins(x=0.01)


def _compact(value: float) -> str:
    """Format a tick.

    >>> _compact(12500), _compact(0.5), _compact(2e6)
    ('12.5K', '0.5', '2M')
    """
    for unit, size in (("G", 1e9), ("M", 1e6), ("K", 1e3)):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def short_trace(text: str, length: int) -> str:
    """Return the text of a trace without the folders of its file, and without its middle if it is still too long.

    >>> short_trace("per-device:64@traces/spot.csv", 28), short_trace("0:32 800:64 1200:128", 16)
    ('per-device:64@spot.csv', '0:32 80\u20261200:128')
    """
    text = re.sub(r"(^|@)[^@]*[/\\]", r"\1", text)
    half = (length - 1) // 2
    return text if len(text) <= length else f"{text[:half]}\u2026{text[half + 1 - length :]}"


def wrapped_trace(text: str) -> str:
    """Return the short text of a trace in lines that fit beside a heat map and above a picture.

    >>> wrapped_trace("SkyPilot us-east-2b, hours 35 to 47")
    'SkyPilot us-east-2b, hours\\n35 to 47'
    >>> wrapped_trace("per-device:16@traces/synthetic_capacity.csv")
    'per-device:16@synthetic_\\ncapacity.csv'
    """
    lines = textwrap.wrap(short_trace(text, 48), 26, break_long_words=False, break_on_hyphens=False)
    return "\n".join(part for line in lines for part in re.findall(r".{1,26}$|.{1,25}[-@:_]|.{1,26}", line))


def _figure(size: tuple[float, float], margins: Mapping[str, float] | None = None) -> Figure:
    layout = None if margins else "constrained"
    figure: Figure = import_extra("matplotlib.figure", "evaluation").Figure(figsize=size, layout=layout)
    if margins:
        figure.subplots_adjust(**margins)
    return figure


@contextmanager
def _style(more: Mapping[str, str]) -> Iterator[None]:
    matplotlib = import_extra("matplotlib", "evaluation")
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # whatever the user has set for other pictures
        matplotlib.rcParams.update({**STYLE, **more})
        yield


def _inline(text: str) -> str:
    """Return the svg element alone, in the colors and the font of the page.

    Ids that nothing refers to are left out. The others come from the text: no other picture of a page has the same
    ones, and the same picture always has these.
    """
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :].strip(), flags=re.DOTALL)
    used = list(dict.fromkeys(re.findall(r'(?:href="#|url\(#)([^")]+)', text)))
    text = re.sub(r' id="([^"]+)"', lambda found: found[0] if found[1] in used else "", text)
    text = text.replace(INK, "currentColor").replace(FAINT, "var(--faint)")
    text = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font: \1 var(--font)", text)
    for number, name in enumerate(used):
        text = text.replace(f'"#{name}"', f'"#ID{number}"').replace(f"url(#{name})", f"url(#ID{number})")
        text = text.replace(f'id="{name}"', f'id="ID{number}"')
    unique = hashlib.sha256(text.encode()).hexdigest()[:10]
    return re.sub(r'("#|url\(#|id=")ID(\d+)', rf"\1p{unique}-\2", text)
