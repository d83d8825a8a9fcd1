"""Batch traces: the global batch size of every step of a training, as an immutable value with exact queries."""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias, final, get_args

import numpy as np
import numpy.typing as npt

from variable_batch_size._validation import MAX_INT, IntArray, as_int, check_choice, check_int, type_error, value_error
from variable_batch_size.trace.csv_file import Every, read_csv, write_csv
from variable_batch_size.trace.runs import TraceEndError, end_of_run, merge_equal_runs, round_runs, run_at
from variable_batch_size.trace.schedule import Dataset, Unit, is_schedule, parse_schedule, ramp_steps

_SHOWN = 6  # how many runs of equal batch sizes the text of a trace shows

OnEnd: TypeAlias = Literal["error", "stop", "hold", "cycle"]


@final
@dataclass(frozen=True, eq=False, repr=False)
class BatchTrace:
    """The global batch size, in samples, of every step of a run: an immutable, hashable value.

    Steps are updates, counted from 0. Create a trace by `from_csv`, `from_sizes`, `from_runs`, `constant`,
    `parse`, `ramp` or `of`. It is stored as runs of equal batch sizes, and queried by binary search.

    Attributes:
        steps: number of steps; None for an infinite trace, which holds its last batch size.
        on_end: what follows step `steps - 1`: "hold" repeats its batch size, "cycle" repeats the trace, "stop" ends the
            training, and "error" is for a trace that must be long enough. With both a later step is a `TraceEndError`.
    """

    _first_step: IntArray  # (runs,)
    _size: IntArray  # (runs,), samples per step
    _length: IntArray = field(init=False)  # (runs,), in steps; an infinite last run has 1
    _offset: IntArray = field(init=False)  # (runs,), samples before the run
    steps: int | None
    on_end: OnEnd = "error"
    _source: str = ""

    def __post_init__(self) -> None:
        """Check `on_end`, and merge neighboring runs of equal batch size, so that equal traces have equal runs."""
        check_choice(self.on_end, "on_end", get_args(OnEnd))
        for name, array in merge_equal_runs(self._first_step, self._size, self.steps)._asdict().items():
            object.__setattr__(self, f"_{name}", array)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 in hexadecimal, the same for equal traces, whatever they were created from."""
        meaning = f"BatchTrace 1 {self.steps} {self.on_end if self.steps else 'hold'} ".encode()
        return hashlib.sha256(meaning + np.stack([self._first_step, self._size]).astype("<i8").tobytes()).hexdigest()

    def __repr__(self) -> str:
        """Return the first batch sizes as a schedule, and what follows.

        >>> BatchTrace.parse("0:32 10:64"), BatchTrace.from_sizes([8, 8, 4], on_end="cycle")
        (BatchTrace("0:32 10:64", then held), BatchTrace("0:8 2:4", 3 steps, on_end="cycle"))
        """
        runs = [f"{step}:{size}" for step, size in zip(self._first_step[:_SHOWN], self._size, strict=False)]
        more = " ..." if len(self._size) > _SHOWN else ""
        end = f'{self.steps} steps, on_end="{self.on_end}"' if self.steps else "then held"
        return f'{type(self).__name__}("{" ".join(runs)}{more}", {end})'

    def __eq__(self, other: object) -> bool:
        return self.fingerprint == other.fingerprint if isinstance(other, BatchTrace) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    @classmethod
    def from_csv(
        cls, path: str | os.PathLike[str], *, renumber: bool = False, every: Every = "step", on_end: OnEnd = "error"
    ) -> BatchTrace:
        """Read a CSV file with the columns `step` (0, 1, 2, ...) and `batchsize` or `batch_size` (samples).

        Args:
            path: the file, in UTF-8. Cells may be separated by `;` or tabs, and the header may have capitals. Other
                columns are ignored.
            renumber: whether to ignore the values in the column `step` and number the rows instead.
            every: what has a row: each "step", or each "change" of the batch size, from step 0 on; then the trace is
                infinite, as for a schedule.
            on_end: what follows the last step.

        Raises:
            OSError: if the file cannot be read.
            ValueError: if the file is not a trace; the message names file, line and value. If `renumber` ignores the
                steps of changes.
        """
        source = os.fspath(path)
        check_choice(every, "every", get_args(Every))
        if renumber and every == "change":
            remedy = "leave out one of them"
            raise value_error('every="change" needs the column step', "renumber=True, which ignores it", remedy)
        steps, sizes = read_csv(source, renumber, every)  # (rows,) each
        return cls(steps, sizes, None if every == "change" else len(sizes), on_end, source)

    @classmethod
    def from_sizes(cls, sizes: Iterable[int] | npt.NDArray[np.integer], *, on_end: OnEnd = "error") -> BatchTrace:
        """Return the trace whose steps 0, 1, 2, ... have the given batch sizes.

        >>> trace = BatchTrace.from_sizes([128, 128, 256])
        >>> len(trace), trace.batch_size(2), trace.total_samples
        (3, 256, 512)

        Args:
            sizes: batch sizes (samples), each in [1, 2**53]: an iterable of ints or an array of shape (steps,).
            on_end: what follows the last step.

        Raises:
            TypeError: if a batch size is not an integer.
            ValueError: if a batch size is not in [1, 2**53], or if there is none.
        """
        array = _integer_array(sizes)
        if array is None or not ((array >= 1) & (array <= MAX_INT)).all():  # checked one by one, for the message
            named = ((size, f"trace step {step} (sizes[{step}]): batch_size") for step, size in enumerate(sizes))
            array = np.array([check_int(size, name, 1, MAX_INT) for size, name in named])  # (steps,)
        if not len(array):
            raise value_error("a trace must have at least one step", "no sizes", "pass at least one")
        return cls(np.arange(len(array)), array.astype(np.int64), len(array), on_end)

    @classmethod
    def from_runs(cls, sizes: Sequence[int], lengths: Sequence[int], *, on_end: OnEnd = "error") -> BatchTrace:
        """Return the trace that repeats each of `sizes` (samples) for as many steps as `lengths` says, both (runs,).

        >>> BatchTrace.from_runs([128, 256], [2, 1]) == BatchTrace.from_sizes([128, 128, 256])
        True

        Raises:
            TypeError, ValueError: as `from_sizes`, or if `lengths` has another length than `sizes`.
        """
        if not len(sizes) == len(lengths) > 0:
            requirement = "a trace must have a length for each size"
            found = f"{len(sizes)} and {len(lengths)}"
            raise value_error(f"{requirement}, and at least one", found, "pass as many")
        first_step, runs = 0, []
        for run, (size, length) in enumerate(zip(sizes, lengths, strict=True)):
            runs.append((first_step, check_int(size, f"sizes[{run}]", 1, MAX_INT)))
            first_step += check_int(length, f"lengths[{run}]", 1, MAX_INT)
        return cls._from_starts(runs, first_step, on_end)

    @classmethod
    def constant(cls, batch_size: int, steps: int | None = None, *, on_end: OnEnd = "error") -> BatchTrace:
        """Return the trace with the same batch size at every step.

        >>> BatchTrace.constant(64).batch_size(10**9)
        64
        >>> BatchTrace.constant(64, steps=1000).total_samples
        64000

        Args:
            batch_size: samples of every step, in [1, 2**53].
            steps: number of steps, in [1, 2**53]; None makes the trace infinite.
            on_end: what follows the last step.

        Raises:
            TypeError: if `batch_size` or `steps` is not an integer.
            ValueError: if `batch_size` or `steps` is not in [1, 2**53].
        """
        return cls._from_starts([(0, check_int(batch_size, "batch_size", 1, MAX_INT))], steps, on_end)

    @classmethod
    def parse(
        cls,
        schedule: str,
        steps: int | None = None,
        *,
        unit: Unit = "steps",
        sequence_length: int | None = None,
        dataset_size: int | None = None,
        drop_last: bool = False,
        on_end: OnEnd = "error",
    ) -> BatchTrace:
        """Return the trace that a schedule string describes.

        >>> trace = BatchTrace.parse("0:128 2000:256 10K:1024")
        >>> trace.batch_size(1999), trace.batch_size(2000), trace.batch_size(10_000)
        (128, 256, 1024)
        >>> BatchTrace.parse("0:768 250B:1536", unit="tokens", sequence_length=4096).constant_from
        79473
        >>> BatchTrace.parse("0:128 60:640", unit="epochs", dataset_size=1000).constant_from
        480

        In samples and tokens, a step has the batch size of the last entry whose threshold is at most the sum of the
        batch sizes of all steps before it, as with Megatron-LM's `--step-batch-size-schedule`
        (megatron/core/num_microbatches_calculator.py). A step that the end of an epoch shortens counts in full. In
        epochs, which may also be the last word of the schedule, the first update of a batch size is the first one of
        its epoch: an epoch has ceil(N / B) steps.

        Args:
            schedule: entries "threshold:batch size", separated by spaces or commas. The thresholds increase from 0.
                K means 1000, M 10^6, B 10^9, and T 10^12.
            steps: number of steps, which must include the first step of the last entry; None makes the trace infinite.
            unit: what a threshold counts: "steps", "samples", "tokens" or "epochs".
            sequence_length: tokens of a sample, if the unit is tokens; t tokens are floor(t / sequence_length) samples.
            dataset_size: number of samples N of the dataset, if the unit is epochs; a `CustomSampler` knows it.
            drop_last: as in the sampler, with which an epoch has floor(N / B) steps.
            on_end: what follows the last step.

        Raises:
            TypeError: if `schedule` or `unit` is not a string, or `steps` or `sequence_length` not an integer.
            ValueError: if an entry has another form, if the thresholds do not increase from 0, if `steps` does not
                reach the last entry, if `unit` is another one, or if `sequence_length` does not belong to it.
        """
        dataset = None if dataset_size is None else Dataset(check_int(dataset_size, "dataset_size", 1), drop_last)
        runs = parse_schedule(schedule, unit, sequence_length, dataset)
        return cls._from_starts(runs, steps, on_end, f"{schedule!r:.60}")

    @classmethod
    def ramp(
        cls, start: int, end: int, increment: int, samples: int, steps: int | None = None, *, on_end: OnEnd = "error"
    ) -> BatchTrace:
        """Return the trace whose batch size grows linearly over the first `samples` samples, then stays at `end`.

        The batch size of a step before which the batch sizes sum to s is

            B = min(end, start + increment * floor(s * n / samples)),   n = (end - start) / increment

        as with Megatron-LM's former options `--rampup-batch-size start increment samples --global-batch-size end`.

        >>> BatchTrace.ramp(start=16, end=32, increment=8, samples=96).batch_sizes(range(6)).tolist()
        [16, 16, 16, 24, 24, 32]

        Args:
            start: batch size of step 0, in [1, 2**53].
            end: batch size after `samples` samples: `start` plus 1 to 10^6 increments.
            increment: samples by which the batch size grows at once.
            samples: length of the ramp, in [1, 2**53].
            steps: number of steps, which must include the first one of size `end`; None makes the trace infinite.
            on_end: what follows the last step.

        Raises:
            TypeError: if an argument is not an integer.
            ValueError: if an argument is out of its range.
        """
        source = f"ramp({start}, {end}, {increment}, {samples})"
        return cls._from_starts(ramp_steps(start, end, increment, samples), steps, on_end, source)

    @classmethod
    def _from_starts(
        cls, runs: list[tuple[int, int]], steps: int | None, on_end: OnEnd, source: str = ""
    ) -> BatchTrace:
        """Return the trace of the (first step, batch size) of each run; `steps` must reach the last run."""
        first_step, size = np.array(runs, np.int64).T  # (runs,), (runs,)
        end = None if steps is None else check_int(steps, "steps", 1, MAX_INT)
        if end is not None and end <= first_step[-1]:
            requirement = f"steps must be > {first_step[-1]}, the first step of the last batch size of {source}"
            raise value_error(requirement, end, "raise it, or end the schedule earlier")
        return cls(first_step, size, end, on_end, source)

    @classmethod
    def of(
        cls, source: object, *, on_end: OnEnd | None = None, dataset_size: int | None = None, drop_last: bool = False
    ) -> BatchTrace:
        """Return the trace that `source` describes.

        >>> BatchTrace.of("0:5") == BatchTrace.of(5) == BatchTrace.constant(5)
        True

        Args:
            source: a BatchTrace, the path of a CSV file, a schedule string, an int (the same batch size at every step),
                or a sequence, array, tensor or pandas Series of ints (the batch size of each step).
            on_end: what follows the last step; None: as a BatchTrace has it, and "error" for other sources.
            dataset_size: of a schedule in epochs, as `drop_last`, see `parse`.

        Raises:
            TypeError: if `source` has another type.
            ValueError: if `source` is not a valid trace, as described at `from_csv`, `parse`, `constant` and
                `from_sizes`.
        """
        if isinstance(source, BatchTrace):
            return source if on_end is None else source.with_on_end(on_end)
        end: OnEnd = "error" if on_end is None else on_end
        if isinstance(source, str):
            epochs = {"dataset_size": dataset_size, "drop_last": drop_last}
            return cls.parse(source, **epochs, on_end=end) if is_schedule(source) else cls.from_csv(source, on_end=end)  # type: ignore[arg-type]
        if isinstance(source, os.PathLike):
            return cls.from_csv(source, on_end=end)
        if (number := as_int(source)) is not None:
            return cls.constant(number, on_end=end)
        is_sizes = isinstance(source, Sequence) and not isinstance(source, (bytes, bytearray, memoryview))
        if is_sizes or hasattr(source, "__array__"):
            return cls.from_sizes(source, on_end=end)  # type: ignore[arg-type]
        requirement = "trace must be a path, a BatchTrace, a sequence of ints, an int or a schedule string"
        raise type_error(requirement, source, "pass one of these")

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write the trace atomically as a CSV file with the columns `step` and `batchsize`, for `from_csv`.

        Raises:
            ValueError: if the trace is infinite.
        """
        write_csv(Path(path), self.batch_sizes(np.arange(self._finite_steps("to_csv"))))

    def batch_size(self, step: int) -> int:
        """Return the global batch size (samples) of `step`.

        Raises:
            TypeError: if `step` is not an integer.
            ValueError: if `step` is negative.
            TraceEndError: if `step` is beyond the last one and `on_end` is "error" or "stop".
        """
        _, step_in_trace = self._fold(check_int(step, "step"), self.steps, "step")
        return int(self._size[run_at(self._first_step, step_in_trace)])

    def batch_sizes(self, steps: npt.ArrayLike) -> IntArray:
        """Return `batch_size` of each element of `steps`, an array of ints of any shape, as int64 of this shape."""
        # dtype object, because numpy converts a list that mixes ints below and above 2**63 to floats.
        array = steps if isinstance(steps, np.ndarray) else np.asarray(steps, object)
        if array.dtype.kind not in "iu" or array.dtype == np.uint64 or array.size == 0:
            return np.array([self.batch_size(step) for step in array.flat], np.int64).reshape(array.shape)
        for extreme in (array.min(), array.max()):
            self.batch_size(extreme)  # raises if it is out of range
        step_in_trace = array.astype(np.int64) % self.steps if self.on_end == "cycle" and self.steps else array
        return self._size[self._first_step.searchsorted(step_in_trace, side="right") - 1]  # same shape as `steps`

    def offset(self, step: int) -> int:
        """Return the number of samples in all steps before `step`; `step` can also be the first one after the trace.

        Raises:
            TypeError, ValueError, TraceEndError: as `batch_size`, but not for the step after the last one.
        """
        step = check_int(step, "step")
        cycles, step_in_trace = (0, step) if step == self.steps else self._fold(step, self.steps, "step")
        run = run_at(self._first_step, step_in_trace)
        samples_in_trace = int(self._offset[run]) + (step_in_trace - int(self._first_step[run])) * int(self._size[run])
        return cycles * self.total_samples + samples_in_trace if cycles else samples_in_trace

    def step_at(self, sample: int) -> int:
        """Return the step of sample number `sample`, counted from 0: offset(step) <= sample < offset(step + 1).

        Raises:
            TypeError, ValueError, TraceEndError: as `batch_size`.
        """
        steps, total = (self.steps, self.total_samples) if self.steps else (0, None)
        cycles, sample_in_trace = self._fold(check_int(sample, "sample"), total, "sample")
        run = run_at(self._offset, sample_in_trace)
        steps_in_run = (sample_in_trace - int(self._offset[run])) // int(self._size[run])  # before that of the sample
        return cycles * steps + int(self._first_step[run]) + steps_in_run

    def __len__(self) -> int:
        """Return the number of steps; raise TypeError if the trace is infinite."""
        return self._finite_steps("len", TypeError)

    def __bool__(self) -> bool:
        """Return True, without the call to `__len__` that fails for an infinite trace."""
        return True

    @property
    def runs(self) -> tuple[IntArray, IntArray]:
        """First step and batch size (samples) of each run of equal sizes, (runs,) both."""
        return self._first_step.copy(), self._size.copy()

    @property
    def total_samples(self) -> int:
        """Return the sum of the batch sizes of steps 0 to `steps - 1`; raise ValueError if the trace is infinite."""
        self._finite_steps("total_samples")
        return int(self._offset[-1]) + int(self._length[-1]) * int(self._size[-1])

    @property
    def max_batch_size(self) -> int:
        """Return the largest global batch size (samples) of any step."""
        return int(self._size.max())

    @property
    def constant_from(self) -> int | None:
        """Return the first step after which the batch size never changes, up to an end by "stop"; None without one."""
        if len(self._size) == 1 and self.on_end != "error":
            return 0
        return int(self._first_step[-1]) if self.steps is None or self.on_end in ("hold", "stop") else None

    def constant_until(self, step: int) -> int | None:
        """Return the step after `step` at which the batch size may change or the trace ends; None if neither does."""
        if self.constant_from is not None and step >= self.constant_from:
            return None
        _, step_in_trace = self._fold(step, self.steps, "step")
        return step - step_in_trace + end_of_run(self._first_step, self._length, step_in_trace)

    def round_to(self, multiple: int) -> BatchTrace:
        """Return the trace of multiples of `multiple` that stays closest to the cumulative samples of this one.

        For every step t <= `steps`:

            rounded.offset(t) = multiple * floor(offset(t) / multiple + 1/2)

        so the two differ by at most multiple / 2 samples. Beyond the last step, `on_end` applies to the rounded sizes.

        >>> BatchTrace.from_sizes([40, 40, 40, 40]).round_to(32).batch_sizes(range(4)).tolist()
        [32, 64, 32, 32]

        Args:
            multiple: samples, for example the microbatch size times the number of ranks.

        Raises:
            TypeError: if `multiple` is not an integer.
            ValueError: if `multiple` is not in [1, 2**53], if a batch size is less than `multiple`, or if the trace is
                infinite and its last batch size is not a multiple, because the difference would grow without bound.
        """
        multiple = check_int(multiple, "multiple", 1, MAX_INT)
        if self.steps is None and self._size[-1] % multiple:
            requirement = f"{self._name}: the last batch_size of an infinite trace must be a multiple of {multiple}"
            raise value_error(requirement, self._size[-1], "change it, or limit the trace with steps=")
        first_step, size = round_runs(self._first_step, self._size, self._length, multiple, self._name)
        return replace(self, _first_step=first_step, _size=size)

    def with_on_end(self, on_end: OnEnd) -> BatchTrace:
        """Return a trace with the same batch sizes and the given `on_end`. An invalid `on_end` raises a ValueError."""
        check_choice(on_end, "on_end", get_args(OnEnd))
        changed = copy.copy(self)  # the runs are the same
        vars(changed).pop("fingerprint", None)  # a cached property, which depends on `on_end`
        object.__setattr__(changed, "on_end", on_end)
        return changed

    @property
    def _name(self) -> str:
        return f"trace {self._source}" if self._source else "trace"

    def _finite_steps(self, caller: str, error: type[Exception] = ValueError) -> int:
        """Return the number of steps; raise `error`, which names the caller, if the trace is infinite."""
        if self.steps is None:
            raise error(f"{caller} requires a finite trace, got {self!r}; limit it with steps=")
        return self.steps

    def _fold(self, position: int, end: int | None, unit: str) -> tuple[int, int]:
        """Return how many times the trace is over before a position, and the position within the trace.

        With `on_end="cycle"` the trace begins again after its end: position 7 of a trace of 5 steps is (1, 2).

        Args:
            position: a step or a sample, counted from 0.
            end: number of steps, or of samples, of the trace; None for an infinite trace.
            unit: "step" or "sample", for the error message.

        Raises:
            TraceEndError: if the position is beyond the end, and `on_end` is "error" or "stop".
        """
        if end is None or position < end or self.on_end == "hold":
            return 0, position
        if self.on_end == "cycle":
            return divmod(position, end)
        requirement = f"{unit} must be < {end}, because {self._name} has {self.steps} steps"
        stop = '"stop", ' if self.on_end == "error" else ""
        remedy = f'use a longer trace, or on_end={stop}"hold" or "cycle"'
        raise TraceEndError(f"{requirement} ({self.total_samples} samples), got {position}; {remedy}")


def _integer_array(sizes: Any) -> npt.NDArray[np.integer] | None:
    """Return batch sizes in an array, a tensor or a Series of integers as an array, (steps,); None for others.

    32.0 counts as an integer: pandas stores a column with a missing value as floats.
    """
    if not hasattr(sizes, "__array__") or np.ma.is_masked(sizes):
        return None
    if hasattr(sizes, "detach"):  # a tensor
        sizes = sizes.detach().cpu()
        sizes = sizes.double() if sizes.is_floating_point() else sizes  # numpy has no bfloat16
    array = np.asarray(sizes)
    if array.ndim == 1 and array.dtype.kind == "f" and not (array % 1).any():
        array = array.astype(np.int64)
    return array if array.ndim == 1 and array.dtype.kind in "iu" else None
