"""Tasks x traces x rules x learning rates x seeds: the cells of an experiment."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, final

from variable_batch_size._log import stacklevel_of_user
from variable_batch_size._validation import MAX_INT, check_int, check_positive, type_error, value_error
from variable_batch_size.lab.evaluation.cell import Cell, rule_of
from variable_batch_size.lab.evaluation.courses import (
    Course,
    TraceOptions,
    TraceSource,
    Training,
    course_of,
    depends_on_the_dataset,
)
from variable_batch_size.lab.evaluation.end import SAMPLES, End
from variable_batch_size.lab.evaluation.record import Record
from variable_batch_size.lab.evaluation.simulated_time import SimulatedTime
from variable_batch_size.lab.evaluation.task import Defaults, Task, dataset_of, load_task
from variable_batch_size.lab.evaluation.tuning import REFERENCE, TUNING, chosen_factors, nearest_to_one
from variable_batch_size.trace import BatchTrace

if TYPE_CHECKING:
    from variable_batch_size.lab.evaluation.loop import Parts

CONSTANT = "constant"


@final
@dataclass(frozen=True)
class Experiment:
    """Trainings of each task under each trace, with each rule, learning rate and seed.

    Seeds and samples are the same for all of them, so that rules are compared in pairs. What is None is taken from the
    attributes of the task, see `Task`. The reference is trained, too: the rule "constant" at the constant batch size
    `ref_batchsize`, at which all rules of the table are alike, tells whether its learning rate is tuned.

    >>> experiment = Experiment(["mnist-cnn"], ["256", "0:32 1000:256"], ["linear", "root"], seeds=3)
    >>> len(experiment.cells())  # with 3 of the reference
    15

    Args:
        tasks: names of tasks; or a mapping from each name to the arguments of that task.
        traces: texts of traces: a number, a schedule, a CSV file, a policy such as "noise-scale:1", or a policy under a
            capacity trace, "per-device:64@spot.json"; or a mapping from names to these, or to the objects.
        rules: names of rules, with a number if they take one, see `rule_of`.
        seeds: number of seeds, 0, 1, ...; or the seeds.
        lr_factors: factors on the learning rate of the task, all of which are trained with every rule.
        tuning_seeds: number of further seeds, 1000, 1001, ..., on which the factor of each rule and trace is chosen:
            `cells` are those, and `judged` the trainings of `seeds` at the chosen factors and the reference's. With 0
            all factors are trained with `seeds`, and rules are judged by the numbers by which they were chosen.
        ends: when trainings end, and so what is equal for all that are compared: "samples", "progress",
            "progress:UPDATES", "seconds:SECONDS" or "cost:PRICE", see `End`. The schedule of a task ends with it.
        windows: number of equal parts of the log of each cluster; a seed has part seed % windows, so that differences
            between parts are a part of the noise: no two of the seeds that judge, or that choose, may have the same
            one. Other traces are the same for all seeds.
        samples: samples of a training.
        lr: learning rate at `ref_batchsize`.
        ref_batchsize: batch size at which it was tuned, in samples.
        minibatch_size: maximum number of rows of a microbatch.
        between: samples between two evaluations.
        options: what the texts of traces leave open.
        time: the time of an update, for traces that are not under a capacity trace; by default it is not simulated.
        data_dir: folder of the files of the tasks, for those that have such an argument.

    Raises:
        TypeError: if an argument has another type.
        ValueError: if an argument is empty or not in its range.
    """

    tasks: Sequence[str] | Mapping[str, Mapping[str, Any]]
    traces: Sequence[str] | Mapping[str, TraceSource]
    rules: Sequence[str]
    seeds: int | Sequence[int] = 3
    lr_factors: Sequence[float] = (1.0,)
    tuning_seeds: int = 0
    ends: Sequence[str] = ("samples",)
    windows: int = 1
    samples: int | None = None
    lr: float | None = None
    ref_batchsize: int | None = None
    minibatch_size: int | None = None
    between: int | None = None
    options: TraceOptions = field(default_factory=TraceOptions)
    time: SimulatedTime | None = None
    data_dir: str | None = None

    def __post_init__(self) -> None:
        for name in ("tasks", "traces", "rules", "lr_factors", "ends"):
            values = getattr(self, name)
            if isinstance(values, str) or not isinstance(values, (Sequence, Mapping, AbstractSet)):
                raise type_error(f"{name} must be a sequence", values, "pass a list")
            if not len(values):
                raise value_error(f"{name} must have at least one item", "none", "pass one")
        for name in ("samples", "ref_batchsize", "minibatch_size", "between"):
            if getattr(self, name) is not None:
                check_int(getattr(self, name), name, 1, MAX_INT)
        for factor in self.lr_factors:
            check_positive(factor, "each of lr_factors", "pass factors on the learning rate of the task")
        check_int(self.tuning_seeds, "tuning_seeds", 0)
        check_int(self.windows, "windows", 1)
        if self.windows > 1:
            self._check_parts("seeds", self.judging_seeds)
            self._check_parts("tuning seeds", range(TUNING, TUNING + self.tuning_seeds))
        if self.tuning_seeds and len(set(self.lr_factors)) == 1:
            requirement = "tuning_seeds need several lr_factors, of which the best one is chosen"
            raise value_error(requirement, f"{self.lr_factors}", "pass lr_factors=[0.5, 1, 2], for example")
        if self.lr is not None:
            check_positive(self.lr, "lr", "pass a learning rate")
        if REFERENCE in self.traces:
            raise value_error("a trace must have a name of its own", repr(REFERENCE), "choose another one")
        for rule in self.rules:
            rule_of(rule)
        for end in self.ends:
            End.of(end)

    def cells(self) -> list[Cell]:
        """Return the cells, by task, seed, trace, rule and learning rate. No training begins.

        Seeds come before traces and rules, so that an evaluation that is not complete can compare them.

        Raises:
            OSError: if a file cannot be read.
            TypeError, ValueError: if a task or a trace is not one, or what a task needs is not known.
        """
        seeds: Iterable[int] = range(TUNING, TUNING + self.tuning_seeds) if self.tuning_seeds else self.judging_seeds
        factors = dict.fromkeys(map(float, self.lr_factors))
        for name, (_, courses) in self._plans.items():
            for trace, course in ((trace, course) for trace, parts in courses.items() for course in parts.values()):
                if course.remark:
                    remark = f"trace {trace} of the task {name}: {course.remark}"
                    warnings.warn(remark, UserWarning, stacklevel=stacklevel_of_user())
        return self._cells(seeds, lambda *_: factors)

    def judged(self, records: Iterable[Record]) -> list[Cell]:
        """Return the trainings that judge what the tuning seeds have chosen: none without `tuning_seeds`.

        Those of each rule and trace at the factor that was best, see `best_of`, and at the one nearest to 1.

        Args:
            records: those of `cells`.
        """
        if not self.tuning_seeds:
            return []
        chosen = chosen_factors(records)
        nearest = nearest_to_one(self.lr_factors)
        return self._cells(self.judging_seeds, lambda *kind: dict.fromkeys((chosen[kind], nearest)))

    def _cells(self, seeds: Iterable[int], factors: Callable[[str, str, str], Iterable[float]]) -> list[Cell]:
        cells: list[Cell] = []
        for name in self._tasks:
            fixed, courses = self._plans[name]
            for seed in seeds:
                for trace, parts in courses.items():
                    window = None if None in parts else seed % self.windows
                    course = parts[window]
                    kind = {"trace": trace, "trace_fingerprint": course.fingerprint, "course": course}
                    kind |= {
                        "end": str(course.end),
                        "window": window,
                        "windows": None if window is None else self.windows,
                    }
                    for rule in (CONSTANT,) if trace == REFERENCE else dict.fromkeys(self.rules):
                        for factor in factors(name, trace, rule):
                            scaled = {"rule": rule, "lr": fixed["lr"] * factor, "lr_factor": factor, "seed": seed}
                            cells.append(Cell(**fixed | scaled | kind))
        return cells

    def targets(self) -> dict[str, tuple[str, float]]:
        """Return the target of each task that has one: a metric and its value."""
        found = {name: self._task(name, arguments)[1].target for name, arguments in self._tasks.items()}
        return {name: target for name, target in found.items() if target is not None}

    @property
    def judging_seeds(self) -> Sequence[int]:
        """The seeds that judge."""
        most = TUNING - 1
        if isinstance(self.seeds, int):
            return range(check_int(self.seeds, "seeds", 1, most))
        return [check_int(seed, "each of seeds", 0, most) for seed in self.seeds]

    def _check_parts(self, kind: str, seeds: Iterable[int]) -> None:
        """Raise ValueError if two of the seeds share a part of a log: they would not be independent samples of it."""
        seen: dict[int, int] = {}  # by their parts
        for seed in seeds:
            other = seen.setdefault(seed % self.windows, seed)
            if other != seed:
                requirement = f"the {kind} must have different parts of a log, seed % windows"
                found = f"part {seed % self.windows} of {self.windows} for seeds {other} and {seed}"
                raise value_error(requirement, found, f"pass as many windows as {kind}, or fewer {kind}")

    @property
    def _tasks(self) -> Mapping[str, Mapping[str, Any]]:
        return self.tasks if isinstance(self.tasks, Mapping) else {name: {} for name in self.tasks}

    def _task(self, name: str, arguments: Mapping[str, Any]) -> tuple[Task, Defaults]:
        task = load_task(name, arguments, self.data_dir)
        return task, Defaults.of(task, name)

    @cached_property
    def _plans(self) -> dict[str, tuple[dict[str, Any], dict[str, dict[int | None, Course]]]]:
        return {name: self._of_task(name, arguments) for name, arguments in self._tasks.items()}

    def _of_task(
        self, name: str, arguments: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, dict[int | None, Course]]]:
        """Return the fields that all cells of a task have in common, and the courses of each trace, one a window."""
        task, defaults = self._task(name, arguments)
        samples = _known(self.samples, defaults.samples, "samples", name)
        fixed = {
            "task": name,
            "task_arguments": dict(arguments),
            "task_version": defaults.version,
            "lr": float(_known(self.lr, defaults.lr, "lr", name)),
            "samples": samples,
            "ref_batchsize": self.ref_batchsize or defaults.ref_batchsize,
            "minibatch_size": self.minibatch_size or defaults.minibatch_size,
            "between": self.between or defaults.between or max(1, samples // 16),
            "max_grad_norm": defaults.max_grad_norm,
            "data_dir": self.data_dir,
        }
        return fixed, self._courses(task, fixed)

    def _courses(self, task: Task, fixed: Mapping[str, Any]) -> dict[str, dict[int | None, Course]]:
        traces: dict[str, TraceSource] = (
            dict(self.traces) if isinstance(self.traces, Mapping) else {text: text for text in self.traces}
        )
        reference = fixed["ref_batchsize"]
        ends = dict.fromkeys(map(End.of, self.ends))
        plan = [(end.named(name), name, source, end) for end in ends for name, source in traces.items()]
        if reference is not None and not (str(reference) in traces and CONSTANT in self.rules and SAMPLES in ends):
            plan.append((REFERENCE, REFERENCE, BatchTrace.constant(reference), SAMPLES))
        logs = {name for name, source in traces.items() if depends_on_the_dataset(source)}
        if self.windows > 1 and not logs:
            raise value_error("windows are parts of the log of a cluster", "no such trace", 'pass one, "POLICY@LOG"')
        seeds = [*self.judging_seeds, *range(TUNING, TUNING + self.tuning_seeds)]
        used = sorted({seed % self.windows for seed in seeds})
        courses: dict[str, dict[int | None, Course]] = {}
        for label, name, source, end in plan:
            size = len(dataset_of(task)) if name in logs else MAX_INT  # type: ignore[arg-type]
            training = Training(size, fixed["samples"], fixed["ref_batchsize"], fixed["minibatch_size"])
            try:
                training = training._replace(end=end.resolved(fixed["samples"], reference))
                parts: dict[int | None, Training] = {None: training}
                if self.windows > 1 and name in logs:
                    parts = {window: training._replace(window=window, windows=self.windows) for window in used}
                courses[label] = {
                    window: course_of(source, part, self.options, self.time) for window, part in parts.items()
                }
            except ValueError as error:
                raise ValueError(f"trace {name} of the task {fixed['task']}: {error}") from error
        return courses


def check(cells: Iterable[Cell]) -> None:
    """Raise an error if a cell cannot train: its objects are created once for each task, trace and rule.

    Raises:
        OSError: if the files of a task are missing.
        TypeError, ValueError: if task, trace, rule and optimizer do not fit one another; the message names them.
        RuntimeError: if a task raises another error.
    """
    from variable_batch_size.lab.evaluation.training import parts_of

    seen = set()
    for cell in cells:
        kind = (
            cell.task,
            str(cell.task_arguments),
            cell.trace_fingerprint,
            cell.rule,
            cell.end,
            cell.samples,
            cell.minibatch_size,
        )
        if kind in seen:
            continue
        seen.add(kind)
        try:
            _check_lr(parts_of(cell), cell)
        except (OSError, ModuleNotFoundError):
            raise
        except Exception as error:
            of = f"task {cell.task}, trace {cell.trace}, rule {cell.rule}"
            if type(error) in (TypeError, ValueError):
                raise type(error)(f"{of}: {error}") from error
            raise RuntimeError(f"{of}: {type(error).__name__}: {error}") from error


def _check_lr(parts: Parts, cell: Cell) -> None:
    """Raise ValueError if the learning rate has no effect on the task's optimizer."""
    rates = [
        [float(group["lr"]) for group in parts.task.optimizer(parts.model, lr).param_groups]
        for lr in (cell.lr, 2 * cell.lr)
    ]
    if rates[0] == rates[1]:
        remedy = "pass it to the optimizer that it returns"
        raise value_error(
            "optimizer(model, lr) must use lr", f"lr {rates[0][0]:g} for {cell.lr:g} and twice it", remedy
        )


def _known(given: Any, default: Any, attribute: str, name: str) -> Any:
    if given is None and default is None:
        requirement = f"the task {name} needs {attribute}"
        raise value_error(requirement, "none", f"pass {attribute}=, or give the task this attribute")
    return default if given is None else given
