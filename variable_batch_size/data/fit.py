"""Fit a batch into the available devices: the cheapest microbatch size, and the largest one that memory holds."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar, final

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from variable_batch_size._validation import MAX_INT, check_int, type_error, value_error
from variable_batch_size.backend import current_world, detect
from variable_batch_size.backend.detection import runs_on_xla
from variable_batch_size.data.streams import rows
from variable_batch_size.microbatching import microbatch_counts

Model = TypeVar("Model", bound=torch.nn.Module)

# Messages of exhausted memory that come without an OutOfMemoryError: from the CPU, C++, cuBLAS, cuDNN and XLA.
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "bad_alloc", "_alloc_failed", "resource_exhausted")


@final
class BatchFit(NamedTuple):
    """How a global batch is computed.

    Attributes:
        minibatch_size: rows of a microbatch.
        rounds: number of microbatches that the busiest rank computes, one after another.
        microbatches: number of microbatches of the step over all ranks, without replays.
    """

    minibatch_size: int
    rounds: int
    microbatches: int


def fit_batch(
    global_batch_size: int, max_minibatch_size: int, world_size: int, *, fixed_shape: bool | None = None
) -> BatchFit:
    """Return the microbatch size, up to what memory holds, with which a step of this batch takes the fewest rounds.

    Ties are broken by the fewest rows computed beyond the batch, including the replays of ranks without a share, so
    that a small batch is spread over the ranks; then by the smallest microbatch, whose rounds are the shortest. If B
    samples are split into c microbatches, for W ranks, the first criterion is ceil(c / W). With a fixed shape of m rows
    the second one is m max(c, W) - B; otherwise it does not depend on m, because `CustomSampler` splits a step of so
    many rounds into min(B, W rounds) microbatches. If the noise is measured, it makes ceil(B / m) of them, in as many
    rounds.

    Args:
        global_batch_size: B, samples of a step.
        max_minibatch_size: rows that fit into the memory of a device, see `find_minibatch_size`. All sizes up to it are
            compared (4096 sizes take about a millisecond).
        world_size: W, number of ranks.
        fixed_shape: as for `CustomSampler`. Default: whether this process trains with PyTorch/XLA.

    Raises:
        TypeError: if an argument is not an integer.
        ValueError: if an argument is not in [1, 2**53].

    >>> fit_batch(200, max_minibatch_size=48, world_size=3, fixed_shape=True)
    BatchFit(minibatch_size=40, rounds=2, microbatches=5)
    >>> fit_batch(200, max_minibatch_size=48, world_size=3, fixed_shape=False)
    BatchFit(minibatch_size=34, rounds=2, microbatches=6)
    """
    batch = check_int(global_batch_size, "global_batch_size", 1, MAX_INT)
    largest = check_int(max_minibatch_size, "max_minibatch_size", 1, MAX_INT)
    world = check_int(world_size, "world_size", 1, MAX_INT)
    fixed = runs_on_xla() if fixed_shape is None else fixed_shape
    # Microbatches of a step, if each has at most 1, 2, ... rows, (sizes,). More rows than the batch are of no use.
    microbatches = microbatch_counts(batch, min(largest, batch), fixed_shape=fixed)
    rounds = -(-microbatches // world)  # (sizes,)
    sizes = np.flatnonzero(rounds == rounds.min()) + 1  # (candidates,), those with the fewest rounds
    # Rows that all ranks compute, with replays, (candidates,); float64 does not overflow.
    rows_computed = sizes * np.maximum(microbatches[sizes - 1], float(world))
    size = int(sizes[rows_computed.argmin() if fixed else 0])  # the smallest one of several
    fewest = int(rounds[size - 1])
    return BatchFit(size, fewest, int(microbatches[size - 1]) if fixed else min(batch, world * fewest))


def find_minibatch_size(
    model_fn: Callable[[], Model],
    loss_fn: Callable[[Model, Any], Tensor],
    example: Any,
    *,
    start: int = 1,
    limit: int = 65536,
    optimizer_fn: Callable[[Iterable[torch.nn.Parameter]], Optimizer] | None = None,
) -> int:
    """Return the largest microbatch, in rows, that the memory of the device holds, by trial.

    The size is doubled from `start` until memory is exhausted; then the interval is bisected. A trial creates a model
    and runs forward and backward on two microbatches, the second one beside the gradients of the first, as in an
    accumulation. Trials release their memory, also failed ones; torch's random generators stay.

    Only what a trial allocates is counted: pass `optimizer_fn` to include the state of the optimizer (it steps once
    between the two microbatches), and leave room for another copy of the gradients if the noise is measured, as
    AdaScale does. On a CPU, the operating system can kill the process instead of raising an error: pass a `limit`
    there. Every rank must use the same size, the smallest that fits on all devices.

    Args:
        model_fn: creates the model, on its device.
        loss_fn: `loss_fn(model, batch)` returns the loss of a batch; it moves the batch to the device if necessary.
        example: a batch of one row, which is repeated: a tensor, or a tuple, list or mapping of tensors, whose first
            dimension is 1.
        start: rows of the first trial.
        limit: maximum rows of a trial.
        optimizer_fn: creates an optimizer from the parameters of the model.

    Raises:
        TypeError: if `model_fn` is a model, `start` or `limit` is not an integer, or the example has no rows.
        ValueError: if `start` or `limit` is < 1, or the example does not have one row.
        MemoryError: if not even one row fits.
        Exception: any other exception of the model, the loss or the optimizer.
    """
    if isinstance(model_fn, torch.nn.Module) or not callable(model_fn):
        requirement = "model_fn must be a function that creates the model of each trial"
        raise type_error(requirement, model_fn, "pass one, such as lambda: Model().to(device)")
    limit = check_int(limit, "limit", 1)
    trial_rows = min(check_int(start, "start", 1), limit)
    num_rows = rows.count_rows(example)
    if num_rows != 1:
        raise value_error("the example must be a batch of one row", f"{num_rows} rows", "pass one, as data[:1]")
    largest_fitting, smallest_failing = 0, limit + 1  # in rows, as far as known
    message = ""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    devices = [] if accelerator is None else [torch.accelerator.current_device_index()]
    device_type = "cuda" if accelerator is None else accelerator.type
    while smallest_failing - largest_fitting > 1:
        try:
            with torch.random.fork_rng(devices, device_type=device_type):
                _try_batch(model_fn(), loss_fn, rows.take_rows(example, np.zeros(trial_rows, np.int64)), optimizer_fn)
            largest_fitting = trial_rows
        except (MemoryError, RuntimeError) as error:
            message = str(error).partition("\n")[0] or type(error).__name__
            names_memory = any(text in f"{error}".lower() for text in _OUT_OF_MEMORY)
            if not names_memory and not isinstance(error, (MemoryError, torch.OutOfMemoryError)):
                raise
            smallest_failing = trial_rows
        gc.collect()  # the exception, which is deleted by now, had frames with tensors
        torch.accelerator.empty_cache()  # accelerators keep free memory
        nothing_failed = smallest_failing > limit
        trial_rows = min(2 * largest_fitting, limit) if nothing_failed else (largest_fitting + smallest_failing) // 2
    if largest_fitting == 0:
        raise MemoryError(
            f"a microbatch of one row must fit into memory beside the model, but the device raised {message!r:.200}; "
            f"use a smaller model or row, activation checkpointing, or a device with more memory"
        )
    return largest_fitting


def _try_batch(
    model: Model,
    loss_fn: Callable[[Model, Any], Tensor],
    batch: Any,
    optimizer_fn: Callable[[Iterable[torch.nn.Parameter]], Optimizer] | None,
) -> None:
    """Compute forward and backward of a batch twice, as in an accumulation, to find out whether memory suffices.

    Args:
        model: a model, on its device.
        loss_fn: returns the loss of a batch.
        batch: the batch.
        optimizer_fn: creates an optimizer, which steps after each backward, so that memory holds its state; None: none.

    Raises:
        MemoryError, RuntimeError: what the device raises if memory does not suffice, among other errors.
    """
    backend = detect(model.parameters())
    optimizer = None if optimizer_fn is None else optimizer_fn(model.parameters())
    for _ in range(2):
        loss = loss_fn(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        backend.host(loss)  # waits for the device, which may raise late
        if optimizer is not None:
            optimizer.step()
            backend.mark_step()


@final
class Elastic(NamedTuple):
    """How a global batch is computed on the GPUs that there are.

    Attributes:
        steps: number of microbatches that the busiest GPU accumulates in an update.
        batch_size: maximum samples of a microbatch.
        global_batch_size: samples of an update, over all GPUs.
        gpus: number of GPUs.
        master: whether this is rank 0.
    """

    steps: int
    batch_size: int
    global_batch_size: int
    gpus: int
    master: bool


def elastic(global_batch_size: int, max_gpu_batch_size: int, gpus: int | None = None) -> Elastic:
    """Return how the present GPUs compute a global batch: in how many steps, and with which batch size of a GPU.

    The fewest steps that memory allows, and then the smallest batch size, as `fit_batch` finds them without a fixed
    shape: `CustomSampler(..., minibatch_size=batch_size)` computes exactly this batch, also if it is not a multiple of
    steps x batch_size x gpus.

    Source: the arguments and results are as in Run:AI's elasticity module for PyTorch.

    Args:
        global_batch_size: samples of an update.
        max_gpu_batch_size: samples of a microbatch that the memory of a GPU holds, see `find_minibatch_size`.
        gpus: number of GPUs. Default: the number of ranks, if there are several, otherwise of accelerators that
            this process sees, at least 1.

    Raises:
        TypeError: if an argument is not an integer.
        ValueError: if an argument is not in [1, 2**53].

    >>> elastic(global_batch_size=100, max_gpu_batch_size=30, gpus=3)
    Elastic(steps=2, batch_size=17, global_batch_size=100, gpus=3, master=True)
    """
    world = current_world()
    if gpus is None:
        gpus = world.size if world.size > 1 else max(1, torch.accelerator.device_count())
    fit = fit_batch(global_batch_size, max_gpu_batch_size, gpus, fixed_shape=False)
    return Elastic(fit.rounds, fit.minibatch_size, int(global_batch_size), int(gpus), world.rank == 0)
