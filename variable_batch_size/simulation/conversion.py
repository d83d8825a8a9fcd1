"""From a capacity trace to the batch trace of a training that no change of the capacity interrupts."""

from __future__ import annotations

from variable_batch_size._validation import check_int, value_error
from variable_batch_size.adaptive.base import Controller
from variable_batch_size.adaptive.throughput import Throughput
from variable_batch_size.cluster.capacity_trace import CapacityTrace
from variable_batch_size.simulation.simulate import simulate
from variable_batch_size.trace.batch_trace import BatchTrace, OnEnd

MAX_STEPS = 10**8  # more are an error: of the unit, or of the throughput


def to_batch_trace(
    capacity: CapacityTrace,
    controller: Controller,
    throughput: Throughput,
    *,
    minibatch_size: int | None = None,
    fixed_shape: bool = False,
    max_updates: int | None = None,
    on_end: OnEnd = "error",
) -> BatchTrace:
    """Return the batch sizes that a training would have under a capacity trace, if changes did not interrupt it.

    An update begins when the one before has ended and there is a device. The devices at its beginning, of which the
    controller is told, determine its batch size and its seconds; a change of the capacity counts from the next update
    on. The last update is the last one that ends within the capacity trace. It is the trace of `simulate` without
    overheads.

    >>> from variable_batch_size.adaptive import PerDevice
    >>> capacity = CapacityTrace(seconds=[0, 2], nodes=[1, 2], end=4)
    >>> to_batch_trace(capacity, PerDevice(64), Throughput.simple(samples_per_second=64)).batch_sizes(range(4)).tolist()
    [64, 64, 128, 128]

    Args:
        capacity: seconds -> number of devices, see `CapacityTrace.devices`.
        controller: chooses the batch size; asked when the number of devices changes.
        throughput: the seconds of an update.
        minibatch_size: maximum number of rows of a microbatch; by default a device computes its share at once.
        fixed_shape: whether every microbatch has exactly `minibatch_size` rows, as in a training with PyTorch/XLA.
        max_updates: number of updates after which the training ends; by default it ends with the capacity trace.
        on_end: what follows the last step of the batch trace.

    Raises:
        TypeError: if `capacity` or `throughput` has another type, or the controller returns no integer.
        ValueError: if no update ends within the capacity trace, or more than 10^8 do.
    """
    limit = MAX_STEPS + 1 if max_updates is None else check_int(max_updates, "max_updates", 1, MAX_STEPS)
    run = simulate(
        capacity,
        controller,
        throughput=throughput,
        rule="constant",
        minibatch_size=minibatch_size,
        fixed_shape=fixed_shape,
        until=limit,
        by="updates",
    )
    if run.summary["updates"] > MAX_STEPS:
        raise value_error("a batch trace must have at most 10^8 steps", "more", "check the throughput and the seconds")
    return run.trace.with_on_end(on_end)
