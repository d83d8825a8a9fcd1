"""Every sample of a dataset once, over all ranks: the batch sampler of an evaluation.

An evaluation is a plan of a single step with all samples, in the order of the dataset, and is cut and dealt like the
steps of a training. Only replays differ: they give all ranks the same number of batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import final

import numpy as np
from torch.utils.data import Sampler

from variable_batch_size._validation import IntArray, check_int, suggests
from variable_batch_size.backend.detection import resolve_world, runs_on_xla
from variable_batch_size.data.iteration import INDICES_PER_CHUNK
from variable_batch_size.data.plan.plan import Plan
from variable_batch_size.data.sampler import number_of_samples
from variable_batch_size.trace.batch_trace import BatchTrace


@final
class EvaluationSampler(Sampler[list[int]]):
    """A batch sampler that deals one rank its share of a dataset, for an evaluation.

    Over all ranks, the batches hold every sample of the dataset exactly once, in its order: batch j, of consecutive
    samples, goes to rank j mod W. Every rank has the same number of batches; one without a batch left repeats another,
    which counts as 0 samples. Use it as `DataLoader(dataset, batch_sampler=sampler)`, and compute means with
    `Accumulator(sampler)`, which are exact.

    The models of the ranks must be the same: the running statistics of batch normalization are each rank's own, so call
    `broadcast_parameters(model)` before the evaluation, which copies them from rank 0.

    The n samples are split into ceil(n / `minibatch_size`) batches whose sizes differ by at most one; or, with a fixed
    shape, into full ones and partial ones whose sizes divide `minibatch_size`, in which each sample is repeated, so
    that a mean over the rows is the mean over the samples. It draws no random numbers and knows no position: every
    iteration yields all batches.

    Args:
        dataset_size: number of samples in the dataset, or the dataset.
        num_replicas: number of ranks. Default, together with `rank`: from `torch.distributed` or PyTorch/XLA.
        rank: this rank, `0 <= rank < num_replicas`.
        minibatch_size: maximum number of rows of a batch. With a fixed shape, numbers with many divisors, such as
            powers of two, need the fewest partial batches.
        fixed_shape: whether every batch has exactly `minibatch_size` rows, so that XLA compiles one graph.
            Default: whether this process trains with PyTorch/XLA, as for `CustomSampler`.

    Attributes:
        world: this rank, and the number of ranks.
        passes: number of iterations that were begun.

    Raises:
        TypeError: if a number is not an integer, or the dataset has no length.
        ValueError: if a number is out of range, the dataset is empty, or only one of `num_replicas` and `rank` is
            given.
        RuntimeError: if neither is given, and a launcher has started several processes without an initialized
            `torch.distributed`.

    >>> [list(EvaluationSampler(5, 2, rank, minibatch_size=2, fixed_shape=False)) for rank in (0, 1)]
    [[[0], [3, 4]], [[1, 2], [0]]]
    """

    @suggests
    def __init__(
        self,
        dataset_size: int | Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        minibatch_size: int = 32,
        *,
        fixed_shape: bool | None = None,
    ) -> None:
        """Cut the whole dataset into batches once: each iteration yields those that are dealt to this rank."""
        super().__init__()
        self.world = resolve_world(rank, num_replicas)
        self.passes = 0
        remedy = "pass a dataset with a length and at least one sample"
        size = check_int(number_of_samples(dataset_size), "dataset_size", 1, remedy=remedy)
        fixed_shape = runs_on_xla() if fixed_shape is None else bool(fixed_shape)
        plan = Plan(BatchTrace.constant(size), size, minibatch_size, fixed_shape=fixed_shape)
        self._deal = plan.deal(plan.epoch(0), 0, self.world)
        self._batches = int(self._deal.counts[0])  # over all ranks, without replays

    def __len__(self) -> int:
        """Return the number of batches, which is the same on every rank."""
        return -(-self._batches // self.world.size)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the indices of each batch of this rank."""
        self.passes += 1
        deal = self._deal
        chunk = max(1, INDICES_PER_CHUNK // deal.minibatch_size)  # batches whose indices are computed together
        for begin in range(0, len(self), chunk):
            start, size = self._locate(np.arange(begin, min(begin + chunk, len(self))))  # (batches,) each
            for indices, samples in zip(deal.positions(start, size).tolist(), size.tolist(), strict=True):
                yield indices if deal.fixed_shape else indices[:samples]  # the others are padding

    def samples(self, batch: int) -> int:
        """Return how many samples a batch of this rank stands for: its weight in a mean; 0 for a replay.

        Args:
            batch: its number in the iteration, `0 <= batch < len(sampler)`.
        """
        batch_number = self.world.rank + batch * self.world.size  # over all ranks
        if batch_number >= self._batches:
            return 0
        _, (size,) = self._locate(np.array([batch]))
        return int(size)

    def _locate(self, batches: IntArray) -> tuple[IntArray, IntArray]:
        """Return the first sample of batches of this rank, and their number of distinct samples, (batches,) each.

        Args:
            batches: numbers of the batches in the iteration of this rank, (batches,).
        """
        in_step = np.zeros_like(batches)  # an evaluation is a single step, number 0, with all samples
        return self._deal.microbatches(in_step, batches)
