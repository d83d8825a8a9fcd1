"""How long updates take, and how far each one moves the training."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, final

from variable_batch_size._validation import MAX_INT, check_number, value_error
from variable_batch_size.adaptive.decisions import Decisions
from variable_batch_size.adaptive.throughput import Throughput
from variable_batch_size.lab.simulation.noise_curve import NoiseCurve
from variable_batch_size.rules.base import Noise, Rule, RuleInput


@final
class EqualUpdates:
    """The next updates of a training whose batch size does not change: their seconds, samples and progress.

    The last update of an epoch is shortened to the rest of the dataset, as in `Plan`. Each method sums over the first n
    updates, n >= 0, in closed form: those of full size, the one that ends the current epoch, and those that end later
    epochs, which are equal.

    Args:
        size: the batch size, in samples.
        dataset_size: samples of an epoch, >= `size`; None: there are no epochs.
        used: samples of the current epoch that were used before.
        seconds: the seconds of an update, by its samples.
        progress: the progress of an update, by its samples.
    """

    def __init__(
        self,
        size: int,
        dataset_size: int | None,
        used: int,
        seconds: Callable[[int], float],
        progress: Callable[[int], float],
    ) -> None:
        self._dataset_size, self._used = dataset_size, used
        self._first, self._epoch = math.inf, 1  # updates of the rest of the current epoch, and of each later one
        tail = last = size
        if dataset_size is not None:
            first, self._epoch = -(-(dataset_size - used) // size), -(-dataset_size // size)
            tail = dataset_size - used - (first - 1) * size
            last = dataset_size - (self._epoch - 1) * size
            self._first = first
        self._sizes = size, tail, last
        self._seconds_of = tuple(map(seconds, self._sizes))
        self._progress_of = tuple(map(progress, self._sizes))

    def seconds(self, updates: int) -> float:
        """Return the seconds of the first `updates` updates."""
        full, tails, lasts = self._counts(updates)
        of_full, of_tail, of_last = self._seconds_of
        return full * of_full + tails * of_tail + lasts * of_last

    def updates(self, updates: int) -> int:
        """Return `updates`; `Engine` reads the total of its goal by name, and a goal may be in updates."""
        return updates

    def samples(self, updates: int) -> int:
        """Return the samples of the first `updates` updates."""
        full, tails, lasts = self._counts(updates)
        of_full, of_tail, of_last = self._sizes
        return full * of_full + tails * of_tail + lasts * of_last

    def progress(self, updates: int) -> float:
        """Return the progress of the first `updates` updates."""
        full, tails, lasts = self._counts(updates)
        of_full, of_tail, of_last = self._progress_of
        return full * of_full + tails * of_tail + lasts * of_last

    def used(self, updates: int) -> int:
        """Return how many samples of the present epoch are used after `updates` updates."""
        return 0 if self._dataset_size is None else (self._used + self.samples(updates)) % self._dataset_size

    def count_ended(self, begin: float, end: float) -> int:
        """Return how many updates end by the time `end`, if the first one begins at `begin`."""
        limit = int(min((end - begin) / min(self._seconds_of), MAX_INT)) + 2
        return bisect_right(range(1, limit), end, key=lambda n: begin + self.seconds(n))

    def first_with(self, total: Callable[[int], float], value: float, most: int) -> int:
        """Return the least number of updates n >= 1 for which total(n) >= value, but at most `most`."""
        return most if total(most) < value else bisect_left(range(1, most), value, key=total) + 1

    def _counts(self, updates: int) -> tuple[int, int, int]:
        """Return how many of the first `updates` have the full size, how many end the current epoch, and later ones."""
        if updates < self._first:
            return updates, 0, 0
        lasts = int(updates - self._first) // self._epoch
        return updates - 1 - lasts, 1, lasts


@final
class SimulatedPosition(NamedTuple):
    """How far a training is, as in a checkpoint."""

    updates: int
    samples: int
    progress: float
    used: int  # samples of the current epoch
    decisions: Decisions

    def after(self, updates_alike: EqualUpdates, updates: int, decisions: Decisions) -> SimulatedPosition:
        """Return the position after the first `updates` of equal updates."""
        return SimulatedPosition(
            self.updates + updates,
            self.samples + updates_alike.samples(updates),
            self.progress + updates_alike.progress(updates),
            updates_alike.used(updates),
            decisions,
        )


@final
@dataclass(frozen=True)
class Model:
    """How long an update takes on a number of devices, and the progress that it makes.

    Args:
        throughput: the seconds of an update.
        devices_per_node: devices of a node.
        minibatch_size: maximum number of rows of a microbatch; None: a device computes its share at once.
        dataset_size: samples of an epoch; None: there are no epochs.
        rule: gives the progress.
        ref_batchsize: batch size at which progress is counted; None if the rule needs none.
        noise: the gradient noise by progress; None if it is not known.
        spread: whether each device gets a share of a batch of few microbatches, see `Throughput.seconds`.
        fixed_shape: whether every microbatch has exactly `minibatch_size` rows.
    """

    throughput: Throughput
    devices_per_node: int
    minibatch_size: int | None
    dataset_size: int | None
    rule: Rule
    ref_batchsize: int | None
    noise: NoiseCurve | None
    spread: bool = True
    fixed_shape: bool = False
    _seconds: dict[tuple[int, int], float] = field(default_factory=dict)  # (samples, devices) -> seconds

    def equal_updates(self, size: int, devices: int, before: SimulatedPosition) -> EqualUpdates:
        """Return the next updates of `size` samples on a number of devices, from the position `before` on.

        Raises:
            TypeError: if the progress of the rule is not a number.
            ValueError: if the batch size exceeds the dataset, or the progress is not finite and >= 0.
        """
        if self.dataset_size is not None and size > self.dataset_size:
            requirement = f"a batch must have at most the {self.dataset_size} samples of the dataset"
            raise value_error(requirement, f"{size} on {devices} devices", "limit it with bounds=, or use fewer nodes")

        def progress(batch_size: int) -> float:
            noise = self.noise_at(before.progress, before.updates, batch_size)
            reference = self.ref_batchsize or batch_size
            scaling = self.rule(RuleInput(batch_size, reference, before.updates, before.samples, noise))
            return check_number(scaling.progress, f"the progress of {self.rule}", "let the rule return a number >= 0")

        return EqualUpdates(size, self.dataset_size, before.used, partial(self.seconds, devices=devices), progress)

    def seconds(self, batch_size: int, devices: int) -> float:
        """Return the seconds of an update."""
        key = batch_size, devices
        if key not in self._seconds:
            cut = {"spread": self.spread, "fixed_shape": self.fixed_shape}
            self._seconds[key] = self.throughput.seconds(batch_size, devices, self.minibatch_size, **cut)
        return self._seconds[key]

    def noise_at(self, progress: float, updates: int, batch_size: int | None) -> Noise | None:
        """Return the noise at a progress, with the gain of an update of this batch size; None if it is not known."""
        if self.noise is None:
            return None
        if batch_size is None or self.ref_batchsize is None:
            return self.noise.at(progress, updates)
        return self.noise.at(progress, updates, self.noise.gain(progress, batch_size, self.ref_batchsize))

    def next_noise(self, progress: float) -> float:
        """Return the first progress after this one at which the noise changes; infinity if there is none."""
        return math.inf if self.noise is None else self.noise.next_change(progress)
