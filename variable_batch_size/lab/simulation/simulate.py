"""`simulate`: time, cost and progress of a training under a capacity trace; `to_batch_trace`: its batch sizes alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, get_args

from variable_batch_size._validation import (
    MAX_INT,
    check_choice,
    check_int,
    check_number,
    check_positive,
    type_error,
    value_error,
)
from variable_batch_size.adaptive.adaptive_trace import AdaptiveTrace, limit_to_dataset
from variable_batch_size.adaptive.base import Controller
from variable_batch_size.adaptive.throughput import Throughput
from variable_batch_size.lab.cluster.capacity_trace import CapacityTrace
from variable_batch_size.lab.simulation.batch_sizes import BatchSizes, ControllerSizes, TraceSizes
from variable_batch_size.lab.simulation.engine import Engine, Overheads, merge_intervals
from variable_batch_size.lab.simulation.model import Model
from variable_batch_size.lab.simulation.nodes import ROUNDING, present_nodes, staying_nodes
from variable_batch_size.lab.simulation.noise_curve import NoiseCurve
from variable_batch_size.lab.simulation.result import Prices, Run, cost_until, with_prices
from variable_batch_size.rules.base import Rule, check_reference, needs_noise, needs_squares
from variable_batch_size.rules.selection import rules_for_groups
from variable_batch_size.trace.batch_trace import BatchTrace, OnEnd

MAX_STEPS = 10**8  # of a batch trace: more are a mistake in a unit, or in the throughput

Unit: TypeAlias = Literal["progress", "samples", "updates", "seconds"]


def simulate(
    capacity: CapacityTrace,
    controller: Controller | object,
    *,
    throughput: Throughput,
    ref_batchsize: int | None = None,
    rule: Rule | str = "linear",
    noise: NoiseCurve | None = None,
    start: int | None = None,
    bounds: tuple[int, int] | None = None,
    every: int | None = None,
    delay: int = 0,
    minibatch_size: int | None = None,
    fixed_shape: bool = False,
    dataset_size: int | None = None,
    devices_per_node: int = 1,
    overheads: Overheads | None = None,
    prices: Prices | None = None,
    on_demand: float | None = None,
    until: float | None = None,
    by: Unit = "progress",
) -> Run:
    """Simulate the time, the cost and the progress of a run under a capacity trace.

    An update of B samples on R devices takes `throughput.seconds(B, R, minibatch_size, spread=...)`, with the B and R
    at its beginning; it is not spread if the rule or the controller reads gradients of single microbatches. `Overheads`
    says what happens when the nodes change. Without `overheads` nothing interrupts the training, and a change takes
    effect at the next update. An update that does not end within the capacity trace is not made, and its time is idle.

    The loss is not simulated. The rule gives the progress of an update from its batch size and the noise at the
    progress before it, and is evaluated once per run of equal updates.

    >>> from variable_batch_size.adaptive import PerDevice
    >>> capacity = CapacityTrace(seconds=[0, 60, 90], nodes=[4, 2, 4], end=180)
    >>> model = Throughput.simple(samples_per_second=64)
    >>> run = simulate(capacity, PerDevice(64), throughput=model, ref_batchsize=256, overheads=Overheads(restart=20))
    >>> run.summary["updates"], run.summary["redone"], run.summary["preemptions"]
    (80, 40.0, 1)

    Args:
        capacity: seconds -> number of nodes.
        controller: chooses the batch size of the next updates. It is called at the beginning, after a restart on
            another number of devices and, with `every`, before each update whose number is a multiple of it. You can
            also pass an `AdaptiveTrace`, a batch trace, or what `BatchTrace.of` accepts. A batch trace gives the batch
            sizes of the updates that are kept, and ends the run if its `on_end` is "stop".
        throughput: the seconds of an update.
        ref_batchsize: batch size, in samples, at which progress is counted: it is 1 an update there.
        rule: the learning-rate rule, or its name, which gives the progress of an update.
        noise: the gradient noise by progress; needed by a rule that reads it, and passed to the controller.
        start: batch size before the first decision of the controller; by default, that takes effect at once.
        bounds: least and largest batch size of the controller.
        every: number of updates between two calls of the controller; by default it is called only at the beginning and
            on another number of devices.
        delay: number of updates from a call to the first update with its decision, >= 0.
        minibatch_size: maximum number of rows of a microbatch; by default a device computes its share at once.
        fixed_shape: whether every microbatch has exactly `minibatch_size` rows, as with PyTorch/XLA.
        dataset_size: samples of an epoch, whose last update is shortened; by default there are no epochs.
        devices_per_node: number of devices of each node, >= 1.
        overheads: what interruptions and checkpoints cost; None: nothing interrupts the training.
        prices: price of a node-hour: a number, or (seconds, price from each on); by default, from the trace.
        on_demand: price of a node-hour on demand, to compare with.
        until: end of the training, in the unit of `by`: it ends with the first update that reaches it, or at this time;
            by default, and at the latest, with the capacity trace.
        by: "progress", "samples", "updates" or "seconds".

    Raises:
        TypeError: if an argument has another type.
        ValueError: if an argument is not in its range, a batch is larger than the dataset, the rule needs
            `ref_batchsize` or `noise` and there is none, or the shape is fixed without a `minibatch_size`.
        TraceEndError: if a batch trace with `on_end="error"` ends before the training.
    """
    _check_type(capacity, "capacity", CapacityTrace)
    _check_type(throughput, "throughput", Throughput)
    _check_type(noise, "noise", NoiseCurve, optional=True)
    _check_type(overheads, "overheads", Overheads, optional=True)
    check_choice(by, "by", get_args(Unit))
    goal = math.inf if until is None else check_positive(until, "until", "pass a positive number")
    costs = overheads or Overheads()
    if fixed_shape and minibatch_size is None:
        raise value_error("a fixed shape needs a minibatch_size", None, "pass the rows of a microbatch")
    checked_rule, reference = _check_rule(rule, ref_batchsize, noise)
    model = Model(
        throughput,
        check_int(devices_per_node, "devices_per_node", 1, MAX_INT // max(1, int(capacity.nodes.max()))),
        None if minibatch_size is None else check_int(minibatch_size, "minibatch_size", 1, MAX_INT),
        None if dataset_size is None else check_int(dataset_size, "dataset_size", 1, MAX_INT),
        checked_rule,
        reference,
        noise,
        spread=not (needs_noise(checked_rule) or needs_squares(checked_rule) or needs_noise(controller)),
        fixed_shape=bool(fixed_shape),
    )
    engine = Engine(
        end=min(capacity.end, goal) if by == "seconds" else capacity.end,
        goal=("updates", math.inf) if by == "seconds" else (by, goal * (1 - ROUNDING) if by == "progress" else goal),
        present=present_nodes(capacity),
        staying=staying_nodes(capacity, costs.notice),
        kills=overheads is not None,
        sizes=_batch_sizes(controller, start, bounds, every, delay, model.dataset_size),
        model=model,
        overheads=costs,
    )
    rented = with_prices(capacity, prices)
    remedy = "pass the price of a node-hour"
    on_demand_price = None if on_demand is None else check_number(on_demand, "on_demand", remedy)
    engine.run()
    summary = _summary(engine, rented, on_demand_price)
    return Run(summary, rented, tuple(merge_intervals(engine.intervals)), tuple(engine.runs), model.devices_per_node)


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
    """Return the batch sizes of a run under a capacity trace, if changes of the capacity do not interrupt the run.

    An update begins when the one before has ended and there is a device. The devices at its beginning determine its
    batch size and its seconds. The last update ends within the capacity trace. It is the trace of `simulate` without
    overheads.

    >>> from variable_batch_size.adaptive import PerDevice
    >>> capacity = CapacityTrace(seconds=[0, 2], nodes=[1, 2], end=4)
    >>> to_batch_trace(capacity, PerDevice(64), Throughput.simple(samples_per_second=64)).batch_sizes(range(4)).tolist()
    [64, 64, 128, 128]

    Args:
        capacity: seconds -> number of devices, see `CapacityTrace.devices`.
        controller: chooses the batch size; called when the number of devices changes.
        throughput: the seconds of an update.
        minibatch_size: maximum number of rows of a microbatch; by default a device computes its share at once.
        fixed_shape: whether every microbatch has exactly `minibatch_size` rows, as with PyTorch/XLA.
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


def _check_type(value: object, name: str, kind: type, optional: bool = False) -> None:
    """Raise TypeError if an argument of `simulate` has another type.

    Args:
        value: the argument.
        name: its name, for the error.
        kind: the type that it must have.
        optional: whether it may be None.
    """
    if not isinstance(value, kind) and not (optional and value is None):
        article = "an" if kind is Overheads else "a"
        raise type_error(f"{name} must be {article} {kind.__name__}", value, "pass one")


def _check_rule(rule: Rule | str, ref_batchsize: int | None, noise: NoiseCurve | None) -> tuple[Rule, int | None]:
    """Return the rule, created if it is a name, and its `ref_batchsize`. Raise ValueError if it lacks what it needs."""
    (checked,) = rules_for_groups(rule, 1)
    if needs_noise(checked) and noise is None:
        raise value_error(f"{checked} needs the gradient noise", "noise=None", "pass noise=NoiseCurve.from_csv(...)")
    return checked, check_reference(checked, ref_batchsize)


def _batch_sizes(
    controller: Any,
    start: int | None,
    bounds: tuple[int, int] | None,
    every: int | None,
    delay: int,
    dataset_size: int | None,
) -> BatchSizes:
    """Return an object that gives the batch size of each update, made from the `controller` argument of `simulate`.

    This is a controller with its options, or an AdaptiveTrace or batch trace, which has no options.
    """
    if isinstance(controller, type):
        requirement = "controller must be a controller or a batch trace"
        raise type_error(requirement, controller, "pass an instance of the class")
    if callable(controller):
        return ControllerSizes(AdaptiveTrace(controller, start, bounds, every=every, delay=delay))
    adaptive = isinstance(controller, AdaptiveTrace)
    kind, place = ("an AdaptiveTrace", "to that") if adaptive else ("a trace", "with a controller")
    for value, name in ((start, "start"), (bounds, "bounds"), (every, "every"), (delay or None, "delay")):
        if value is not None:
            raise value_error(f"{name} must be left out with {kind}", value, f"pass it {place}")
    if isinstance(controller, AdaptiveTrace):
        return ControllerSizes(controller if dataset_size is None else limit_to_dataset(controller, dataset_size))
    trace = BatchTrace.of(controller)
    if dataset_size is not None and trace.max_batch_size > dataset_size:
        requirement = f"every batch size of the trace must be at most the dataset's size of {dataset_size} samples"
        raise value_error(requirement, trace.max_batch_size, "use a larger dataset or limit the trace")
    return TraceSizes(trace)


def _summary(engine: Engine, rented: CapacityTrace, on_demand: float | None) -> Mapping[str, float]:
    """Return the `summary` of a `Run`, after the engine has run.

    Args:
        engine: the simulated training.
        rented: the nodes with their prices.
        on_demand: price of a node-hour on demand; None: not known.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ("productive", "redone", "restarting", "saving", "idle")}
    for interval in engine.intervals:
        seconds[interval.state].append(interval.end - interval.begin)
    position, reference = engine.position, engine.model.ref_batchsize
    values: dict[str, float] = {"elapsed": engine.now}
    values |= {name: math.fsum(lengths) for name, lengths in seconds.items()}
    values |= {"updates": position.updates, "samples": position.samples, "progress": position.progress}
    values["goodput"] = position.progress / engine.now
    if reference is not None and position.samples:
        values["efficiency"] = position.progress * reference / position.samples
    values |= {"preemptions": engine.preemptions, "restarts": engine.restarts}
    cost = cost_until(rented, engine.now)
    if cost is not None:
        values["cost"] = cost
        if position.progress:
            values["cost_per_progress"] = cost / position.progress
    if on_demand is not None:
        productive = (row for row in engine.intervals if row.state == "productive")
        node_seconds = math.fsum(row.nodes * (row.end - row.begin) for row in productive)
        values["on_demand_cost"] = node_seconds * on_demand / 3600
    return values
