"""Which rule for which trace, how sure that is, and what is not known, in three sentences."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from variable_batch_size._validation import FloatArray
from variable_batch_size.evaluation.analysis import BASELINE, Analysis, possible
from variable_batch_size.evaluation.metric import lower_is_better
from variable_batch_size.evaluation.statistics import CONFIDENCE, Interval, difference_interval, mean_interval
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

    The rules that never diverged are compared by the seeds that all of them have: the one with the best mean with each
    other one by paired differences, whose intervals are widened by their number (Bonferroni). Where one contains 0, no
    difference is seen. The rule that is truly best is then the named one, or one to which no difference is seen, with
    95% confidence (Hsu 1984, Constrained Simultaneous Confidence Intervals for Multiple Comparisons with the Best).
    That all others are worse is less sure, because the best mean is in part luck. If no difference to the baseline is
    seen, that is recommended, as the simplest.
    """
    return [_recommend(analysis, task, trace) for task in analysis.tasks for trace in analysis.traces(task)]


def _recommend(analysis: Analysis, task: str, trace: str) -> Recommendation:
    facts = analysis.facts(task, trace)
    stable = facts[(facts["divergence"] == 0) & facts["value"].notna()]
    if stable.empty:
        which = f"No rule can be recommended for {task} under {trace}: each one diverged at least once."
        sentences = (
            which,
            "How they compare where they do not diverge is not said.",
            _unknown(analysis, task, None, facts),
        )
        return Recommendation(task, trace, None, (), sentences)
    values = analysis.shared(task, trace, [*map(str, stable.index)])
    if values.empty:
        which = (
            f"No rule can be recommended for {task} under {trace} yet: no seed was trained with each one that is left."
        )
        apart = f"Rules are compared by equal seeds, which {listed([*values.columns])} do not have."
        return Recommendation(task, trace, None, (), (which, apart, _unknown(analysis, task, None, facts)))
    sign = 1 if lower_is_better(analysis.metric) else -1
    best = str((sign * values.mean()).idxmin())
    confidence = 1 - (1 - CONFIDENCE) / max(1, len(stable) - 1)
    differences = {str(rule): values[rule] - values[best] for rule in values if rule != best}
    pairs = {rule: difference_interval(found.to_numpy(np.float64), confidence) for rule, found in differences.items()}
    alike = [rule for rule, pair in pairs.items() if not pair.decided]
    rule = analysis.baseline if analysis.baseline in alike else best
    sentences = (
        _which(analysis, task, trace, values[best].to_numpy(np.float64), best, rule, alike, not pairs),
        _how_sure(best, pairs, alike),
        _unknown(analysis, task, rule, facts),
    )
    alternatives = tuple(name for name in (best, *alike) if name != rule)
    return Recommendation(task, trace, rule, alternatives, sentences)


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
    return (
        f"For {task} under {trace}, use {rule}, the simplest: no difference seen to {same}; "
        f"{best} has the best mean ({lead})."
    )


def _how_sure(best: str, pairs: dict[str, Interval], alike: list[str]) -> str:
    """Return what the paired differences say, and how large one could be that was not seen."""
    if not pairs:
        return "There is nothing to compare it with."
    if next(iter(pairs.values())).n < 2:
        return "One seed says nothing about chance: no difference can be told from it."
    parts = []
    if beaten := [rule for rule in pairs if rule not in alike]:
        least = min(min(abs(pairs[rule].low), abs(pairs[rule].high)) for rule in beaten)
        parts.append(f"{best} was better than {listed(beaten)}, by {number(least)} or more")
    if alike:
        bounds = [max(abs(pairs[rule].low), abs(pairs[rule].high)) for rule in alike]
        missed = max((bound for bound in bounds if math.isfinite(bound)), default=math.nan)
        others = alike[0] if len(alike) == 1 else "another one of these"
        lost = f"a difference of up to {number(missed)} between {best} and {others} could not be told from chance"
        parts.append(lost if missed else f"{listed([best, *alike])} brought the same")
    seeds = next(iter(pairs.values())).n
    sure = f"the best of them is {listed([best, *alike], 'or')} with 95% confidence"
    return f"By paired differences over {seeds} seeds, {sure}: {'; '.join(parts)}."


def _unknown(analysis: Analysis, task: str, rule: str | None, facts: pd.DataFrame) -> str:
    cells = analysis.own[analysis.own["task"] == task]
    parts = [f"longer trainings than {cells['samples'].max():,.0f} samples"]
    fact: dict[Any, float] | None = facts.loc[rule].to_dict() if rule in facts.index else None
    if fact is None or fact["grid"] < 2:
        parts.append("what another learning rate would bring")
    else:
        bounds = interval(fact["regret"], fact["regret_low"], fact["regret_high"], "+")
        edge = ", whose best one is at the edge of the grid" if fact["edge"] else ""
        parts.append(f"the order at other learning rates ({rule} has a regret of {bounds} to a tuned {BASELINE}{edge})")
    parts.append("other models, data and hardware")
    failed = facts[facts["divergence"] > 0]
    counts = [
        f"{name} {row['divergence'] * row['divergence_n']:.0f} of {row['divergence_n']:.0f}"
        for name, row in failed.iterrows()
    ]
    diverged = f"; left out because trainings diverged: {listed(counts)}" if counts else ""
    return f"Not known: {listed(parts)}{diverged}."
