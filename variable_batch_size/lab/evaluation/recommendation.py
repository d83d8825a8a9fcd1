"""Which rule for which trace, as a row of a table and a sentence."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from variable_batch_size.lab.evaluation import tuning
from variable_batch_size.lab.evaluation.analysis import BASELINE, Analysis
from variable_batch_size.lab.evaluation.claims import Claim
from variable_batch_size.lab.evaluation.metric import possible
from variable_batch_size.lab.evaluation.statistics import CONFIDENCE, difference_interval, mean_interval
from variable_batch_size.lab.evaluation.wording import interval, listed, number

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Recommendation:
    """What an evaluation says about a task and a trace.

    Attributes:
        task: name of the task.
        trace: name of the trace.
        rule: the rule to use, None if no one can be recommended.
        alternatives: other rules to which no difference is seen.
        sentence: what to use, and why.
        row: the trace, what to use, and the numbers behind it, by column.
    """

    task: str
    trace: str
    rule: str | None
    alternatives: tuple[str, ...]
    sentence: str
    row: dict[str, str]

    def __str__(self) -> str:
        """Return the sentence."""
        return self.sentence


def recommend(analysis: Analysis) -> list[Recommendation]:
    """Return a recommendation for each task and trace.

    Of the rules that never failed, and that no such rule is claimed to be better than (see `claims_of`), it is the one
    with the best mean over the seeds that all of them have; the others are those to which no difference is seen. The
    rule that is truly best among those that do not fail is one of them, with 95% confidence, for all traces of a report
    together. The baseline is recommended if it is among them, as the simplest.
    """
    return [
        _recommend(analysis, task, trace)
        for task in analysis.tasks
        for trace in analysis.traces(task)
        if not (analysis.is_reference(task, trace) and [*analysis.facts(task, trace).index] == [BASELINE])
    ]


def _recommend(analysis: Analysis, task: str, trace: str) -> Recommendation:
    facts, stable = analysis.facts(task, trace), analysis.stable(task, trace)
    values = analysis.shared(task, trace, stable)
    row = {"trace": trace, "use": "-", "best mean": "-", "as good, as far as seen": "-", "up to": "-"}
    last = {"seeds": f"{len(values)}", "left out": ", ".join(_left_out(facts, stable, analysis.metric)) or "-"}
    if why := _why_none(analysis.metric, facts, values):
        sentence = f"For {task} under {trace}, no rule can be recommended{why}."
        return Recommendation(task, trace, None, (), sentence, row | last)
    tuned = len(analysis.factors(task, trace)) > 1
    names = {str(rule): f"{rule} at {factor:g}x" if tuned else str(rule) for rule, factor in facts["factor"].items()}
    claims = analysis.claims[task, trace]
    beaten = {claim.worse for claim in claims if claim.better in stable}
    left = [rule for rule in stable if rule not in beaten] or stable
    means = analysis.shared(task, trace, left).mean()
    best = str(means.idxmin() if analysis.lower else means.idxmax())
    alike = [best, *(rule for rule in left if rule != best)]
    rule = analysis.baseline if analysis.baseline in alike else best
    others = tuple(name for name in alike if name != rule)
    differences = analysis.differences(task, trace, best, analysis.together)
    bounds = [abs(bound) for name in alike[1:] for bound in (differences[name].low, differences[name].high)]
    limits = possible(analysis.metric, values.to_numpy(np.float64).ravel())
    most = limits.get("most", math.inf) - limits.get("least", 0.0)
    missed = number(min(most, max(filter(math.isfinite, bounds), default=math.nan)))
    own = values[best].to_numpy(np.float64)
    mean = mean_interval(own, **possible(analysis.metric, own))
    optimistic = ", optimistic" if analysis.is_optimistic(task, trace) else ""
    row |= {
        "use": names[rule],
        "best mean": f"{number(mean.value, mean.high - mean.low)} ({best}{optimistic})",  # of several: no interval
        "as good, as far as seen": listed(others) if others else "-",
        "up to": missed,
    }
    parts = [f"no difference is seen to {listed(others)} ({missed} could be missed)"] if others else []
    if others and not missed.strip("0."):
        parts = [f"{listed(alike)} brought the same"]
    parts += _claimed(
        sorted(claims, key=lambda claim: alike.index(claim.better) if claim.better in alike else len(alike)), names
    )
    kind = f", the {'simplest' if rule == BASELINE else 'baseline'}" if rule != best else ""
    among = "among trainings that did not fail, " if others and facts["failed"].any() else ""
    reason = f": {among}{'; '.join(parts)}" if parts else ", the only rule that can be judged"
    sentence = f"For {task} under {trace}, use {names[rule]}{kind}{reason}."
    return Recommendation(task, trace, rule, others, sentence, row | last)


def _left_out(facts: pd.DataFrame, stable: list[str], metric: str) -> list[str]:
    """Return the rules that are not compared, each with the reason."""
    rows = facts[~facts.index.isin(stable)]
    return [
        f"{name} ({f'{rate * number:.0f} of {number:.0f} failed' if rate else f'without {metric}'})"
        for name, rate, number in zip(rows.index, rows["failed"], rows["failed_n"], strict=True)
    ]


def _why_none(metric: str, facts: pd.DataFrame, values: pd.DataFrame) -> str | None:
    """Return why no rule can be recommended; None if one can.

    Args:
        metric: what rules are compared by.
        facts: the rules, trained.
        values: of the rules that never failed and have the metric, by seed, of the seeds that all have.
    """
    if not len(values.columns) and (facts["value_n"] + facts["failed"] * facts["failed_n"] == 0).all():
        return f": no training has a finite {metric}"
    if not len(values.columns):
        return ": each one failed at least once"
    if values.empty:
        return f" yet: no seed was trained with each of {listed([*map(str, values.columns)])}"
    return " yet: one seed says nothing about chance" if len(values) == 1 else None


def _claimed(claims: Iterable[Claim], names: dict[str, str]) -> list[str]:
    """Return which rule was better than which others, or failed less often."""
    found: dict[tuple[str, str], list[str]] = {}
    for claim in claims:
        kind = "failed less often" if claim.by == "failures" else "was better"
        found.setdefault((claim.better, kind), []).append(names[claim.worse])
    return [f"{names[winner]} {kind} than {listed(losers)}" for (winner, kind), losers in found.items()]


def reference_of(analysis: Analysis, task: str) -> str:
    """Return whether the learning rate is tuned within noise at the reference's batch size, as a sentence."""
    traces = [trace for trace in analysis.traces(task) if analysis.is_reference(task, trace)]
    cells = analysis.ends[analysis.ends["trace"].isin(traces) & (analysis.ends["task"] == task)]
    cells = cells[cells["rule"] == BASELINE]
    if cells.empty:
        return "The reference was not trained: whether its learning rate is tuned is not known."
    factors = sorted(map(float, tuning.tried(cells)["lr_factor"].unique()))
    size, lr = cells["ref_batchsize"].iloc[0], (cells["lr"] / cells["lr_factor"]).iloc[0]
    at = f"at its batch size of {size:g} and learning rate of {lr:.4g}"
    if len(factors) == 1:
        return f"Whether the reference is tuned is not known: {at} one learning rate was tried."
    best, own = tuning.own_factors(cells)[BASELINE], tuning.nearest_to_one(factors)
    tried = f"of {listed([f'{factor:g}' for factor in factors if factor != own], 'or')} times that"
    edge = ", at the edge of what was tried" if best in (factors[0], factors[-1]) else ""
    choosing = tuning.tried(cells)
    if choosing["failed"].all():
        return f"The reference failed with all seeds: {at}, and at all learning rates that were tried. Try others."
    if best == own:
        seeds = int(choosing.groupby("seed")["lr_factor"].nunique().eq(len(factors)).sum())
        seen = f"no learning rate {tried} had a lower median loss with {seeds} seed{'s' * (seeds != 1)}"
        return f"The reference is tuned, as far as was tried: {at} {seen}{edge}."
    judged = tuning.judging(cells)
    by_factor = [judged[(judged["lr_factor"] == factor) & ~judged["failed"]] for factor in (own, best)]
    first, second = (rows.set_index("seed")[analysis.metric].dropna() for rows in by_factor)
    choices = 1 if tuning.is_apart(cells) else len(factors) - 1  # of which the best one was chosen
    sign = 1.0 if analysis.lower else -1.0
    gain = difference_interval(sign * (first - second).dropna().to_numpy(np.float64), 1 - (1 - CONFIDENCE) / choices)
    better = f"{analysis.metric} is better by {interval(gain.value, gain.low, gain.high)} at {best:g} times it{edge}"
    if gain.low > 0:
        return f"The reference is not tuned: {at}, {better}. What rules bring at its learning rate depends on that."
    if gain.high < 0:
        return (
            f"The reference is tuned, as far as was tried: {at} {best:g} times it was chosen, and judged to be worse."
        )
    return f"The reference is tuned within noise: {at}, {better}, which is not told from chance."
