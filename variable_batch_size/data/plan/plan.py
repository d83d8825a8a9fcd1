"""Which samples make up which update: a pure function of trace, dataset size and epoch.

A plan knows no device, seed or order of samples: its positions `0 .. samples - 1` are places in the order of an epoch.
`Plan.step` describes one update; `Plan.deal`, which is fast, thousands at once. A test checks that they are the same.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, final

import numpy as np

from variable_batch_size._validation import MAX_INT, IntArray, check_int
from variable_batch_size.data.plan.deal import Deal, Dealing, Step
from variable_batch_size.data.plan.state import Past
from variable_batch_size.microbatching import count_microbatches, cut
from variable_batch_size.trace.batch_trace import BatchTrace
from variable_batch_size.world import World

_SIMPLE = Dealing()
STEPS_PER_DEAL = 4096  # large enough for NumPy to be fast, small enough for the first microbatch to be ready soon


@final
@dataclass(frozen=True, slots=True)
class Epoch:
    """A pass through the dataset, or the part of it before the training ends.

    It consists of the steps `first_step .. end_step - 1` of the trace.

    Attributes:
        number: number of the epoch, from 0.
        first_step: its first step in the trace.
        end_step: the step after its last one.
        samples: number of samples of the dataset that all its steps use.
        trace_offset: sum of the batch sizes of the trace before `first_step`. It exceeds `samples_before` where steps
            were shortened.
        samples_before: number of samples of all earlier epochs.
        complete: whether the epoch ends with the dataset, and not where the training ends.
        known_from: the first step whose samples are known. After a resume it may lie within the epoch: an update that
            an end of the training had shortened does not fit the trace, so that steps before it cannot be planned.
    """

    number: int
    first_step: int
    end_step: int
    samples: int
    trace_offset: int
    samples_before: int
    complete: bool = True
    known_from: int = 0

    @property
    def updates(self) -> int:
        """The number of its steps."""
        return self.end_step - self.first_step


@final
@dataclass(frozen=True)
class Plan:
    """Which samples make up which update; independent of world, seed and device.

    Args:
        trace: step -> global batch size, in samples.
        dataset_size: samples of an epoch, >= 1.
        minibatch_size: maximum number of rows of a microbatch, >= 1.
        drop_last: whether a step that exceeds the rest of an epoch becomes the first step of the next one, so that the
            tail of the epoch is not used; otherwise the step is shortened.
        fixed_shape: whether every microbatch has exactly `minibatch_size` rows.
        begin: the epoch in which a resumed run began, with which the plan begins; None: epoch 0 of the trace.
        max_updates: number of updates after which the training ends, >= 1; None: no such end. A trace with
            `on_end="stop"` ends it after its last step, too.
        max_samples: number of samples after which it ends, >= 1; the last update is shortened to it.

    Raises:
        TypeError: if a number is not an integer.
        ValueError: if a number is < 1, or the trace has a batch size larger than the dataset.
    """

    trace: BatchTrace
    dataset_size: int
    minibatch_size: int
    drop_last: bool = False
    fixed_shape: bool = True
    begin: Epoch | None = None
    max_updates: int | None = None
    max_samples: int | None = None
    _past: Past = field(init=False, repr=False, compare=False)
    _endless_trace: BatchTrace = field(init=False, repr=False, compare=False)  # the trace, as if it never ended
    _latest: list[Epoch] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the arguments, and derive the trace that never ends, with which steps beyond its end are counted."""
        for name in ("dataset_size", "minibatch_size", "max_updates", "max_samples"):
            if not (name.startswith("max") and getattr(self, name) is None):
                number = check_int(getattr(self, name), name, 1, MAX_INT, remedy="pass a positive integer")
                object.__setattr__(self, name, number)
        if self.trace.max_batch_size > self.dataset_size:
            raise ValueError(
                f"every batch size of the trace must be at most the dataset's size of {self.dataset_size} samples, but "
                f"the trace has a batch size of {self.trace.max_batch_size}; use a larger dataset or limit the trace"
            )
        object.__setattr__(self, "_past", Past(self.trace))
        ends = self.trace.on_end in ("error", "stop")
        object.__setattr__(self, "_endless_trace", self.trace.with_on_end("hold") if ends else self.trace)

    @property
    def first_epoch(self) -> int:
        """The number of the first epoch that the plan knows."""
        return 0 if self.begin is None else self.begin.number

    def past(self, step: int) -> str:
        """Return a hash of the batch sizes before a step, to check that the trace of a restored run has the same past.

        Raises:
            ValueError: if the trace ends earlier and has `on_end="error"`.
        """
        self._check_trace_reaches(step)
        return self._past.fingerprint(step)

    def resume(self, state: dict[str, Any]) -> Plan:
        """Return the plan of a run that resumes at a saved position: it begins with the epoch of that position.

        The state, and not the trace, tells what lies before the saved step, because the trace may be another one after
        it: the first step of the epoch, how many samples this and earlier epochs have used, and whether the epoch has
        ended with the dataset. If the saved run ended within the epoch, by `max_updates` or so, the epoch continues.

        Args:
            state: what `Batches.position_state` returned, and "fixed_shape".

        Raises:
            ValueError: if the trace ends before the step; or inside the epoch, and has `on_end="error"`.
        """
        keys = "epoch", "step", "first_step", "samples_before", "epoch_samples"
        number, step, first_step, samples_before, epoch_samples = (check_int(state[key], key, 0) for key in keys)
        self._check_trace_reaches(step)
        complete = bool(state["ended"])
        offset = self._endless_trace.offset(first_step)
        known_from = first_step
        # If the saved run had an end, that may have shortened the last update. Then the batch sizes of the trace before
        # the step sum to more than the samples used. The epoch continues as if the excess lay before it. An update
        # has at least one sample: fewer samples than updates have another reason.
        excess = self._endless_trace.offset(step) - offset - epoch_samples
        if excess and not complete and epoch_samples >= step - first_step:
            offset += excess
            known_from = step
        begin = Epoch(number, first_step, step, epoch_samples, offset, samples_before, complete)
        if not (complete or self._ends_at(step, samples_before + epoch_samples)):
            through = None if self.ends else number
            begin = self._next_epoch(number, first_step, samples_before, offset, through=through)
        return replace(self, fixed_shape=bool(state["fixed_shape"]), begin=replace(begin, known_from=known_from))

    def epoch(self, number: int) -> Epoch:
        """Return which steps of the trace make up epoch `number`: the epochs follow one another along the trace.

        An epoch after the end of the training has no steps.

        Raises:
            ValueError: if the number is negative, the epoch lies before that of `begin`, or the trace ends inside the
                epoch and has `on_end="error"`.
        """
        if self._latest and self._latest[0].number == number:  # nearly always: callers stay in an epoch
            return self._latest[0]
        if number < 0:
            raise ValueError(f"an epoch must be an integer >= 0, got {number}; count epochs from 0")
        if number < self.first_epoch:
            raise ValueError(
                f"the plan of a run that was resumed, or whose trace grows, knows its epochs from {self.first_epoch} "
                f"on, got epoch {number}; ask for a later one, or load an earlier state"
            )
        return self._walk_to_epoch(number, through=None if self.ends else number)

    def _walk_to_epoch(self, number: int, through: int | None) -> Epoch:
        """Return epoch `number`, and store it as the one that was asked for last.

        Where an epoch begins depends on all epochs before it. So it goes through them, from the epoch that was asked
        for last or, if that is a later one, from the first one.

        Args:
            number: number of the epoch.
            through: as for `_next_epoch`.
        """
        epoch = self._latest[0] if self._latest else None  # read once: a loader's thread may replace it
        if epoch is None or epoch.number > number:
            epoch = self.begin or self._next_epoch(0, 0, 0, through=through)
        while epoch.number < number:
            if self.ends_with(epoch):  # the training has ended: all later epochs are empty
                offset = self._endless_trace.offset(epoch.end_step)
                samples_before = epoch.samples_before + epoch.samples
                epoch = Epoch(number, epoch.end_step, epoch.end_step, 0, offset, samples_before, complete=False)
            else:  # skip all epochs that are alike at once
                num_alike = self._count_alike(epoch, number - epoch.number)
                first_step = epoch.first_step + num_alike * epoch.updates
                samples_before = epoch.samples_before + num_alike * epoch.samples
                epoch = self._next_epoch(epoch.number + num_alike, first_step, samples_before, through=through)
        self._latest[:] = [epoch]
        return epoch

    def epoch_runs(self, epochs: int | None) -> Iterator[tuple[Epoch, int]]:
        """Yield each run of epochs with equal numbers of steps and samples: its first epoch, and how many it has.

        So a caller need not go through the epochs one by one, of which there may be millions.

        Args:
            epochs: number of epochs, >= 1; None: until the training ends, which it has to do by itself.
        """
        epoch_number = self.first_epoch
        while epoch_number != epochs:
            epoch = self.epoch(epoch_number)
            epochs_left = epochs - epoch_number if epochs else 2**53  # without `epochs`, more than any training has
            num_alike = 1 if self.ends_with(epoch) else self._count_alike(epoch, epochs_left)
            yield epoch, num_alike
            epoch_number += num_alike
            if self.ends_with(self.epoch(epoch_number - 1)):
                return

    def check_trace(self, epochs: int | None) -> None:
        """Check that a trace with `on_end="error"` lasts until the training ends, if its end is known.

        Args:
            epochs: number of epochs of the training, if known.

        Raises:
            ValueError: if the trace ends before.
        """
        steps = self.trace.steps
        if steps is None or self.trace.on_end != "error" or not (epochs or self.ends):
            return
        if self.max_updates is None or self.max_updates > steps:
            # An epoch has at least one step, so without a number of epochs the training ends in these.
            last_epoch = epochs - 1 if epochs else self.first_epoch + steps
            # Raises the error if an epoch on the way needs steps that the trace does not have.
            self._walk_to_epoch(max(self.first_epoch, last_epoch), through=epochs - 1 if epochs else None)

    def ends_with(self, epoch: Epoch) -> bool:
        """Return whether the training ends with this epoch, or has ended before."""
        return self._ends_at(epoch.end_step, epoch.samples_before + epoch.samples)

    @property
    def ends(self) -> bool:
        """Whether the training ends by itself."""
        return self._end_step is not None or self.max_samples is not None

    def fraction(self, epoch: Epoch, step: int, epochs: int | None) -> float:
        """Return which fraction of the training lies before a step, in [0, 1]; 0 if its end is not known.

        Args:
            epoch: the epoch of the step.
            step: the step.
            epochs: number of epochs of the training, if known.
        """
        samples = self.samples_before(epoch, step)
        fractions = [0.0]  # of each limit that may end the training; the one that comes first has the largest
        if self._end_step is not None:
            fractions.append(step / self._end_step)
        if self.max_samples is not None:
            fractions.append(samples / self.max_samples)
        if epochs:
            fractions.append(self.epochs_before(epoch, step) / epochs)
        return min(1.0, max(fractions))

    def epochs_before(self, epoch: Epoch, step: int) -> float:
        """Return how many epochs lie before a step, with the fraction of the samples of its own epoch that are used.

        Args:
            epoch: the epoch of the step.
            step: the step, a number in the trace.
        """
        used_samples = self.samples_before(epoch, step) - epoch.samples_before
        return epoch.number + used_samples / self.whole_samples(epoch)

    def updates_in(self, epochs: float) -> int:
        """Return how many updates a number of epochs > 0 has; it may be a fraction, which is reached in samples."""
        epoch = self.epoch(math.ceil(epochs) - 1)
        steps = range(epoch.first_step, epoch.end_step)
        target_epochs = round(epochs, 9)  # a product such as 0.1 * 3 exceeds 0.3, which would cost one more update
        return epoch.first_step + bisect_left(steps, target_epochs, key=lambda step: self.epochs_before(epoch, step))

    def ends_whatever_follows(self, epoch: Epoch) -> bool:
        """Return whether an epoch ends before the step `end_step`, whatever batch size that step gets.

        It does if it has used the whole dataset, or if the training ends there. With `drop_last` and samples left over,
        the batch size of that step decides: the step still belongs to the epoch if enough samples are left for it.
        """
        return epoch.samples == self.dataset_size or self.ends_with(epoch)

    def whole_samples(self, epoch: Epoch) -> int:
        """Return the number of samples that an epoch would have if the training did not end in it."""
        return epoch.samples if epoch.complete else self._whole_epoch(epoch.trace_offset)[1]

    def _ends_at(self, step: int, samples: int) -> bool:
        """Return whether the training has ended before a step; `samples`: number of samples of all earlier steps."""
        too_many_steps = self._end_step is not None and step >= self._end_step
        return too_many_steps or (self.max_samples is not None and samples >= self.max_samples)

    @property
    def _end_step(self) -> int | None:
        """The step before which the training ends at the latest, by `max_updates` or with its trace; or None."""
        possible_ends = [self.max_updates, self.trace.steps if self.trace.on_end == "stop" else None]
        return min((end for end in possible_ends if end is not None), default=None)

    def _count_alike(self, epoch: Epoch, most: int) -> int:
        """Return how many epochs from `epoch` on, at most `most`, have the same numbers of steps and samples.

        So callers can skip many epochs at once. They are alike until the batch size changes, or the training ends.
        """
        if epoch is self.begin:  # a run with another trace, or another end, may have made it: later ones may differ
            return 1
        steps = epoch.updates
        limits = [most]  # numbers of epochs; the smallest one is the result
        change = self.trace.constant_until(epoch.first_step)  # the next step with another batch size, None without one
        if change is not None:
            # The steps whose sizes decide where an epoch ends: with drop_last one more than it has. All of them must
            # come before the change.
            deciding_steps = -(-self.dataset_size // self.trace.batch_size(epoch.first_step))  # rounded up
            limits.append((change - epoch.first_step - deciding_steps) // steps + 1)
        if self._end_step is not None:
            limits.append((self._end_step - epoch.first_step) // steps)
        if self.max_samples is not None:
            limits.append((self.max_samples - epoch.samples_before) // epoch.samples)
        return max(1, min(limits))

    def _next_epoch(
        self, number: int, first_step: int, samples_before: int, offset: int | None = None, *, through: int | None
    ) -> Epoch:
        """Return the epoch that begins at `first_step`: it ends with the dataset, or where the training ends.

        Args:
            number: number of the epoch.
            first_step: its first step.
            samples_before: number of samples of earlier epochs.
            offset: its `Epoch.trace_offset`. Default: the sum of the batch sizes before `first_step`; it is larger if
                an update of this epoch was shortened.
            through: the last epoch of the training, if it is known, for the error about a trace that is too short.

        Raises:
            ValueError: if the trace ends inside the epoch and has `on_end="error"`.
        """
        trace = self._endless_trace
        offset = trace.offset(first_step) if offset is None else offset
        if self._ends_at(first_step, samples_before):
            return Epoch(number, first_step, first_step, 0, offset, samples_before, complete=False)
        end_sample = offset + self.dataset_size
        whole_end_step, whole_samples = self._whole_epoch(offset)
        end_step, samples = whole_end_step, whole_samples
        if self.max_samples is not None:
            samples = min(whole_samples, self.max_samples - samples_before)
        if samples < whole_samples:
            end_step = trace.step_at(offset + samples - 1) + 1  # after the step that has the last of these samples
        if self._end_step is not None and self._end_step < end_step:
            end_step = self._end_step
            samples = trace.offset(end_step) - offset
        complete = (end_step, samples) == (whole_end_step, whole_samples)
        trace_steps = self.trace.steps if self.trace.on_end == "error" else None
        if trace_steps is not None and self.trace.total_samples < end_sample:  # the trace ends inside the epoch
            if end_step > trace_steps or not self._ends_at(end_step, samples_before + samples):
                raise self._too_short(number, first_step, samples_before, offset, through)
            complete = False  # the next step might belong to it
        return Epoch(number, first_step, end_step, samples, offset, samples_before, complete)

    def _whole_epoch(self, offset: int) -> tuple[int, int]:
        """Return the end step and the number of samples that an epoch would have if the training did not end in it.

        The end step is the number of the first step after the epoch.

        Args:
            offset: samples that the trace has before the first step of the epoch, `Epoch.trace_offset`.
        """
        trace = self._endless_trace  # as if the trace had no end
        end_sample = offset + self.dataset_size
        end_step = trace.step_at(end_sample - 1) + 1
        last_step_is_incomplete = trace.offset(end_step) > end_sample
        if self.drop_last and last_step_is_incomplete:
            end_step -= 1
        return end_step, min(self.dataset_size, trace.offset(end_step) - offset)

    def _check_trace_reaches(self, step: int) -> None:
        """Raise ValueError if the trace ends before a step that a saved run has reached."""
        trace = self.trace
        if trace.steps is not None and trace.on_end in ("error", "stop") and step > trace.steps:
            raise ValueError(
                f"the trace must have the steps that were trained, but it has {trace.steps} and the state is at step "
                f'{step}; pass the trace of the saved run, or on_end="hold" or on_end="cycle"'
            )

    def _too_short(self, number: int, first_step: int, before: int, offset: int, through: int | None) -> ValueError:
        """Return the error about a trace that ends inside an epoch: it names how much is missing up to the end.

        Args:
            number: number of the epoch.
            first_step: its first step.
            before: number of samples of earlier epochs.
            offset: its `Epoch.trace_offset`.
            through: the last epoch of the training, if it is known.
        """
        in_trace = self.trace.total_samples - offset  # samples of the epoch for which the trace has steps
        missing_samples = []  # how many are missing before an end of the training, and that end; the smallest is named
        missing = []  # phrases of the message
        if self.max_samples is not None:
            missing_samples.append((self.max_samples - before - in_trace, f"max_samples={self.max_samples}"))
        if through is not None:
            up_to_end = (through - number + 1) * self.dataset_size
            missing_samples.append((up_to_end - in_trace, f"the end of epoch {through}"))
        if missing_samples:
            missing.append("{} samples before {}".format(*min(missing_samples)))
        if self.max_updates is not None:
            missing.append(f"{self.max_updates - len(self.trace)} updates before max_updates={self.max_updates}")
        steps, begin, what_is_missing = len(self.trace), first_step, " and ".join(missing)
        return ValueError(
            f"the trace must last longer, but its {steps} steps end in epoch {number}, which begins at step {begin}, "
            f'{what_is_missing}; add steps (shortened ones count), or pass on_end="stop", "hold" or "cycle"'
        )

    def step(self, epoch: Epoch, number: int, dealing: Dealing = _SIMPLE) -> Step:
        """Return update `number` of the trace: its samples, and how they are cut into microbatches.

        Args:
            epoch: the epoch in which the update lies.
            number: number of the update in the trace.
            dealing: how steps are split into microbatches, and these are dealt to ranks.
        """
        minibatch_size, fixed_shape = self.minibatch_size, self.fixed_shape
        start = self._endless_trace.offset(number) - epoch.trace_offset  # position in the epoch's order
        batch_size = min(self.trace.batch_size(number), epoch.samples - start)
        step_cut = cut(batch_size, minibatch_size, fixed_shape=fixed_shape, multiple_of=dealing.multiple_of)
        return Step(number, batch_size, start, minibatch_size, step_cut, fixed_shape, dealing)

    def samples_before(self, epoch: Epoch, number: int) -> int:
        """Return how many samples all updates before step `number` use, over all epochs and ranks.

        Args:
            epoch: the epoch of the step.
            number: number of the step in the trace.
        """
        return epoch.samples_before + min(epoch.samples, self._endless_trace.offset(number) - epoch.trace_offset)

    def deal(
        self, epoch: Epoch, first_step: int, world: World, dealing: Dealing = _SIMPLE, end_step: int = MAX_INT
    ) -> Deal:
        """Return a rank's microbatches in the next `STEPS_PER_DEAL` steps of `epoch`, up to its end or `end_step`.

        It does for many steps what `step` does for one, with arrays of shape (steps,).

        Args:
            epoch: the epoch.
            first_step: the first step.
            world: the rank, and the number of ranks.
            dealing: how steps are split into microbatches, and these are dealt to ranks.
            end_step: the step before which it ends, if its batch size is not known yet.
        """
        steps = np.arange(first_step, min(end_step, epoch.end_step, first_step + STEPS_PER_DEAL))
        start = self._endless_trace.offset(first_step) - epoch.trace_offset
        ends = np.minimum(start + np.cumsum(self.trace.batch_sizes(steps)), epoch.samples)
        starts = np.concatenate(([start], ends[:-1]))
        sizes = ends - starts
        if dealing.shares_samples:  # the share of the rank counts as a step, in a world of one rank
            share = dealing.share(sizes, self.minibatch_size, world)
            rounds = share.microbatches + share.replays
            world = World()
            dealing = _SIMPLE
            starts = starts + share.start
            sizes = np.maximum(1, share.samples)  # a rank without samples repeats one, with weight 0
            counts = np.maximum(1, share.microbatches)
            replays = share.replays
        else:
            counts = self.microbatches(sizes, dealing.multiple_of)
            replays = dealing.replays(counts, world)
            rounds = np.maximum(1, dealing.count_dealt(counts, world) + replays)
        ends = np.cumsum(rounds)  # now in microbatches, and not in samples
        cut_by = (self.minibatch_size, self.fixed_shape, dealing)
        return Deal(first_step, ends, counts, starts, sizes, replays, world, *cut_by)

    def deals(
        self, epoch: Epoch, first_step: int, world: World, dealing: Dealing, end_step: int = MAX_INT
    ) -> Iterator[Deal]:
        """Yield the microbatches of one rank from `first_step` to the end of `epoch`, for thousands of steps at a time.

        Arguments are as for `deal`.
        """
        for step in range(first_step, min(end_step, epoch.end_step), STEPS_PER_DEAL):
            yield self.deal(epoch, step, world, dealing, end_step)

    def microbatches(self, batch_sizes: IntArray, multiple_of: int) -> IntArray:
        """Return the number of microbatches into which each step of these sizes is cut, over all ranks, (steps,).

        Args:
            batch_sizes: samples of each step, (steps,).
            multiple_of: the numbers are multiples of this number, where a step has as many samples.
        """
        return count_microbatches(
            batch_sizes, self.minibatch_size, fixed_shape=self.fixed_shape, multiple_of=multiple_of
        )

    def count(self, epoch: Epoch, first_step: int, world: World, dealing: Dealing) -> int:
        """Return how many microbatches one rank computes from `first_step` to the end of `epoch`.

        Args:
            epoch: the epoch.
            first_step: the first step.
            world: the rank, and the number of ranks.
            dealing: how steps are split into microbatches, and these are dealt to ranks.
        """
        return sum(map(len, self.deals(epoch, first_step, world, dealing)))
