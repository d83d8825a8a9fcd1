"""Policies under several capacity traces: a table of all runs, its means, and paired differences, with intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from variable_batch_size._extras import import_extra
from variable_batch_size._validation import FloatArray, type_error, value_error
from variable_batch_size.cluster.capacity_trace import CapacityTrace
from variable_batch_size.simulation.cost import cost_until, priced
from variable_batch_size.simulation.run import Run
from variable_batch_size.simulation.simulate import simulate

if TYPE_CHECKING:
    import pandas as pd

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


def sweep(traces: Mapping[str, CapacityTrace], policies: Mapping[str, object], **arguments: Any) -> pd.DataFrame:
    """Simulate each policy under each capacity trace, and return a row for each run.

    The index is `trace` and `policy`. The columns are the numbers of `Run.summary`, and what can be compared between
    traces of different lengths: each part of the elapsed time as a share of it (`productive_share`, ...);
    `progress_per_hour`, and `progress_per_node_hour` of the nodes that were there, 0 if there were none;
    `preemptions_per_day` and `restarts_per_day`; if prices are known, `cost_per_hour` and `cost_per_progress`, which is
    infinite if no update was kept.

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

    The index is `policy` and `fact`, the columns are `mean`, `low` and `high`. Each trace counts once, however long it
    is. An interval takes the traces as independent samples of those that may come: of few traces it may go beyond what
    is possible, and of a single one it is nan, as is the mean of a fact that one of the traces does not have.

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

    The differences are paired: they are taken under each trace, so that what all policies have in common, such as a
    trace with few nodes, does not widen the interval.

    Raises:
        ModuleNotFoundError: if scipy is not installed.
    """
    facts = [name for name in RATES if name in table]
    first = table.xs(table.index.unique("policy")[0], level="policy")
    return means(table[facts].sub(first[facts], level="trace"))


def _row(name: str, capacity: CapacityTrace, controller: object, arguments: Mapping[str, Any]) -> dict[str, float]:
    try:
        run = simulate(capacity, controller, **arguments)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    return {**run.summary, **_rates(run)}


def _rates(run: Run) -> dict[str, float]:
    """Return what can be compared between traces of different lengths."""
    elapsed, progress = run.summary["elapsed"], run.summary["progress"]  # seconds, updates at the reference
    node_hours = cost_until(priced(run.capacity, 1.0), elapsed) or 0.0
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
