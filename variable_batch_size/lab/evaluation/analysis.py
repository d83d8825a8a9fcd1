"""From records to tables: values over seeds, paired differences, regret, failures and time to a target."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from variable_batch_size._validation import FloatArray, value_error
from variable_batch_size.lab.evaluation import tuning
from variable_batch_size.lab.evaluation.claims import FAILED, Claim, claims_of
from variable_batch_size.lab.evaluation.metric import Mode, lower_is_better, possible
from variable_batch_size.lab.evaluation.record import Record
from variable_batch_size.lab.evaluation.statistics import (
    CONFIDENCE,
    Interval,
    difference_interval,
    first_reached,
    mean_interval,
    rate_interval,
    regret_interval,
    to_target,
)
from variable_batch_size.lab.evaluation.tidy import PLACES, tidy
from variable_batch_size.rules import RULES

if TYPE_CHECKING:
    import pandas as pd

NOT_METRICS = {*PLACES, "batch_size", "batch_least", "batch_most", "lr"}
BASELINE = "constant"
GROUP = ["task", "trace", "rule"]


@dataclass(frozen=True)
class Analysis:
    """Tables of an evaluation, complete or not.

    A training failed if it diverged, or if its final loss is not below that of the untrained model by the margin of the
    task, 5 % by default. It has no final value: means are those of the seeds that did not fail, whose number is beside
    them, and so is the rate of failures.

    Each rule is judged at its own learning rate: of the factors that all rules of a trace have, the one with the
    least median loss, where a failure is the worst. It is chosen on the tuning seeds of an `Experiment` if there are
    any; otherwise on those that judge, and then all values are optimistic by that choice.

    Args:
        records: those of any tasks, traces, rules, learning rates and seeds, at least one.
        metric: what trainings are compared by, at the end of their samples.
        baseline: the rule with which the others are compared, under the same trace, seeds and samples.
        targets: name of a task -> (metric, value) that a training has to reach.
        mode: "min" if less of the metric is better, "max" if more is; None: its name tells.

    Raises:
        ValueError: if there is no record, or none has this metric or, but for the default, this rule, or a task does
            not evaluate the metric of its target.
    """

    records: Sequence[Record]
    metric: str = "loss"
    baseline: str = BASELINE
    targets: Mapping[str, tuple[str, float]] | None = None
    mode: Mode | None = None

    def __post_init__(self) -> None:
        if not self.records:
            raise value_error("an evaluation must have at least one record", "none", "run it first")
        if self.metric not in self.metrics:
            known = " or ".join(f'"{name}"' for name in self.metrics)
            raise value_error(f"metric must be {known}", repr(self.metric), "choose one that the task evaluates")
        lower_is_better(self.metric, self.mode)  # or an error, before any work
        if self.baseline != BASELINE and self.baseline not in self.rules:
            known = " or ".join(self.rules)
            raise value_error(f"baseline must be {known}", repr(self.baseline), "choose a rule of the evaluation")
        for record in self.records:
            self._check_target(record)

    def _check_target(self, record: Record) -> None:
        target = (self.targets or {}).get(record.cell["task"])
        if target is not None and target[0] not in record.curve:
            known = " or ".join(f'"{name}"' for name in self.metrics if name in record.curve)
            requirement = f"the target of the task {record.cell['task']} must be of {known}, which it evaluates"
            raise value_error(requirement, repr(target[0]), "correct it; what is trained remains")

    @property
    def lower(self) -> bool:
        """Whether less of the metric is better."""
        return lower_is_better(self.metric, self.mode)

    @cached_property
    def metrics(self) -> list[str]:
        """The metrics that the tasks evaluate."""
        names = dict.fromkeys(name for record in self.records for name in record.curve)
        return [name for name in names if name not in NOT_METRICS and name != "train_loss"]

    @cached_property
    def tasks(self) -> list[str]:
        """The tasks, sorted."""
        return sorted(self.tidy["task"].unique())

    @cached_property
    def rules(self) -> list[str]:
        """The rules in the order of the table of rules: the baseline first, those with arguments by their text."""
        places = {name: place for place, name in enumerate(RULES)}
        return sorted(
            self.tidy["rule"].unique(),
            key=lambda rule: (rule != self.baseline, places.get(rule.partition(":")[0], len(places)), rule),
        )

    def traces(self, task: str) -> list[str]:
        """Return the traces of a task, sorted."""
        return sorted(self.tidy.loc[self.tidy["task"] == task, "trace"].unique())

    def rows(self, task: str, trace: str) -> pd.DataFrame:
        """Return the rows of `tidy` of a task and trace at the reference's learning rate, in the order of rules."""
        rows = self.tidy[self.tidy["key"].isin(self.own["key"])]
        rows = rows[(rows["task"] == task) & (rows["trace"] == trace)]
        return rows.sort_values(
            ["rule", "seed", "samples"],
            key=lambda column: column.map(self.rules.index) if column.name == "rule" else column,
        )

    @cached_property
    def tidy(self) -> pd.DataFrame:
        """A row for each evaluation of each cell: the cell, its status, and the values of its curve."""
        return tidy(self.records)

    @cached_property
    def ends(self) -> pd.DataFrame:
        """A row for each cell: its values at the end of the samples, nan if it failed, and what it used until then.

        `reached` is whether it reached the target, and `target_samples`, `target_updates`, `target_seconds` and
        `target_cost` are what that took, or all that it used.
        """
        import pandas as pd

        rows = [self._end(cell) for _, cell in self.tidy.groupby("key", sort=False)]
        return pd.DataFrame(rows).sort_values([*GROUP, "lr_factor", "seed"], ignore_index=True)

    def rules_of(self, task: str) -> list[str]:
        """Return the rules of a task, in the order of rules."""
        found = set(self.own.loc[self.own["task"] == task, "rule"])
        return [rule for rule in self.rules if rule in found]

    @cached_property
    def own(self) -> pd.DataFrame:
        """The rows of `ends` that judge: of the seeds that chose nothing, each rule of a trace at its own factor."""
        return self._judging[self._judging["lr_factor"] == self._judging["own_factor"]]

    @cached_property
    def untuned(self) -> pd.DataFrame:
        """The rows of `ends` that judge at the learning rate of the reference: the factor nearest to 1 of a trace."""
        nearest = self._judging.groupby(["task", "trace"])["lr_factor"].transform(tuning.nearest_to_one)
        return self._judging[self._judging["lr_factor"] == nearest]

    @cached_property
    def _judging(self) -> pd.DataFrame:
        import pandas as pd

        found = []
        for key in self._groups:
            cells = self.cells(*key)
            factors = tuning.own_factors(cells)
            rows = tuning.judging(cells)
            found.append(rows.assign(own_factor=rows["rule"].map(factors)))
        return pd.concat(found)

    def tried(self, task: str, trace: str) -> pd.DataFrame:
        """Return the rows of `ends` by which the factors of a trace are chosen: those of tuning seeds, or all."""
        return tuning.tried(self.cells(task, trace))

    def factors(self, task: str, trace: str) -> list[float]:
        """Return the factors of a trace among which each rule's own one is chosen, sorted."""
        return tuning.common_factors(self.cells(task, trace))

    def is_optimistic(self, task: str, trace: str) -> bool:
        """Return whether the seeds that judge have chosen the learning rates, too."""
        return len(self.factors(task, trace)) > 1 and not tuning.is_apart(self.cells(task, trace))

    def is_reference(self, task: str, trace: str) -> bool:
        """Return whether a trace is the reference's constant batch size, at which rules are alike."""
        return trace in (tuning.REFERENCE, f"{self.cells(task, trace)['ref_batchsize'].iloc[0]:g}")

    def cells(self, task: str, trace: str) -> pd.DataFrame:
        """Return the rows of `ends` of a task and trace."""
        return self.ends[(self.ends["task"] == task) & (self.ends["trace"] == trace)]

    @cached_property
    def summary(self) -> pd.DataFrame:
        """For each task, trace and rule, at its own learning rate: everything that the report prints.

        Each fact has columns `fact`, `fact_low` and `fact_high`, and `fact_n`, from how many seeds it is: the final
        `value` of the metric, and `value_t` by Student's t; the paired `difference` to the baseline; the rate of those
        that `failed`, `short` of which did not reach their end; `untuned`, the value at the learning rate of the
        reference, the rate of those that `untuned_failed` there, and the `regret` of the others, by how much that value
        is worse than the best that was tried for that trace; each
        `target_...` with `reached` of `target_n`. Without an interval its bounds are nan.
        `factor` is the own one, `edge` whether it is at the edge of those that were tried, and `difference_decided`
        whether one of the `claims` is about the rule and the baseline.
        """
        import pandas as pd

        rows = {}
        for task in self.tasks:
            for trace in self.traces(task):
                pairs, factors = self.differences(task, trace, self.baseline), self.factors(task, trace)
                decided = {
                    rule
                    for claim in self.claims[task, trace]
                    for rule in (claim.better, claim.worse)
                    if self.baseline in claim
                }
                for name, cells in self._own(task, trace).groupby("rule", sort=False):
                    rule = str(name)
                    row = self._row(cells) | _flat("difference", pairs.get(rule, _NONE))
                    row |= self._untuned(task, trace, rule) | {"factor": (factor := cells["lr_factor"].iloc[0])}
                    row["edge"] = len(factors) > 1 and factor in (factors[0], factors[-1])
                    rows[task, trace, rule] = row | {"difference_decided": rule != self.baseline and rule in decided}
        return pd.DataFrame.from_dict(rows, orient="index").rename_axis(GROUP)

    def facts(self, task: str, trace: str) -> pd.DataFrame:
        """Return the rows of `summary` of a task and trace, by rule, in the order of rules."""
        rows = self.summary.reset_index()
        rows = rows[(rows["task"] == task) & (rows["trace"] == trace)].set_index("rule")
        return rows.reindex([rule for rule in self.rules if rule in rows.index])

    def shared(self, task: str, trace: str, rules: Sequence[str]) -> pd.DataFrame:
        """Return the metric by seed and rule at the learning rate of the reference, of seeds that all rules have."""
        import pandas as pd

        own = self._own(task, trace)
        values = {rule: _by_seed(own[(own["rule"] == rule) & ~own["failed"]], self.metric) for rule in rules}
        return pd.DataFrame(values).dropna()

    def stable(self, task: str, trace: str) -> list[str]:
        """Return the rules that have the metric at the learning rate of the reference, and never failed."""
        own = self._own(task, trace).groupby("rule")
        kept = ~own["failed"].any() & own[self.metric].count().gt(0)
        return [rule for rule in self.rules if kept.get(rule, False)]

    @cached_property
    def claims(self) -> dict[tuple[str, str], list[Claim]]:
        """What may be claimed of each task and trace, at the learning rate of the reference; see `claims_of`."""
        return claims_of({key: self._by_rule(*key) for key in self._groups})

    @cached_property
    def together(self) -> float:
        """The confidence of an interval with which those of all pairs of rules hold together (Bonferroni)."""
        return 1 - (1 - CONFIDENCE) / max(1, self.comparisons * (1 + self.any_failed))

    @cached_property
    def any_failed(self) -> bool:
        """Whether a training that judges failed, so that the claims of differences have half of the level."""
        return bool(self.own["failed"].any())

    @cached_property
    def seeds(self) -> int:
        """The number of seeds that judge, the least of all tasks and traces."""
        return min(rows["seed"].nunique() for _, rows in self.own.groupby(["task", "trace"]))

    @cached_property
    def comparisons(self) -> int:
        """The number of pairs of rules, under all traces and of all tasks."""
        return sum(math.comb(len(self._by_rule(*key)), 2) for key in self._groups)

    @cached_property
    def pairing(self) -> float:
        """The standard deviation of paired differences to the baseline over that without pairs: the median."""
        found = []
        for key in self._groups:
            rules = self._by_rule(*key)
            for rule, values in rules.items():
                both = np.isfinite(values) & np.isfinite(first := rules.get(self.baseline, values))
                apart = float(values[both].var(ddof=1) + first[both].var(ddof=1)) if both.sum() > 2 else 0.0
                if rule != self.baseline and apart > 0:
                    found.append(float((values[both] - first[both]).std(ddof=1)) / math.sqrt(apart))
        return float(np.median(found)) if found else math.nan

    @property
    def _groups(self) -> list[tuple[str, str]]:
        return [(task, trace) for task in self.tasks for trace in self.traces(task)]

    def _by_rule(self, task: str, trace: str) -> dict[str, FloatArray]:
        """Return the metric of each rule by seed as `claims_of` takes it."""
        own, sign = self._own(task, trace), 1.0 if self.lower else -1.0
        values = (sign * own[self.metric]).where(~own["failed"], FAILED)
        table = own.assign(judged=values).pivot_table("judged", "rule", "seed", aggfunc="first", dropna=False)
        return {rule: _floats(table.loc[rule]) for rule in self.rules if rule in table.index}

    def differences(self, task: str, trace: str, first: str, confidence: float = CONFIDENCE) -> dict[str, Interval]:
        """Return the paired differences of each rule to the rule `first`, at the learning rate of the reference."""
        own = self._own(task, trace)
        of_first = _by_seed(own[own["rule"] == first], self.metric)
        found = {}
        for rule, cells in own.groupby("rule", sort=False):
            if rule != first:
                pairs = (_by_seed(cells, self.metric) - of_first).dropna()
                found[str(rule)] = difference_interval(_floats(pairs), confidence)
        return found

    def _own(self, task: str, trace: str) -> pd.DataFrame:
        return self.own[(self.own["task"] == task) & (self.own["trace"] == trace)]

    def grid(self, task: str, trace: str) -> pd.DataFrame:
        """Return the metric of what was tried, (rule, factor) x seed, without what failed with any seed."""
        cells = self.tried(task, trace)
        stable = cells[~cells["failed"].groupby([cells["rule"], cells["lr_factor"]]).transform("any")]
        table = stable.pivot_table(self.metric, ["rule", "lr_factor"], "seed", aggfunc="first", dropna=False)
        return table.dropna(how="all")

    def _end(self, cell: pd.DataFrame) -> dict[str, Any]:
        last: dict[str, Any] = {str(name): value for name, value in cell.iloc[-1].items()}
        failed = last["status"] != "finished"
        row = {**last, "failed": failed, "evaluations": len(cell)}
        row |= {name: np.nan if failed else last.get(name, np.nan) for name in self.metrics}
        target = (self.targets or {}).get(last["task_name"])
        if target is None:
            return row
        metric, value = target
        lower = self.lower if metric == self.metric else lower_is_better(metric)
        found = first_reached(cell[metric].to_numpy(np.float64), value, lower)
        at = cell.iloc[-1 if found is None else found]
        return {**row, "reached": found is not None, **{f"target_{name}": at[name] for name in PLACES}}

    def _row(self, cells: pd.DataFrame) -> dict[str, Any]:
        finished = cells[~cells["failed"]]
        values = _floats(finished[self.metric].dropna())
        row = _flat("value", mean_interval(values, **possible(self.metric, values)))
        row |= _flat("value_t", difference_interval(values))
        row |= _flat("failed", rate_interval(int(cells["failed"].sum()), len(cells)))
        row["short"] = int((cells["status"] == "short").sum())
        for name in dict.fromkeys((*PLACES, "wall_seconds", *self.metrics)):
            own = _floats(finished[name].dropna())
            row |= _flat(f"end_{name}", mean_interval(own, **possible(name, own)))
        for name in PLACES if "reached" in cells and cells["reached"].notna().all() else ():
            found = to_target(cells[f"target_{name}"].to_numpy(np.float64), cells["reached"].to_numpy(bool))
            row |= {"reached": found.reached, "target_n": found.n, f"target_{name}": found.value}
            row |= {f"target_{name}_low": found.low, f"target_{name}_high": found.high}
        return row

    def _untuned(self, task: str, trace: str, rule: str) -> dict[str, Any]:
        """Return the value of a rule at the learning rate of the reference, and its regret."""
        cells, sign = self.untuned, 1.0 if self.lower else -1.0
        cells = cells[(cells["task"] == task) & (cells["trace"] == trace) & (cells["rule"] == rule)]
        failed = _flat("untuned_failed", rate_interval(int(cells["failed"].sum()), len(cells)))
        own, grid = _by_seed(cells[~cells["failed"]], self.metric), self.grid(task, trace)
        values, judged = _floats(own), tuning.judging(self.cells(task, trace))
        regret = _NONE
        if tuning.is_apart(self.cells(task, trace)):  # the best one is of those that were judged
            stable = judged[~judged["failed"].groupby([judged["rule"], judged["lr_factor"]]).transform("any")]
            ways = {kind: _by_seed(rows, self.metric) for kind, rows in stable.groupby(["rule", "lr_factor"])}
            least = min(ways.values(), key=lambda values: sign * values.mean(), default=own * np.nan)
            regret = difference_interval(sign * _floats((own - least).dropna()))
        elif len(grid):
            grid = grid[[seed for seed in own.index if seed in grid.columns]]
            whole = grid.dropna(axis=1)  # a seed that has only begun says nothing of tuning
            grid = whole if whole.shape[1] else grid.dropna()
            regret = regret_interval(sign * _floats(own[grid.columns]), sign * _floats(grid)) if grid.size else _NONE
        untuned = _flat("untuned", mean_interval(values, **possible(self.metric, values)))
        return untuned | failed | _flat("regret", regret)


_NONE = Interval(np.nan, np.nan, np.nan, 0)


def _by_seed(cells: pd.DataFrame, metric: str) -> pd.Series[float]:
    return cells.set_index("seed")[metric].dropna()


def _floats(values: Any) -> FloatArray:
    """Return the values of a pandas object."""
    found: FloatArray = values.to_numpy(np.float64)
    return found


def _flat(name: str, interval: Interval) -> dict[str, Any]:
    return {name: interval.value, f"{name}_low": interval.low, f"{name}_high": interval.high, f"{name}_n": interval.n}
