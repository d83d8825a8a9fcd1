"""What a judgement says, in words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from variable_batch_size.lab.evaluation.judgement import Judgement, Row, Trace
from variable_batch_size.lab.evaluation.statistics import SEEDS, ConfidenceInterval

BETTER, WORSE, SAME, OPEN, FAILS = "\u25b2", "\u25bc", "=", "?", "\u2715"  # told apart without a color


class Sentence(NamedTuple):
    """A sentence of the report, after a mark: "\u25b2" and "root: better than constant by 0.05 (0.03 to 0.07)"."""

    mark: str
    text: str

    def __str__(self) -> str:
        """Return the mark and the text as one string."""
        return f"{self.mark} {self.text}"


def verdict(judgement: Judgement, trace: Trace) -> list[Sentence]:
    """Return the report's sentences about one trace: first which rule is best, if that is known, then the others."""
    rows_of_others = [row for row in trace.rows if row.answer != "baseline"]
    if len(rows_of_others) == len(trace.rows):
        return [Sentence(OPEN, f"no run of {judgement.baseline} ended under this trace"), *_failing(trace)]
    if all(row.failed == row.trained for row in trace.rows):
        return [Sentence(FAILS, "nothing trains under this trace: all runs failed")]
    if judgement.waiting:
        return [Sentence(OPEN, "nothing is claimed before all runs of the plan have ended")]
    claimed = [row for row in rows_of_others if row.answer in ("better", "worse")]
    claimed.sort(key=lambda row: (row.answer, -abs(row.difference.value)))  # better ones first, by size
    sentences = [_claim(judgement, row) for row in claimed]
    if not any(row.answer == "better" for row in claimed):
        sentences.insert(0, _none_better(judgement, trace))
    same_rules = [row.rule for row in rows_of_others if row.answer == "same"]
    if same_rules and len(same_rules) < len(rows_of_others):
        text = f"{join_names(same_rules)}: the same runs as {judgement.baseline}, bit for bit"
        sentences.append(Sentence(SAME, text))
    undecided = [row for row in rows_of_others if row.answer == "open" and row.failed < row.trained]
    if claimed and undecided:
        sentences.append(Sentence(OPEN, f"not decided: {join_names([row.rule for row in undecided])}"))
    sentences += _failing(trace)
    if trace.constant and rows_of_others:
        sentences.append(Sentence(SAME, "the batch size is constant: a rule is a learning rate here"))
    return sentences


def _claim(judgement: Judgement, row: Row) -> Sentence:
    """Say by how much a rule is better or worse, and whether another learning rate might bring as much."""
    size = _absolute(row.difference)
    possible_gain = judgement.reference.most  # that another rate may bring
    text = f"{row.rule}: {row.answer} than {judgement.baseline} by {format_interval(*size)}"
    if size.value <= possible_gain:
        text += f", which another learning rate may bring, too (up to {format_number(possible_gain, possible_gain)})"
    return Sentence(BETTER if row.answer == "better" else WORSE, text)


def _none_better(judgement: Judgement, trace: Trace) -> Sentence:
    """Say which rule to use where none is claimed to be better than the baseline, and how sure that is."""
    baseline = judgement.baseline
    rows_of_others = [row for row in trace.rows if row.answer != "baseline"]
    if not rows_of_others:
        return Sentence(SAME, f"{baseline} is the only rule")
    if all(row.answer == "same" for row in rows_of_others):
        return Sentence(SAME, f"all rules have the same runs, bit for bit: use {baseline}")
    if all(row.answer in ("same", "worse") or row.failed == row.trained for row in rows_of_others):
        return Sentence(SAME, f"{baseline}: no other rule is better")
    best = next((row for row in rows_of_others if row.rule == trace.best), None)
    of_baseline = trace.rows[0]
    if best is not None and best.failed * of_baseline.trained < of_baseline.failed * best.trained:
        counts = f"in {best.failed} of {best.trained}, {baseline} in {of_baseline.failed} of {of_baseline.trained}"
        return Sentence(OPEN, f"not decided, use {best.rule}: it failed {counts}")
    text = f"not decided, use {baseline}: no rule is seen to be better"
    if best is not None and math.isfinite(best.difference.low):
        ahead = (best.difference.value < 0) == judgement.lower
        text += f"; {best.rule} is {'ahead' if ahead else 'behind'} by {format_interval(*_absolute(best.difference))}"
        text += ", which is no claim"
    if trace.outlook is not None:
        seeds, difference = trace.outlook
        text += f"; a new evaluation of {seeds} seeds would see {format_number(difference, difference)}"
    elif max(row.trained for row in trace.rows) < SEEDS:
        text += f"; of fewer than {SEEDS} seeds nothing is claimed"
    return Sentence(OPEN, text)


def _failing(trace: Trace) -> Iterator[Sentence]:
    """Yield sentences about the rules of which a seed ended far behind the others, or training runs failed."""
    for row in trace.rows:
        if row.stuck is not None:
            seed, value, least, most = row.stuck
            others = f"the others at {format_number(least)} to {format_number(most)}"
            yield Sentence(OPEN, f"{row.rule}: seed {seed} ended at {format_number(value)}, {others}")
        if row.failed:
            yield Sentence(FAILS, f"{row.rule}: fails in {row.failed} of {row.trained}")


def describe_failures(judgement: Judgement) -> list[Sentence]:
    """Return sentences about the rules that are claimed to fail more or less often than the baseline."""
    sentences = []
    for rule, failures in judgement.failures.items():
        if failures.claimed:
            word, mark = ("more", WORSE) if failures.claimed > 0 else ("less", BETTER)
            of_baseline = f"{failures.baseline_failed} of {failures.baseline_trained}"
            counts = f"{failures.failed} of {failures.trained} against {of_baseline}"
            text = f"{rule} fails {word} often than {judgement.baseline}: {counts} runs under all traces"
            sentences.append(Sentence(mark, text))
    return sentences


def describe_choices(judgement: Judgement) -> str:
    """Return a warning that the baseline or the metric was chosen after the runs, which makes claims harder."""
    chosen = f"{judgement.metric} beside {judgement.baseline} was chosen after the runs"
    return f"{chosen}: a claim must stand among {judgement.choices} choices."


def describe_reference(judgement: Judgement) -> str:
    """Return a sentence that says whether the learning rate is tuned at the reference batch size."""
    outcome = judgement.reference
    if outcome.answer == "waiting":
        return "Whether the reference is tuned is said when all runs of the plan have ended."
    if outcome.answer == "missing":
        return "The reference was not trained: whether the learning rate is tuned is not known."
    at = f"at batch size {outcome.batchsize:g} and learning rate {outcome.lr:.4g}"
    if outcome.answer == "failed":
        return f"The reference failed with all seeds, {at}. Tune it first."
    if outcome.answer == "untried":
        return f"Whether the reference is tuned is not known: {at}, no other rate was tried with two seeds or more."
    best = max(outcome.gains, key=lambda factor: outcome.gains[factor].value, default=1.0)
    tried = f"({', '.join(f'{factor:g}' for factor in sorted(outcome.gains))} times)"
    factors = join_names([f"{factor:g}" for factor in outcome.failing]) if outcome.failing else ""
    failing = f"; {factors} times it fails more often" if factors else ""
    if outcome.answer == "not tuned":
        gain = f"{best:g} times the rate is better by {format_interval(*outcome.gains[best])}"
        return f"The reference is not tuned: {at}, {gain}. What rules bring at this rate depends on that."
    most = format_number(outcome.most, outcome.most)
    if outcome.answer == "open" and not outcome.gains:  # a rate is better where it does not fail
        return f"Whether the reference is tuned is not decided: {at}{failing}."
    if outcome.answer == "open" and not outcome.most:
        worse = f"other rates {tried} are worse, but of fewer than {SEEDS} seeds nothing is claimed"
        return f"Whether the reference is tuned is not decided: {at}, {worse}{failing}."
    if outcome.answer == "open":
        farthest = max(outcome.gains, key=lambda factor: outcome.gains[factor].high)
        best_rate = f"{farthest:g} times the rate may be better by up to {most}"
        return f"Whether the reference is tuned is not decided: {at}, {best_rate}{failing}."
    if not outcome.gains:
        return f"The reference is tuned: {at}{failing}."
    worse = f"no other rate {tried} is better by more than {most}" if outcome.most else f"other rates {tried} are worse"
    return f"The reference is tuned: {at}, {worse}{failing}."


def describe_loss(judgement: Judgement, trace: Trace) -> str:
    """Return as text how much worse a rule is than the reference after equal samples: the baseline, and the best other.

    The trace tells which rules these are, see `Trace.lost`.
    """
    return "; ".join(f"{rule} {format_interval(*bounds)}" for rule, bounds in trace.lost.items())


def format_number(value: float, spread: float = 0.0, sign: str = "") -> str:
    """Format a number: with two digits of its spread, or with three significant digits; "-" if it is not finite.

    >>> [format_number(value) for value in (0.123456, 12345.6, 0.7, 3.0, math.nan)]
    ['0.123', '12,346', '0.700', '3', '-']
    >>> format_number(0.123456, 0.02), format_number(-1e-9, 1.0), format_number(1 / 35, 1e-18)
    ('0.123', '0.0', '0.0286')
    """
    if not math.isfinite(value):
        return "-"
    is_whole = abs(value - round(value)) < 1e-9 * max(1.0, abs(value))
    scale = 0.0 if is_whole else abs(value) / 10
    if math.isfinite(spread) and spread > 1e-6 * abs(value):
        scale = spread
    digits = min(9, max(0, 1 - math.floor(math.log10(scale)))) if scale else 0  # two digits of the scale
    return f"{round(value, digits) + 0.0:{sign},.{digits}f}"  # + 0.0: no -0.0


def format_interval(value: float, low: float, high: float, sign: str = "") -> str:
    """Format an estimate and its interval, if there is one.

    >>> format_interval(0.1234, 0.11, 0.15), format_interval(0.1234, math.nan, math.nan)
    ('0.123 (0.110 to 0.150)', '0.123')
    >>> format_interval(-0.02, -0.05, 0.01, sign="+")
    '-0.020 (-0.050 to +0.010)'
    """
    if not math.isfinite(low):
        return format_number(value, sign=sign)
    texts = [format_number(end, high - low, sign) for end in (value, low, high)]
    return f"{texts[0]} ({texts[1]} to {texts[2]})"


def join_names(names: Sequence[str], last: str = "and") -> str:
    """Return names as one text, with a word before the last one.

    >>> join_names(["a", "b", "c"]), join_names(["a"], "or")
    ('a, b and c', 'a')
    """
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} {last} {names[-1]}"


def _absolute(difference: ConfidenceInterval) -> ConfidenceInterval:
    """Return the absolute value of a difference, with its interval, whose bounds change places if it is negative."""
    value, low, high = difference
    return difference if value >= 0 else ConfidenceInterval(-value, -high, -low)
