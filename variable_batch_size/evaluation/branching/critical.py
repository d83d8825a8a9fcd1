"""Up to which batch size does a training lose nothing? Branches of the same samples, in larger and larger batches."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, final

import numpy as np
from tqdm import tqdm

from variable_batch_size._validation import FloatArray, check_int, check_number, value_error
from variable_batch_size.evaluation.branching.branch import LAST, Cost, check_share, plain
from variable_batch_size.evaluation.branching.candidate import Candidate
from variable_batch_size.evaluation.branching.ranking import paired_interval
from variable_batch_size.evaluation.branching.start import Start
from variable_batch_size.evaluation.branching.trial import Trial, kept_random_numbers, train_trial, untrained_metrics
from variable_batch_size.evaluation.statistics import CONFIDENCE, Interval
from variable_batch_size.evaluation.task import Task
from variable_batch_size.evaluation.wording import aligned, interval, number

Verdict = Literal["within", "beyond", "not told apart"]


@final
@dataclass(frozen=True)
class Size:
    """A batch size.

    Attributes:
        batch_size: samples of an update.
        difference: its loss minus that of the smallest batch size, with its interval; nan after a divergence.
        verdict: whether the interval lies within the tolerance or beyond it; "not told apart" if it contains it.
    """

    batch_size: int
    difference: Interval
    verdict: Verdict


@final
@dataclass(frozen=True)
class CriticalBatchSize:
    """The largest batch size of which all smaller ones lose no more than a tolerance.

    Attributes:
        updates: updates before the branches.
        samples: samples before the branches.
        tolerance: of the difference of losses.
        value: the critical batch size, by the estimates.
        low: the largest one that lies within the tolerance with confidence, with all smaller ones.
        high: the largest one before the first that lies beyond it with confidence; None: even the largest one that was
            tried may lie within.
        cost: what it cost.
        sizes: the batch sizes that were tried.
        trials: their branches.
    """

    updates: int
    samples: int
    tolerance: float
    value: int
    low: int
    high: int | None
    cost: Cost
    sizes: tuple[Size, ...]
    trials: tuple[Trial, ...]

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return the names of the columns, and the rows, of a table of the batch sizes."""
        metrics = list(dict.fromkeys(name for trial in self.trials for name in trial.metrics))
        columns = ["batch size", "more loss than the smallest", *(f"final {m}" for m in metrics), "tolerance"]
        return columns, [self._row(size, metrics) for size in self.sizes]

    def _row(self, size: Size, metrics: Sequence[str]) -> list[str]:
        own = [trial.metrics for trial in self.trials if trial.name == str(size.batch_size)]
        finals = [number(float(np.mean([one.get(name, math.nan) for one in own]))) for name in metrics]
        if math.isnan(size.difference.value):
            return [f"{size.batch_size:,}", "diverged", *finals, size.verdict]
        unknown = size is self.sizes[0] or math.isnan(size.difference.low)
        more = "-" if unknown else interval(*size.difference[:3], sign="+")
        return [f"{size.batch_size:,}", more, *finals, "-" if size is self.sizes[0] else size.verdict]

    def conclusion(self) -> str:
        """Return what is seen, as a sentence."""
        largest = self.sizes[-1].batch_size
        if any(one.status == "diverged" for one in _of(self.sizes[0].batch_size, self.trials)):
            return f"The smallest batch size, {self.sizes[0].batch_size:,}, diverged: there is nothing to compare with."
        if self.low == largest:
            return f"The critical batch size is at least {largest:,}, the largest one that was tried."
        if self.high == self.low:
            return f"The critical batch size is {self.value:,}, of those that were tried."
        bounds = f"{self.low:,} or more" if self.high is None else f"between {self.low:,} and {self.high:,}"
        return f"The critical batch size is {bounds}: the noise allows no narrower answer."

    def __str__(self) -> str:
        """Return the table and what it says."""
        head = (
            f"From update {self.updates:,} ({self.samples:,} samples), the same samples in batches of each size; "
            f"tolerance {self.tolerance:g}"
        )
        return "\n".join([head, aligned(*self.table()), self.conclusion()])

    def as_json(self) -> dict[str, Any]:
        """Return everything as values of JSON; what is not a number is None."""
        return plain(asdict(self))  # type: ignore[no-any-return]


@final
@dataclass(frozen=True)
class BatchSizes:
    """Branches to train; `cost` says what they cost, `run` trains them. See `critical_batch_size` for the arguments."""

    start: Start
    batch_sizes: tuple[int, ...]
    candidate: Candidate
    samples: int
    tolerance: float
    orders: int = 1
    last: float = LAST
    confidence: float = CONFIDENCE
    threads: int = 1

    def __post_init__(self) -> None:
        for size in self.batch_sizes:
            check_int(size, "each of batch_sizes", 1)
        if len(self.batch_sizes) < 2 or list(self.batch_sizes) != sorted(set(self.batch_sizes)):
            requirement = "batch_sizes must be two or more, the smallest first"
            raise value_error(requirement, list(self.batch_sizes), "pass for example [64, 128, 256]")
        check_int(self.samples, "samples", 1)
        check_int(self.orders, "orders", 1)
        check_int(self.threads, "threads", 1)
        check_number(self.tolerance, "tolerance", "pass a difference of losses")
        for name in ("last", "confidence"):
            check_share(getattr(self, name), name)
        if self.samples < 16 * self.batch_sizes[-1]:
            requirement = "samples must be at least 16 times the largest batch size, for an interval"
            found = f"{self.samples:,} with {self.batch_sizes[-1]:,}"
            raise value_error(requirement, found, "pass more samples, or smaller batch sizes")

    @property
    def cost(self) -> Cost:
        """What the branches cost."""
        return Cost.of(len(self.batch_sizes) * self.orders, self.samples, self.start.total)

    def check(self) -> None:
        """Create the objects of each branch, so that errors come before the first one trains."""
        self.start.check_ends(self.samples)
        with kept_random_numbers(self.threads):
            for size in self.batch_sizes:
                self.start.begin(self.candidate, size, 0, samples=self.samples)

    def run(self, *, progress: bool = False) -> CriticalBatchSize:
        """Train the branches."""
        self.check()
        trials = []
        bar = tqdm(total=self.cost.samples, unit="sample", unit_scale=True, disable=not progress)
        with kept_random_numbers(self.threads), bar:
            untrained = untrained_metrics(self.start.task, self.start.seed)
            for size in self.batch_sizes:
                for order in range(self.orders):
                    parts = self.start.begin(self.candidate, size, order, samples=self.samples)
                    trials.append(train_trial(parts, str(size), order, untrained, bar))
        sizes = self._sizes(trials)
        verdicts = [(size.batch_size, size.verdict) for size in sizes]
        estimate = _last([(size.batch_size, bool(size.difference.value <= self.tolerance)) for size in sizes])
        low = _last([(size, verdict == "within") for size, verdict in verdicts])
        high = _last([(size, verdict != "beyond") for size, verdict in verdicts])
        known = None if high == self.batch_sizes[-1] else high
        at = self.start.updates, self.start.samples
        return CriticalBatchSize(*at, self.tolerance, estimate, low, known, self.cost, sizes, tuple(trials))

    def _sizes(self, trials: Sequence[Trial]) -> tuple[Size, ...]:
        """Return the batch sizes with their differences to the smallest one."""
        width = self.batch_sizes[-1]
        means = {
            size: [_block_means(t, self.samples, width, self.last) for t in _of(size, trials)]
            for size in self.batch_sizes
        }
        level = 1 - (1 - self.confidence) / (len(self.batch_sizes) - 1)
        smallest = means[self.batch_sizes[0]]
        sizes = [Size(self.batch_sizes[0], Interval(0.0, 0.0, 0.0, self.orders), "within")]
        for size in self.batch_sizes[1:]:
            if any(one is None for one in (*means[size], *smallest)):
                sizes.append(Size(size, Interval(math.nan, math.nan, math.nan, 0), "beyond"))
                continue
            differences = [a - b for a, b in zip(means[size], smallest, strict=True)]  # type: ignore[operator]
            found = paired_interval(differences, level)
            low, high = found.low > self.tolerance, found.high <= self.tolerance
            sizes.append(Size(size, found, "beyond" if low else "within" if high else "not told apart"))
        return tuple(sizes)


def critical_batch_size(
    checkpoint: str | os.PathLike[str] | None,
    task: Task | str,
    *,
    batch_sizes: Sequence[int],
    samples: int,
    rule: Candidate | str = "root",
    tolerance: float = 0.01,
    orders: int = 1,
    last: float = LAST,
    confidence: float = CONFIDENCE,
    threads: int = 1,
    progress: bool = False,
    total: int | None = None,
    **start: Any,
) -> CriticalBatchSize:
    """Train the same samples in larger and larger batches from one checkpoint, and find where the loss suffers.

    The critical batch size is the largest one for which it and all smaller ones have a training loss of at most that of
    the smallest batch size plus a tolerance. Losses are compared on the same samples: in pairs of means over blocks as
    long as the largest batch, of the last part of the branches. The loss of an update is that of the weights before it,
    so that a large batch lags by half of itself: where the loss still falls fast, the result is too small rather than
    too large. The metrics of the evaluation at the end have no such lag.

    Args:
        checkpoint: see `branch`.
        task: see `branch`.
        batch_sizes: batch sizes in samples, the smallest first: the one to which the others are compared, and those
            which it divides.
        samples: samples of each branch, at least 16 times the largest batch size.
        rule: how the learning rate follows the batch size: "root" for Adam, "linear" for SGD; with a factor, if wanted.
        tolerance: by how much the loss may be larger.
        orders, last, confidence, threads, progress: see `branch`.
        total: samples of a full training, for the schedule.
        start: the others of `branch`.

    Raises:
        OSError: if a file cannot be read.
        TypeError, ValueError: if an argument is wrong, or task, checkpoint and rule do not fit one another.

    Source: Merrill et al. 2025, Critical Batch Size Revisited, arXiv 2505.23971; the intervals are ours.
    """
    found = Start.read(checkpoint, task, samples=total, **start)
    candidate = Candidate.of(rule)
    sizes = BatchSizes(found, tuple(batch_sizes), candidate, samples, tolerance, orders, last, confidence, threads)
    return sizes.run(progress=progress)


def _of(size: int, trials: Sequence[Trial]) -> list[Trial]:
    return [trial for trial in trials if trial.name == str(size)]


def _block_means(trial: Trial, samples: int, width: int, last: float) -> FloatArray | None:
    """Return the mean losses over blocks of `width` samples in the last part; None after a divergence.

    Within an update, each sample counts with the mean of the update.
    """
    if trial.status == "diverged":
        return None
    ends = np.concatenate([[0], np.cumsum(trial.samples)])
    sums = np.concatenate([[0.0], np.cumsum(np.array(trial.losses) * trial.samples)])
    blocks = max(1, int(last * samples / width))
    edges = samples - width * np.arange(blocks, -1, -1)
    means: FloatArray = np.diff(np.interp(edges, ends, sums)) / width
    return means


def _last(known: Sequence[tuple[int, bool]]) -> int:
    """Return the last batch size before the first one that does not hold; the first one always does."""
    found = known[0][0]
    for size, holds in known[1:]:
        if not holds:
            break
        found = size
    return found
