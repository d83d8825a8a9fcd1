"""The course of a training so far: what it has measured, between two evaluations and at each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, final

from variable_batch_size._validation import type_error, value_error
from variable_batch_size.lab.evaluation.simulated_time import SimulatedTime

FACTOR = 10  # a loss above this multiple of the untrained model's is one of a training that has diverged
COLUMNS = (
    "updates", "samples", "progress", "seconds", "cost", "batch_size", "lr", "train_loss", "batch_least", "batch_most",
)  # fmt: skip


@final
class Curve:
    """The learning curve of a training run as it grows, with a row for each evaluation of the model.

    Its public attributes are a part of the checkpoints of the run.

    Args:
        time: the simulated time; None if it is not known.
        minibatch_size: maximum number of rows of a microbatch.
        before: number of updates of the checkpoint from which the training starts; 0 without one.
    """

    def __init__(self, time: SimulatedTime | None, minibatch_size: int, before: int = 0) -> None:
        """Begin with an empty curve."""
        self._time, self._minibatch_size, self._before = time, minibatch_size, before
        self._microbatches: list[tuple[float, int]] = []  # mean loss and samples of each since the last update
        self.rows: list[dict[str, Any]] = []
        self.since: list[tuple[int, float, float]] = []  # samples, lr and loss of each update since the last row
        self.seconds = 0.0  # simulated
        self.untrained: float | None = None  # loss of the evaluation of the untrained model
        self.first: float | None = None  # training loss of the first update
        self.last: float | None = None  # training loss of the last update
        self.diverged = False
        self.wall_seconds = 0.0  # of all processes that have trained this cell, one after the other

    @property
    def samples(self) -> int:
        """Samples at the last row; -1 if there is none."""
        return int(self.rows[-1]["samples"]) if self.rows else -1

    @property
    def cost(self) -> float | None:
        """The cost of the simulated seconds; None if it is not known."""
        return None if self._time is None else self._time.cost(self.seconds)

    @property
    def limit(self) -> float:
        """The loss above which the training has diverged: ten times its first loss, in training or evaluation."""
        first = max((loss for loss in (self.untrained, self.first) if loss is not None), default=0.0)
        return FACTOR * first if first > 0 else math.inf  # a multiple says nothing of a loss that may be negative

    def add_microbatch(self, loss: float, samples: int) -> bool:
        """Record the mean loss of a microbatch. Return False if it is not finite, so that the training must end.

        Raises:
            ValueError: if the first update already has such a loss: that is no divergence.
        """
        if self.last is None and not math.isfinite(loss):
            remedy = "mend loss(), the data or the model: nothing has been trained yet"
            raise value_error("loss() must return a finite loss before the first update", loss, remedy)
        self._microbatches.append((loss, samples))
        self.diverged |= not math.isfinite(loss)
        return not self.diverged

    def add_update(self, updates: int, lr: float) -> None:
        """Record an update: its learning rate, its batch size and mean loss, and the simulated time at its end.

        Batch size and loss come from the microbatches that were added since the last update.

        Args:
            updates: number of updates so far, with this one.
            lr: learning rate of the update.
        """
        batch_size = sum(samples for _, samples in self._microbatches)
        self.last = sum(loss * samples for loss, samples in self._microbatches) / batch_size
        self.first = self.last if self.first is None else self.first
        self._microbatches = []
        self.since.append((batch_size, lr, self.last))
        if self._time is not None:
            updates_since_start = updates - self._before  # since the checkpoint from which the training starts
            self.seconds = self._time.update_end(self.seconds, updates_since_start, batch_size, self._minibatch_size)

    def add_evaluation(self, updates: int, samples: int, progress: float, metrics: Mapping[str, float]) -> None:
        """Add a row: metrics of the model, and means over the updates since the last row.

        A value that is not finite is None in the row. If the loss is not finite, there is no row, and the training has
        diverged.

        Args:
            updates, samples: totals so far.
            progress: progress so far, in updates at `ref_batchsize`.
            metrics: what the task's evaluation has returned.

        Raises:
            TypeError: if the metrics are not a mapping with a loss.
            ValueError: if the loss before the first update is not finite: that is no divergence.
        """
        values = check_metrics(metrics)
        if self.last is None and not math.isfinite(values["loss"]):
            remedy = "mend evaluate() or the model: nothing has been trained yet"
            raise value_error("evaluate() must return a finite loss of the untrained model", values["loss"], remedy)
        if self.untrained is None:
            self.untrained = values["loss"]
        means: tuple[float | None, ...] = (None,) * 5  # the last five of COLUMNS
        if self.since:
            sizes, rates, losses = zip(*self.since, strict=True)
            loss = sum(size * loss for size, loss in zip(sizes, losses, strict=True)) / sum(sizes)
            means = sum(sizes) / len(sizes), sum(rates) / len(rates), loss, min(sizes), max(sizes)
            self.diverged |= not loss <= self.limit  # not `loss > limit`, which is False for nan
        self.diverged |= not values["loss"] <= self.limit
        if math.isfinite(values["loss"]):
            seconds = None if self._time is None else self.seconds
            row = dict(zip(COLUMNS, (updates, samples, progress, seconds, self.cost, *means), strict=True)) | values
            finite = {name: value for name, value in row.items() if value is not None and math.isfinite(value)}
            self.rows.append(dict.fromkeys(row) | finite)  # None for all others
            self.since = []

    def columns(self) -> dict[str, list[Any] | None]:
        """Return the curve by columns: name -> a value for each row. `seconds` and `cost` are None if not known."""
        columns = {name: [row.get(name) for row in self.rows] for name in (self.rows or [{}])[0]}
        unknown = {name: None for name in ("seconds", "cost") if set(columns[name]) == {None}}
        return {**columns, **unknown}

    def state_dict(self) -> dict[str, Any]:
        """Return the state between two updates as plain values, for a checkpoint."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        vars(self).update(state_dict)
        self._microbatches = []


def check_metrics(metrics: Any) -> dict[str, float]:
    """Return the metrics of an evaluation as floats; raise TypeError if they lack a loss, or one has a taken name."""
    if not isinstance(metrics, Mapping) or "loss" not in metrics:
        requirement = "evaluate() must return a mapping with the key 'loss'"
        raise type_error(requirement, metrics, 'return for example {"loss": 0.5, "accuracy": 0.9}')
    if taken := set(metrics) & set(COLUMNS):
        raise type_error("a metric of evaluate() must have a name of its own", taken.pop(), "choose another one")
    return {str(name): float(value) for name, value in metrics.items()}
