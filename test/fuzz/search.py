"""Run a case: equal to its twin, refused where its loop is wrong, or a finding."""

from __future__ import annotations

import math
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fuzz.case import SQUARES_RULE, Case
from fuzz.drawing import draw_case
from fuzz.model import tokens
from fuzz.objects import State, loaders_of
from fuzz.saving import Folder
from fuzz.training import Rank, Record
from fuzz.twin import Expected, expected
from helpers.worlds import through_file
from variable_batch_size.backend import Backend, LocalBackend
from variable_batch_size.testing import run_ranks

TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-4, torch.bfloat16: 0.1, torch.float16: 0.05}
SAME_COUNTS = "a rule that scales betas needs the same number of updates in a group, but group"


@dataclass(frozen=True)
class Outcome:
    """What became of a case: "equal", "refused" or "finding"."""

    seed: int
    kind: str
    features: frozenset[str]
    message: str = ""


def run_case(seed: int, without: frozenset[str] = frozenset()) -> Outcome:
    """Train the case of a seed with the package and with the twin, and compare them after every update."""
    case = draw_case(seed, without)
    wanted = expected(case)
    try:
        records = train(case)
    except Exception as error:
        if is_refusal(case, error):
            return Outcome(seed, "refused", case.used)
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__} at {where.name}:{where.lineno}: {error}"
        return Outcome(seed, "finding", case.used, " ".join(text.split())[:300])
    message = first_difference(case, records, wanted)
    return Outcome(seed, "finding" if message else "equal", case.used, message or "")


def is_refusal(case: Case, error: Exception) -> bool:
    """Whether an error is documented for this case."""
    scales_betas = any(rule.name in ("sqrt-sde", "root-half-life", SQUARES_RULE) for rule in case.rules)
    return case.intermittent and scales_betas and isinstance(error, ValueError) and SAME_COUNTS in str(error)


def train(case: Case) -> list[list[Record]]:
    """Train all segments; return the records of all ranks of each."""
    if case.saves is None:
        return train_segments(case, None)
    with tempfile.TemporaryDirectory() as path:
        return train_segments(case, Folder(Path(path)))


def train_segments(case: Case, folder: Folder | None) -> list[list[Record]]:
    """Train all segments, which save in a folder if there is one."""
    records, start, state = [], 0, None
    for number, segment in enumerate(case.segments):

        def train_rank(
            backend: Backend,
            begin: int = start,
            given: State | None = state,
            at: int = number,
            found: Folder | None = folder,
        ) -> Rank:
            rank = Rank(case, case.segments[at], begin, given, found, backend)
            rank.final = rank.train()
            return rank

        ranks = run_ranks(train_rank, segment.world) if segment.world > 1 else [train_rank(LocalBackend())]
        records += [rank.records for rank in ranks]
        states = [rank.final for rank in ranks]
        state = {**states[segment.saved_by % segment.world], "loaders": None}
        state = through_file(state) if segment.through_file else state
        folder = ranks[0].saves.folder if ranks[0].saves else None
        start = segment.end
        if number + 1 < len(case.segments):
            state["loaders"] = loaders_of(states, segment, case.segments[number + 1], case)
    return records


def first_difference(case: Case, records: list[list[Record]], wanted: list[Expected]) -> str | None:
    """The first difference between the package and the twin, in words, unless rounding explains it."""
    exact = difference(case, records, wanted, [0.0] * len(wanted))
    return exact and difference(case, records, wanted, sensitivity(case, wanted))


def sensitivity(case: Case, wanted: list[Expected]) -> list[float]:
    """How far the twin comes, at each update, from rounding its initial weights: far, in a training that diverges."""
    result = []
    for update, other in zip(wanted, expected(case, shift=10 * torch.finfo(torch.float64).eps), strict=True):
        pairs = [(update.weights, other.weights), (update.averages, other.averages)]
        moved = [float((one - pair[1][name]).abs().max()) for pair in pairs for name, one in pair[0].items()]
        result.append(max(*moved, abs(update.progress - other.progress), abs(update.lr_factor - other.lr_factor)))
    return result


def difference(case: Case, records: list[list[Record]], wanted: list[Expected], slack: Sequence[float]) -> str | None:
    """The first difference that exceeds the tolerance and the slack of its update, in words."""
    for record in sorted((record for own in records for record in own), key=lambda record: record.update):
        update = wanted[record.update]
        pairs = [
            ("updates", record.updates, record.update + 1),
            ("samples", record.samples, update.samples),
            ("rows", record.rows, rows_of_rank(update, *record.world)),
            ("step() returned", record.updated, update.updated),
            ("counted", record.count is not None, case.counts and not case.divides),
            ("logged", set(record.logged), {"one", "value"} if case.logs else set()),
            ("done", record.done, is_done(case, record.update, update.samples)),
            ("epoch", record.epoch, update.epoch),
        ]
        for name, found, right in pairs:
            if found != right:
                return f"after update {record.update} {name}: {found} instead of {right}"
        numbers = [("progress", record.progress, update.progress)]
        if record.count is not None:
            numbers.append(("count", record.count, sum(map(tokens, case.updates[record.update].samples))))
        if record.logged:
            mean = mean_of(case, record.update)  # nan if nothing was counted
            numbers += [("value", record.logged["value"], mean), ("one", record.logged["one"], mean * 0 + 1)]
        if update.updated:
            numbers.append(("lr_factor", record.lr_factor, update.lr_factor))
        for name, found, right in numbers:
            if math.isnan(found) and math.isnan(right):
                continue
            if not abs(found - right) <= slack[record.update] + TOLERANCE[case.dtype] * max(1.0, abs(right)):
                return f"after update {record.update} {name}: {found} instead of {right}"
        for found, right in ((record.weights, update.weights), (record.averages, update.averages)):
            if text := weights_differ(case, record, found, right, slack[record.update]):
                average = " (average)" if found is record.averages else ""
                return f"after update {record.update} of {len(wanted)}: {text}{average}"
    return done(case, records)


def mean_of(case: Case, number: int) -> float:
    """What the loop logs: the mean of the numbers of the samples; with step(count=), weighed by the counts."""
    samples = case.updates[number].samples
    if not case.counts or case.divides:
        return sum(samples) / len(samples)
    total = sum(map(tokens, samples))
    return sum(i * tokens(i) for i in samples) / total if total else math.nan


def is_done(case: Case, number: int, samples: int) -> bool:
    """Whether the training has ended with an update."""
    of_trace = len(case.trace.sizes) if case.trace.on_end == "stop" else None
    return number + 1 in (case.max_updates, of_trace) or samples == case.max_samples


def done(case: Case, records: list[list[Record]]) -> str | None:
    """Whether every update was made."""
    made = {record.update for own in records for record in own}
    missing = set(range(len(case.updates))) - made
    return f"updates {sorted(missing)} were not made" if missing else None


def rows_of_rank(update: Expected, rank: int, size: int) -> list[list[int]]:
    """The rows of a rank's microbatches: microbatch j goes to rank j mod size; without a share it repeats another."""
    rows = [rows for _, rows in update.microbatches]
    return rows[rank::size] or [rows[rank % len(rows)]]


def weights_differ(
    case: Case, record: Record, found: dict[str, Tensor], wanted: dict[str, Tensor], slack: float
) -> str | None:
    tolerance = TOLERANCE[case.dtype] * (1 + record.update / 10 if case.dtype.itemsize == 2 else 1)  # rounding adds up
    largest = max((float(weight.abs().max()) for weight in wanted.values()), default=0.0)
    for name, weight in found.items():
        by = float((weight.double() - wanted[name]).abs().max())
        if not by <= slack + tolerance * max(1.0, largest):
            return f"{name} differs by {by:.2g}"
    return None
