"""Tasks x traces x rules x learning rates x seeds: the cells of an experiment."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from variable_batch_size._log import stacklevel_of_user
from variable_batch_size._validation import MAX_INT, check_int, check_positive, type_error, value_error
from variable_batch_size.lab.evaluation.cell import Cell
from variable_batch_size.lab.evaluation.curve import Curve
from variable_batch_size.lab.evaluation.end import SAMPLES, End
from variable_batch_size.lab.evaluation.records import REFERENCE
from variable_batch_size.lab.evaluation.simulated_time import SimulatedTime
from variable_batch_size.lab.evaluation.start import Start
from variable_batch_size.lab.evaluation.task import LEAST, Defaults, Task, dataset_of, load_task
from variable_batch_size.lab.evaluation.timed_trace import (
    TimedTrace,
    TimedTraining,
    TraceOptions,
    TraceSource,
    depends_on_the_dataset,
    timed_trace,
)
from variable_batch_size.rules.selection import rule_named
from variable_batch_size.trace import BatchTrace

CONSTANT = "constant"
TUNED = (0.5, 1.0, 2.0)  # factors of the reference, which tell whether it is tuned


@final
@dataclass(frozen=True)
class Experiment:
    """A plan of training runs: each task under each trace of batch sizes, with each rule, learning rate and seed.

    Seeds and samples are the same for all of them. What is None is taken from the attributes of the task, see `Task`.
    The reference is also trained: the rule "constant" at the constant batch size `ref_batchsize`, with 0.5, 1 and 2
    times the learning rate. It shows what the trace costs, and whether the reference is tuned.

    >>> experiment = Experiment(["mnist-cnn"], ["0:32 1000:256"], ["linear", "root"])
    >>> len(experiment.cells())  # 5 seeds of 3 rules, and of the reference at 3 learning rates
    30

    Args:
        tasks: names of tasks; or a mapping from each name to the arguments of that task.
        traces: texts of traces: a number, a schedule, a CSV file, a policy such as "noise-scale:1", or a policy under a
            capacity trace, "per-device:64@spot.json"; or a mapping from names to these, or to the objects.
        rules: names of rules, with a number if they take one, see `rule_named`.
        baseline: the rule against which they are judged, which is trained in any case.
        seeds: number of seeds, 0, 1, ...; or the seeds.
        lr_factors: factors on the learning rate at which every rule is trained, beside 1, at which it is judged.
        ends: when a run ends, and therefore what is equal in all runs that are compared: "samples", "progress",
            "progress:UPDATES", "seconds:SECONDS" or "cost:PRICE", see `End`. The schedule of a task ends with it.
        samples: number of samples of a run, including those before its start.
        lr: learning rate at `ref_batchsize`.
        ref_batchsize: batch size at which it was tuned, in samples.
        minibatch_size: maximum number of rows of a microbatch.
        between: samples between two evaluations.
        warmup: samples over which the learning rate rises linearly to the task's scheduled value, as the linear rule
            needs it (Goyal et al. 2017).
        options: what the texts of traces leave open.
        time: the time of an update, for traces that are not under a capacity trace; by default it is not simulated.
        data_dir: folder of the files of the tasks, for those that have such an argument.
        start: folder of checkpoints of a run of the task. All runs continue from the newest of these checkpoints; their
            traces and their time begin there. A seed changes the order of the samples, and the random numbers, from the
            next epoch on.

    Raises:
        TypeError: if an argument has another type.
        ValueError: if an argument is empty or not in its range.
    """

    tasks: Sequence[str] | Mapping[str, Mapping[str, Any]]
    traces: Sequence[str] | Mapping[str, TraceSource]
    rules: Sequence[str]
    baseline: str = CONSTANT
    seeds: int | Sequence[int] = 5
    lr_factors: Sequence[float] = (1.0,)
    ends: Sequence[str] = ("samples",)
    samples: int | None = None
    lr: float | None = None
    ref_batchsize: int | None = None
    minibatch_size: int | None = None
    between: int | None = None
    warmup: int | None = None
    options: TraceOptions = field(default_factory=TraceOptions)
    time: SimulatedTime | None = None
    data_dir: str | None = None
    start: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        """Check the arguments that need no task; `cells` checks the others."""
        for name in ("tasks", "traces", "rules", "lr_factors", "ends"):
            values = getattr(self, name)
            if isinstance(values, str) or not isinstance(values, (Sequence, Mapping, AbstractSet)):
                raise type_error(f"{name} must be a sequence", values, "pass a list")
            if not len(values):
                raise value_error(f"{name} must have at least one item", "none", "pass one")
        for name, least in LEAST.items():
            if getattr(self, name) is not None:
                check_int(getattr(self, name), name, least, MAX_INT)
        for factor in (*self.lr_factors, 1.0 if self.lr is None else self.lr):
            check_positive(factor, "lr and each of lr_factors", "pass a learning rate, and factors on it")
        if REFERENCE in self.traces:
            raise value_error("a trace must have a name of its own", repr(REFERENCE), "choose another one")
        for rule in (self.baseline, *self.rules):
            rule_named(rule)
        ends = [End.parse(end) for end in self.ends]
        if self.start is not None and (len(self.tasks) > 1 or ends != [SAMPLES]):
            found = f"{len(self.tasks)} tasks and the ends {', '.join(self.ends)}"
            requirement = "runs that continue from a checkpoint must have one task and equal samples"
            raise value_error(requirement, found, "leave the others out")

    def cells(self) -> list[Cell]:
        """Return the training runs, each as a `Cell`, by task, seed, trace, rule and learning rate. None begins.

        Seeds come before traces and rules, so that an evaluation that is not complete can compare them.

        Raises:
            OSError: if a file cannot be read.
            TypeError, ValueError: if a task, a trace or the start is not one, or what a task needs is not known.
        """
        tasks = self.tasks if isinstance(self.tasks, Mapping) else {name: {} for name in self.tasks}
        return [cell for name, arguments in tasks.items() for cell in self._task_cells(name, arguments)]

    def _task_cells(self, name: str, arguments: Mapping[str, Any]) -> Iterable[Cell]:
        """Yield the training runs of a task with these arguments. Warn of traces whose batch size does not change."""
        data_dir = self.data_dir and str(Path(self.data_dir).absolute())  # the same in any process
        task = load_task(name, arguments, data_dir)
        defaults = Defaults.read(task, name)
        warmup = defaults.warmup if self.warmup is None else self.warmup
        scheduled = defaults.schedule is not None or warmup > 0
        start = None if self.start is None else Start.read(self.start, scheduled=scheduled)
        samples = self._given_or_default("samples", defaults, name)
        lr = self._given_or_default("lr", defaults, name) if start is None else start.lr
        fixed = {
            "task": name,
            "task_arguments": dict(arguments),
            "task_version": str(defaults.version),
            "samples": samples,
            "ref_batchsize": self.ref_batchsize or (start and start.ref_batchsize) or defaults.ref_batchsize,
            "minibatch_size": self.minibatch_size or defaults.minibatch_size,
            "between": self.between or defaults.between or max(1, samples // 16),
            "max_grad_norm": defaults.max_grad_norm,
            "warmup": warmup,
            "data_dir": data_dir,
            "start": start,
        }
        seeds = [check_int(seed, "each of seeds", 0) for seed in self._seeds]
        if start is not None:
            self._check_start(task, name, start, samples, len(seeds))
        timed_traces = self._timed_traces(task, fixed)
        for trace, timed in timed_traces.items():
            if timed.remark and trace != REFERENCE:
                warnings.warn(f"trace {trace}: {timed.remark}", UserWarning, stacklevel=stacklevel_of_user())
        for seed in seeds:
            for trace, timed in timed_traces.items():
                yield from self._cells_of_trace({**fixed, "seed": seed}, lr, trace, timed)

    def _cells_of_trace(self, fixed: Mapping[str, Any], lr: float, trace: str, timed: TimedTrace) -> Iterator[Cell]:
        """Yield the training runs under a trace: each rule at each factor on the learning rate.

        Args:
            fixed: the arguments of `Cell` that the runs of this task and seed have in common.
            lr: the learning rate, of which the factors make others.
            trace: the name of the trace.
            timed: its batch sizes and times.
        """
        rules = dict.fromkeys((self.baseline, *self.rules))  # each once
        factors = dict.fromkeys((1.0, *map(float, self.lr_factors)))
        if trace == REFERENCE:
            rules, factors = dict.fromkeys((CONSTANT,)), dict.fromkeys(TUNED)
        of_trace = {"trace": trace, "trace_fingerprint": timed.fingerprint, "timed": timed}
        for rule in rules:
            for factor in factors:
                rule_and_lr = {"rule": rule, "lr": lr * factor, "lr_factor": factor}
                yield Cell(**{**fixed, **of_trace, **rule_and_lr}, end=str(timed.end))

    @property
    def _seeds(self) -> Sequence[int]:
        """The seeds: 0, 1, ... if `seeds` is their number."""
        return range(check_int(self.seeds, "seeds", 1)) if isinstance(self.seeds, int) else self.seeds

    def _given_or_default(self, attribute: str, defaults: Defaults, name: str) -> Any:
        """Return an attribute of the experiment, such as `lr`; if it is None, the default that the task has.

        Args:
            attribute: the name of the attribute.
            defaults: the attributes of the task.
            name: the name of the task, for the error.

        Raises:
            ValueError: if neither has a value.
        """
        value = getattr(self, attribute)
        if value is None:
            value = getattr(defaults, attribute)
        if value is None:
            remedy = f"pass {attribute}=, or give the task this attribute"
            raise value_error(f"the task {name} needs {attribute}", "none", remedy)
        return value

    def _check_start(self, task: Task, name: str, start: Start, samples: int, seeds: int) -> None:
        """Check that the training runs can continue from a checkpoint.

        Args:
            task: the task.
            name: its name, for errors.
            start: the checkpoint.
            samples: samples of a run, with those before the checkpoint.
            seeds: number of seeds; several need an epoch that has not begun, whose order they change.

        Raises:
            ValueError: if they cannot, or the seeds would change nothing.
        """
        where, size = f"the checkpoint in {start.path}", len(dataset_of(task))  # type: ignore[arg-type]
        if self.lr is not None or (self.ref_batchsize or start.ref_batchsize) != start.ref_batchsize:
            found = f"lr {self.lr}, ref_batchsize {self.ref_batchsize}"
            raise value_error(f"lr and ref_batchsize must match {where}", found, "leave them out")
        if size != start.dataset_size:
            found = f"{size:,} samples instead of {start.dataset_size:,}"
            raise value_error(f"the dataset of the task {name} must match {where}", found, "pass its task")
        if samples <= start.samples:
            found = f"{start.samples:,} of {samples:,}"
            remedy = "pass an earlier one, or more --samples"
            raise value_error(f"{where} must lie before the end of a run", found, remedy)
        if seeds > 1 and samples <= (start.epoch + 1) * size:
            requirement = f"seeds change runs from the next epoch on, but {where} has begun the last one"
            raise value_error(requirement, f"{seeds} seeds", "pass seeds=1, or an earlier checkpoint")

    def _timed_traces(self, task: Task, fixed: Mapping[str, Any]) -> dict[str, TimedTrace]:
        """Compute the batch sizes and times of all traces and of the reference: the name of a run's trace -> these."""
        traces: Mapping[str, TraceSource] = (
            self.traces if isinstance(self.traces, Mapping) else dict(zip(self.traces, self.traces, strict=True))
        )
        reference, start = fixed["ref_batchsize"], fixed["start"]
        ends = [End.parse(end) for end in self.ends]
        wanted_traces = [(end.name_trace(name), name, source, end) for end in ends for name, source in traces.items()]
        if reference is not None:
            wanted_traces.append((REFERENCE, REFERENCE, BatchTrace.constant(reference), SAMPLES))
        timed_traces: dict[str, TimedTrace] = {}
        for label, name, source, end in wanted_traces:
            needs_size = start is not None or depends_on_the_dataset(source)
            size = len(dataset_of(task)) if needs_size else MAX_INT  # type: ignore[arg-type]
            before = (0, 0) if start is None else (start.updates, start.samples)  # updates and samples
            training = TimedTraining(size, fixed["samples"], reference, fixed["minibatch_size"], before=before)
            try:
                training = training._replace(end=end.with_amount(fixed["samples"], reference))
                timed_traces[label] = timed_trace(source, training, self.options, self.time)
            except ValueError as error:
                raise ValueError(f"trace {name} of the task {fixed['task']}: {error}") from error
        return timed_traces


def check_cells(cells: Iterable[Cell]) -> None:
    """Raise an error if a training run cannot begin, so that mistakes are found before the first run, not hours later.

    The model, optimizer and sampler are created once for each task, trace and rule.

    Args:
        cells: the runs.

    Raises:
        OSError: if the files of a task are missing.
        TypeError, ValueError: if task, trace, rule and optimizer do not fit one another; the message names them.
        RuntimeError: if a task raises another error.
    """
    from variable_batch_size.lab.evaluation.training import create_parts

    examples: dict[tuple[object, ...], Cell] = {}  # one cell of each combination
    for cell in cells:
        combination = cell.task, str(cell.task_arguments), cell.trace_fingerprint, cell.rule, cell.end, cell.samples
        examples.setdefault((*combination, cell.minibatch_size), cell)
    for cell in examples.values():
        try:
            parts = create_parts(cell, Curve(cell.timed.time, cell.minibatch_size))
            rates, rates_at_twice_lr = (
                [float(group["lr"]) for group in parts.task.optimizer(parts.model, lr).param_groups]
                for lr in (cell.lr, 2 * cell.lr)
            )
            if rates == rates_at_twice_lr:
                found = f"lr {rates[0]:g} for {cell.lr:g} and twice it"
                raise value_error("optimizer(model, lr) must use lr", found, "pass it to the optimizer that it returns")
        except (OSError, ModuleNotFoundError):
            raise
        except Exception as error:
            name = f"task {cell.task}, trace {cell.trace}, rule {cell.rule}"
            if type(error) in (TypeError, ValueError):
                raise type(error)(f"{name}: {error}") from error
            raise RuntimeError(f"{name}: {type(error).__name__}: {error}") from error
