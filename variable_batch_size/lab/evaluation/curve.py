"""The course of a training so far: what it has measured, between two evaluations and at each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, final

from variable_batch_size._validation import type_error, value_error
from variable_batch_size.lab.evaluation.simulated_time import SimulatedTime

FACTOR = 10  # a loss above this multiple of the untrained model's is one of a training that has diverged
TOTALS = ("updates", "samples", "progress", "seconds", "cost")
MEANS = ("batch_size", "lr", "train_loss")
RANGE = ("batch_least", "batch_most")


@final
class Curve:
    """The curve of a record as it grows; a part of the checkpoint.

    Args:
        time: the simulated time; None if it is not known.
        minibatch_size: maximum number of rows of a microbatch.

    Attributes:
        rows: the rows so far.
        seconds: simulated seconds.
        last: training loss of the last update; None before the first one.
        diverged: whether the training has diverged.
        wall_seconds: seconds that it took, over all sittings.
    """

    def __init__(self, time: SimulatedTime | None, minibatch_size: int) -> None:
        self._time, self._minibatch_size = time, minibatch_size
        self.rows: list[dict[str, Any]] = []
        self.seconds = 0.0
        self._step = (0.0, 0)  # sum of the losses of the update under way, samples
        self._since = [0.0, 0.0, 0, 0]  # since the last row: sums of losses, learning rates, samples and updates
        self._range: tuple[int, ...] = ()  # since the last row: the smallest and the largest batch size
        self._first: float | None = None  # training loss of the first update
        self.last: float | None = None
        self.diverged = False
        self.wall_seconds = 0.0

    @property
    def samples(self) -> int:
        """Samples at the last row; -1 if there is none."""
        return int(self.rows[-1]["samples"]) if self.rows else -1

    @property
    def cost(self) -> float | None:
        """The cost of the simulated seconds; None if it is not known."""
        return None if self._time is None else self._time.cost(self.seconds)

    @property
    def began(self) -> bool:
        """Whether an update was made."""
        return self.last is not None

    @property
    def large(self) -> bool:
        """Whether the loss of the last update was one of a training that has diverged, or of an unusual batch."""
        return self.last is not None and not self.last <= self._training_limit

    @property
    def _untrained(self) -> float:
        """The loss of the untrained model; infinite as long as it is not known."""
        return float(self.rows[0]["loss"]) if self.rows else math.inf

    @property
    def _training_limit(self) -> float:
        """The loss of training above which it has diverged: it may have another scale than that of the evaluation."""
        return _limit(self._untrained if self._first is None else max(self._untrained, self._first))

    def microbatch(self, loss: float, samples: int) -> bool:
        """Add the mean loss of a microbatch; return False if the training ends, because it is not finite.

        Raises:
            ValueError: if the first update already has such a loss: that is no divergence.
        """
        if not (self.began or math.isfinite(loss)):
            remedy = "mend loss(), the data or the model: nothing has been trained yet"
            raise value_error("loss() must return a finite loss before the first update", loss, remedy)
        total, count = self._step
        self._step = total + loss * samples, count + samples
        self.diverged = self.diverged or not math.isfinite(loss)
        return not self.diverged

    def update(self, updates: int, lr: float) -> None:
        """Add the update of the microbatches since the last one."""
        total, count = self._step
        self._step = (0.0, 0)
        for column, value in enumerate((total, lr, count, 1)):
            self._since[column] += value
        if self._time is not None:
            self.seconds = self._time.after(self.seconds, updates, count, self._minibatch_size)
        self._range = min((*self._range, count)), max((*self._range, count))
        self.last = total / count
        self._first = self.last if self._first is None else self._first

    def evaluation(self, updates: int, samples: int, progress: float, metrics: Mapping[str, float]) -> None:
        """Add a row, with None for a metric that is not finite; a loss that is not ends the training, without a row.

        Raises:
            ValueError: if the loss of the untrained model is not finite: that is no divergence.
        """
        values = _checked(metrics)
        if not (self.rows or math.isfinite(values["loss"])):
            remedy = "mend evaluate() or the model: nothing has been trained yet"
            raise value_error("evaluate() must return a finite loss of the untrained model", values["loss"], remedy)
        losses, rates, count, number = self._since
        means = (count / number, rates / number, losses / count) if number else (None, None, None)
        self.diverged |= not values["loss"] <= _limit(self._untrained)
        self.diverged |= bool(number) and not losses / count <= self._training_limit
        totals = (updates, samples, progress, None if self._time is None else self.seconds, self.cost)
        sizes = self._range or (None, None)
        row = dict(zip((*TOTALS, *MEANS, *RANGE), (*totals, *means, *sizes), strict=True)) | values
        if math.isfinite(values["loss"]):
            self.rows.append({name: _finite(value) for name, value in row.items()})
            self._since, self._range = [0.0, 0.0, 0, 0], ()

    def columns(self) -> dict[str, list[Any] | None]:
        """Return the columns of the record."""
        names = dict.fromkeys(name for row in self.rows for name in row)
        columns: dict[str, list[Any] | None] = {name: [row.get(name) for row in self.rows] for name in names}
        for name in ("seconds", "cost"):
            if all(value is None for value in columns.get(name) or []):
                columns[name] = None
        return columns

    def state_dict(self) -> dict[str, Any]:
        """Return the state between two updates, as plain values."""
        kept = {"rows": self.rows, "seconds": self.seconds, "since": self._since, "losses": (self._first, self.last)}
        return {**kept, "range": self._range, "diverged": self.diverged, "wall_seconds": self.wall_seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state."""
        self.rows, self.seconds = list(state_dict["rows"]), state_dict["seconds"]
        self._since, self._step = list(state_dict["since"]), (0.0, 0)
        self._range = tuple(state_dict.get("range", ()))
        self._first, self.last = state_dict.get("losses", (None, None))
        self.diverged, self.wall_seconds = state_dict["diverged"], state_dict["wall_seconds"]


def _limit(first: float) -> float:
    """Return the loss above which a training has diverged; one that may be negative has no multiple."""
    return FACTOR * first if first > 0 else math.inf


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value


def _checked(metrics: Any) -> dict[str, float]:
    """Return the metrics of an evaluation as floats."""
    if not isinstance(metrics, Mapping) or "loss" not in metrics:
        requirement = "evaluate() must return a mapping with the key 'loss'"
        raise type_error(requirement, metrics, 'return for example {"loss": 0.5, "accuracy": 0.9}')
    for name in metrics:
        if not isinstance(name, str) or name in (*TOTALS, *MEANS, *RANGE):
            raise type_error("a metric of evaluate() must have a name of its own", name, "choose another one")
    return {name: float(value) for name, value in metrics.items()}
