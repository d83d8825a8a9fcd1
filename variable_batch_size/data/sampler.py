"""A plan as the `batch_sampler` of a `torch.utils.data.DataLoader`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence, Sized
from typing import Any, NoReturn, final

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from variable_batch_size._validation import check_int, suggests, type_error, value_error
from variable_batch_size.adaptive.adaptive_trace import AdaptiveTrace
from variable_batch_size.adaptive.decided_trace import DecidedTrace, prepare
from variable_batch_size.backend.detection import resolve_world
from variable_batch_size.data.batches import Batches, Split
from variable_batch_size.data.dataset.content import Content
from variable_batch_size.data.dealer import Dealer
from variable_batch_size.data.iteration import Iteration
from variable_batch_size.data.plan.plan import Plan
from variable_batch_size.data.plan.shares import by_speed
from variable_batch_size.data.plan.shuffle import order
from variable_batch_size.data.tokens.budget import budget_of
from variable_batch_size.data.tokens.token_batches import TokenBatches
from variable_batch_size.trace.batch_trace import BatchTrace, OnEnd


def collecting_error(batch_size: int | None) -> ValueError:
    """Return the error of a `DataLoader` that has a `CustomSampler` as `sampler=`."""
    return ValueError(
        f"a CustomSampler yields whole microbatches, but the loader has it as sampler=, and collects "
        f"batch_size={batch_size} of them; pass it as batch_sampler=, and no batch_size, shuffle or drop_last"
    )


def number_of_samples(dataset: object) -> Any:
    """Return the number of samples of a dataset; or the argument itself if it has no length, as it is such a number.

    Raises:
        TypeError: if it is a loader or a string, whose length is not a number of samples.
    """
    if isinstance(dataset, (DataLoader, str)):
        remedy = "pass an integer" if isinstance(dataset, str) else "pass loader.dataset"
        raise type_error("dataset_size must be a number of samples, or the dataset", dataset, remedy)
    is_number = isinstance(dataset, (Tensor, np.ndarray)) and dataset.ndim == 0
    return len(dataset) if isinstance(dataset, Sized) and not is_number else dataset


TraceLike = BatchTrace | AdaptiveTrace | str | os.PathLike[str] | int | Sequence[int]


@final
class CustomSampler(Dealer, Sampler[list[int]]):
    """A batch sampler that deals one rank its microbatches of every update.

    Over all ranks, the microbatches of an update hold exactly the samples of its batch. Use it as
    `DataLoader(dataset, batch_sampler=sampler)`: each item is a list of the indices of one microbatch. A step of B
    samples takes ceil(B / (`minibatch_size` * `num_replicas`)) rounds of microbatches whose sizes differ by at most
    one. Where the result depends on the cut, as with measured noise or batch normalization, there are
    ceil(B / `minibatch_size`) microbatches in every world; with a fixed shape, full ones and a rest in which samples
    are repeated. A rank without a share replays a microbatch, which `CustomOptimizer` weighs with 0.

    Every microbatch must reach `optimizer.step()`, in order. To resume a run, call `load_state_dict`; never skip
    microbatches.

    Args:
        dataset_size: number of samples in the dataset, or the dataset: then eight of its rows, or the indices of a
            `Subset`, are compared between ranks before the first update, and with a restored state.
        trace: path of a CSV file, `BatchTrace`, batch sizes, one batch size, or a schedule `"0:128 2000:256"`, or
            `"0:128 60:640 epochs"`; global batch sizes, in samples. Or an `AdaptiveTrace`, whose controller chooses
            them: the length of an epoch is an estimate then, as if the last batch size stayed.
        num_replicas: number of ranks. Default, together with `rank`: from `torch.distributed` or PyTorch/XLA.
        rank: this rank, `0 <= rank < num_replicas`.
        minibatch_size: maximum number of rows of a microbatch. Default: 32, or any number with `lengths`.
        seed: seed of the shuffle, the same on every rank; 0 <= seed < 2**64.
        shuffle: whether the order of an epoch is a permutation drawn by (seed, epoch), or the dataset's order.
        drop_last: whether a step that exceeds the rest of an epoch becomes the first step of the next one; otherwise it
            is shortened.
        on_end: what follows the last step of the trace: "error", "stop", "hold" or "cycle". Default: what the trace
            says. "stop" ends the training there, also inside an epoch.
        fixed_shape: whether every microbatch has exactly `minibatch_size` rows, so that XLA compiles one graph.
            Default: whether the parameters of the optimizer that attaches live on a device that compiles shapes, xla or
            tpu; False before. A restored state brings its own, because the noise and normalization layers depend on it.
        equal_rounds: whether every rank must compute the same number of microbatches in every step, and no replay, as
            layers and losses that communicate in forward need. A step that breaks it raises ValueError when an epoch
            with it is read; if the trace is constant, now.
        speeds: relative speed of each rank, > 0, the same on every rank; only their ratios count. Default: equal. A
            step of B samples is dealt so that max_r n_r / speeds[r] is least, for n_r samples of rank r; where rounds
            are equal, the ranks have microbatches of unequal sizes. Where the result depends on the cut, and with a
            fixed shape, whole microbatches are dealt in this way; there, equal rounds leave speeds without effect. A
            run may resume with other speeds.
        reproducible: whether updates are bitwise identical on any number of ranks, see "To the last bit" in the
            documentation. Each update is then divided into the microbatches of a run on one rank, and the result
            depends on this division.
        epochs: number of epochs that will be trained, if known: `vbs.remaining_epochs` ends after them. A trace with
            `on_end="error"` that ends before them, or before `max_updates` or `max_samples`, raises now.
        max_updates: number of updates after which the training ends: an iteration ends there, later epochs are empty,
            and `optimizer.done` is True. Updates and samples of epochs that `set_epoch` has skipped count.
        max_samples: number of samples after which it ends; the last update is shortened to it.
        lengths: length of each sample, an array of integers >= 1, (samples,): then batch sizes, the trace,
            `ref_batchsize`, `samples` and `max_samples` are in tokens, and the loss of a microbatch is its mean over
            them. A step begins and ends with the samples whose ends, in the order of the epoch, are nearest to the
            cumulative sums of the trace: each sample comes once an epoch.
        max_tokens: the most tokens that a microbatch holds.
        counts: how many tokens of each sample count in the loss, integers >= 0. Default: `lengths`.
        pad: whether each row of a microbatch is as long as its longest one, so that rows x longest <= `max_tokens`.
        fingerprint: a name of the rows that is compared instead, for a dataset that is slow to read, or has random
            generators of its own.

    Raises:
        TypeError: if a number is not an integer, or `trace` has another type.
        ValueError: if a number is out of range, only one of `num_replicas` and `rank` is given, a batch size of the
            trace exceeds the dataset, the trace is too short, `equal_rounds` are not possible, or `speeds` are not one
            positive number for each rank. The optimizer that attaches raises it for `speeds` on XLA.
        RuntimeError: if neither is given, and a launcher has started several processes without an initialized
            `torch.distributed`.

    >>> sampler = CustomSampler(6, trace=4, num_replicas=1, rank=0, minibatch_size=2, shuffle=False)
    >>> list(sampler)
    [[0, 1], [2, 3], [4, 5]]
    """

    @suggests
    def __init__(
        self,
        dataset_size: int | Sized,
        trace: TraceLike,
        num_replicas: int | None = None,
        rank: int | None = None,
        minibatch_size: int | None = None,
        seed: int = 0,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        on_end: OnEnd | None = None,
        fixed_shape: bool | None = None,
        equal_rounds: bool = False,
        speeds: Sequence[float] | None = None,
        reproducible: bool = False,
        epochs: int | None = None,
        max_updates: int | None = None,
        max_samples: int | None = None,
        fingerprint: str | None = None,
        lengths: Any = None,
        max_tokens: int | None = None,
        counts: Any = None,
        pad: bool = False,
    ) -> None:
        world = resolve_world(rank, num_replicas)
        number = number_of_samples(dataset_size)
        size = number  # in the unit of batch sizes: samples, or tokens with `lengths`
        cut_is_known = fixed_shape is not None  # otherwise the optimizer that attaches decides it by its device
        budget = None
        if lengths is None and not (max_tokens is counts is None and not pad):
            raise value_error("max_tokens=, counts= and pad= need the lengths of the samples", "none", "pass lengths=")
        if lengths is not None:
            if minibatch_size is not None:
                raise value_error("lengths= bounds a microbatch by max_tokens", "minibatch_size= as well", "omit it")
            budget = budget_of(lengths, max_tokens, counts, check_int(number, "dataset_size", 1), pad=pad)
            size, minibatch_size = budget.total, budget.max_tokens
        minibatch_size = 32 if minibatch_size is None else minibatch_size
        fixed_shape = bool(fixed_shape)
        decided = None
        if callable(trace):
            raise type_error(
                "trace must be a batch trace, or an AdaptiveTrace", trace, "put AdaptiveTrace(...) around it"
            )
        if isinstance(trace, AdaptiveTrace):
            if on_end is not None:
                raise value_error("on_end must be left out with a trace that never ends", repr(on_end), "omit it")
            rows = check_int(minibatch_size, "minibatch_size", 1)
            trace = trace if budget is None else budget.limit(trace)
            decided = DecidedTrace.begin(prepare(trace, size), world.size, rows, fixed_shape=fixed_shape)
            batch_trace = decided.trace
        else:
            batch_trace = BatchTrace.of(trace, on_end=on_end, dataset_size=size, drop_last=drop_last)
        plan = Plan(
            trace=batch_trace,
            dataset_size=size,
            minibatch_size=minibatch_size,
            drop_last=drop_last,
            fixed_shape=fixed_shape,
            max_updates=max_updates,
            max_samples=max_samples,
        )
        if on_end == "stop" and plan.trace.steps is None and epochs is None and not plan.ends:
            remedy = "pass epochs=, max_updates= or max_samples="
            raise value_error('on_end="stop" needs a trace with a last step', "one without", remedy)
        seed = check_int(seed, "seed", 0, 2**64 - 1, "take it modulo 2**64")
        order(number, seed, 0, shuffle=shuffle)  # raises if so many samples have no order
        epochs = None if epochs is None else check_int(epochs, "epochs")
        plan.check_trace(epochs)
        split = Split(equal_rounds=equal_rounds, unequal=None if speeds is None else by_speed(speeds, world.size))
        arguments = plan, world, seed, shuffle, split, decided, bool(reproducible)
        batches = Batches(*arguments) if budget is None else TokenBatches(*arguments, budget=budget)
        batches.check_reference(batches.max_batch_size)
        content = Content(None if number is dataset_size else dataset_size, seed, fingerprint).digest
        super().__init__(batches.with_checked_rounds(), epochs=epochs, cut_is_known=cut_is_known, content=content)

    @property
    def seed(self) -> int:
        """The seed of the shuffle."""
        return self.batches.seed

    @property
    def shuffle(self) -> bool:
        """Whether the order of an epoch is a permutation."""
        return self.batches.shuffle

    @property
    def trace(self) -> BatchTrace:
        """The batch trace; of a controller, the batch sizes of the updates so far.

        Raises:
            AttributeError: if a controller has chosen them, and there was no update yet.
        """
        decided = self.batches.decided
        return self.plan.trace if decided is None else decided.so_far(self.position.step)

    @property
    def drop_last(self) -> NoReturn:
        """Refuses to answer a trainer such as Accelerate, which would split each microbatch over the ranks once more.

        Raises:
            RuntimeError: always; `plan.drop_last` is the argument.
        """
        raise RuntimeError(
            "a CustomSampler deals each rank its own microbatches, but they are to be dealt once more, as by "
            "accelerator.prepare(loader); leave the loader out, and move its batches with .to(accelerator.device)"
        )

    def __iter__(self) -> Iteration:
        """Return an iterator over the rest of this epoch, from the last committed update on.

        Raises:
            ValueError: if a `DataLoader` has this sampler as `sampler=`, and would collect several microbatches.
        """
        # Without this, gradients would be wrong silently. A sampler is not told who reads it: the BatchSampler of torch
        # has an attribute batch_size, and that of torchdata gets an argument of this name.
        caller = sys._getframe(1)
        if caller.f_globals.get("__name__", "").partition(".")[0] in ("torch", "torchdata"):
            names = getattr(caller.f_locals.get("self"), "__dict__", {}) | caller.f_locals
            if isinstance(batch_size := names.get("batch_size"), int):
                raise collecting_error(batch_size)
        return Iteration(self.training)

    def __len__(self) -> int:
        """Return how many microbatches an epoch has on this rank, from where its iteration has begun.

        Between two iterations it is the epoch of the next one, or 0 if the training ends. With workers, a loader has
        read the end before the loop is there, so that the last `step()` of an epoch ends it.
        """
        iteration, position = self.training.iteration, self.position
        if iteration is not None and iteration.start.epoch == position.epoch:
            has_ended = iteration.exhausted and self.batches.ends_epoch(position)
            if not has_ended:
                return self.batches.count(iteration.start)
        try:
            return self.batches.count(self.batches.next_update(position))
        except ValueError:  # the trace ends
            return 0
