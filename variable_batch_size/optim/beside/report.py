"""The rows of scalars that an optimizer logs, and its progress bar: on rank 0, without waiting for a device."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, final

from torch import Tensor

from variable_batch_size._validation import check_int
from variable_batch_size.backend import Backend
from variable_batch_size.backend.agreement import Agreement
from variable_batch_size.data.batches import Batch
from variable_batch_size.data.plan.plan import Epoch
from variable_batch_size.data.training import Training
from variable_batch_size.optim.beside.means import StepMeans
from variable_batch_size.optim.stage import LoopStage
from variable_batch_size.optim.tensors.late import copy_later
from variable_batch_size.optim.update import Updater
from variable_batch_size.rules import Noise
from variable_batch_size.tracker import Tracker


class _Moment(NamedTuple):
    seconds: float
    updates: int
    samples: int
    fraction: float  # of the whole training


class ReportedStages(Protocol):
    """What is measured of updates, where it is: the stages that rows of scalars show."""

    means: StepMeans

    @property
    def noise_reader(self) -> Callable[[], Callable[[], Noise]] | None:
        """Return a function that returns a reader of the present noise; None if it is not measured."""

    @property
    def skipped(self) -> int | None:
        """The number of updates that were skipped; None if none is."""


@final
class Reporter(LoopStage):
    """Logs a row of scalars after each interval of updates or samples, and moves the progress bar after each update.

    Numbers on a device are read by a function that the tracker calls some updates later.
    """

    def __init__(
        self,
        updater: Updater,
        training: Training,
        backend: Backend,
        measured: ReportedStages,
        tracker: Tracker,
        log_steps: int | None,
        log_samples: int | None,
    ) -> None:
        self._samples = None if log_samples is None else check_int(log_samples, "log_samples", 1)
        default = 10 if log_samples is None else None  # updates between two rows
        self._steps = default if log_steps is None else check_int(log_steps, "log_steps", 1)
        logs = backend.leads or backend.elastic  # the first rank; where ranks may come and go, any may become it
        if not logs:
            tracker.mute()  # a loop may log to it on every rank
        self._tracker = tracker if logs else None
        self._updater, self._measured, self._training, self._backend = updater, measured, training, backend
        self._begin: _Moment | None = None  # after the first update of this run
        self._earlier = 0.0  # seconds of earlier runs, up to the restored update
        self._last: _Moment | None = None  # after the update of the last row
        self._seconds_left: float | None = None  # of the whole training, at the last row
        if self._tracker is not None:
            self._tracker.check()

    def follow_up(self, batch: Batch, agreement: Agreement, *, leads: bool) -> None:
        """Move the progress bar after an update, and log a row of scalars if one is due."""
        tracker = self._tracker
        if tracker is None or not self._backend.leads:
            return
        updates, epoch = self._training.updates, self._epoch
        row_is_due = self._is_row_due(batch)
        if self._begin is None or row_is_due:
            now = _Moment(time.monotonic(), updates, self._training.samples, self._fraction)
            if self._begin is None:
                self._begin = now
                self._earlier = tracker.last_before(updates, "vbs/seconds")
        if row_is_due:
            read_row = self._row_reader(batch, now)
            if self._reads_device:  # later, so that the host does not wait for the device
                tracker.log_later(updates, read_row)
            else:
                tracker.log(updates, read_row())
            self._seconds_left = _estimate_seconds_left(self._begin, now)
            self._last = now
        tracker.write_pending(updates)
        tracker.show(epoch.number, batch.start + batch.batch_size, epoch.samples, self._seconds_left)

    def state_dict(self) -> dict[str, Any]:
        """Return no state, but write the log to the disk, so that it has no hole if a run resumes after a kill."""
        if self._tracker is not None:
            self._tracker.flush()
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next row drop the rows after the restored update, because those updates are made again."""
        if self._tracker is not None:  # where ranks come and go, others may log until this one leads
            self._tracker.rewind(None if self._backend.elastic else self._training.updates)
        self._begin = self._last = None

    @property
    def _reads_device(self) -> bool:
        """Whether the next row has numbers that an accelerator computes, which the host would wait for."""
        updater, measured = self._updater, self._measured
        has_computed = measured.noise_reader is not None or updater.options.grad_norm or bool(measured.means.names)
        return has_computed and updater.parameters[0].device.type != "cpu"

    def _is_row_due(self, batch: Batch) -> bool:
        """Return whether the last update, of this batch, has reached a multiple of `log_steps` or `log_samples`."""
        if self._steps is not None and self._training.updates % self._steps == 0:
            return True
        samples, interval = self._training.samples, self._samples
        return interval is not None and samples // interval > (samples - batch.batch_size) // interval

    def _known_scalars(self, batch: Batch, now: _Moment) -> dict[str, float]:
        """Return the scalars of a row that the host knows, such as speeds, by their tags without the prefix vbs/."""
        epoch, batches = self._epoch, self._training.batches
        begin = self._begin or now
        last = self._last or begin  # speeds are means since then
        seconds = now.seconds - last.seconds
        return {
            "epoch": epoch.number + (batch.start + batch.batch_size) / batches.plan.whole_samples(epoch),
            "samples": now.samples,
            "seconds": self._earlier + (now.seconds - begin.seconds),
            "samples_per_second": _per_second(now.samples - last.samples, seconds),
            "updates_per_second": _per_second(now.updates - last.updates, seconds),
            "global_batch_size": batch.batch_size,
            "num_microbatches": batch.num_microbatches,
            "world_size": batches.world.size,
        }

    def _row_reader(self, batch: Batch, now: _Moment) -> Callable[[], dict[str, float]]:
        """Return a function that returns the scalars of the update that was just made.

        It is called at once, or some updates later, when a device has computed them. So all that it reads is fetched
        here, before the next update changes it.
        """
        updater, measured = self._updater, self._measured
        known_scalars = self._known_scalars(batch, now)
        skipped = {} if measured.skipped is None else {"skipped": measured.skipped}
        scaling = updater.last_scaling
        read_factors = _float_later(scaling.lr), _float_later(scaling.gradient)
        read_lr, read_norm = _float_later(updater.reference_lr), _float_later(updater.grad_norm)
        read_noise = None if measured.noise_reader is None else measured.noise_reader()
        read_progress, read_means = updater.progress.reader(), measured.means.reader()

        def read() -> dict[str, float]:
            """Return the scalars, by tag; called later, it waits for no device."""
            factor = math.prod(read_factor() for read_factor in read_factors)
            row = {**known_scalars, "lr_effective": read_lr() * factor, "lr_factor": factor, **skipped}
            if updater.options.grad_norm:
                row["grad_norm"] = read_norm()
            if read_noise is not None:
                noise = read_noise()
                row |= {"gain": noise.gain, "progress": read_progress()}
                row |= {name: getattr(noise, name) for name in ("noise_scale", "sigma2", "mu2")}
            return {f"vbs/{name}": value for name, value in row.items()} | read_means()

        return read

    @property
    def _epoch(self) -> Epoch:
        """The epoch of the last update."""
        return self._training.batches.epoch(self._training.position)

    @property
    def _fraction(self) -> float:
        """The share of the whole training that is done, in [0, 1], or 0 if its end is not known."""
        training = self._training
        return training.batches.plan.fraction(self._epoch, training.position.step, training.epochs)


def _estimate_seconds_left(begin: _Moment, now: _Moment) -> float | None:
    """Return the seconds to the end of the training at the speed since `begin`; None if that is not known.

    `fraction` of a moment: the share of the whole training that was done then.
    """
    if now.fraction <= begin.fraction:
        return None
    return (now.seconds - begin.seconds) * (1 - now.fraction) / (now.fraction - begin.fraction)


def _per_second(number: int, seconds: float) -> float:
    """Return a rate, or nan if no time has passed."""
    return number / seconds if seconds > 0 else math.nan


def _float_later(value: Any) -> Callable[[], float]:
    """Return a function that returns the present value of a number or a tensor, or nan for None.

    Called some updates later, it does not wait for the device of the tensor.
    """
    if isinstance(value, Tensor):
        read = copy_later(value)
        return lambda: float(read())
    return lambda: math.nan if value is None else float(value)
