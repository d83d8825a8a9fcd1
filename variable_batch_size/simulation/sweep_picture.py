"""A picture of policies under several capacity traces."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from variable_batch_size._extras import import_extra
from variable_batch_size.simulation.sweep import means

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

PANELS = {
    "productive_share": "productive (share of time)",
    "progress_per_node_hour": "modelled progress per node-hour\n(updates at the reference)",
    "cost_per_progress": "cost per progress",
}


def plot_sweep(table: pd.DataFrame) -> Figure:
    """Draw a `sweep`, and return the figure: a dot for each run, with a line through the dots of each trace.

    The black bars are the means over the traces with their 95 % t intervals.

    Raises:
        ModuleNotFoundError: if matplotlib or scipy is not installed.
    """
    plt = import_extra("matplotlib.pyplot", "plot")
    policies = table.index.unique("policy")
    facts = [fact for fact in PANELS if fact in table]
    shown = means(table)
    width = 1.5 + len(facts) * (1.2 + 0.9 * len(policies))
    figure, panels = plt.subplots(1, len(facts), figsize=(width, 4.5), layout="constrained")
    for axes, fact in zip(panels, facts, strict=True):
        runs = table[fact].unstack("policy")[policies]  # (traces, policies)
        axes.plot(policies, runs.T.replace(np.inf, np.nan), "o-", color="tab:blue", lw=0.5, ms=4, alpha=0.5)
        mean = shown.xs(fact, level="fact").loc[policies].replace(np.inf, np.nan)
        places = np.arange(len(policies)) + 0.2
        axes.errorbar(places, mean["mean"], mean["mean"] - mean["low"], fmt="_k", ms=12, capsize=4)
        axes.set(title=PANELS[fact], ylim=(0, None), xlim=(-0.5, len(policies) - 0.3))
        axes.tick_params("x", rotation=30 if len(policies) > 2 else 0)
    caption = f"a line for each of {len(table.index.unique('trace'))} capacity traces; black: means, 95% t intervals"
    figure.supxlabel(caption, fontsize="medium")
    result: Figure = figure
    return result
