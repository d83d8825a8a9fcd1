"""What a training will compute, counted without running it: epochs, updates, and the microbatches of any world.

Everything is a function of how often each batch size occurs and of runs of epochs that are alike, so the work grows
with the number of runs in the trace, and not with the number of updates or ranks.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import final

import numpy as np

from variable_batch_size._validation import IntArray, check_int, value_error
from variable_batch_size.data.plan.plan import Epoch, Plan
from variable_batch_size.trace.batch_trace import BatchTrace


@final
@dataclass(frozen=True, slots=True)
class Load:
    """What a world computes in an update of each size.

    Attributes:
        world_size: number of ranks.
        microbatches: microbatches over all ranks, without replays, (sizes,), as all below.
        rounds: microbatches of the busiest rank.
        busiest: rows of all microbatches of the busiest rank.
        rows: rows of the largest microbatch.
        smallest: rows of the smallest one.
        idle: ranks that have no microbatch of their own, and replay one.
        repeated: rows over all ranks that are computed beyond the samples.
    """

    world_size: int
    microbatches: IntArray
    rounds: IntArray
    busiest: IntArray
    rows: IntArray
    smallest: IntArray
    idle: IntArray
    repeated: IntArray

    @property
    def shapes(self) -> tuple[int, ...]:
        """The numbers of rows of all microbatches, in ascending order: PyTorch/XLA compiles a graph for each."""
        return tuple(np.unique(np.concatenate([self.smallest, self.rows])).tolist())


@final
@dataclass(frozen=True, slots=True)
class DryRun:
    """The updates of a training.

    Attributes:
        plan: the training.
        epochs: the first of each run of epochs with equal numbers of steps and samples, and how many there are.
        last: the last epoch, which may be incomplete.
        sizes: the different batch sizes in ascending order, in samples, (sizes,).
        updates: number of updates of each size, (sizes,).
    """

    plan: Plan
    epochs: tuple[tuple[Epoch, int], ...]
    last: Epoch
    sizes: IntArray
    updates: IntArray

    @property
    def ends_early(self) -> bool:
        """Whether the training ends before the end of an epoch."""
        return not self.last.complete

    @property
    def samples(self) -> int:
        """Number of samples of all updates."""
        return self.last.samples_before + self.last.samples

    def load(self, world_size: int, *, spread: bool = True) -> Load:
        """Return what a world computes in an update of each size.

        Args:
            world_size: number of ranks, >= 1.
            spread: whether a batch is split further, so that all ranks have equally many microbatches; the sampler
                does it without a fixed shape, unless the noise is measured or the model has batch normalization.

        Raises:
            TypeError: if `world_size` is not an integer.
            ValueError: if it is not >= 1.
        """
        world = check_int(world_size, "world_size", 1)
        microbatches = self.plan.microbatches(self.sizes, world if spread else 1)  # (sizes,), as all below
        rounds = -(-microbatches // world)  # rounded up
        idle = np.maximum(world - microbatches, 0)
        if self.plan.fixed_shape:
            max_rows = self.plan.minibatch_size
            rows = np.full_like(microbatches, max_rows)
            repeated = (microbatches + idle) * max_rows - self.sizes
            return Load(world, microbatches, rounds, rounds * max_rows, rows, rows, idle, repeated)
        # So many microbatches, the last ones, have a row more than the smallest one.
        smallest, num_larger = np.divmod(self.sizes, microbatches)
        rows = smallest + (num_larger > 0)
        rows_of_busiest = rounds * smallest + -(-num_larger // world)  # the busiest rank has the last microbatch
        # Idle ranks repeat the microbatches from the first on: all of them `turns` times, and then the first `rest`.
        turns, remaining = np.divmod(idle, microbatches)
        repeated = turns * self.sizes + remaining * smallest + np.maximum(remaining - (microbatches - num_larger), 0)
        return Load(world, microbatches, rounds, rows_of_busiest, rows, smallest, idle, repeated)


def dry_run(plan: Plan, epochs: int | None = None) -> DryRun:
    """Count the updates that a training will make of each batch size, and its epochs, without running it.

    Args:
        plan: the training, from its beginning.
        epochs: number of epochs, >= 1; by default it ends by itself.

    Raises:
        TypeError: if `epochs` is not an integer.
        ValueError: if `epochs` is not >= 1; is None, and the training does not end by itself; or the trace ends inside
            an epoch and has `on_end="error"`.
    """
    limit = None if epochs is None else check_int(epochs, "epochs", 1)
    if limit is None and not plan.ends:
        requirement = "epochs must be an integer >= 1, because the trace does not end the training"
        raise value_error(requirement, epochs, "pass a number of epochs, of updates or of samples")
    plan.check_trace(limit)
    runs = tuple(plan.epoch_runs(limit))
    last = plan.epoch(runs[-1][0].number + runs[-1][1] - 1)
    counts = _count_sizes(plan.trace, last.end_step)
    for epoch, num_alike in runs:  # the last update of each epoch may be smaller than the trace says
        last_step = epoch.end_step - 1
        counts[plan.trace.batch_size(last_step)] -= num_alike
        counts[plan.step(epoch, last_step).batch_size] += num_alike
    sizes = sorted(size for size, count in counts.items() if count)
    return DryRun(plan, runs, last, np.array(sizes), np.array([counts[size] for size in sizes]))


def _count_sizes(trace: BatchTrace, end_step: int) -> Counter[int]:
    """Return how often each batch size occurs in the steps of a trace before `end_step`."""
    first_step, size = trace.runs  # (runs,) both
    cycles, rest = divmod(end_step, trace.steps) if trace.on_end == "cycle" and trace.steps else (0, end_step)
    counts: Counter[int] = Counter()
    for times, end in ((cycles, trace.steps or 0), (1, rest)):  # whole cycles, and the steps after them
        if times and end:
            is_used = first_step < end  # (runs,)
            lengths = np.diff(first_step[is_used], append=end)  # (used runs,), in steps
            distinct_sizes, size_index = np.unique(size[is_used], return_inverse=True)  # (sizes,), (used runs,)
            steps_of_size = np.zeros(len(distinct_sizes), np.int64)  # steps of each size
            np.add.at(steps_of_size, size_index, lengths)
            for distinct_size, steps in zip(distinct_sizes, steps_of_size, strict=True):
                counts[int(distinct_size)] += times * int(steps)
    return counts
