"""Draw docs/_static/adaptive.svg, and print the tables of benchmarks/NOTEBOOK.md, of what benchmarks/adaptive.py found.

python docs/figures/adaptive.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib as mpl
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator

ROOT = Path(__file__).parents[2]
FIGURE = ROOT / "docs" / "_static" / "adaptive.svg"
RUNS, SIZES = (ROOT / "benchmarks" / f"{name}.csv" for name in ("adaptive", "adaptive_sizes"))
CONSTANT = SMALL, *_ = "smallest", "middle", "largest"
COLORS = {
    SMALL: "#808890",
    "middle": "#808890",
    "largest": "#808890",
    "NoiseScale": "#26a269",
    "NormTest": "#d9822b",
    "Goodput": "#2f8fdd",
    "Goodput (64)": "#9c6ade",
    "Seesaw": "#d0406c",
}  # legible on white and on black
NEUTRAL = COLORS[SMALL]
COSTS = {"updates": "updates", "samples": "samples", "core": "s on one core", "devices": "s on 64 devices"}
AT_END = {"last_updates": "updates at the end", "last_loss": "loss at the end"}  # of a schedule


def ratios(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the costs relative to the run with the smallest batches and the same seed; nan without the target."""
    keyed = runs.set_index(["task", "trace", "seed"])
    small = keyed.xs(SMALL, level="trace")[list(COSTS)]
    reached = keyed[list(COSTS)].where(keyed["reached"] == 1)
    return reached.div(small).reorder_levels(["task", "trace", "seed"]).loc[keyed.index]


def table(runs: pd.DataFrame) -> list[str]:
    """Return the lines of a Markdown table with medians over the seeds."""
    relative = ratios(runs).reset_index()
    lines = [
        _line("task", "batch sizes", *COSTS.values(), "simulation off by"),
        _line("---", "---", *["--:"] * len(COSTS), "--:"),
    ]
    for (task, trace), own in runs.groupby(["task", "trace"], sort=False):
        found = relative[(relative["task"] == task) & (relative["trace"] == trace)]
        cells = [_cost(own[cost], found[cost], cost, trace) for cost in COSTS]
        predicted = own["doublings"].median()
        simulated = "" if pd.isna(predicted) else f"{2**predicted:.2f}x"
        lines.append(_line(str(task) if trace == SMALL else "", str(trace), *cells, simulated))
    return lines


def table_at_end(runs: pd.DataFrame) -> list[str]:
    """Return the lines of a table of the task with a schedule, in which all runs use the same samples."""
    own = runs[runs["task"] == "GPT"].groupby("trace", sort=False)[list(AT_END)]
    lines = [_line("GPT", *AT_END.values()), _line("---", "--:", "--:")]
    for trace, found in own:
        low, high = found["last_loss"].min(), found["last_loss"].max()
        loss = f"{found['last_loss'].median():.2f} ({low:.2f} to {high:.2f})"
        lines.append(_line(str(trace), f"{found['last_updates'].median():,.0f}", loss))
    return lines


def _cost(absolute: pd.Series, relative: pd.Series, cost: str, trace: object) -> str:
    if trace == SMALL:
        return f"{absolute.median():,.{1 if cost in ('core', 'devices') else 0}f}"
    if relative.isna().all():
        return "not reached"
    missing = f" ({relative.notna().sum()} of {len(relative)})" if relative.isna().any() else ""
    return f"{relative.median():.2f}x{missing}"


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def draw(runs: pd.DataFrame, sizes: pd.DataFrame, file: Path) -> None:
    """Draw the batch sizes of one seed above, and the simulated times of all seeds below."""
    names = ["text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"]
    mpl.rcParams.update(dict.fromkeys(names, NEUTRAL))
    mpl.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    mpl.rcParams.update({"svg.hashsalt": "adaptive", "svg.fonttype": "none", "font.family": "sans-serif"})
    tasks = runs["task"].unique()
    shape = {"height_ratios": [3, 2], "width_ratios": [1] * len(tasks)}
    figure, panels = plt.subplots(
        2, len(tasks), figsize=(10, 6), layout="constrained", gridspec_kw=shape, squeeze=False
    )
    for (above, below), task in zip(panels.T, tasks, strict=True):
        above.set(title=task, xlabel="samples")
        courses(above, sizes[sizes["task"] == task])
        times(below, ratios(runs).xs(task, level="task"))
    panels[0, 0].set(ylabel="batch size (samples)")
    panels[0, -1].legend(handles=[_key("-", "training"), _key(":", "simulation")], frameon=False, loc="upper left")
    keys = [_key("", "one core", markerfacecolor="none"), _key("", "64 devices")]
    panels[1, 0].legend(handles=keys, frameon=False, loc="lower center", handletextpad=0, ncols=2)
    figure.savefig(file, transparent=True, metadata={"Date": None})


def _key(style: str, label: str, **more: str) -> Line2D:
    return Line2D(
        [], [], linestyle=style, marker="" if style else "o", color=NEUTRAL, label=label, markersize=5, **more
    )


def courses(axes: Axes, sizes: pd.DataFrame) -> None:
    """Draw the batch sizes of trainings, and dashed those of simulations."""
    for (trace, course), own in sizes.groupby(["trace", "course"], sort=False):
        if trace in CONSTANT:
            continue
        style = "-" if course == "training" else ":"
        axes.step(own["samples"], own["batch_size"], style, where="post", color=COLORS[str(trace)], linewidth=1.2)
    axes.set(xscale="log", yscale="log", xlim=(300, 300_000), ylim=(14, 1200))
    axes.set_yticks([16, 32, 64, 128, 256, 512, 1024])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.xaxis.set_minor_formatter("")


def times(axes: Axes, relative: pd.DataFrame) -> None:
    """Draw the simulated times of all seeds, open for one core and filled for 64 devices."""
    places = {trace: -row for row, trace in enumerate(list(COLORS)[1:])}
    for trace, place in places.items():
        if trace in relative.index:
            own = relative.loc[trace]
            for cost, fill, shift in (("core", "none", 0.15), ("devices", COLORS[trace], -0.15)):
                heights = [place + shift] * len(own)
                axes.scatter(own[cost], heights, s=22, facecolors=fill, edgecolors=COLORS[trace], linewidths=1)
    axes.axvline(1, color=NEUTRAL, linewidth=0.8)
    axes.set(xscale="log", xlim=(0.11, 9), xlabel="time to the target / smallest batches", yticks=[*places.values()])
    axes.set(ylim=(min(places.values()) - 0.5, 0.5))
    for label, trace in zip(axes.set_yticklabels(list(places)), places, strict=True):
        label.set_color(COLORS[trace])
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")
    axes.label_outer()
    axes.tick_params("x", labelbottom=True)


def main() -> None:
    """Draw, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FIGURE, help="the file to draw")
    runs = pd.read_csv(RUNS)
    draw(runs, pd.read_csv(SIZES), parser.parse_args().out)
    print("\n".join(table(runs)), "\n".join(table_at_end(runs)), sep="\n\n")


if __name__ == "__main__":
    main()
