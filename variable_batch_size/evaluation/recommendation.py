"""Which rule for which trace, how sure that is, and what is not known, in three sentences."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from variable_batch_size._validation import FloatArray
from variable_batch_size.evaluation.analysis import BASELINE, Analysis, possible
from variable_batch_size.evaluation.statistics import Interval, mean_interval
from variable_batch_size.evaluation.wording import interval, listed, number

if TYPE_CHECKING:
    import pandas as pd

FEW = 3  # rules that the first sentence names; the second one names all


@dataclass(frozen=True)
class Recommendation:
    """What an evaluation says about a task and a trace.

    Attributes:
        task: name of the task.
        trace: name of the trace.
        rule: the rule to use, None if no one can be recommended.
        alternatives: other rules to which no difference is seen.
        sentences: which rule, how sure, what is not known.
    """

    task: str
    trace: str
    rule: str | None
    alternatives: tuple[str, ...]
    sentences: tuple[str, str, str]

    def __str__(self) -> str:
        """Return the sentences."""
        return " ".join(self.sentences)


def recommend(analysis: Analysis) -> list[Recommendation]:
    """Return a recommendation for each task and trace.

    Of the rules that never diverged, and are not seen to be worse than the baseline, the one with the best mean over
    the seeds that all of them have is compared with each other one by paired differences over the seeds that both have,
    whose intervals are widened by the number of rules (Bonferroni). Where one contains 0, no difference is seen. The
    rule that is truly best is then the named one, or one to which no difference is seen, with 95% confidence (Hsu 1984,
    Constrained Simultaneous Confidence Intervals for Multiple Comparisons with the Best). That all others
    are worse is less sure, because the best mean is in part luck. If no difference to the baseline is seen, that is
    recommended, as the simplest, unless a third rule is seen to be better than it.
    """
    return [_recommend(analysis, task, trace) for task in analysis.tasks for trace in analysis.traces(task)]


def _recommend(analysis: Analysis, task: str, trace: str) -> Recommendation:
    facts, stable = analysis.facts(task, trace), analysis.stable(task, trace)
    values = analysis.shared(task, trace, stable)
    if why := _why_none(analysis.metric, facts, values):
        which = f"No rule can be recommended for {task} under {trace}{why[0]}."
        return Recommendation(task, trace, None, (), (which, why[1], _unknown(analysis, task, None, facts)))
    sign = 1 if analysis.lower else -1
    worse = facts["difference_decided"] & (sign * facts["difference"] > 0)  # than the baseline
    best, pairs = _best(analysis, task, trace, [rule for rule in stable if not worse[rule]])
    better = _better(analysis, task, trace, stable, best)
    beaten = {name for names in better.values() for name in names}
    alike = [rule for rule in stable if rule not in {best, *beaten}]
    rule = analysis.baseline if analysis.baseline in alike else best
    sentences = (
        _which(analysis, task, trace, values[best].to_numpy(np.float64), best, rule, alike, len(stable) == 1),
        _how_sure(pairs, better, [best, *alike], _range(analysis.metric, values)),
        _unknown(analysis, task, rule, facts),
    )
    alternatives = tuple(name for name in (best, *alike) if name != rule)
    return Recommendation(task, trace, rule, alternatives, sentences)


def _best(analysis: Analysis, task: str, trace: str, rules: list[str]) -> tuple[str, dict[str, Interval]]:
    """Return the rule with the best mean over the seeds that all have, and the differences of all others to it.

    With more seeds that only two of them have, another one may be seen to be better: then it is that one.
    """
    sign = 1 if analysis.lower else -1
    best = str((sign * analysis.shared(task, trace, rules).mean()).idxmin())
    for _ in rules:
        pairs = analysis.differences(task, trace, best, analysis.simultaneous(task, trace))
        better = [rule for rule in rules if rule in pairs and pairs[rule].decided and sign * pairs[rule].value < 0]
        if not better:
            break
        best = better[0]
    return best, pairs


def _better(analysis: Analysis, task: str, trace: str, rules: list[str], best: str) -> dict[str, list[str]]:
    """Return rule -> those than which it is seen to be better, by the differences to the best one and the baseline."""
    sign = 1 if analysis.lower else -1
    found: dict[str, str] = {}  # rule -> one that is better
    for first in dict.fromkeys(rule for rule in (best, analysis.baseline) if rule in rules):
        pairs = analysis.differences(task, trace, first, analysis.simultaneous(task, trace))
        for rule in rules:
            if rule in pairs and pairs[rule].decided:
                winner, loser = (first, rule) if sign * pairs[rule].value > 0 else (rule, first)
                found.setdefault(loser, winner)
    return {winner: [rule for rule in rules if found.get(rule) == winner] for winner in dict.fromkeys(found.values())}


def _why_none(metric: str, facts: pd.DataFrame, values: pd.DataFrame) -> tuple[str, str] | None:
    """Return why no rule can be recommended, as the ends of two sentences; None if one can.

    Args:
        metric: what rules are compared by.
        facts: the rules, trained.
        values: of the rules that never diverged and have the metric, by seed, of the seeds that all have.
    """
    if not len(values.columns) and (facts["value_n"] + facts["divergence"] * facts["divergence_n"] == 0).all():
        return f": no training has {metric}", f"Either the task does not evaluate {metric}, or it is not finite."
    if not len(values.columns):
        return ": each one diverged at least once", "How they compare where they do not diverge is not said."
    names = [*map(str, values.columns)]
    if values.empty:
        apart = f"Rules are compared by equal seeds, which {listed(names)} do not have."
        return " yet: no seed was trained with each one that is left", apart
    if len(values) == 1:
        seen = listed([f"{number(float(values[name].iloc[0]))} with {name}" for name in names])
        return " yet: one seed says nothing about chance", f"Its {metric} is {seen}."
    return None


def _range(metric: str, values: pd.DataFrame) -> float:
    """Return the largest difference that two values of a metric can have, infinite if that is not known."""
    bounds = possible(metric, values.to_numpy(np.float64).ravel())
    return bounds.get("most", math.inf) - bounds.get("least", 0.0)


def _which(
    analysis: Analysis, task: str, trace: str, values: FloatArray, best: str, rule: str, alike: list[str], single: bool
) -> str:
    mean = mean_interval(values, **possible(analysis.metric, values))
    seeds = f"{mean.n} seed{'s' if mean.n > 1 else ''}"
    lead = f"{analysis.metric} {interval(mean.value, mean.low, mean.high)}, {seeds}"
    if single:
        return f"For {task} under {trace}, {best} is the only rule that can be judged: {lead}."
    if not alike:
        return f"For {task} under {trace}, use {best}: {lead}."
    others = [name for name in (best, *alike) if name != rule]
    same = listed(others) if len(others) <= FEW else f"{len(others)} others"
    if rule == best:
        return f"For {task} under {trace}, use {best}: {lead}; no difference seen to {same}."
    kind = "simplest" if rule == BASELINE else "baseline"
    return (
        f"For {task} under {trace}, use {rule}, the {kind}: no difference seen to {same}; "
        f"{best} has the best mean ({lead})."
    )


def _how_sure(pairs: dict[str, Interval], better: dict[str, list[str]], alike: list[str], most: float) -> str:
    """Return what the paired differences say, and how large one could be that was not seen.

    Args:
        pairs: rule -> its difference to the best one.
        better: rule -> those than which it was seen to be better.
        alike: the best one, and those to which no difference is seen.
        most: largest difference that there can be.
    """
    (best, *others), beaten = alike, [rule for worse in better.values() for rule in worse]
    if not (others or beaten):
        return "There is nothing to compare it with."
    least = min((min(abs(pairs[rule].low), abs(pairs[rule].high)) for rule in better.get(best, ())), default=0.0)
    by = {best: f", by {number(least)} or more"}
    parts = [f"{rule} was better than {listed(worse)}{by.get(rule, '')}" for rule, worse in better.items()]
    if others:
        bounds = [max(abs(pairs[rule].low), abs(pairs[rule].high)) for rule in others]
        missed = min(most, max((bound for bound in bounds if math.isfinite(bound)), default=math.nan))
        other = others[0] if len(others) == 1 else "another one of these"
        lost = f"a difference of up to {number(missed)} between {best} and {other} could not be told from chance"
        parts.append(lost if number(missed).strip("0.") else f"{listed(alike)} brought the same")
    counts = sorted({pairs[rule].n for rule in (*others, *beaten)})
    seeds = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    sure = f"the best of them is {listed(alike, 'or')} with 95% confidence"
    return f"By paired differences over {seeds} seeds, {sure}: {'; '.join(parts)}."


def _unknown(analysis: Analysis, task: str, rule: str | None, facts: pd.DataFrame) -> str:
    cells = analysis.own[analysis.own["task"] == task]
    parts = [f"longer trainings than {cells['planned_samples'].max():,.0f} samples"]
    fact: dict[Any, float] | None = facts.loc[rule].to_dict() if rule in facts.index else None
    if fact is None or fact["grid"] < 2:
        parts.append("what another learning rate would bring")
    else:
        bounds = interval(fact["regret"], fact["regret_low"], fact["regret_high"], "+")
        edge = ", whose best one is at the edge of the grid" if fact["edge"] else ""
        parts.append(f"the order at other learning rates ({rule} has a regret of {bounds} to a tuned {BASELINE}{edge})")
    parts.append("other models, data and hardware")
    failed = facts["divergence"] * facts["divergence_n"]
    counts = {
        "left out because trainings diverged": failed,
        f"without {analysis.metric}": facts["divergence_n"] - failed - facts["value_n"],
    }
    said = [f"; {what}: {listed(found)}" for what, count in counts.items() if (found := _counts(count, facts))]
    return f"Not known: {listed(parts)}{''.join(said)}."


def _counts(count: pd.Series[float], facts: pd.DataFrame) -> list[str]:
    """Return the rules whose count of trainings is not 0, each with it and the number of all."""
    pairs = zip(facts.index, count, facts["divergence_n"], strict=True)
    return [f"{name} {some:.0f} of {all_:.0f}" for name, some, all_ in pairs if round(some)]
