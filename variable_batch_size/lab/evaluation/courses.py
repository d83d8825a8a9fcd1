"""From what a user calls a trace to the batch sizes of a training, and the time that they take."""

from __future__ import annotations

import hashlib
import math
import os
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, final

from variable_batch_size._validation import type_error, value_error, without_addresses
from variable_batch_size.adaptive.adaptive_trace import AdaptiveTrace
from variable_batch_size.adaptive.base import Controller
from variable_batch_size.adaptive.decided_trace import describe
from variable_batch_size.adaptive.static import ConstantBatch
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
    """The batch sizes of a policy under a capacity trace, as `simulate` finds them.

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
        price: price of a node-hour; by default, that of the trace, if it has one.
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
    """What turns the text of a trace into batch sizes.

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


class Training(NamedTuple):
    """What the batch sizes of a capacity trace or a policy depend on; with which of how many parts of its log."""

    dataset_size: int
    samples: int
    ref_batchsize: int | None
    minibatch_size: int
    end: End = SAMPLES
    window: int = 0
    windows: int = 1


@final
@dataclass(frozen=True, eq=False)
class Course:
    """The batch sizes of a training, and the time that they take.

    Attributes:
        trace: the batch sizes, or the controller that chooses them.
        time: the simulated time; None if no model of it is known.
        remark: what a user should know of it, if there is something.
        end: when the training ends.
    """

    trace: BatchTrace | AdaptiveTrace
    time: SimulatedTime | None
    remark: str | None = None
    end: End = SAMPLES

    @property
    def exact_end(self) -> End:
        """The end, at the time or the cost of the last update if that is known before: under a capacity trace."""
        if self.end.by not in ("seconds", "cost") or not isinstance(self.time, RunTime):
            return self.end
        last = float(self.time.end[-1])
        return End(self.end.by, last if self.end.by == "seconds" else self.time.cost(last))

    @property
    def fingerprint(self) -> str:
        """First 16 hexadecimal digits of the SHA-256 of what both are."""
        if isinstance(self.trace, AdaptiveTrace):
            _check_named(self.trace.controller)
            sizes = describe(self.trace)
        else:
            sizes = self.trace.fingerprint
        return hashlib.sha256(f"{sizes} {self.time!r}".encode()).hexdigest()[:16]


def _check_named(controller: Controller) -> None:
    """Raise an error if the name of a controller may be that of another one, too: records go by it."""
    if without_addresses(found := repr(controller)) != found:
        requirement = "the repr of a controller must tell its numbers, because it names the trainings"
        raise value_error(
            requirement, found, "make it a frozen dataclass with a method __call__, or give it a __repr__"
        )


def depends_on_the_dataset(source: TraceSource) -> bool:
    """Return whether the batch sizes depend on the size of the dataset."""
    return isinstance(source, UnderCapacity) or (isinstance(source, str) and "@" in source)


def course_of(
    source: TraceSource, training: Training, options: TraceOptions, time: SimulatedTime | None = None
) -> Course:
    """Return the course of a training until its end.

    Args:
        source: a batch trace, or what `BatchTrace.of` makes one of; an `AdaptiveTrace`; the text of a policy, such as
            "noise-scale:1"; an `UnderCapacity`, or "policy@log".
        training: the training.
        options: what the text leaves open.
        time: the simulated time of a trace that is not under a capacity trace.

    Raises:
        TypeError: if `source` has another type.
        ValueError: if the text is not that of a trace, the trace is not one for this training, or the time or the cost
            with which it ends is not known.
    """
    course = replace(_course_of(source, training, options, time), end=training.end)
    if training.end.by in ("seconds", "cost"):
        remedy = "pass --samples-per-second, and --price for a cost; from Python time=ModelTime(...)"
        if course.time is None:
            raise value_error(f"the end {training.end} needs the time of an update", "none", remedy)
        if training.end.by == "cost" and not course.time.cost(3600.0):
            raise value_error(f"the end {training.end} needs a price", "none", remedy)
        if isinstance(course.time, RunTime):
            _check_reached(training, course.time)
    return course


def _check_reached(training: Training, time: RunTime) -> None:
    """Raise ValueError if the updates until the end of a log, or of 8 times the samples, do not reach the end."""
    last = float(time.end[-1]) if len(time.end) else 0.0
    found = last if training.end.by == "seconds" else time.cost(last) or 0.0
    if not reached(found / (training.end.amount or math.inf)):
        requirement = f"the updates under the capacity trace must reach the end {training.end}"
        remedy = f"pass a shorter end, another log, or more samples: {MOST} times as many are trained at most"
        raise value_error(requirement, f"{training.end.by} {found:,.6g}", remedy)


def _course_of(source: TraceSource, training: Training, options: TraceOptions, time: SimulatedTime | None) -> Course:
    if isinstance(source, str) and "@" in source:
        source = _under(source, options)
    if isinstance(source, UnderCapacity):
        return _simulated(source, training, options)
    if isinstance(source, str) and source.partition(":")[0] in POLICIES:
        source = _adaptive(parse_policy(source), training, options)
    if isinstance(source, AdaptiveTrace):
        return Course(source, time)
    if callable(source):
        raise type_error("a trace must be a batch trace, or an AdaptiveTrace", source, "put AdaptiveTrace around it")
    if isinstance(source, str) and not (source[:1].isdigit() or Path(source).is_file()):
        requirement = f"a trace must be a number, a schedule, a CSV file, {FORMS}, or POLICY@LOG"
        raise value_error(requirement, f"{source!r:.60}", "pass one of these; a file must exist")
    trace = _batch_trace(source)
    starts, sizes = trace.runs
    remark = None
    if len(starts) > 1 and (first := trace.offset(int(starts[1]))) >= training.samples:
        remark = _one_size(int(sizes[0]), training, f"its first change follows sample {first:,}")
    on_end = options.on_end or trace.on_end
    if on_end == "error" and training.end.by != "samples":
        on_end = "stop"  # how far it must last is not known before
    return Course(trace if trace.steps is None else trace.with_on_end(on_end), time, remark)


def _batch_trace(source: Any) -> BatchTrace:
    try:
        return BatchTrace.of(source)
    except ValueError:
        if isinstance(source, str) and Path(source).is_file() and _is_capacity(source):
            raise value_error(
                "a capacity trace must have a policy", repr(source), f'pass "per-device:64@{source}"'
            ) from None
        raise


def _one_size(size: int, training: Training, because: str) -> str:
    whole = f"for all {training.samples:,} samples of the training"
    if training.end.by != "samples":
        whole = f"for {training.samples:,} samples or more"
    return f"the batch size is {size} {whole}, {because}; train on more samples to compare rules"


def _is_capacity(path: str) -> bool:
    try:
        cluster.read(path)
    except (ValueError, OSError):
        return False
    return True


def _under(text: str, options: TraceOptions) -> UnderCapacity:
    policy, _, log = text.partition("@")
    if options.under is None:
        requirement = f"the trace {text} needs the time of an update"
        remedy = "pass an UnderCapacity with its throughput, or --samples-per-second"
        raise value_error(requirement, "none", remedy)
    return replace(options.under, capacity=log, policy=policy)


def _adaptive(controller: Controller, training: Training, options: TraceOptions) -> AdaptiveTrace:
    """Return the trace of a policy, which starts at the reference batch size."""
    low, high = options.bounds or (1, training.dataset_size)
    start = None if training.ref_batchsize is None else min(max(training.ref_batchsize, low), high)
    return AdaptiveTrace(controller, start, options.bounds, every=options.every or EVERY)


def _simulated(source: UnderCapacity, training: Training, options: TraceOptions) -> Course:
    capacity = source.capacity if isinstance(source.capacity, CapacityTrace) else cluster.read(source.capacity)
    if training.windows > 1:
        length = capacity.duration / training.windows
        capacity = capacity.slice(training.window * length, (training.window + 1) * length)
    policy = parse_policy(source.policy) if isinstance(source.policy, str) else source.policy
    arguments: dict[str, Any] = {}
    if needs_noise(policy):
        start = training.ref_batchsize
        arguments = {"start": start, "every": options.every or EVERY, "noise": source.noise}
        if source.noise is None:
            remedy = "pass noise=NoiseCurve.from_csv(...), or --noise"
            raise value_error(f"{policy} needs the gradient noise", "noise=None", remedy)
    simulated = partial(
        simulate,
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
        **arguments,
    )
    run = _until_the_end(training, lambda samples: simulated(until=samples))
    if training.end.by == "samples" and run.summary["samples"] < training.samples:
        part = fewer = ""
        if training.windows > 1:
            part, fewer = f"part {training.window} of {training.windows} (windows) of ", "fewer windows, "
        requirement = f"{part}the capacity trace must last for the {training.samples:,} samples of the training"
        least = math.ceil(100 * training.samples / max(1, run.summary["samples"])) / 100
        remedy = (
            f"train on fewer samples, pass {fewer}a faster throughput, or a log whose time is scaled by {least:g} or "
            f"more, see vbs capacity convert --scale-time"
        )
        raise value_error(requirement, f"{run.summary['samples']:,.0f} until second {capacity.end:,.6g}", remedy)
    trace = run.trace
    if trace.max_batch_size > training.dataset_size:
        requirement = f"a batch size must be at most the dataset's size of {training.dataset_size} samples"
        raise value_error(requirement, trace.max_batch_size, "limit it with bounds=")
    remark = None
    if capacity.changes and len(trace.runs[0]) == 1 and not isinstance(policy, ConstantBatch):
        ended = f"which ends at second {run.summary['elapsed']:,.6g} of {capacity.end:,.6g}"
        remark = _one_size(trace.max_batch_size, training, ended)
    return Course(trace.with_on_end("stop"), RunTime.of(run), remark)


def _until_the_end(training: Training, simulated: Callable[[int], Run]) -> Run:
    """Return the simulation of a training until its end; of what comes before, if the capacity trace ends there.

    An end in time or cost is that of the fewest samples whose last update reaches it, when it is made for the first
    time. So a crash after the end takes nothing back, as with an end in samples.

    Args:
        training: the training.
        simulated: returns the simulation until so many samples.
    """
    most, amount = training.end.most(training.samples), training.end.amount
    if training.end.by not in ("seconds", "cost") or amount is None:
        return simulated(most)
    fact = "elapsed" if training.end.by == "seconds" else "cost"

    def is_over(samples: int) -> bool:
        summary = simulated(samples).summary
        return summary["samples"] < samples or reached(summary.get(fact, 0.0) / amount)

    samples = 1 + bisect_left(range(1, most), True, key=is_over)
    run = simulated(samples)
    return run if run.summary["samples"] >= samples or samples == 1 else simulated(samples - 1)
