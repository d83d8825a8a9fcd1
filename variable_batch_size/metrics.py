"""Means of losses and accuracies over exactly the samples of a training or an evaluation, in any world.

A mean over microbatches would be biased: rows repeat in partial microbatches, replays have no samples, and the
microbatches of a discarded step are computed again. Values therefore wait until their step is committed, or their
evaluation is complete, and each is weighted by the number of distinct samples in its microbatch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from variable_batch_size._validation import check_int, suggests
from variable_batch_size.backend import Backend
from variable_batch_size.data.evaluation_sampler import EvaluationSampler
from variable_batch_size.metric_sources import SAMPLES, EvaluationSource, Source, TrainingSource
from variable_batch_size.optim.beside.means import check_mean
from variable_batch_size.optim.checks.consistency import check_names
from variable_batch_size.optim.optimizer import CustomOptimizer
from variable_batch_size.optim.properties import Commit
from variable_batch_size.optim.tensors.arithmetic import WITHOUT_FLOAT64


@final
class _Sum(NamedTuple):
    """The number of some samples, and the sum of a value over them. Immutable: addition creates new tensors."""

    samples: int = 0
    parts: tuple[Any, ...] = ()  # 0-D tensors that add up to the sum: one of float64, or two of float32


@final
class Accumulator:
    """Means over all samples, on all ranks, of the committed updates of an epoch, or of an evaluation.

    mean = sum_j n_j v_j / sum_j n_j over the microbatches j, where n_j is the number of distinct samples of microbatch
    j and v_j is the mean of the value over its rows: the loss, or `(output.argmax(1) == target).float().mean()` for the
    accuracy. Repeated rows do not bias v_j, and a replay has n_j = 0. With `reduction="sum"`, pass sums over the rows
    instead; their sum over the samples is divided by the number of samples. For a mean over tokens, divide the result
    for the loss by the result for the number of tokens. In all other cases, sums and counts over rows would be wrong.

    Call `add` for every microbatch, on every rank and with the same names, for replays too. It never waits for the
    device. Sums are kept in float64, or as pairs of float32 on devices without float64, so that a sum over a million
    microbatches loses no digits.

    During training, call `add` before the `step()` of the microbatch. Values of a step that is discarded, by
    `discard_step()`, `set_epoch()` or `load_state_dict()` of the optimizer, are discarded too, as are values of an
    update that was skipped because the host found a non-finite or too large gradient, although `optimizer.samples`
    counts it; on a device that the host does not read (AdaScale on XLA) such an update is not known, and its values
    count.

    In an evaluation the i-th value of a name belongs to batch i of the sampler. Every pass over the loader starts
    again with no samples, and its values count when every name has one for every batch. On XLA `add` runs the graph of
    the batch.

    Source: `Accumulator` of AdaptDL, Qiao et al. 2021, arXiv 2008.12260.

    Args:
        source: the `CustomOptimizer` of the training loop, or the `EvaluationSampler` that the loader of an evaluation
            reads.
        backend: how the ranks of an evaluation communicate. Default: by PyTorch/XLA or `torch.distributed`, as the
            process does; `LocalBackend()` for an evaluation on one rank alone. An optimizer has its own.

    Raises:
        TypeError: if `source` is neither.
        ValueError: if the sampler deals for another rank or world than the backend's, or an optimizer is given with a
            backend.
    """

    @suggests
    def __init__(self, source: CustomOptimizer | EvaluationSampler, *, backend: Backend | None = None) -> None:
        self._source = _source_of(source, backend)
        self._epoch: int | None = None  # the argument of the last `set_epoch`
        self._stage = 0  # stage of the training at that call
        self._restored: dict[str, tuple[int, float]] = {}  # name -> samples and sum over all ranks, from a checkpoint
        self._committed: dict[str, _Sum] = {}  # sums of this rank since the restore, up to the last commit
        self._pending: dict[str, _Sum] = {}  # the same with the values since that commit, which do not count yet
        if isinstance(source, CustomOptimizer):
            source.register(self)

    def reset(self) -> None:
        """Drop all values, also restored ones, and start again with no samples."""
        self._restored, self._committed, self._epoch = {}, {}, None
        self.discard()

    def set_epoch(self, epoch: int) -> None:
        """Start again with no samples, unless the sums belong to this epoch, as after a restore in the middle of it.

        Call it at the beginning of each epoch, like `set_epoch` of the sampler and the optimizer.
        """
        stage = self._source.stage  # how many samplers the training has had before; each counts epochs from 0
        if (stage, check_int(epoch, "epoch", 0, remedy="count epochs from 0")) != (self._stage, self._epoch):
            self.reset()
            self._stage, self._epoch = stage, epoch

    @torch.no_grad()
    def add(self, **means: Tensor | float) -> None:
        """Add values of the current microbatch. Several calls may add different names.

        Args:
            means: name -> mean of a value over the rows of the microbatch, or their sum if the optimizer's loss is one
                (`reduction="sum"`): a number or a tensor with one element.

        Raises:
            RuntimeError: if all updates of the epoch are committed, or a name already has a value for this microbatch,
                or for every batch of an evaluation.
            TypeError: if a value is neither a number nor a tensor.
            ValueError: if a tensor has not exactly one element, or a name is "samples".
        """
        for name, mean in means.items():
            _check_mean(name, mean)
        if self._source.starts_over():
            self.reset()
        for name, samples in self._source.weigh(means.keys()).items():  # the names, and SAMPLES once a microbatch
            value = means.get(name, 1.0)  # 1.0 for SAMPLES, to count them
            rows = self._source.rows if name in means else 1
            self._pending[name] = self._add_weighted(self._pending.get(name, _Sum()), value, samples, rows)
        if self._source.end_add():
            self._committed = dict(self._pending)

    def read(self) -> dict[str, float]:
        """Return the mean of each name over the samples that count, and under "samples" their number.

        Every rank has to call it: the hosts exchange their sums.

        Raises:
            RuntimeError: on every rank, if ranks have added values under other names, or an evaluation is incomplete.
        """
        sums = self._sums_over_ranks()
        means = {name: total / samples if samples else math.nan for name, (samples, total) in sums.items()}
        return {**means, SAMPLES: sums.get(SAMPLES, (0, 0.0))[0]}

    def state_dict(self) -> dict[str, dict[str, float]]:
        """Return the samples and sums over all ranks, as numbers that do not depend on the world.

        Every rank has to call it: the hosts exchange their sums. Save it with the optimizer's state of the update.

        Raises:
            RuntimeError: as `read` does.
        """
        sums = self._sums_over_ranks().items()
        state = {name: {SAMPLES: samples, "sum": total} for name, (samples, total) in sums}
        if SAMPLES in state and self._epoch is not None:
            state[SAMPLES] |= {"epoch": self._epoch, "stage": self._stage}
        return state

    def load_state_dict(self, state_dict: Mapping[str, Mapping[str, float]]) -> None:
        """Replace the sums by a result of `state_dict()`, which every rank loads. The number of ranks can differ."""
        restored = {name: (int(saved[SAMPLES]), float(saved["sum"])) for name, saved in state_dict.items()}
        self.reset()
        self._restored = restored
        saved_epoch = state_dict.get(SAMPLES, {})
        self._epoch = int(saved_epoch["epoch"]) if "epoch" in saved_epoch else None
        self._stage = int(saved_epoch.get("stage", 0))

    def commit(self, commit: Commit) -> None:
        """Count the values since the last commit, or drop them if their step was skipped. The optimizer calls it."""
        if commit.updated:
            self._committed = dict(self._pending)
        else:
            self.discard()

    def discard(self) -> None:
        """Drop the values since the last commit. The optimizer calls it when a step is discarded."""
        self._pending = dict(self._committed)
        self._source.discard()

    def _add_weighted(self, old: _Sum, mean: Tensor | float, samples: int, rows: int) -> _Sum:
        """Return a sum with one more value of a microbatch.

        Args:
            old: the sum without it; not changed.
            mean: the mean of the value over the rows of the microbatch, or its sum over them.
            samples: number of distinct samples in the microbatch.
            rows: 1 if `mean` is a mean; otherwise the number of rows over which it is a sum.
        """
        num_samples = old.samples + samples
        value = mean.reshape(()) if isinstance(mean, Tensor) else torch.tensor(float(mean), dtype=torch.float64)
        if value.device.type not in WITHOUT_FLOAT64:
            (total,) = old.parts or (torch.zeros((), dtype=torch.float64, device=value.device),)
            # Without samples, in a microbatch that only repeats another, the value may be infinite, and 0 * inf is nan.
            return _Sum(num_samples, (torch.add(total, value, alpha=samples / rows) if samples else total,))
        backend = self._source.backend
        high, low = old.parts or backend.scalars([0.0, 0.0], value)
        weight = torch.as_tensor(backend.scalar(samples / rows, value), dtype=torch.float32)
        weighted = torch.where(weight > 0, value * weight, 0.0)
        return _Sum(num_samples, compensated_add(high, low, weighted))

    def _sums_over_ranks(self) -> dict[str, tuple[int, float]]:
        """Return name -> number of samples and sum of the value, over all ranks, with those of the checkpoint.

        Raises:
            RuntimeError: on every rank, if a rank lacks values, or ranks have added values under other names.
        """
        committed = dict(sorted(self._committed.items()))
        sums_of_rank = [(name, sums.samples, self._to_float(sums.parts)) for name, sums in committed.items()]
        message = json.dumps([self._source.count_missing(), sums_of_rank])
        by_rank = [json.loads(text) for text in self._source.agreement.gather("Accumulator.read()", message)]
        for rank, (missing, _) in enumerate(by_rank):
            if missing:
                raise RuntimeError(
                    f"each name needs a value for every batch, but rank {rank} lacks {missing}; read after a loop over "
                    "the whole loader, or call reset() to start again (for fewer samples, use a "
                    "torch.utils.data.Subset)"
                )
        check_names("add()", [[name for name, *_ in rows] for _, rows in by_rank])
        sums = dict(self._restored)
        for _, rows in by_rank:
            for name, samples, total in rows:
                samples_before, total_before = sums.get(name, (0, 0.0))
                sums[name] = samples_before + samples, total_before + total
        return sums

    def _to_float(self, parts: Sequence[Tensor]) -> float:
        """Return the number that the tensors add up to; waits for the device."""
        return sum((self._source.backend.host(part).double().item() for part in parts), 0.0)


def _source_of(source: object, backend: Backend | None) -> Source:
    """Return the object that tells to which microbatch a value belongs, for an optimizer or an evaluation's sampler."""
    if isinstance(source, EvaluationSampler):
        return EvaluationSource(source, backend)
    if not isinstance(source, CustomOptimizer):
        raise TypeError(
            f"an Accumulator needs the vbs.CustomOptimizer of the training loop or the vbs.EvaluationSampler of an "
            f"evaluation, got {type(source).__name__}; pass the wrapper, not the inner optimizer or its sampler"
        )
    if backend is not None:
        raise ValueError(
            f"an Accumulator for training uses the backend of the optimizer, got backend={type(backend).__name__}; "
            f"omit it"
        )
    return TrainingSource(source)


def _check_mean(name: str, mean: Tensor | float) -> None:
    """Raise TypeError or ValueError unless a name and its value may be passed to `Accumulator.add`."""
    if name == SAMPLES:
        raise ValueError(
            f"the name {SAMPLES!r} is reserved for the number of samples, which is counted by itself; choose another "
            f"name"
        )
    check_mean(name, mean)


def compensated_add(high: Tensor, low: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return high + low + value as a pair (high, low) again: two numbers whose sum has twice the digits of one.

    It replaces float64 on devices without it. All are 0-D tensors of float32.

    Source: Knuth, The Art of Computer Programming, volume 2, section 4.2.2, theorem B.
    """
    total = high + value
    added = total - high  # what `total` has of `value` after rounding
    return total, low + ((high - (total - added)) + (value - added))
