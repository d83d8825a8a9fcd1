"""Which rules an evaluation claims to be better or worse than the baseline, at the learning rate of the reference.

Everything is about the trainings at factor 1; the reference's at other factors only tell whether it is tuned.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import numpy as np

from variable_batch_size._validation import FloatArray, IntArray, value_error
from variable_batch_size.lab.evaluation.failures import (
    constant_batchsize,
    find_failed,
    is_reference,
    reference_trainings,
)
from variable_batch_size.lab.evaluation.metric import Mode, lower_is_better
from variable_batch_size.lab.evaluation.records import DIFFERS_IN, REFERENCE, Evaluation, check_traces, tuned_rate
from variable_batch_size.lab.evaluation.statistics import (
    DIFFERENCES,
    SEEDS,
    BoolArray,
    Claims,
    Comparison,
    ConfidenceInterval,
    claims,
    compare,
    detectable_difference,
    judge_tuning,
    mean_interval,
    moments,
)
from variable_batch_size.rules import RULES

if TYPE_CHECKING:
    import pandas as pd

BASELINE = "constant"
MOST_SEEDS = 100  # of a new evaluation that is advised
MIN_FOR_STUCK, STUCK = 4, 2.0  # seeds; ranges of the others by which the worst one is behind them
NOT_METRICS = {"updates", "samples", "progress", "seconds", "cost", "train_loss", "lr"}
NOT_METRICS |= {"batch_size", "batch_least", "batch_most"}

Answer: TypeAlias = Literal["baseline", "same", "better", "worse", "open", "waiting"]
Tuned: TypeAlias = Literal["tuned", "not tuned", "open", "failed", "untried", "missing", "waiting"]


@dataclass(frozen=True)
class Row:
    """A rule under a trace.

    Attributes:
        rule: its name.
        mean: of the metric, over the trainings that did not fail.
        trained: number of trainings that ended and were not killed.
        failed: how many of them failed.
        difference: rule - baseline.
        answer: what is claimed; "same": it has the trainings of the baseline, bit for bit.
        stuck: the seed that ended worst and its metric, far from the others, and theirs, least and most; else None.
    """

    rule: str
    mean: ConfidenceInterval
    trained: int
    failed: int
    difference: ConfidenceInterval
    answer: Answer
    stuck: tuple[int, float, float, float] | None = None


@dataclass(frozen=True)
class Trace:
    """The rules under a trace.

    Attributes:
        name: as users read it, with its end if there are several.
        constant: whether the batch size is constant, so that a rule is a learning rate.
        rows: one a rule, the baseline first.
        lost: rule -> by how much it is worse than the reference at equal samples, of the baseline and `best`.
        best: the other rule with the best mean, of those that are not claimed to be worse and failed no more often than
            the baseline.
        outlook: of the best other rule, if none is claimed to be better: seeds of a new evaluation, and the difference
            that it would see.
    """

    name: str
    constant: bool
    rows: tuple[Row, ...]
    lost: Mapping[str, ConfidenceInterval]
    best: str | None
    outlook: tuple[int, float] | None


@dataclass(frozen=True)
class Reference:
    """Whether the learning rate is tuned at the reference's batch size.

    Attributes:
        answer: what is claimed.
        batchsize: in samples.
        lr: learning rate.
        gains: factor -> by how much it is better than factor 1, positive if it is, with intervals that hold together
            at 99 %.
        failing: factors that failed more often, which have no gain.
        most: upper bound of how much better a factor may be, nan if it is not known.
    """

    answer: Tuned
    batchsize: float = np.nan
    lr: float = np.nan
    gains: Mapping[float, ConfidenceInterval] = field(default_factory=dict)
    failing: tuple[float, ...] = ()

    @property
    def most(self) -> float:
        return max([0.0, *(gain.high for gain in self.gains.values())]) if self.gains else np.nan


class Failures(NamedTuple):
    """How often a rule and the baseline failed, under all traces in which they differ.

    `claimed` is -1 if the rule is claimed to fail less often, 1 if more often, 0 otherwise.
    """

    failed: int
    trained: int
    baseline_failed: int
    baseline_trained: int
    claimed: int


@dataclass(frozen=True)
class Judgement:
    """What an evaluation says of a task.

    Attributes:
        task: its name, with what else tells it from others of the report.
        metric: what is compared.
        lower: whether less of it is better.
        baseline: the rule with which the others are compared.
        reference: whether it is tuned.
        traces: in the order of their names.
        failures: rule -> how often it failed, of those that did, or whose baseline did.
        waiting: number of planned trainings that have not ended; nothing is claimed before all have.
        earlier_seeds: seeds of the plan that an earlier one has judged, which are left out.
        choices: pairs of a baseline and a metric that share the levels, where these were chosen afterwards; else 1.
        killed: the trainings whose process died, in words.
        trainings: those that are judged, with the final `loss`, the final `value` of the metric, and `failed`.
    """

    task: str
    metric: str
    lower: bool
    baseline: str
    reference: Reference
    traces: tuple[Trace, ...]
    failures: Mapping[str, Failures]
    waiting: int
    earlier_seeds: tuple[int, ...]
    choices: int
    killed: tuple[str, ...]
    trainings: pd.DataFrame = field(compare=False, repr=False)

    @property
    def rules(self) -> list[str]:
        """The rules, the baseline first."""
        return sort_rules(self.trainings["rule"].unique(), self.baseline)


def judge(
    evaluation: Evaluation, metric: str = "loss", baseline: str | None = None, mode: Mode | None = None
) -> list[Judgement]:
    """Return what an evaluation says of each of its tasks.

    What was seen of a training belongs to all that is claimed of its seed: the last plan is judged by the seeds that it
    was the first to have, or else by the latest of its seeds, with all trainings of these seeds that any plan has.

    The levels are shared by all tasks; a quarter of those before with each plan of five or more seeds that adds
    trainings to the folder, up to the last one that added to what is judged; and shared by all pairs of a baseline and
    a metric, unless these are the plan's baseline and the loss.

    Args:
        evaluation: what has ended, at least one training.
        metric: what is compared at the end of the trainings.
        baseline: rule with which the others are compared; None: that of the plan, "constant" or, if it is not there,
            the first one.
        mode: "min" if less of the metric is better, "max" if more is; None: its name tells.

    Raises:
        ValueError: if there is no training, or none has the metric or the baseline, or the name of the metric does not
            tell whether less of it is better.
    """
    trainings = evaluation.trainings
    if trainings.empty:
        raise value_error("an evaluation must have at least one training that has ended", "none", "run it first")
    known = metrics_of(trainings)
    if metric not in known:
        found = " or ".join(f'"{name}"' for name in known)
        raise value_error(f"metric must be {found}", repr(metric), "choose one that the task evaluates")
    lower = lower_is_better(metric, mode)
    rules = sort_rules(trainings.loc[trainings["trace"] != REFERENCE, "rule"].unique())
    if baseline is not None and baseline not in rules:
        raise value_error(f"baseline must be {' or '.join(rules)}", repr(baseline), "choose a rule of the evaluation")
    default = BASELINE if BASELINE in rules or not rules else rules[0]
    tasks = [(str(name), of_task) for name, of_task in trainings.groupby(_task_names(trainings))]
    judgements, looks = [], _numbers_of_looks(evaluation)
    for name, of_task in tasks:
        family = _family_of(of_task, evaluation)
        planned = family.baseline if family.baseline in rules else default
        chosen = baseline or planned
        choices = 1 if (metric, chosen) == ("loss", planned) else len(known) * max(1, len(rules))
        earlier = max([looks.get(key, 0) for key in family.keys], default=0)
        shared = family._replace(looks=len(tasks) * 4**earlier, choices=choices)
        judged = of_task[of_task["key"].isin(family.keys)]
        check_traces(row["environment"] | row for row in judged.to_dict("records"))
        judgements.append(_judge(name, judged, metric, lower, chosen, shared))
    return judgements


class _Family(NamedTuple):
    """The trainings of a task that are judged together.

    `keys` are all of them, `left_out` the seeds of the last plan that are not theirs, `waiting` is the number of those
    that have not ended, and `baseline` that of the first plan. The levels are shared by `choices` of a baseline and a
    metric in each of `looks`.
    """

    keys: set[str]
    left_out: tuple[int, ...] = ()
    waiting: int = 0
    baseline: str | None = None
    looks: int = 1
    choices: int = 1


def _family_of(trainings: pd.DataFrame, evaluation: Evaluation) -> _Family:
    """Return what judges a task, of which these trainings have ended."""
    ended = set(evaluation.trainings["key"])
    seeds = dict(zip(trainings["key"], trainings["seed"], strict=True))
    of_plans = [({seeds[key] for key in plan.keys if key in seeds}, plan) for plan in evaluation.plans]
    of_plans = [(found, plan) for found, plan in of_plans if found]
    if not of_plans:
        return _Family(ended)
    first = {seed: number for number, (found, _) in reversed([*enumerate(of_plans)]) for seed in found}
    asked, _ = of_plans[-1]
    latest = max(first[seed] for seed in asked)
    judged = {seed for seed, number in first.items() if number == latest}
    planned = {key for found, plan in of_plans if found & judged for key in plan.keys}
    keys = {key for key in planned if seeds.get(key) in judged}
    return _Family(keys, tuple(sorted(asked - judged)), len(planned - ended), of_plans[latest][1].baseline)


def _numbers_of_looks(evaluation: Evaluation) -> dict[str, int]:
    """Return by the key of a training how many reports of the folder were there before its plan: one for each plan."""
    seeds = dict(zip(evaluation.trainings["key"], evaluation.trainings["seed"], strict=True))
    looks, number = dict[str, int](), 0
    for plan in evaluation.plans:
        if new := set(plan.keys) - looks.keys():
            looks |= dict.fromkeys(new, number)
            number += len({seeds[key] for key in plan.keys if key in seeds}) >= SEEDS  # else nothing is claimed
    return looks


def metrics_of(trainings: pd.DataFrame) -> list[str]:
    """Return the metrics that the tasks evaluate, the loss first."""
    names = dict.fromkeys(["loss", *(name for curve in trainings["curve"] for name in curve)])
    return [name for name in names if name not in NOT_METRICS]


def sort_rules(rules: Iterable[str], first: str = BASELINE) -> list[str]:
    """Return rules in the order of the table of rules, after the `first`; those with arguments by their text."""
    places = {name: place for place, name in enumerate(RULES)}
    return sorted(rules, key=lambda rule: (rule != first, places.get(rule.partition(":")[0], len(places)), rule))


def _task_names(trainings: pd.DataFrame) -> pd.Series[str]:
    """Return the task of each training, with what else differs, so that these cannot be compared."""
    rates = zip(trainings["lr"], trainings["lr_factor"], strict=True)
    frame = trainings.assign(tuned=[tuned_rate(lr, factor) for lr, factor in rates])
    names = frame["task"].astype(str)
    for column, word in DIFFERS_IN.items():
        several = frame.groupby("task")[column].transform("nunique") > 1
        text = frame[column].map(lambda value: value if isinstance(value, str) else f"{value:g}")
        names += (f", {word} " + text).where(several, "")
    return names


def _judge(
    task: str,
    trainings: pd.DataFrame,
    metric: str,
    lower: bool,
    baseline: str,
    family: _Family,
) -> Judgement:
    """Return what trainings of a task say."""
    waiting, parts = family.waiting, family.looks * family.choices
    final = {name: [_final_value(curve, name) for curve in trainings["curve"]] for name in ("loss", metric)}
    trainings = trainings.assign(loss=final["loss"], value=final[metric], label=_labels(trainings))
    trainings["failed"] = find_failed(trainings)
    trainings["value"] = trainings["value"].where((trainings["status"] == "finished") & ~trainings["failed"])
    killed = trainings[trainings["status"] == "killed"]
    at_factor_1 = trainings[(trainings["trace"] != REFERENCE) & np.isclose(trainings["lr_factor"], 1)]
    table = _Table.from_trainings(at_factor_1, baseline, lower)
    claimed = claims(table.values, table.failed, table.same, parts)
    traces = tuple(_judge_traces(table, claimed, trainings, waiting, parts))
    gains = [abs(row.difference.value) for trace in traces for row in trace.rows if row.answer == "better"]
    of_reference = family.looks if metric == "loss" else parts  # its loss is the same whatever the baseline
    reference = _judge_reference(trainings[is_reference(trainings)], table.sign, of_reference)
    if reference.answer == "tuned" and min(gains, default=np.inf) <= reference.most:
        reference = replace(reference, answer="open")  # another rate may bring as much as what is claimed
    return Judgement(
        task,
        metric,
        lower,
        baseline,
        Reference("waiting") if waiting else reference,
        traces,
        _failures_by_rule(table.rules, claimed, waiting),
        waiting,
        family.left_out,
        family.choices,
        tuple(f"{row.rule} at {row.lr_factor:g}x under {row.label}, seed {row.seed}" for row in killed.itertuples()),
        trainings,
    )


def _failures_by_rule(rules: Sequence[str], claimed: Claims, waiting: int) -> dict[str, Failures]:
    """Return how often each rule failed, of those that did, or whose baseline did."""
    fails = np.zeros_like(claimed.fails) if waiting else claimed.fails
    return {
        rule: Failures(*map(int, (*counts, sign)))
        for rule, counts, sign in zip(rules, claimed.failures, fails, strict=True)
        if counts[0] or counts[2]
    }


@dataclass(frozen=True)
class _Table:
    """The trainings at factor 1, as `claims` takes them: the metric, less is better, and which failed."""

    names: list[str]
    rules: list[str]  # the baseline first
    seeds: list[int]
    values: FloatArray
    failed: BoolArray
    same: BoolArray
    sign: float

    @property
    def trained(self) -> IntArray:
        counts: IntArray = (self.failed | ~np.isnan(self.values)).sum(-1)
        return counts

    @classmethod
    def from_trainings(cls, trainings: pd.DataFrame, baseline: str, lower: bool) -> _Table:
        """Return the trainings by trace, rule and seed; a rule is the same where its losses are the baseline's."""
        names, seeds = sorted(trainings["label"].unique()), sorted(trainings["seed"].unique())
        rules = sort_rules({baseline, *trainings["rule"]}, baseline)
        values = np.full((len(names), len(rules), len(seeds)), np.nan)
        sign = 1.0 if lower else -1.0
        fails = np.zeros(values.shape, bool)
        losses = np.full(values.shape, None, object)
        for row in trainings.to_dict("records"):
            place = names.index(row["label"]), rules.index(row["rule"]), seeds.index(row["seed"])
            values[place] = sign * row["value"]
            fails[place] = row["failed"]
            losses[place] = tuple(row["curve"].get("loss", ()))
        trained = np.vectorize(lambda loss: loss is not None, otypes=[bool])(losses)
        both_trained = trained & trained[:, :1]
        same = both_trained.any(-1) & ((losses == losses[:, :1]) | ~both_trained).all(-1)
        return cls(names, rules, [*map(int, seeds)], values, fails, same, sign)


def _judge_traces(table: _Table, claimed: Claims, used: pd.DataFrame, waiting: int, parts: int) -> Iterator[Trace]:
    at_reference = table.sign * reference_trainings(used)["value"].to_numpy(np.float64)
    _, means, variances = moments(table.values)
    level = DIFFERENCES / parts / max(1, int(claimed.tested.sum()))
    for place, name in enumerate(table.names):
        numbers = [number for number, trained in enumerate(table.trained[place]) if trained]
        rows = {number: _judge_rule(table, claimed, place, number, waiting) for number in numbers}
        candidates = [number for number in numbers if _may_be_best(rows[number], rows.get(0))]
        best = min(candidates, key=means[place].__getitem__, default=0)
        of_trace = used[(used["label"] == name) & np.isclose(used["lr_factor"], 1)]
        beside = dict.fromkeys((0, best)) if (of_trace["end"] == "samples").all() and len(at_reference) else ()
        outlook = None
        if best and not waiting and all(row.answer != "better" for row in rows.values()):
            gap = abs(float(means[place, best] - means[place, 0]))
            outlook = _outlook(gap, variances[place, best], variances[place, 0], table.values.shape[-1], level)
        longest = max(of_trace["curve"], key=lambda curve: len(curve.get("samples", ())))
        yield Trace(
            name,
            bool(np.isfinite(constant_batchsize(longest))),
            tuple(rows.values()),
            {table.rules[n]: compare(table.values[place, n], at_reference).interval() for n in beside},
            table.rules[best] if best else None,
            outlook,
        )


def _judge_rule(table: _Table, claimed: Claims, place: int, number: int, waiting: int) -> Row:
    """Return what is said of the rule with a number in the table under the trace at a place of it."""
    answer: Answer = "waiting" if waiting else _ANSWERS[int(claimed.differs[place, number])]
    answer = "baseline" if not number else "same" if table.same[place, number] else answer
    difference = Comparison(*(part[place, number] for part in claimed.difference)).interval()
    mean = mean_interval(table.values[place, number])
    counts = int(table.trained[place, number]), int(table.failed[place, number].sum())
    shown = _with_sign(mean, table.sign), *counts, _with_sign(difference, table.sign), answer
    return Row(table.rules[number], *shown, _stuck_of(table, place, number))


def _stuck_of(table: _Table, place: int, number: int) -> tuple[int, float, float, float] | None:
    """Return the seed of a rule under a trace that ended worst, if it is far from the others; see `Row.stuck`."""
    values = table.values[place, number]
    known = np.flatnonzero(~np.isnan(values))
    if len(known) < MIN_FOR_STUCK:
        return None
    *others, worst = known[np.argsort(values[known])]
    least, most = values[others[0]], values[others[-1]]
    if values[worst] - most <= STUCK * (most - least):
        return None
    ends = sorted(table.sign * value for value in (least, most))
    return table.seeds[worst], float(table.sign * values[worst]), *map(float, ends)


def _may_be_best(row: Row, baseline: Row | None) -> bool:
    """Return whether a rule is another one than the baseline, not worse, and failed no more often."""
    if row.answer in ("baseline", "same", "worse") or not np.isfinite(row.mean.value):
        return False
    return baseline is None or row.failed * baseline.trained <= baseline.failed * row.trained


_ANSWERS: Mapping[int, Answer] = {-1: "better", 0: "open", 1: "worse"}


def _outlook(gap: float, variance: float, of_baseline: float, seeds: int, level: float) -> tuple[int, float] | None:
    """Return how many seeds, at least as many as now, would see a difference of `gap`, or what the most would see."""
    if not np.isfinite(gap + variance + of_baseline):
        return None
    numbers = np.arange(max(SEEDS, seeds), max(MOST_SEEDS, seeds) + 1)
    differences = detectable_difference(variance, of_baseline, numbers.astype(np.float64), level)
    enough = np.flatnonzero(differences <= gap)
    return (int(numbers[enough[0]]), gap) if len(enough) else (int(numbers[-1]), float(differences[-1]))


def _judge_reference(trainings: pd.DataFrame, sign: float, parts: int) -> Reference:
    """Return whether the learning rate of the task is tuned at the reference's batch size."""
    if trainings.empty:
        return Reference("missing")
    tuned_at = float(trainings["ref_batchsize"].iloc[0]), float((trainings["lr"] / trainings["lr_factor"]).iloc[0])
    kinds = trainings.groupby([trainings["lr_factor"].round(9), "seed"])
    values, fails = (kinds[name].first().unstack() for name in ("value", "failed"))
    factors = [1.0, *(factor for factor in values.index if factor != 1)]
    values = values.reindex(factors)
    fails = fails.reindex(factors).eq(True)
    if fails.loc[1.0].any() and values.loc[1.0].isna().all():
        return Reference("failed", *tuned_at)
    intervals, answer = judge_tuning(sign * values.to_numpy(np.float64), fails.to_numpy(), parts)
    gains = {factor: ConfidenceInterval(*gain.tolist()) for factor, gain in zip(factors[1:], intervals, strict=True)}
    gains = {factor: gain for factor, gain in gains.items() if np.isfinite(gain.low)}
    rates = fails.sum(axis=1) / (fails | values.notna()).sum(axis=1)
    failing = tuple(sorted(rates[1:][rates[1:] > rates[1.0]].index))
    return Reference(_TUNED[int(answer)] if gains or failing else "untried", *tuned_at, gains, failing)


_TUNED: Mapping[int, Tuned] = {-1: "tuned", 0: "open", 1: "not tuned"}


def _labels(trainings: pd.DataFrame) -> pd.Series[str]:
    """Return the trace of each training, with its end where a trace has several."""
    several = trainings.groupby("trace")["end"].transform("nunique") > 1
    return trainings["trace"] + (", " + trainings["end"]).where(several, "")


def _final_value(curve: Mapping[str, Sequence[float | None]], name: str) -> float:
    value = (curve.get(name) or [None])[-1]
    return np.nan if value is None else float(value)


def _with_sign(interval: ConfidenceInterval, sign: float) -> ConfidenceInterval:
    return interval if sign > 0 else ConfidenceInterval(-interval.value, -interval.high, -interval.low)
