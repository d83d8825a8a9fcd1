"""Policies under several capacity traces: a table of runs, and means and paired differences with intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from variable_batch_size._extras import import_extra
from variable_batch_size._validation import type_error, value_error
from variable_batch_size.lab.cluster.capacity_trace import CapacityTrace
from variable_batch_size.lab.simulation.result import Run, cost_until, with_prices
from variable_batch_size.lab.simulation.simulate import simulate

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

    The index is `trace` and `policy`. The columns hold `Run.summary` and, to compare traces of different
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

    for name, items in (("traces", traces), ("policies", policies)):
        if not isinstance(items, Mapping):
            raise type_error(f"{name} must be a mapping with a name for each item", items, "pass {name: value}")
        if not items:
            raise value_error(f"{name} must have at least one item", "none", "pass {name: value}")
    rows = {
        (trace, policy): _run_facts(f"{policy} under {trace}", capacity, controller, arguments)
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

    t_distribution, by_policy = import_extra("scipy.stats", "evaluation").t, dict[object, pd.DataFrame]()
    facts = [name for name in RATES if name in table]
    for policy, runs in table[facts].groupby(level="policy", sort=False):
        with np.errstate(invalid="ignore"):  # of infinite costs
            mean, error = runs.mean(skipna=False), runs.sem(skipna=False)  # (facts,)
        half_width = t_distribution.ppf((1 + CONFIDENCE) / 2, len(runs) - 1) * error
        by_policy[policy] = pd.DataFrame({"mean": mean, "low": mean - half_width, "high": mean + half_width})
    return pd.concat(by_policy, names=["policy", "fact"])


def compare(table: pd.DataFrame) -> pd.DataFrame:
    """Return by how much each policy of a `sweep` differs from the first one, on average, in the form of `means`.

    The differences are paired, so that a trace with few nodes, which all policies have in common, does not widen the
    interval.

    Raises:
        ModuleNotFoundError: if scipy is not installed.
    """
    facts = [name for name in RATES if name in table]
    first = table.xs(table.index.unique("policy")[0], level="policy")
    return means(table[facts].sub(first[facts], level="trace"))


def _run_facts(name: str, capacity: CapacityTrace, policy: object, arguments: Mapping[str, Any]) -> dict[str, float]:
    """Simulate a run, and return its summary and rates: a row of `sweep`. A ValueError has the `name` of the run."""
    try:
        run = simulate(capacity, policy, **arguments)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    return {**run.summary, **_rates(run)}


def _rates(run: Run) -> dict[str, float]:
    """Return rates and shares of a run, see RATES, which can be compared between traces of different lengths."""
    elapsed, progress = run.summary["elapsed"], run.summary["progress"]  # seconds, updates at the reference
    node_hours = cost_until(with_prices(run.capacity, 1.0), elapsed) or 0.0
    rates = {f"{name}_share": run.summary[name] / elapsed for name in SHARES}
    rates["progress_per_hour"] = 3600 * run.summary["goodput"]
    rates["progress_per_node_hour"] = progress / node_hours if node_hours else 0.0
    rates |= {f"{name}_per_day": 86400 * run.summary[name] / elapsed for name in ("preemptions", "restarts")}
    if (cost := run.summary.get("cost")) is not None:
        rates["cost_per_hour"] = 3600 * cost / elapsed
        rates["cost_per_progress"] = run.summary.get("cost_per_progress", math.inf)
    return rates
