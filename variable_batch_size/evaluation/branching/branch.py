"""From one checkpoint, which rule and learning rate train best? Each candidate trains on the very same samples."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Final, Literal, final, get_args

import numpy as np
from tqdm import tqdm

from variable_batch_size._validation import FloatArray, check_choice, check_int, check_number, type_error, value_error
from variable_batch_size.evaluation.branching.candidate import Candidate
from variable_batch_size.evaluation.branching.ranking import Pair, Place, ranking
from variable_batch_size.evaluation.branching.start import Start, updates_ahead
from variable_batch_size.evaluation.branching.trial import Trial, kept_random_numbers, train_trial, untrained_metrics
from variable_batch_size.evaluation.statistics import CONFIDENCE, LEAST
from variable_batch_size.evaluation.task import Task
from variable_batch_size.evaluation.wording import aligned, interval, listed, number

By = Literal["training", "evaluation"]
LAST: Final = 0.5  # share of the updates that are compared
DECAY: Final = 0.0  # share of the updates in which the learning rate falls


@final
@dataclass(frozen=True)
class Cost:
    """What branches cost, known before they train.

    Attributes:
        branches: number of trainings.
        samples_each: samples of each of them, at most: the last update of an epoch may be smaller.
        samples: samples of all.
        share: `samples` divided by those of a full training; None if these are not known.
        evaluations: number of evaluations of the task.
    """

    branches: int
    samples_each: int
    samples: int
    share: float | None
    evaluations: int

    @classmethod
    def of(cls, branches: int, samples_each: int, total: int | None) -> Cost:
        """Return the cost of branches, of a task whose training has `total` samples."""
        samples = branches * samples_each
        return cls(branches, samples_each, samples, samples / total if total else None, branches + 1)

    def __str__(self) -> str:
        """Return it as a line."""
        share = "" if self.share is None else f", {100 * self.share:.3g} % of a full training"
        branches = f"{self.branches} branch{'es' if self.branches > 1 else ''}"
        each = f"{branches} of at most {self.samples_each:,} samples, {self.samples:,} in all"
        return f"{each}{share}, and {self.evaluations} evaluations"


@final
@dataclass(frozen=True)
class Branching:
    """What branches have brought.

    Attributes:
        updates: updates before the branches.
        samples: samples before the branches.
        batch_size: samples of an update.
        compared: updates, the last ones, that are compared; 0: the losses of the evaluation at the end are.
        cost: what they cost.
        places: the candidates, the best one first; those that train alike are one, "constant = root*0.5".
        pairs: the difference of each pair of candidates that have not diverged, with intervals that hold together.
        trials: the branches, by candidate and order of samples.
    """

    updates: int
    samples: int
    batch_size: int
    compared: int
    cost: Cost
    places: tuple[Place, ...]
    pairs: tuple[Pair, ...]
    trials: tuple[Trial, ...]

    @property
    def best(self) -> tuple[str, ...]:
        """The candidates than which no other one is seen to be better; none if all have diverged."""
        return tuple(one.name for one in self.places if one.rank in (1, None) and not math.isnan(one.loss))

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return the names of the columns, and the rows, of a table of the candidates."""
        metrics = list(dict.fromkeys(name for trial in self.trials for name in trial.metrics))
        columns = [
            "candidate",
            "rank",
            "training loss" if self.compared else "evaluation",
            f"more than {self.places[0].name}",
            *(f"final {m}" for m in metrics),
        ]
        return [*columns, "no difference seen to"], [self._row(place, metrics) for place in self.places]

    def _row(self, place: Place, metrics: Sequence[str]) -> list[str]:
        own = [trial for trial in self.trials if trial.name == place.name]
        if math.isnan(place.loss):
            count = sum(trial.status == "diverged" for trial in own)
            diverged = "diverged" if len(own) == 1 else f"diverged ({count} of {len(own)})"
            return [place.name, str(place.rank), diverged, "-", *("-" for _ in metrics), "-"]
        finals = [number(float(np.mean([trial.metrics[name] for trial in own]))) for name in metrics]
        unknown = place is self.places[0] or math.isnan(place.to_best.low)
        more = "-" if unknown else interval(*place.to_best[:3], sign="+")
        return [place.name, str(place.rank or "-"), f"{place.loss:.5g}", more, *finals, ", ".join(place.same) or "-"]

    def conclusion(self) -> str:
        """Return what is seen, as a sentence."""
        best = self.best
        if not best:
            return "All candidates diverged."
        if len(self.places) == 1:
            return f"{best[0]} is the only candidate."
        if all(place.rank in (1, None) for place in self.places):
            return f"No difference is seen between any of the candidates: {self._missing()}."
        if len(best) == 1:
            return f"{best[0]} is better than all others."
        return f"No difference is seen between {listed(best)}; each of the others is worse than one of them."

    def _missing(self) -> str:
        """Return what would tell candidates apart between which no difference is seen."""
        known = not all(math.isnan(pair.difference.low) for pair in self.pairs)
        if not self.compared:
            few = (
                "compare more orders" if known else "one evaluation tells nothing of its noise, compare several orders"
            )
            return f"{few} (--orders)"
        if known:
            return "train longer branches"
        return f"{self.compared} updates are too few for an interval, compare {LEAST} or more (--updates, --last)"

    def __str__(self) -> str:
        """Return the table and what it says."""
        mean = f"the mean training loss of the last {self.compared} updates"
        what = mean if self.compared else "the loss of the evaluation at the end"
        head = f"From update {self.updates:,} ({self.samples:,} samples), batch size {self.batch_size:,}: {what}"
        return "\n".join([head, aligned(*self.table()), self.conclusion()])

    def as_json(self) -> dict[str, Any]:
        """Return everything as values of JSON; what is not a number is None."""
        return plain(asdict(self) | {"best": self.best})  # type: ignore[no-any-return]


@final
@dataclass(frozen=True)
class Branches:
    """Branches to train; `cost` says what they cost, and `run` trains them. The arguments are those of `branch`."""

    start: Start
    batch_size: int
    candidates: tuple[Candidate, ...]
    updates: int
    orders: int = 1
    last: float = LAST
    confidence: float = CONFIDENCE
    threads: int = 1
    decay: float = DECAY
    by: By = "training"

    def __post_init__(self) -> None:
        check_int(self.batch_size, "batch_size", 1)
        check_int(self.updates, "updates", 2)
        check_int(self.orders, "orders", 1)
        check_int(self.threads, "threads", 1)
        if not self.candidates:
            raise value_error("candidates must have at least one item", "none", 'pass ["root", "linear"]')
        if len(set(self.candidates)) < len(self.candidates):
            raise value_error("candidates must be different", ", ".join(map(str, self.candidates)), "pass each once")
        check_choice(self.by, "by", get_args(By))
        for name in ("last", "confidence"):
            check_share(getattr(self, name), name)
        if check_number(self.decay, "decay", "pass a share of the updates") > 1:
            raise value_error("decay must be a share of the updates", self.decay, "pass a number from 0 to 1")

    @cached_property
    def distinct(self) -> dict[str, Candidate]:
        """What is trained, by the names of all candidates that train alike, such as "constant = root*0.5"."""
        self.start.check_ends(self.updates * self.batch_size)
        found: dict[object, list[Candidate]] = {}
        with kept_random_numbers(self.threads):
            for candidate in self.candidates:
                try:
                    parts = self.start.begin(candidate, self.batch_size, 0, updates=self.updates)
                except (TypeError, ValueError) as error:
                    raise type(error)(f"candidate {candidate}: {error}") from error
                found.setdefault(candidate.course(updates_ahead(parts)), []).append(candidate)
        return {" = ".join(map(str, alike)): alike[0] for alike in found.values()}

    @property
    def cost(self) -> Cost:
        """What the branches cost."""
        return Cost.of(len(self.distinct) * self.orders, self.updates * self.batch_size, self.start.total)

    @property
    def compared(self) -> int:
        """The number of updates that are compared; 0: the evaluation at the end is."""
        return 0 if self.by == "evaluation" else max(1, round(self.last * self.updates))

    def factor(self, update: int) -> float:
        """Return the factor on the learning rate of an update of a branch, beside that of the schedule."""
        return min(1.0, (self.updates - update) / (self.decay * self.updates)) if self.decay else 1.0

    def check(self) -> None:
        """Create the objects of each branch, so that errors come before the first one trains."""
        _ = self.distinct

    def run(self, *, progress: bool = False) -> Branching:
        """Train the branches."""
        trials = []
        bar = tqdm(total=self.cost.samples, unit="sample", unit_scale=True, disable=not progress)
        with kept_random_numbers(self.threads), bar:
            untrained = untrained_metrics(self.start.task, self.start.seed)
            for name, candidate in self.distinct.items():
                for order in range(self.orders):
                    parts = self.start.begin(candidate, self.batch_size, order, updates=self.updates)
                    trials.append(train_trial(parts, name, order, untrained, bar, self.factor))
        places, pairs = ranking({name: self._compared(name, trials) for name in self.distinct}, self.confidence)
        at = self.start.updates, self.start.samples
        return Branching(*at, self.batch_size, self.compared, self.cost, places, pairs, tuple(trials))

    def _compared(self, name: str, trials: Sequence[Trial]) -> list[FloatArray] | None:
        """Return the losses that are compared, of each order; None if the candidate has diverged."""
        own = [trial for trial in trials if trial.name == name]
        if any(trial.status == "diverged" for trial in own):
            return None
        if self.by == "evaluation":
            return [np.array([trial.metrics["loss"]]) for trial in own]
        return [np.array(trial.losses[-self.compared :]) for trial in own]


def branch(
    checkpoint: str | os.PathLike[str] | None,
    task: Task | str,
    *,
    batch_size: int,
    candidates: Sequence[Candidate | str],
    updates: int,
    orders: int = 1,
    last: float = LAST,
    confidence: float = CONFIDENCE,
    threads: int = 1,
    decay: float = DECAY,
    by: By = "training",
    progress: bool = False,
    **start: Any,
) -> Branching:
    """Train each candidate from one checkpoint on the same samples, and rank them by their training losses.

    All branches begin with the same weights, optimizer state, noise averages, random numbers and place in the order of
    samples, so that the losses of an update are compared in pairs: what the samples contribute to both cancels. Each
    loss is that of the weights before the update. The differences of the last updates are averaged; their interval
    accounts for their correlation in time (`series_interval`) and for the number of pairs (Bonferroni). With `orders`,
    the intervals also cover what another order of samples does to a whole branch. The checkpoint is only read.

    A short branch sees what a learning rate does now. A large one may lose now, and win when the schedule ends: such a
    ranking need not be that of full trainings. With `decay=1` the learning rate falls to 0 within the branch, as at the
    end of a training, which predicted more, but not more than the order of the candidates in other tasks;
    docs/branching.md has the figures.

    Args:
        checkpoint: folder of a `Checkpoint`, or of one checkpoint in it, with the task's model and optimizer. None:
            branches begin with the untrained model.
        task: the task, or its name, see `load_task`.
        batch_size: samples of each update.
        candidates: rules and factors on the learning rate: a `Candidate`, or its text, such as "root" or "linear*0.5".
            Those with the same factors in all updates are trained once, as "constant = root*0.5" at a ratio of 4.
        updates: updates of each branch.
        orders: number of orders of samples that each candidate trains on. The first one is that of the training; in the
            others, samples of the epoch under way may repeat. The intervals are then not narrower than those of the
            means of orders.
        last: share of the updates that are compared, the last ones.
        confidence: probability that all intervals contain the differences.
        threads: number of threads of torch.
        decay: share of the updates, the last ones, in which the learning rate falls to 0 in a line; 0: it does not.
        by: what is compared: the losses of "training", or that of the "evaluation" at the end, of which only two
            or more `orders` can tell a difference: a single value tells nothing of its noise.
        progress: whether to show a progress bar.
        start: `samples` (of a full training, for the schedule), `ref_batchsize`, `minibatch_size`, `data_dir`; `seed`
            and `lr`, which a checkpoint has itself; and `schedule=False`, with which the learning rate stays as it is
            in the checkpoint. Without a part "scheduler" in the checkpoint it always does, with a warning.

    Raises:
        OSError: if a file cannot be read.
        TypeError, ValueError: if an argument is wrong, or task, checkpoint and candidates do not fit one another.
    """
    found = Start.read(checkpoint, task, **start)
    if isinstance(candidates, str) or not isinstance(candidates, Sequence):
        raise type_error("candidates must be a sequence", candidates, 'pass ["root", "linear"]')
    chosen = tuple(map(Candidate.of, candidates))
    return Branches(found, batch_size, chosen, updates, orders, last, confidence, threads, decay, by).run(
        progress=progress
    )


def check_share(value: object, name: str) -> None:
    """Raise an error unless a value is a number in (0, 1)."""
    if not isinstance(value, (int, float)):
        raise type_error(f"{name} must be a number", value, "pass one between 0 and 1")
    if not 0 < value < 1:
        raise value_error(f"{name} must be between 0 and 1", value, "pass for example 0.5")


def plain(value: Any) -> Any:
    """Return values of JSON: mappings, lists, and None for what is not finite."""
    if isinstance(value, dict):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, (tuple, list)):
        fields = getattr(value, "_asdict", None)
        return plain(fields()) if fields else [plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
