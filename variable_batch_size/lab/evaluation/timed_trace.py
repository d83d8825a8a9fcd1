"""From what a user calls a trace to the batch sizes of a training, and the time that they take."""

from __future__ import annotations

import hashlib
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np

from variable_batch_size._validation import type_error, value_error, without_addresses
from variable_batch_size.adaptive.adaptive_trace import AdaptiveTrace
from variable_batch_size.adaptive.base import Controller, needs_throughput
from variable_batch_size.adaptive.decided_trace import describe
from variable_batch_size.adaptive.table import FORMS, POLICIES, parse_policy
from variable_batch_size.adaptive.throughput import Throughput
from variable_batch_size.lab import cluster
from variable_batch_size.lab.cluster.capacity_trace import CapacityTrace
from variable_batch_size.lab.evaluation.end import MOST, SAMPLES, End, reached
from variable_batch_size.lab.evaluation.simulated_time import RunTime, SimulatedTime
from variable_batch_size.lab.simulation.engine import Overheads
from variable_batch_size.lab.simulation.noise_curve import NoiseCurve
from variable_batch_size.lab.simulation.result import Run
from variable_batch_size.lab.simulation.simulate import simulate
from variable_batch_size.rules.base import needs_noise
from variable_batch_size.trace.batch_trace import BatchTrace, OnEnd

EVERY = 50  # updates between two questions to a policy that reads the noise or the time


@final
@dataclass(frozen=True)
class UnderCapacity:
    """A trace whose batch sizes follow the nodes of a cluster: a policy under a capacity trace, see `simulate`.

    The simulation ends with the samples of the training, in epochs of its dataset. It is the same for all rules, so
    that they are compared under equal batch sizes: its updates are spread over the devices as under a rule that reads
    no noise.

    Args:
        capacity: the nodes at each time, or the file of a log.
        policy: a controller, or its name and argument, such as "per-device:64".
        throughput: seconds of an update.
        devices_per_node: number of devices of a node.
        overheads: what interruptions cost.
        noise: the gradient noise by progress, for policies that read it.
        price: price of a node-hour; by default, from the trace, if it has one.
    """

    capacity: CapacityTrace | str | os.PathLike[str]
    policy: Controller | str
    throughput: Throughput
    devices_per_node: int = 1
    overheads: Overheads | None = None
    noise: NoiseCurve | None = None
    price: float | None = None


TraceSource: TypeAlias = BatchTrace | AdaptiveTrace | UnderCapacity | str | os.PathLike[str] | int


@final
@dataclass(frozen=True)
class TraceOptions:
    """Options with which the text of a trace, such as a policy, becomes batch sizes.

    Args:
        on_end: what follows the last step of a batch trace that has one; by default, what it says itself.
        bounds: least and largest batch size of a policy.
        every: number of updates between two questions to a policy.
        under: an `UnderCapacity` whose capacity and policy the text replaces; needed by "policy@log" only.
    """

    on_end: OnEnd | None = None
    bounds: tuple[int, int] | None = None
    every: int | None = None
    under: UnderCapacity | None = None


class TimedTraining(NamedTuple):
    """The facts about a training run, beside its trace, on which its batch sizes depend."""

    dataset_size: int
    samples: int  # of the whole training
    ref_batchsize: int | None  # batch size at which the learning rate was tuned
    minibatch_size: int  # maximum number of rows of a microbatch
    end: End = SAMPLES
    before: tuple[int, int] = (0, 0)  # updates and samples of the checkpoint from which it starts

    @property
    def rest(self) -> int:
        """Number of samples after the checkpoint from which the training starts, or of all without one."""
        return self.samples - self.before[1]


@final
@dataclass(frozen=True, eq=False)
class TimedTrace:
    """The batch sizes of a training run, and the simulated time that its updates take.

    Attributes:
        trace: the batch sizes, or the controller that chooses them.
        time: the simulated time; None if no model of it is known.
        remark: a note for the user, such as that the batch size is constant; None without one.
        end: when the training ends.
    """

    trace: BatchTrace | AdaptiveTrace
    time: SimulatedTime | None
    remark: str | None = None
    end: End = SAMPLES

    @property
    def fingerprint(self) -> str:
        """First 16 hexadecimal digits of the SHA-256 of batch sizes and time.

        Raises:
            ValueError: if the repr of a controller has an address in memory: it names the trainings.
        """
        if isinstance(self.trace, AdaptiveTrace):
            sizes = describe(self.trace)
            name = repr(self.trace.controller)
            # An address would be another one in each process.
            if without_addresses(name) != name:
                requirement = "the repr of a controller must tell its numbers, because it names the runs"
                remedy = "make it a frozen dataclass with a method __call__, or give it a __repr__"
                raise value_error(requirement, name, remedy)
        else:
            sizes = self.trace.fingerprint
        return hashlib.sha256(f"{sizes} {self.time!r}".encode()).hexdigest()[:16]


def depends_on_the_dataset(source: TraceSource) -> bool:
    """Return whether the batch sizes of a trace depend on the size of the dataset.

    Under a capacity trace they do, because updates end with the epochs; in text such a trace is "POLICY@LOG".
    """
    return isinstance(source, UnderCapacity) or (isinstance(source, str) and "@" in source)  # "POLICY@LOG"


def timed_trace(
    source: TraceSource, training: TimedTraining, options: TraceOptions, time: SimulatedTime | None = None
) -> TimedTrace:
    """Compute the batch sizes of a training run from its trace, and the time that its updates take.

    Args:
        source: the trace: batch sizes, a policy that chooses them, or a text that stands for one of these.
        training: what else the batch sizes depend on.
        options: what the text of a trace leaves open.
        time: the time of an update, for a trace that is not under a capacity trace; None: not known.

    Raises:
        TypeError: if `source` has another type.
        ValueError: if the text is not that of a trace, the trace is not one for this training, or the time or the cost
            with which it ends is not known.
    """
    if isinstance(source, str):
        source = _parse_policy_text(source, training, options)
    if isinstance(source, UnderCapacity):
        timed = _simulate_timed(source, training, options)
    elif isinstance(source, AdaptiveTrace):
        timed = TimedTrace(source, time, None, training.end)
    elif callable(source):
        raise type_error("a trace must be a batch trace, or an AdaptiveTrace", source, "put AdaptiveTrace around it")
    else:
        timed = TimedTrace(_batch_trace(source, training, options), time, None, training.end)
    _check_end(timed)
    if not isinstance(timed.trace, BatchTrace):
        return timed
    remark = _remark_if_constant(timed.trace, training) or timed.remark
    return replace(timed, remark=remark, trace=_after_checkpoint(timed.trace, training))


def _parse_policy_text(text: str, training: TimedTraining, options: TraceOptions) -> TraceSource:
    """Return the trace for a text "POLICY" or "POLICY@LOG", as "per-device:64@spot.json", or another text unchanged."""
    policy, at, log = text.partition("@")
    if at:
        if options.under is None:
            remedy = "pass an UnderCapacity with its throughput, or --samples-per-second"
            raise value_error(f"the trace {text} needs the time of an update", "none", remedy)
        return replace(options.under, capacity=log, policy=policy)
    if text.partition(":")[0] not in POLICIES:
        return text
    controller = parse_policy(text)
    follows = needs_noise(controller) or needs_throughput(controller)  # what training measures; others say a first size
    start = _start(training, options) if follows else None
    return AdaptiveTrace(controller, start, options.bounds, every=options.every or EVERY)


def _start(training: TimedTraining, options: TraceOptions) -> int | None:
    """Return the batch size at which a controller begins: the reference within the bounds, or None without one."""
    least, most = options.bounds or (1, training.dataset_size)
    return None if training.ref_batchsize is None else min(max(training.ref_batchsize, least), most)


def _remark_if_constant(trace: BatchTrace, training: TimedTraining) -> str | None:
    """Return a note for the user if the batch size does not change within the training; None if it does."""
    starts, sizes = trace.runs  # first steps and batch sizes of the runs of equal batch sizes
    later = ""
    if len(starts) > 1:
        samples_before_change = trace.offset(int(starts[1]))
        if samples_before_change < training.end.max_samples(training.rest):
            return None
        later = f"; its first change follows sample {samples_before_change:,}"
    return f"the batch size is {sizes[0]} throughout, so that rules are only learning rates here{later}"


def _batch_trace(source: Any, training: TimedTraining, options: TraceOptions) -> BatchTrace:
    """Create the batch trace from a number, a schedule or a file, and set what follows its last step, `on_end`."""
    if isinstance(source, str) and not (source[:1].isdigit() or Path(source).is_file()):
        requirement = f"a trace must be a number, a schedule, a CSV file, {FORMS}, or POLICY@LOG"
        raise value_error(requirement, f"{source!r:.60}", "pass one of these; a file must exist")
    trace = BatchTrace.of(source)
    if trace.steps is None:
        return trace
    on_end = options.on_end or trace.on_end
    if on_end == "error" and training.end.by != "samples":
        on_end = "stop"  # it is not known before how many steps the training has
    return trace.with_on_end(on_end)


def _after_checkpoint(trace: BatchTrace, training: TimedTraining) -> BatchTrace:
    """Shift a trace so that it begins at the checkpoint from which the training starts.

    The sampler counts steps from the beginning of the first training. So there is a step for each update before the
    checkpoint; they are over, and have the batch size 1.
    """
    updates_before = training.before[0]  # updates
    if not updates_before:
        return trace
    if trace.steps is not None and trace.on_end == "error":  # checked now: the sampler would count the steps of size 1
        if trace.total_samples < training.rest:
            requirement = f"the trace must last for the {training.rest:,} samples that follow the checkpoint"
            remedy = 'pass a longer trace, or on_end="stop", "hold" or "cycle"'
            raise value_error(requirement, f"{trace.total_samples:,}", remedy)
        trace = trace.with_on_end("hold")
    if trace.steps is not None and trace.on_end == "cycle":  # written out, as the shifted trace would cycle otherwise
        # The last update of each epoch may have fewer samples, so that there may be one step more for each epoch.
        max_steps = trace.step_at(training.rest) + 2 + training.rest // training.dataset_size
        trace = BatchTrace.from_sizes(trace.batch_sizes(np.arange(max_steps)), on_end="hold")
    starts, sizes = trace.runs
    steps = None if trace.steps is None else updates_before + trace.steps
    return BatchTrace(np.append(0, updates_before + starts), np.append(1, sizes), steps, trace.on_end)


def _check_end(timed: TimedTrace) -> None:
    """Raise ValueError if a training is to end at a time or a cost that is not known, or that it does not reach."""
    end, time = timed.end, timed.time
    if end.by not in ("seconds", "cost"):
        return
    remedy = "pass --samples-per-second, and --price for a cost; from Python time=ModelTime(...)"
    if time is None:
        raise value_error(f"the end {end} needs the time of an update", "none", remedy)
    last = 3600.0  # seconds: any time, to see whether a cost is known; or when a simulated run ends
    if isinstance(time, RunTime):
        last = float(time.end[-1]) if len(time.end) else 0.0
    if end.by == "cost" and last and not time.cost(last):
        raise value_error(f"the end {end} needs a price", "none", remedy)
    if isinstance(time, RunTime):
        reached_amount = last if end.by == "seconds" else time.cost(last) or 0.0
        if not reached(reached_amount / (end.amount or math.inf)):
            requirement = f"the updates under the capacity trace must reach the end {end}"
            remedy = f"pass a shorter end, another log, or more samples: {MOST} times as many are trained at most"
            raise value_error(requirement, f"{end.by} {reached_amount:,.6g}", remedy)


def _simulate_timed(source: UnderCapacity, training: TimedTraining, options: TraceOptions) -> TimedTrace:
    """Simulate a training under a capacity trace, and return its batch sizes and the times of its updates."""
    capacity = source.capacity if isinstance(source.capacity, CapacityTrace) else cluster.read(source.capacity)
    policy = parse_policy(source.policy) if isinstance(source.policy, str) else source.policy
    arguments: dict[str, Any] = {}
    if needs_noise(policy):
        if source.noise is None:
            remedy = "pass noise=NoiseCurve.from_csv(...), or --noise"
            raise value_error(f"{policy} needs the gradient noise", "noise=None", remedy)
        arguments = {"start": _start(training, options), "every": options.every or EVERY, "noise": source.noise}
    run = simulate(
        capacity,
        policy,
        throughput=source.throughput,
        ref_batchsize=training.ref_batchsize,
        rule="constant",
        bounds=options.bounds,
        minibatch_size=training.minibatch_size,
        dataset_size=training.dataset_size,
        devices_per_node=source.devices_per_node,
        overheads=source.overheads,
        prices=source.price,
        by="samples",
        until=training.end.max_samples(training.rest),
        **arguments,
    )
    _check_simulated_run(run, training)
    # After a checkpoint, epochs end at other updates than in the simulation, which may have a few updates too few.
    on_end: OnEnd = "hold" if training.before[0] else "stop"
    return TimedTrace(run.trace.with_on_end(on_end), RunTime.from_run(run), None, training.end)


def _check_simulated_run(run: Run, training: TimedTraining) -> None:
    """Raise ValueError if a simulation has too few samples for a training, or a batch exceeds its dataset."""
    if training.end.by == "samples" and run.summary["samples"] < training.rest:
        requirement = f"the capacity trace must last for the {training.rest:,} samples of the training"
        scale = math.ceil(100 * training.rest / max(1, run.summary["samples"])) / 100
        remedy = (
            f"train on fewer samples, pass a faster throughput, or a log whose time is scaled by {scale:g} or more, "
            f"see vbs capacity convert --scale-time"
        )
        raise value_error(requirement, f"{run.summary['samples']:,.0f} until second {run.capacity.end:,.6g}", remedy)
    if run.trace.max_batch_size > training.dataset_size:
        requirement = f"a batch size must be at most the dataset's size of {training.dataset_size} samples"
        raise value_error(requirement, run.trace.max_batch_size, "limit it with bounds=")
