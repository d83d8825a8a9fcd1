"""Which rule for which trace, how sure that is, and what is not known, in three sentences."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from variable_batch_size._validation import FloatArray
from variable_batch_size.evaluation import tuning
from variable_batch_size.evaluation.analysis import BASELINE, Analysis
from variable_batch_size.evaluation.claims import Claim
from variable_batch_size.evaluation.metric import possible
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
    if why := _why_none(analysis.metric, facts, values):
        which = f"No rule can be recommended for {task} under {trace}{why[0]}."
        return Recommendation(task, trace, None, (), (which, why[1], _unknown(analysis, task, trace, None, facts)))
    claims = analysis.claims[task, trace]
    beaten = {claim.worse for claim in claims if claim.better in stable}
    left = [rule for rule in stable if rule not in beaten] or stable
    sign = 1 if analysis.lower else -1
    best = str((sign * analysis.shared(task, trace, left).mean()).idxmin())
    alike = [rule for rule in left if rule != best]
    rule = analysis.baseline if analysis.baseline in alike else best
    differences = analysis.differences(task, trace, best, analysis.together)
    pairs = differences if analysis.lower else {name: _turned(own) for name, own in differences.items()}
    sentences = (
        _which(analysis, task, trace, values[best].to_numpy(np.float64), best, rule, alike, len(stable) == 1),
        _how_sure(
            pairs,
            claims,
            _names(facts, len(analysis.factors(task, trace)) > 1),
            [best, *alike],
            _range(analysis.metric, values),
            bool(facts["failed"].any()),
        ),
        _unknown(analysis, task, trace, rule, facts),
    )
    alternatives = tuple(name for name in (best, *alike) if name != rule)
    return Recommendation(task, trace, rule, alternatives, sentences)


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


def _why_none(metric: str, facts: pd.DataFrame, values: pd.DataFrame) -> tuple[str, str] | None:
    """Return why no rule can be recommended, as the ends of two sentences; None if one can.

    Args:
        metric: what rules are compared by.
        facts: the rules, trained.
        values: of the rules that never failed and have the metric, by seed, of the seeds that all have.
    """
    if not len(values.columns) and (facts["value_n"] + facts["failed"] * facts["failed_n"] == 0).all():
        return f": no training has {metric}", f"Either the task does not evaluate {metric}, or it is not finite."
    if not len(values.columns):
        return ": each one failed at least once", "How they compare where they do not fail is not said."
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
    factors = analysis.factors(task, trace)
    optimistic = ", optimistic by the choice of its learning rate" if analysis.is_optimistic(task, trace) else ""
    factor = float(analysis.facts(task, trace)["factor"].to_dict()[best])
    times = "" if factor == 1 else f"{factor:g} times "
    at = f" at {times}the learning rate of the reference" if len(factors) > 1 else ""
    chosen = number(mean.value, mean.high - mean.low)  # of several, so that its own interval would be too narrow
    found = interval(mean.value, mean.low, mean.high) if single else chosen
    lead = f"{analysis.metric} {found}{at}, {seeds}{optimistic}"
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


def _how_sure(
    pairs: dict[str, Interval],
    claims: list[Claim],
    names: dict[str, str],
    alike: list[str],
    most: float,
    failed: bool,
) -> str:
    """Return what was claimed, and how large a difference could be that was not seen.

    Args:
        pairs: rule -> its difference to the best one, with an interval that holds together with those of all pairs.
        claims: what may be claimed.
        names: of the rules in claims.
        alike: the best one, and those to which no difference is seen.
        most: largest difference that there can be.
        failed: whether a rule is left out, because a training failed.
    """
    best, *others = alike
    winners = dict.fromkeys([best, *(claim.better for claim in claims)])
    parts = [text for winner in winners if (text := _claimed(winner, claims, best, pairs, names))]
    if not (others or parts):
        return "There is nothing to compare it with."
    if others:
        bounds = [max(abs(pairs[rule].low), abs(pairs[rule].high)) for rule in others]
        missed = min(most, max((bound for bound in bounds if math.isfinite(bound)), default=math.nan))
        other = others[0] if len(others) == 1 else "another one of these"
        lost = f"a difference of up to {number(missed)} between {best} and {other} could not be told from chance"
        parts.append(lost if number(missed).strip("0.") else f"{listed(alike)} brought the same")
    counts = sorted({pairs[rule].n for rule in pairs if pairs[rule].n})
    seeds = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1])))) if counts else "0"
    sure = f"the best of {'those that did not fail' if failed else 'them'} is {listed(alike, 'or')} with 95% confidence"
    return f"By paired differences over {seeds} seeds, {sure}: {'; '.join(parts)}."


def _names(facts: pd.DataFrame, tuned: bool) -> dict[str, str]:
    """Return the names of rules in claims: with their factors if they are `tuned`, as at others they may be alike."""
    return {str(rule): f"{rule} at {factor:g}x" if tuned else str(rule) for rule, factor in facts["factor"].items()}


def _turned(own: Interval) -> Interval:
    return Interval(-own.value, -own.high, -own.low, own.n)


def _claimed(winner: str, claims: list[Claim], best: str, pairs: dict[str, Interval], names: dict[str, str]) -> str:
    """Return than which rules one was better, or failed less often."""
    own = [claim for claim in claims if claim.better == winner]
    by_values = [claim for claim in own if claim.by != "failures"]
    failing = [names[claim.worse] for claim in own if claim.by == "failures"]
    bounds = [pairs[claim.worse].low if claim.by == "means" and winner == best else 0.0 for claim in by_values]
    by = f", by {number(min(bounds))} or more" if bounds and min(bounds) > 0 else ""
    losers = listed([names[claim.worse] for claim in by_values]) if by_values else ""
    parts = [f"{names[winner]} was better than {losers}{by}"] if by_values else []
    return " and ".join([*parts, *([f"{names[winner]} failed less often than {listed(failing)}"] if failing else [])])


def _unknown(analysis: Analysis, task: str, trace: str, rule: str | None, facts: pd.DataFrame) -> str:
    cells = analysis.own[analysis.own["task"] == task]
    own = cells[cells["trace"] == trace]
    parts = [f"longer trainings than {own[['planned_samples', 'samples']].max().max():,.0f} samples"]
    factors = analysis.factors(task, trace)
    if len(factors) < 2:
        parts.append("what another learning rate would bring")
    else:
        beyond = f"learning rates beyond {factors[0]:g} to {factors[-1]:g} times the reference's"
        edges = [str(name) for name in facts.index[facts["edge"]]]
        parts.append(f"{beyond}{f' ({listed(edges)} may be better there)' if edges else ''}")
    parts.append("other models, data and hardware")
    failed = facts["failed"] * facts["failed_n"]
    counts = {
        "left out because trainings failed": failed,
        "among these, not at their end with 8 times the samples, or at that of the trace": facts["short"],
        f"without {analysis.metric}": facts["failed_n"] - failed - facts["value_n"],
    }
    said = [f"; {what}: {listed(found)}" for what, count in counts.items() if (found := _counts(count, facts))]
    return f"Not known: {listed(parts)}{''.join(said)}."


def _counts(count: pd.Series[float], facts: pd.DataFrame) -> list[str]:
    """Return the rules whose count of trainings is not 0, each with it and the number of all."""
    pairs = zip(facts.index, count, facts["failed_n"], strict=True)
    return [f"{name} {some:.0f} of {all_:.0f}" for name, some, all_ in pairs if round(some)]
