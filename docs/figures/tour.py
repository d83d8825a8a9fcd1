"""Draw docs/_static/tour.svg: the guided tour on MNIST, once with each of three rules.

python docs/figures/tour.py            trains (about two minutes on two cores) and draws
python docs/figures/tour.py --runs X   keeps the scalars in the folder X, and reads those that are there

Further flags are those of the tour.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib import pyplot as plt

ROOT = Path(__file__).parents[2]
TOUR = ROOT / "test" / "variable_train_mnist.py"
FIGURE = ROOT / "docs" / "_static" / "tour.svg"
COLORS = {"linear": "#d9822b", "root": "#2f8fdd", "adascale": "#26a269"}  # legible on white and on black
NEUTRAL = "#808890"
WIDTH = 2_000  # samples over which the lines are smoothed: the trace changes from update to update


def run(rule: str, folder: Path, more: list[str]) -> pd.DataFrame:
    """Train with a rule, unless the folder has its scalars; return a row per update."""
    scalars = folder / rule / "scalars.csv"
    if not scalars.exists():
        flags = f"--device cpu --rule {rule} --log-steps 1 --target 0 --logdir".split()
        subprocess.run([sys.executable, str(TOUR), *flags, str(scalars.parent), *more], check=True)
    return pd.read_csv(scalars)


def smooth(samples: pd.Series, values: pd.Series) -> tuple[np.ndarray, np.ndarray]:
    """Return the middles of windows of `WIDTH` samples, and medians of the values over the windows."""
    medians = values.groupby(samples.iloc[:-1] // WIDTH).median().dropna()  # the last update of all is a short one
    return (medians.index.to_numpy() + 0.5) * WIDTH, medians.to_numpy()


def draw(runs: dict[str, pd.DataFrame], file: Path) -> None:
    """Draw the four panels."""
    names = ["text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"]
    mpl.rcParams.update(dict.fromkeys(names, NEUTRAL))
    mpl.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    mpl.rcParams.update({"svg.hashsalt": "tour", "svg.fonttype": "none", "font.family": "sans-serif"})
    panels: np.ndarray
    figure, panels = plt.subplots(2, 2, figsize=(9, 4.2), sharex=True, layout="constrained")
    batch, lr, noise, accuracy = panels.flat
    some = next(iter(runs.values()))
    batch.step(some["vbs/samples"], some["vbs/global_batch_size"], color=NEUTRAL, linewidth=0.8)
    batch.set(ylabel="batch size\n(samples)", yscale="log")
    for rule, rows in runs.items():
        lr.plot(*smooth(rows["vbs/samples"], rows["vbs/lr_effective"]), color=COLORS[rule], linewidth=1.2)
        tested = rows.dropna(subset="accuracy")
        accuracy.plot(tested["vbs/samples"], 100 * tested["accuracy"], ".-", color=COLORS[rule], label=rule)
    lr.set(ylabel="learning rate", yscale="log")
    lr.set_yticks([0.005, 0.01, 0.02, 0.05])
    measured = runs["adascale"]
    noise.plot(*smooth(measured["vbs/samples"], measured["vbs/noise_scale"]), color=COLORS["adascale"], linewidth=1.2)
    noise.set(ylabel="noise scale\n(samples)", yscale="log")
    accuracy.set(ylabel="accuracy (%)", xlabel="samples")
    accuracy.legend(frameon=False, loc="lower right")
    accuracy.locator_params(axis="x", nbins=4)
    noise.set_xlabel("samples")
    for axis in (batch.yaxis, lr.yaxis, noise.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("")
    accuracy.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    figure.align_ylabels()
    figure.savefig(file, transparent=True, metadata={"Date": None})


def main() -> None:
    """Parse the flags, train and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="folder of the scalars; by default a temporary one")
    parser.add_argument("--out", type=Path, default=FIGURE, help="the file to draw")
    flags, more = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = flags.runs or Path(temporary)
        draw({rule: run(rule, folder, more) for rule in COLORS}, flags.out)


if __name__ == "__main__":
    main()
