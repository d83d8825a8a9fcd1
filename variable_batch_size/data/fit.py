"""Fitting the batch into the devices there are: the microbatch that costs least, and the largest that memory holds."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar, final

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from variable_batch_size._validation import MAX_INT, check_int
from variable_batch_size.backend import detect
from variable_batch_size.data.plan import counts

Model = TypeVar("Model", bound=torch.nn.Module)

# What devices say when their memory is exhausted and it is no OutOfMemoryError: the CPU, C++, cuBLAS and cuDNN, XLA.
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "bad_alloc", "_ALLOC_FAILED", "RESOURCE_EXHAUSTED")


@final
class Fit(NamedTuple):
    """How a global batch is computed.

    Attributes:
        minibatch_size: rows of a microbatch.
        rounds: microbatches that the busiest rank computes, one after another.
        microbatches: of the step, over all ranks, replays not counted.
    """

    minibatch_size: int
    rounds: int
    microbatches: int


def fit(global_batch_size: int, max_minibatch_size: int, world_size: int) -> Fit:
    """The microbatch size, up to what memory holds, with which a step of this batch takes the fewest rounds.

    Of several it takes that with the fewest rows computed beyond the batch, where the replays of ranks without a share
    count too: so a small batch is spread over the ranks. Of those that are left it takes the smallest, whose rounds are
    the shortest. With the c microbatches of m rows that the sampler's cut makes of B samples, for W ranks, the three
    are ceil(c / W), m max(c, W) - B, and m.

    Args:
        global_batch_size: samples of a step, any number >= 1.
        max_minibatch_size: rows that fit into a device's memory, as `find_minibatch_size` finds them; all sizes up to
            it are looked at (4096 take a millisecond).
        world_size: ranks.

    Raises:
        ValueError: where one of them is not a whole number from 1 to 2**53.
    """
    batch = check_int(global_batch_size, "global_batch_size", 1, MAX_INT)
    largest = check_int(max_minibatch_size, "max_minibatch_size", 1, MAX_INT)
    world = check_int(world_size, "world_size", 1, MAX_INT)
    cut = counts(batch, min(largest, batch))  # a microbatch larger than the batch has only more rows
    rounds = -(-cut // world)
    sizes = np.flatnonzero(rounds == rounds.min()) + 1
    rows = sizes * np.maximum(cut[sizes - 1], float(world))  # in floats, which do not overflow
    size = int(sizes[rows.argmin()])  # the first one of several
    return Fit(size, int(rounds[size - 1]), int(cut[size - 1]))


def find_minibatch_size(
    model_fn: Callable[[], Model],
    loss_fn: Callable[[Model, Any], Tensor],
    example: Any,
    *,
    start: int = 1,
    limit: int = 65536,
    optimizer_fn: Callable[[Iterable[torch.nn.Parameter]], Optimizer] | None = None,
) -> int:
    """The largest microbatch, in rows, that the device's memory holds, found by trying.

    From `start` the size is doubled until memory is exhausted, then the interval is halved until the answer is known.
    A try makes a model, and computes two microbatches, forward and backward: the second one meets the gradients of
    the first, as in an accumulation. It leaves nothing behind, a failed one neither.

    What the trial does not have it does not count: pass `optimizer_fn` for the optimizer's state (one step is made
    between the two microbatches), and leave room for a further copy of the gradients where their noise is measured,
    as under AdaScale. A CPU's system may end the process instead of refusing memory: pass a `limit` there. Every rank
    of a training has to use the same size, the smallest that its devices hold.

    Args:
        model_fn: makes the model, on its device.
        loss_fn: `loss_fn(model, batch)` is the loss of a batch; it moves the batch to the device if need be.
        example: a batch of one row, which is repeated: a tensor, or a sequence or mapping of such, whose first
            dimension is 1.
        start: rows of the first try; where they do not fit, it goes down from there.
        limit: rows of the largest try.
        optimizer_fn: makes an optimizer from the model's parameters.

    Raises:
        TypeError, ValueError: where `start` or `limit` is no size, or the example no batch of one row.
        MemoryError: where not even one row fits.
        Exception: whatever else the model, the loss or the optimizer raises.
    """
    limit = check_int(limit, "limit", 1)
    size = min(check_int(start, "start", 1), limit)
    fits, too_large, said = 0, limit + 1, None
    while too_large - fits > 1:
        refused = _try(model_fn, loss_fn, example, size, optimizer_fn)
        if refused is None:
            fits = size
        else:
            too_large, said = size, refused
        size = min(2 * fits, limit) if too_large > limit else (fits + too_large) // 2
    if fits == 0:
        raise MemoryError(
            f"a microbatch of one row must fit into memory beside the model, but the device said {said!r:.200}; use a "
            f"smaller model or row, activation checkpointing, or a device with more memory"
        )
    return fits


def _try(
    model_fn: Callable[[], Model],
    loss_fn: Callable[[Model, Any], Tensor],
    example: Any,
    rows: int,
    optimizer_fn: Callable[[Iterable[torch.nn.Parameter]], Optimizer] | None,
) -> str | None:
    """None where memory suffices, else what the device said."""
    said = None
    try:
        _compute(model_fn(), loss_fn, _repeated(example, rows), optimizer_fn)
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        said = str(error).partition("\n")[0] or type(error).__name__
    # Here the exception is gone, and with it the frames that held tensors; on an accelerator, free memory is cached.
    gc.collect()
    torch.accelerator.empty_cache()
    return said


def _compute(
    model: Model,
    loss_fn: Callable[[Model, Any], Tensor],
    batch: Any,
    optimizer_fn: Callable[[Iterable[torch.nn.Parameter]], Optimizer] | None,
) -> None:
    backend = detect(model.parameters())
    optimizer = None if optimizer_fn is None else optimizer_fn(model.parameters())
    for _ in range(2):
        loss = loss_fn(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        backend.host(loss)  # waits for the device, which may be late to say that it cannot
        if optimizer is not None:
            optimizer.step()
            backend.mark_step()


def _repeated(example: Any, rows: int) -> Any:
    """A batch of so many copies of the one row in `example`.

    Raises:
        ValueError: when there is another number of rows in a tensor.
        TypeError: when a leaf is no tensor.
    """
    if isinstance(example, Mapping):
        return {key: _repeated(value, rows) for key, value in example.items()}
    if isinstance(example, (tuple, list)):
        return tuple(_repeated(value, rows) for value in example)
    if not isinstance(example, Tensor):
        raise TypeError(
            f"the example must be made of tensors, in tuples, lists or mappings, got {example!r:.60}; leave out what "
            f"is none, and add it in loss_fn"
        )
    if example.dim() == 0 or len(example) != 1:
        raise ValueError(
            f"the example must be a batch of one row, got a tensor of shape {tuple(example.shape)}; pass tensors whose "
            f"first dimension is 1, as data[:1]"
        )
    return example.repeat(rows, *[1] * (example.dim() - 1))


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return any(text.lower() in str(error).lower() for text in _OUT_OF_MEMORY)
