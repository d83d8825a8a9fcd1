"""Policies under several capacity traces: a table of runs, means and paired differences with intervals, a picture."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from variable_batch_size._extras import import_extra
from variable_batch_size._validation import FloatArray, type_error, value_error
from variable_batch_size.lab.cluster.capacity_trace import CapacityTrace
from variable_batch_size.lab.simulation.result import Run, cost_until, with_prices
from variable_batch_size.lab.simulation.simulate import simulate

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

SHARES = ("productive", "redone", "restarting", "saving", "idle")
RATES = (
    *(f"{name}_share" for name in SHARES),
    "progress_per_hour",
    "progress_per_node_hour",
    "efficiency",
    "preemptions_per_day",
    "restarts_per_day",
    "cost_per_hour",
    "cost_per_progress",
)  # what can be compared between traces of different lengths
CONFIDENCE = 0.95
PANELS = {
    "productive_share": "productive (share of time)",
    "progress_per_node_hour": "modelled progress per node-hour\n(updates at the reference)",
    "cost_per_progress": "cost per progress",
}  # of a picture


def sweep(traces: Mapping[str, CapacityTrace], policies: Mapping[str, object], **arguments: Any) -> pd.DataFrame:
    """Simulate each policy under each capacity trace, and return a row for each run.

    The index is `trace` and `policy`. The columns are those of `Run.summary` and, to compare traces of different
    lengths, the parts of the elapsed time as shares of it (`productive_share`, ...); `progress_per_hour` and
    `progress_per_node_hour`; `preemptions_per_day` and `restarts_per_day`; with prices, `cost_per_hour` and
    `cost_per_progress`, which is infinite if no update was kept.

    Args:
        traces: name -> capacity trace, at least one.
        policies: name -> controller or batch trace of `simulate`, at least one.
        arguments: further arguments of `simulate`.

    Raises:
        TypeError: if an argument has another type.
        ValueError: if there is no trace or no policy, or `simulate` raises one; the message names policy and trace.
    """
    import pandas as pd

    for name, given in (("traces", traces), ("policies", policies)):
        if not isinstance(given, Mapping):
            raise type_error(f"{name} must be a mapping with a name for each item", given, "pass {name: value}")
        if not given:
            raise value_error(f"{name} must have at least one item", "none", "pass {name: value}")
    rows = {
        (trace, policy): _row(f"{policy} under {trace}", capacity, controller, arguments)
        for trace, capacity in traces.items()
        for policy, controller in policies.items()
    }
    index = pd.MultiIndex.from_tuples(rows, names=["trace", "policy"])
    return pd.DataFrame(list(rows.values()), index=index)


def means(table: pd.DataFrame) -> pd.DataFrame:
    """Return the mean over the traces of each comparable column of `sweep`, with a 95 % t interval.

    The index is `policy` and `fact`, the columns are `mean`, `low` and `high`. Each trace counts once. The interval
    treats the traces as independent samples; it is nan for a single trace, as is the mean of a fact that a trace does
    not have.

    Raises:
        ModuleNotFoundError: if scipy is not installed.
    """
    import pandas as pd

    quantile = import_extra("scipy.special", "evaluation").stdtrit  # (degrees of freedom, probability)
    facts = [name for name in RATES if name in table]
    rows = {
        (policy, fact): _interval(runs[fact].to_numpy(np.float64), quantile)
        for policy, runs in table.groupby(level="policy", sort=False)
        for fact in facts
    }
    index = pd.MultiIndex.from_tuples(rows, names=["policy", "fact"])
    return pd.DataFrame(list(rows.values()), index=index, columns=["mean", "low", "high"])


def compare(table: pd.DataFrame) -> pd.DataFrame:
    """Return the differences of each policy to the first one of a `sweep`, as `means` does.

    The differences are paired, so that a trace with few nodes, which all policies have in common, does not widen the
    interval.

    Raises:
        ModuleNotFoundError: if scipy is not installed.
    """
    facts = [name for name in RATES if name in table]
    first = table.xs(table.index.unique("policy")[0], level="policy")
    return means(table[facts].sub(first[facts], level="trace"))


def plot_sweep(table: pd.DataFrame, currency: str | None = None) -> Figure:
    """Draw a `sweep`, and return the figure: a dot for each run, with a line through the dots of each trace.

    Black bars are the means over the traces with their 95 % t intervals.

    Args:
        table: the table.
        currency: the currency of costs, to be shown.

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
        unit = f" ({currency})" if currency and "cost" in fact else ""
        axes.set(title=PANELS[fact] + unit, ylim=(0, None), xlim=(-0.5, len(policies) - 0.3))
        axes.tick_params("x", rotation=30 if len(policies) > 2 else 0)
    caption = f"a line for each of {len(table.index.unique('trace'))} capacity traces; black: means, 95% t intervals"
    figure.supxlabel(caption, fontsize="medium")
    result: Figure = figure
    return result


def _row(name: str, capacity: CapacityTrace, controller: object, arguments: Mapping[str, Any]) -> dict[str, float]:
    try:
        run = simulate(capacity, controller, **arguments)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    return {**run.summary, **_rates(run)}


def _rates(run: Run) -> dict[str, float]:
    elapsed, progress = run.summary["elapsed"], run.summary["progress"]  # seconds, updates at the reference
    node_hours = cost_until(with_prices(run.capacity, 1.0), elapsed) or 0.0
    rates = {f"{name}_share": run.summary[name] / elapsed for name in SHARES}
    rates["progress_per_hour"] = 3600 * run.summary["goodput"]
    rates["progress_per_node_hour"] = progress / node_hours if node_hours else 0.0
    rates |= {f"{name}_per_day": 86400 * run.summary[name] / elapsed for name in ("preemptions", "restarts")}
    if (cost := run.summary.get("cost")) is not None:
        rates |= {
            "cost_per_hour": 3600 * cost / elapsed,
            "cost_per_progress": run.summary.get("cost_per_progress", math.inf),
        }
    return rates


def _interval(values: FloatArray, quantile: Callable[[int, float], float]) -> tuple[float, float, float]:
    """Return the mean of independent values, (samples,), and its interval of Student's t distribution."""
    with np.errstate(invalid="ignore"):
        mean = float(values.mean())
    if not math.isfinite(mean) or len(values) == 1:
        return mean, math.nan, math.nan
    half = quantile(len(values) - 1, (1 + CONFIDENCE) / 2) * float(values.std(ddof=1)) / math.sqrt(len(values))
    return mean, mean - half, mean + half
