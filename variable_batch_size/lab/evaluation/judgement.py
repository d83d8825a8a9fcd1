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
    """The result of one learning-rate rule under one trace of batch sizes: a row of the report's table.

    Attributes:
        rule: its name.
        mean: of the metric, over the trainings that did not fail.
        trained: number of trainings that ended and were not killed.
        failed: how many of them failed.
        difference: rule - baseline.
        answer: what is claimed; "same": it has the trainings of the baseline, bit for bit.
        stuck: a seed that ended far behind the others, its metric, and the least and largest of the others; else None.
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
    """The results of all rules under one trace of batch sizes.

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
    """Whether the learning rate is tuned: whether no other rate is better at the reference batch size.

    Attributes:
        answer: what is claimed.
        batchsize: in samples.
        lr: learning rate.
        gains: factor -> by how much it is better than factor 1, positive if it is, with intervals that hold together
            at 99 %.
        failing: factors that failed more often, which have no gain.
    """

    answer: Tuned
    batchsize: float = np.nan
    lr: float = np.nan
    gains: Mapping[float, ConfidenceInterval] = field(default_factory=dict)
    failing: tuple[float, ...] = ()

    @property
    def most(self) -> float:
        """Upper bound of how much better another rate may be, at least 0, or nan if none was compared."""
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
    """The results of one task: which rules are claimed to be better or worse than the baseline, and why.

    Attributes:
        task: its name, with what else tells it from others of the report.
        metric: what is compared.
        lower: whether less of it is better.
        baseline: the rule with which the others are compared.
        reference: whether it is tuned.
        traces: in the order of their names.
        failures: rule -> how often it failed, of those that did, or whose baseline did.
        waiting: number of planned runs that have not ended; nothing is claimed before all have ended.
        earlier_seeds: seeds of the plan that an earlier one has judged, which are left out.
        choices: pairs of a baseline and a metric that share the levels, where these were chosen afterwards; else 1.
        killed: the runs whose process died, in words.
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
    """Return for each task which rules are claimed to be better or worse than the baseline.

    Once a report has shown the runs of a seed, later claims about this seed depend on that report. The last plan is
    therefore judged by the seeds that it was the first to have, or, if it has none, by the latest of its seeds, with
    all runs of these seeds in any plan.

    The levels are shared by all tasks; a quarter of those before with each plan of five or more seeds that adds runs to
    the folder, up to the last one that added to what is judged; and shared by all pairs of a baseline and a metric,
    unless these are the plan's baseline and the loss.

    Args:
        evaluation: the runs that have ended, at least one.
        metric: what is compared at the end of the runs.
        baseline: rule to compare the others with; None: the baseline of the plan, "constant" or, if it is not there,
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
    judgements, reports_before = [], _count_earlier_reports(evaluation)
    for name, of_task in tasks:
        family = _family_of(of_task, evaluation)
        planned = family.baseline if family.baseline in rules else default
        chosen = baseline or planned
        choices = 1 if (metric, chosen) == ("loss", planned) else len(known) * max(1, len(rules))
        earlier = max([reports_before.get(key, 0) for key in family.keys], default=0)
        shared = family._replace(looks=len(tasks) * 4**earlier, choices=choices)
        judged = of_task[of_task["key"].isin(family.keys)]
        check_traces(row["environment"] | row for row in judged.to_dict("records"))
        judgements.append(_judge(name, judged, metric, lower, chosen, shared))
    return judgements


class _Family(NamedTuple):
    """The training runs of a task that are judged together, so that their tests share one level of significance.

    Attributes:
        keys: names of the runs.
        left_out: seeds of the last plan that are not judged, because an earlier plan has judged them.
        waiting: number of planned runs that have not ended.
        baseline: the rule that the plan names; None: it names none.
        looks: number of parts of the level: one for each task, times 4 for each report that could be made before.
        choices: by how many choices of a baseline and a metric each of these parts is divided.
    """

    keys: set[str]
    left_out: tuple[int, ...] = ()
    waiting: int = 0
    baseline: str | None = None
    looks: int = 1
    choices: int = 1


def _family_of(trainings: pd.DataFrame, evaluation: Evaluation) -> _Family:
    """Choose which training runs of a task are judged: the runs of the seeds that were planned last.

    An earlier report may have shown the results of earlier seeds, so these cannot confirm what it suggested.

    Args:
        trainings: the runs of the task that have ended.
        evaluation: all runs that have ended, and the plans.
    """
    ended = set(evaluation.trainings["key"])
    seed_of = dict(zip(trainings["key"], trainings["seed"], strict=True))
    seeds_of_plans = [({seed_of[key] for key in plan.keys if key in seed_of}, plan) for plan in evaluation.plans]
    plans = [(seeds, plan) for seeds, plan in seeds_of_plans if seeds]  # the others are of other tasks
    if not plans:
        return _Family(ended)
    latest_first = reversed([*enumerate(plans)])  # so that the first plan of a seed counts
    first_plan = {seed: index for index, (seeds, _) in latest_first for seed in seeds}
    last_seeds, _ = plans[-1]
    latest = max(first_plan[seed] for seed in last_seeds)
    judged = {seed for seed, index in first_plan.items() if index == latest}
    planned = {key for seeds, plan in plans if seeds & judged for key in plan.keys}
    keys = {key for key in planned if seed_of.get(key) in judged}
    return _Family(keys, tuple(sorted(last_seeds - judged)), len(planned - ended), plans[latest][1].baseline)


def _count_earlier_reports(evaluation: Evaluation) -> dict[str, int]:
    """Return how many reports could be made before each training run was planned: the key of the run -> number.

    Each report that could be seen before makes later claims harder. A plan whose runs have fewer than SEEDS seeds does
    not count: its report claims nothing.
    """
    seed_of = dict(zip(evaluation.trainings["key"], evaluation.trainings["seed"], strict=True))
    reports_before, reports = dict[str, int](), 0
    for plan in evaluation.plans:
        new_keys = set(plan.keys) - reports_before.keys()
        if new_keys:
            reports_before |= dict.fromkeys(new_keys, reports)
            seeds = {seed_of[key] for key in plan.keys if key in seed_of}
            reports += len(seeds) >= SEEDS
    return reports_before


def metrics_of(trainings: pd.DataFrame) -> list[str]:
    """Return the names of the metrics that the tasks evaluate, the loss first."""
    columns = dict.fromkeys(["loss", *(name for curve in trainings["curve"] for name in curve)])
    return [name for name in columns if name not in NOT_METRICS]


def sort_rules(rules: Iterable[str], first: str = BASELINE) -> list[str]:
    """Sort the names of rules: the `first` one, then the others in the order of the table `RULES`."""
    places = {name: place for place, name in enumerate(RULES)}  # names without arguments, such as of "NAME:1.5"
    return sorted(rules, key=lambda rule: (rule != first, places.get(rule.partition(":")[0], len(places)), rule))


def _task_names(trainings: pd.DataFrame) -> pd.Series[str]:
    """Return each run's task, with the settings in which runs of it differ: they are judged as different tasks."""
    rates = zip(trainings["lr"], trainings["lr_factor"], strict=True)
    frame = trainings.assign(tuned=[tuned_rate(lr, factor) for lr, factor in rates])
    names = frame["task"].astype(str)
    for column, word in DIFFERS_IN.items():
        has_several = frame.groupby("task")[column].transform("nunique") > 1
        text = frame[column].map(lambda value: value if isinstance(value, str) else f"{value:g}")
        names += (f", {word} " + text).where(has_several, "")
    return names


def _judge(
    task: str,
    trainings: pd.DataFrame,
    metric: str,
    lower: bool,
    baseline: str,
    family: _Family,
) -> Judgement:
    """Judge the training runs of one task: which rules are better or fail, and whether the reference is tuned.

    The arguments are those of `Judgement`; `family` has what else these runs share.
    """
    waiting, parts = family.waiting, family.looks * family.choices  # of the level of significance
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
    reference_parts = family.looks if metric == "loss" else parts  # its loss is the same whatever the baseline
    reference = _judge_reference(trainings[is_reference(trainings)], table.sign, reference_parts)
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
    """Return how often each rule failed, for the rules that did or whose baseline did."""
    signs = np.zeros_like(claimed.fails) if waiting else claimed.fails  # nothing is claimed while runs are missing
    failures = {}
    for rule, counts, sign in zip(rules, claimed.failures, signs, strict=True):
        failed, trained, baseline_failed, baseline_trained = map(int, counts)
        if failed or baseline_failed:
            failures[rule] = Failures(failed, trained, baseline_failed, baseline_trained, int(sign))
    return failures


@dataclass(frozen=True)
class _Table:
    """The results of the runs at factor 1 as arrays, from which `claims` computes its tests."""

    traces: list[str]  # their names
    rules: list[str]  # the baseline first
    seeds: list[int]
    values: FloatArray  # sign * final metric, less is better, (traces, rules, seeds); nan of a run that failed
    failed: BoolArray  # (traces, rules, seeds)
    same: BoolArray  # where a rule has the losses of the baseline, bit for bit, (traces, rules)
    sign: float  # 1 if less of the metric is better, else -1

    @property
    def trained(self) -> IntArray:
        """Number of runs of each rule under each trace, (traces, rules)."""
        counts: IntArray = (self.failed | ~np.isnan(self.values)).sum(-1)
        return counts

    @classmethod
    def from_trainings(cls, trainings: pd.DataFrame, baseline: str, lower: bool) -> _Table:
        """Arrange runs in arrays by trace, rule and seed. `lower` says whether less of the metric is better."""
        traces, seeds = sorted(trainings["label"].unique()), sorted(trainings["seed"].unique())
        rules = sort_rules({baseline, *trainings["rule"]}, baseline)
        values = np.full((len(traces), len(rules), len(seeds)), np.nan)
        sign = 1.0 if lower else -1.0
        failed = np.zeros(values.shape, bool)
        losses = np.full(values.shape, None, object)
        for run in trainings.to_dict("records"):
            place = traces.index(run["label"]), rules.index(run["rule"]), seeds.index(run["seed"])
            values[place] = sign * run["value"]
            failed[place] = run["failed"]
            losses[place] = tuple(run["curve"].get("loss", ()))
        trained = np.vectorize(lambda loss: loss is not None, otypes=[bool])(losses)
        both_trained = trained & trained[:, :1]  # the rule and the baseline, which is the first rule
        same = both_trained.any(-1) & ((losses == losses[:, :1]) | ~both_trained).all(-1)
        return cls(traces, rules, [*map(int, seeds)], values, failed, same, sign)


def _judge_traces(table: _Table, claimed: Claims, trainings: pd.DataFrame, waiting: int, parts: int) -> Iterator[Trace]:
    """Yield the results of all rules under each trace.

    Args:
        table, claimed: the runs at factor 1, and what is claimed of them.
        trainings: the runs of the task, including those of the reference.
        waiting: number of planned runs that have not ended.
        parts: number of parts into which the level of significance is divided.
    """
    reference_values = table.sign * reference_trainings(trainings)["value"].to_numpy(np.float64)
    _, means, variances = moments(table.values)  # (traces, rules)
    level = DIFFERENCES / parts / max(1, int(claimed.tested.sum()))
    for trace, name in enumerate(table.traces):
        rules = [rule for rule, num_runs in enumerate(table.trained[trace]) if num_runs]  # indices; 0 is the baseline
        rows = {rule: _judge_rule(table, claimed, trace, rule, waiting) for rule in rules}
        candidates = [rule for rule in rules if _may_be_best(rows[rule], rows.get(0))]
        best = min(candidates, key=means[trace].__getitem__, default=0)
        of_trace = trainings[(trainings["label"] == name) & np.isclose(trainings["lr_factor"], 1)]
        has_equal_samples = (of_trace["end"] == "samples").all() and len(reference_values)
        compared = dict.fromkeys((0, best)) if has_equal_samples else ()  # with the reference
        outlook = None
        if best and not waiting and all(row.answer != "better" for row in rows.values()):
            gap = abs(float(means[trace, best] - means[trace, 0]))
            outlook = _outlook(gap, variances[trace, best], variances[trace, 0], table.values.shape[-1], level)
        longest = max(of_trace["curve"], key=lambda curve: len(curve.get("samples", ())))
        yield Trace(
            name,
            bool(np.isfinite(constant_batchsize(longest))),
            tuple(rows.values()),
            {table.rules[rule]: compare(table.values[trace, rule], reference_values).interval() for rule in compared},
            table.rules[best] if best else None,
            outlook,
        )


def _judge_rule(table: _Table, claimed: Claims, trace: int, rule: int, waiting: int) -> Row:
    """Return the result of one rule under one trace, given by their indices in the table. Rule 0 is the baseline.

    Nothing is claimed while some of the planned runs, whose number is `waiting`, have not ended.
    """
    answer: Answer = "waiting" if waiting else _ANSWERS[int(claimed.differs[trace, rule])]
    if table.same[trace, rule]:
        answer = "same"
    if rule == 0:
        answer = "baseline"
    difference = Comparison(*(array[trace, rule] for array in claimed.difference)).interval()
    mean = mean_interval(table.values[trace, rule])
    trained, failed = int(table.trained[trace, rule]), int(table.failed[trace, rule].sum())
    shown = _with_sign(mean, table.sign), trained, failed, _with_sign(difference, table.sign), answer
    return Row(table.rules[rule], *shown, _stuck_seed(table, trace, rule))


def _stuck_seed(table: _Table, trace: int, rule: int) -> tuple[int, float, float, float] | None:
    """Return the worst seed of a rule under a trace if it ended far behind the others, as in `Row.stuck`, else None.

    It is far behind if its distance to the next one is more than STUCK times the range of the others.
    """
    values = table.values[trace, rule]  # (seeds,), less is better
    trained_seeds = np.flatnonzero(~np.isnan(values))
    if len(trained_seeds) < MIN_FOR_STUCK:
        return None
    *others, worst = trained_seeds[np.argsort(values[trained_seeds])]
    least_of_others, most_of_others = values[others[0]], values[others[-1]]
    if values[worst] - most_of_others <= STUCK * (most_of_others - least_of_others):
        return None
    range_of_others = sorted(table.sign * value for value in (least_of_others, most_of_others))
    return table.seeds[worst], float(table.sign * values[worst]), *map(float, range_of_others)


def _may_be_best(row: Row, baseline: Row | None) -> bool:
    """Return whether a rule could be better than the baseline: it is not claimed to be worse, nor failed more often."""
    if row.answer in ("baseline", "same", "worse") or not np.isfinite(row.mean.value):
        return False
    return baseline is None or row.failed * baseline.trained <= baseline.failed * row.trained


_ANSWERS: Mapping[int, Answer] = {-1: "better", 0: "open", 1: "worse"}


def _outlook(gap: float, variance: float, of_baseline: float, seeds: int, level: float) -> tuple[int, float] | None:
    """Return how many seeds a new evaluation needs to find a difference of means of `gap`, at least as many as now.

    If MOST_SEEDS do not suffice, return them and the smallest difference that they find. None if a value is not known.

    Args:
        gap: the difference between a rule and the baseline, > 0.
        variance, of_baseline: variances of both.
        seeds: number of seeds of this evaluation.
        level: level of significance of a test.
    """
    if not np.isfinite(gap + variance + of_baseline):
        return None
    numbers = np.arange(max(SEEDS, seeds), max(MOST_SEEDS, seeds) + 1)
    differences = detectable_difference(variance, of_baseline, numbers.astype(np.float64), level)
    enough = np.flatnonzero(differences <= gap)
    return (int(numbers[enough[0]]), gap) if len(enough) else (int(numbers[-1]), float(differences[-1]))


def _judge_reference(trainings: pd.DataFrame, sign: float, parts: int) -> Reference:
    """Return whether the learning rate is tuned: whether no other rate is better at the reference batch size.

    Args:
        trainings: the runs of the reference, at several learning rates.
        sign: 1 if less of the metric is better, else -1.
        parts: number of parts into which the level of significance is divided.
    """
    if trainings.empty:
        return Reference("missing")
    # Batch size and learning rate of the reference.
    tuned_at = float(trainings["ref_batchsize"].iloc[0]), float((trainings["lr"] / trainings["lr_factor"]).iloc[0])
    by_factor_and_seed = trainings.groupby([trainings["lr_factor"].round(9), "seed"])
    values, failed = (by_factor_and_seed[name].first().unstack() for name in ("value", "failed"))  # (factors, seeds)
    factors = [1.0, *(factor for factor in values.index if factor != 1)]
    values = values.reindex(factors)
    failed = failed.reindex(factors).eq(True)
    if failed.loc[1.0].any() and values.loc[1.0].isna().all():
        return Reference("failed", *tuned_at)
    intervals, answer = judge_tuning(sign * values.to_numpy(np.float64), failed.to_numpy(), parts)
    gains = {factor: ConfidenceInterval(*gain.tolist()) for factor, gain in zip(factors[1:], intervals, strict=True)}
    gains = {factor: gain for factor, gain in gains.items() if np.isfinite(gain.low)}
    failure_rates = failed.sum(axis=1) / (failed | values.notna()).sum(axis=1)
    failing = tuple(sorted(factor for factor in factors[1:] if failure_rates[factor] > failure_rates[1.0]))
    return Reference(_TUNED[int(answer)] if gains or failing else "untried", *tuned_at, gains, failing)


_TUNED: Mapping[int, Tuned] = {-1: "tuned", 0: "open", 1: "not tuned"}


def _labels(trainings: pd.DataFrame) -> pd.Series[str]:
    """Return the name of each run's trace, and after it the end of the run where runs of the trace end differently."""
    has_several_ends = trainings.groupby("trace")["end"].transform("nunique") > 1
    return trainings["trace"] + (", " + trainings["end"]).where(has_several_ends, "")


def _final_value(curve: Mapping[str, Sequence[float | None]], name: str) -> float:
    """Return the last value of a column of a curve, or nan if there is none."""
    column = curve.get(name)
    return float(column[-1]) if column and column[-1] is not None else np.nan


def _with_sign(interval: ConfidenceInterval, sign: float) -> ConfidenceInterval:
    """Return an interval multiplied by `sign`, 1 or -1. With -1 the bounds change places."""
    return interval if sign > 0 else ConfidenceInterval(-interval.value, -interval.high, -interval.low)
