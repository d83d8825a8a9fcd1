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
    """Updates that follow one another with the same batch size: how long the first n of them take, and what they bring.

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
        """Compute the sizes of an update that is full, ends this epoch, or ends a later one, and what each brings."""
        self._dataset_size, self._used = dataset_size, used
        self._updates_left, self._updates_per_epoch = math.inf, 1  # in the current epoch, and in each later one
        end_of_this_epoch = end_of_later_epoch = size  # batch sizes of the updates that end an epoch
        if dataset_size is not None:
            samples_left = dataset_size - used
            updates_left = -(-samples_left // size)  # rounded up
            self._updates_left, self._updates_per_epoch = updates_left, -(-dataset_size // size)
            end_of_this_epoch = samples_left - (updates_left - 1) * size
            end_of_later_epoch = dataset_size - (self._updates_per_epoch - 1) * size
        self._sizes = size, end_of_this_epoch, end_of_later_epoch
        self._seconds_of = tuple(map(seconds, self._sizes))  # of an update of each of these sizes
        self._progress_of = tuple(map(progress, self._sizes))

    def seconds(self, updates: int) -> float:
        """Return the seconds of the first `updates` updates."""
        return self._total(self._seconds_of, updates)

    def updates(self, updates: int) -> int:
        """Return `updates` itself, so that a total of updates can be read like one of samples or of progress."""
        return updates

    def samples(self, updates: int) -> int:
        """Return the samples of the first `updates` updates."""
        full, ends, later_ends = self._counts(updates)
        size, size_at_end, size_at_later_end = self._sizes
        return full * size + ends * size_at_end + later_ends * size_at_later_end

    def progress(self, updates: int) -> float:
        """Return the progress of the first `updates` updates."""
        return self._total(self._progress_of, updates)

    def used(self, updates: int) -> int:
        """Return how many samples of the present epoch are used after `updates` updates."""
        return 0 if self._dataset_size is None else (self._used + self.samples(updates)) % self._dataset_size

    def count_ended(self, begin: float, end: float) -> int:
        """Return how many updates end by the time `end`, if the first one begins at `begin`, both in seconds."""
        at_most = int(min((end - begin) / min(self._seconds_of), MAX_INT)) + 2  # if all were the fastest ones
        return bisect_right(range(1, at_most), end, key=lambda n: begin + self.seconds(n))

    def first_with(self, total: Callable[[int], float], value: float, most: int) -> int:
        """Return the least number of updates n >= 1, at most `most`, with which a total reaches a value.

        Args:
            total: number of updates -> total, which ascends.
            value: the value.
            most: the largest number of updates, which is also the result if no number suffices.
        """
        return most if total(most) < value else bisect_left(range(1, most), value, key=total) + 1

    def _total(self, amounts: tuple[float, ...], updates: int) -> float:
        """Return a sum, such as of seconds, over the first `updates` updates.

        Args:
            amounts: what one update adds to it: of the full size, at the end of the current epoch, and of a later
                epoch.
            updates: number of updates.
        """
        full, ends, later_ends = self._counts(updates)
        of_full, of_end, of_later_end = amounts
        return full * of_full + ends * of_end + later_ends * of_later_end

    def _counts(self, updates: int) -> tuple[int, int, int]:
        """Return how many of the first updates have the full size, end the current epoch, and end later epochs.

        An update that ends an epoch is shortened to the rest of the dataset.
        """
        if updates < self._updates_left:
            return updates, 0, 0
        later_ends = int(updates - self._updates_left) // self._updates_per_epoch
        return updates - 1 - later_ends, 1, later_ends


@final
class SimulatedPosition(NamedTuple):
    """How far a simulated training is: what a checkpoint of it would contain."""

    updates: int
    samples: int
    progress: float  # in updates at the reference batch size
    used: int  # samples of the current epoch
    decisions: Decisions  # of the controller: the batch size in effect, and those that follow

    def after(self, updates_alike: EqualUpdates, updates: int, decisions: Decisions) -> SimulatedPosition:
        """Return the position after the first `updates` of some equal updates, with the decisions made by then."""
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
    """The model of a simulation: how long an update takes on a number of devices, and the progress that it makes.

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
            """Return the progress of an update of this size, by the learning-rate rule and the noise before it."""
            noise = self.noise_at(before.progress, before.updates, batch_size)
            reference = self.ref_batchsize or batch_size
            scaling = self.rule(RuleInput(batch_size, reference, before.updates, before.samples, noise))
            return check_number(scaling.progress, f"the progress of {self.rule}", "let the rule return a number >= 0")

        return EqualUpdates(size, self.dataset_size, before.used, partial(self.seconds, devices=devices), progress)

    def seconds(self, batch_size: int, devices: int) -> float:
        """Return the seconds of an update of `batch_size` samples on some devices; each is computed once."""
        key = batch_size, devices
        if key not in self._seconds:
            options = {"spread": self.spread, "fixed_shape": self.fixed_shape}
            self._seconds[key] = self.throughput.seconds(batch_size, devices, self.minibatch_size, **options)
        return self._seconds[key]

    def noise_at(self, progress: float, updates: int, batch_size: int | None) -> Noise | None:
        """Return the gradient noise at a progress, with the gain of an update of this size, or None if not known."""
        if self.noise is None:
            return None
        if batch_size is None or self.ref_batchsize is None:
            return self.noise.at(progress, updates)
        return self.noise.at(progress, updates, self.noise.gain(progress, batch_size, self.ref_batchsize))

    def next_noise(self, progress: float) -> float:
        """Return the first progress after this one at which the noise changes; infinity if there is none."""
        return math.inf if self.noise is None else self.noise.next_change(progress)
