"""Draw docs/_static/controllers.svg: the batch sizes that controllers choose in one simulated training.

python docs/figures/controllers.py
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt

from variable_batch_size.adaptive import (
    AdaptiveTrace,
    ConstantBatch,
    Controller,
    Goodput,
    NoiseScale,
    NormTest,
    PerDevice,
    Seesaw,
    Throughput,
)
from variable_batch_size.lab import cluster
from variable_batch_size.lab.simulation import NoiseCurve, Overheads, Run, simulate

ROOT = Path(__file__).parents[2]
FIGURE = ROOT / "docs" / "_static" / "controllers.svg"
BLUE, NEUTRAL = "#2f8fdd", "#808890"  # legible on white and on black
REFERENCE, BOUNDS, PROGRESS = 256, (64, 8192), 100_000
SAMPLES = PROGRESS * REFERENCE  # over which the learning rate of `Seesaw` falls
LENGTH = 1000  # progress between two rows of the noise


def cosine(samples: int) -> float:
    """Return the factor on the learning rate after so many samples."""
    return (1 + math.cos(math.pi * min(samples / SAMPLES, 1))) / 2


CONTROLLERS: dict[str, Controller] = {
    "ConstantBatch(1024)": ConstantBatch(1024),
    "PerDevice(128)": PerDevice(128),
    "NoiseScale()": NoiseScale(),
    "NormTest(0.5)": NormTest(0.5),
    "Goodput((64, 8192))": Goodput(BOUNDS),
    "Seesaw(cosine, 256, critical=4096)": Seesaw(cosine, REFERENCE, 4096),
}


def noise() -> NoiseCurve:
    """Return a noise scale that rises from 200 samples to 6000, as the loss falls."""
    progress = np.arange(0, PROGRESS, LENGTH)
    return NoiseCurve(progress.tolist(), [1.0] * len(progress), (1 / (200 + 5800 * progress / PROGRESS)).tolist())


def run(controller: Controller) -> Run:
    """Simulate the training with a controller."""
    return simulate(
        cluster.read(ROOT / "traces" / "spot_example.json"),
        AdaptiveTrace(controller, start=REFERENCE, bounds=BOUNDS),
        throughput=Throughput.simple(samples_per_second=150, communication_seconds=0.5),
        ref_batchsize=REFERENCE,
        rule="adascale",
        noise=noise(),
        overheads=Overheads(restart=90, save_every=1800, save=20),
        until=PROGRESS,
    )


def draw(file: Path) -> None:
    """Draw a panel for each controller."""
    names = ["text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"]
    mpl.rcParams.update(dict.fromkeys(names, NEUTRAL))
    mpl.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    mpl.rcParams.update({"svg.hashsalt": "controllers", "svg.fonttype": "none", "font.family": "sans-serif"})
    figure, panels = plt.subplots(3, 2, figsize=(8, 6), sharex=True, sharey=True, layout="constrained")
    curve = noise()
    for axes, (name, controller) in zip(panels.flat, CONTROLLERS.items(), strict=True):
        found = run(controller)
        rows = found.timeline.query("state == 'productive'")
        edges = np.append(0, rows["progress"].cumsum())  # (rows + 1,)
        axes.stairs(rows["batch_size"], edges, baseline=None, color=BLUE, linewidth=1.2)
        axes.plot(curve.progress, np.divide(curve.sigma2, curve.mu2), "--", color=NEUTRAL, linewidth=0.8)
        axes.set_title(f"{name}: {found.summary['elapsed'] / 3600:.1f} hours", fontsize=10)
        axes.set(yscale="log", ylim=(100, 10_000), xlim=(0, PROGRESS), xticks=np.arange(0, PROGRESS, PROGRESS // 4))
    panels[0, 0].annotate("noise scale", (0.3 * PROGRESS, 2500), rotation=12, fontsize=9)
    figure.supylabel("batch size (samples)", fontsize=10)
    figure.supxlabel(f"progress (updates of {REFERENCE} samples)", fontsize=10)
    for axes in panels.flat:
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.yaxis.set_major_formatter("{x:g}")
    figure.savefig(file, transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FIGURE, help="the file to draw")
    draw(parser.parse_args().out)
