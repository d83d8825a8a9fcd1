"""How long an update takes on a number of devices: a model, and its fit to measurements."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import NamedTuple, final

import numpy as np
import numpy.typing as npt

from variable_batch_size._extras import import_extra
from variable_batch_size._validation import (
    FloatArray,
    IntArray,
    check_int,
    check_number,
    check_positive,
    type_error,
    value_error,
)
from variable_batch_size.adaptive.scalars import updates_in
from variable_batch_size.microbatching import count_microbatches

LEAST_SECONDS = 1e-15  # of a microbatch of one row, so that 2**53 updates, the most that are counted, take seconds


@final
@dataclass(frozen=True, slots=True)
class Throughput:
    """The time of an update, by the model of Pollux (Qiao et al., OSDI 2021, section 3.2).

    The busiest device computes s + 1 microbatches of m rows (the sizes of a batch may differ by one row, and the rows
    of each count), and R devices sum their gradients:

        T_accum = accum_base + accum_row * m
        T_net   = 0 if R = 1, else net_base + net_device * (R - 2)
        T       = s * T_accum + (T_accum^overlap + T_net^overlap)^(1 / overlap)

    Args:
        accum_base: seconds of forward and backward of a microbatch, whatever its size, >= 0.
        accum_row: seconds per row of a microbatch, >= 0; the sum of both is at least 1e-15.
        net_base: seconds of communication between two devices, >= 0.
        net_device: further seconds per further device, >= 0.
        overlap: how much communication overlaps with the last backward: 1 not at all, 10 almost completely.

    Raises:
        TypeError: if a value is not a number.
        ValueError: if a value is not in its range.
    """

    accum_base: float
    accum_row: float
    net_base: float = 0.0
    net_device: float = 0.0
    overlap: float = 1.0

    def __post_init__(self) -> None:
        """Check the parameters: seconds >= 0, an overlap in [1, 10], and a microbatch that takes time."""
        for field in fields(self):
            number = check_number(getattr(self, field.name), field.name, "pass seconds, or an overlap in [1, 10]")
            object.__setattr__(self, field.name, number)
        if not 1 <= self.overlap <= 10:
            raise value_error("overlap must be in [1, 10]", self.overlap, "pass 1 for none")
        if self.accum_base + self.accum_row < LEAST_SECONDS:
            requirement = f"a microbatch must take time, accum_base + accum_row >= {LEAST_SECONDS} seconds"
            raise value_error(requirement, self.accum_base + self.accum_row, "pass one of them, and check the unit")

    @classmethod
    def simple(cls, samples_per_second: float, communication_seconds: float = 0.0) -> Throughput:
        """Return the model of devices that compute equally fast whatever the microbatch, and do not overlap.

        >>> Throughput.simple(samples_per_second=500, communication_seconds=0.1).seconds(1000, devices=4)
        0.6

        Args:
            samples_per_second: samples that one device computes in a second, in [1e-9, 1e15].
            communication_seconds: seconds of the communication of an update on two or more devices, >= 0.

        Raises:
            TypeError: if an argument is not a number.
            ValueError: if an argument is not in its range.
        """
        rate = check_positive(samples_per_second, "samples_per_second", "pass a positive number")
        if not 1e-9 <= rate <= 1e15:
            raise value_error("samples_per_second must be in [1e-9, 1e15]", rate, "check the unit")
        seconds = check_number(communication_seconds, "communication_seconds", "pass seconds")
        return cls(accum_base=0.0, accum_row=1 / rate, net_base=seconds)

    def seconds(
        self,
        batch_size: int,
        devices: int,
        minibatch_size: int | None = None,
        *,
        spread: bool = True,
        fixed_shape: bool = False,
    ) -> float:
        """Return the seconds of an update, which the device with the most rows determines.

        Args:
            batch_size: samples of the update, >= 1.
            devices: number of devices, >= 1.
            minibatch_size: maximum number of rows of a microbatch; by default a device computes its share at once.
            spread: whether a batch is split further, so that all devices have equally many microbatches; a sampler does
                it unless the gradient noise is measured. Without `minibatch_size` it always is.
            fixed_shape: whether every microbatch has exactly `minibatch_size` rows, see `CustomSampler`.

        Raises:
            TypeError: if a number is not an integer.
            ValueError: if a number is < 1, or the shape is fixed without a `minibatch_size`.
        """
        size, number = check_int(batch_size, "batch_size", 1), check_int(devices, "devices", 1)
        rows = None if minibatch_size is None else check_int(minibatch_size, "minibatch_size", 1)
        return float(self.of_sizes(np.array(size), number, rows, spread=spread, fixed_shape=fixed_shape))

    def of_sizes(
        self,
        batch_sizes: IntArray,
        devices: int,
        minibatch_size: int | None = None,
        *,
        spread: bool = True,
        fixed_shape: bool = False,
    ) -> FloatArray:
        """Return the seconds of updates of these batch sizes, an array of any shape; for the others see `seconds`."""
        if fixed_shape:
            if minibatch_size is None:
                raise value_error("a fixed shape needs a minibatch_size", None, "pass the rows of a microbatch")
            rounds = -(-count_microbatches(batch_sizes, minibatch_size, fixed_shape=True) // devices)  # rounded up
            return self.of_rounds(rounds * minibatch_size, minibatch_size, rounds, devices)
        largest_batch = int(batch_sizes.max())
        most_rows = largest_batch if minibatch_size is None else min(minibatch_size, largest_batch)
        multiple_of = min(devices, largest_batch) if spread or minibatch_size is None else 1
        microbatches = count_microbatches(batch_sizes, most_rows, fixed_shape=False, multiple_of=multiple_of)
        rows, num_larger = np.divmod(batch_sizes, microbatches)  # so many of the microbatches have one row more
        rounds = -(-microbatches // devices)
        rows_of_busiest = rounds * rows + -(-num_larger // devices)  # devices get the smaller microbatches first
        return self.of_rounds(rows_of_busiest, rows + (num_larger > 0), rounds, devices)

    def of_rounds(
        self, busiest: npt.ArrayLike, rows: npt.ArrayLike, rounds: npt.ArrayLike, devices: npt.ArrayLike
    ) -> FloatArray:
        """Return the seconds of updates.

        Args:
            busiest: rows of all microbatches of the busiest device, of any shape.
            rows: rows of its last microbatch, after which the devices communicate, of the same shape.
            rounds: number of its microbatches, of the same shape.
            devices: number of devices, of the same shape, or one for all.
        """
        parameters = np.array([self.accum_base, self.accum_row, self.net_base, self.net_device, self.overlap])
        arrays = (np.asarray(values, np.float64) for values in (busiest, rows, rounds, devices))
        return _seconds(parameters, *arrays)

    @classmethod
    def fit(cls, measured: npt.ArrayLike) -> Throughput:
        """Return the model that is closest to measured updates, by the squares of the relative errors of their seconds.

        What the measurements do not distinguish has the simplest value. Updates on one number of devices give a model
        for this number only, without overlap. There is no communication without updates on several devices, or if
        none is on one device and all have equally many rounds. `net_device` is 0 without two numbers of devices above
        1, `accum_base` is 0 if all microbatches have equally many rows, and there is no overlap if those on several
        devices have.

        >>> model = Throughput(accum_base=0.01, accum_row=0.001, net_base=0.05)
        >>> rows = [(devices, 32, 2, model.of_rounds(64, 32, 2, devices)) for devices in (1, 2, 4)]
        >>> round(Throughput.fit(rows).net_base, 4), round(Throughput.fit(rows).error(rows), 4)
        (0.05, 0.0)

        Args:
            measured: number of devices, rows of a microbatch, microbatches of the slowest device, and seconds of each
                update, (updates, 4).

        Raises:
            ModuleNotFoundError: if scipy is not installed.
            TypeError: if a value is not a number.
            ValueError: if the shape is another one, a value is not finite and > 0, or one of the first three is not
                whole, or the seconds do not depend on the rows.
        """
        updates = measured_updates(measured)
        fitted = _fit_parameters(updates)
        accum_base, accum_row, *_ = fitted
        computation = updates.rounds * (accum_base + accum_row * updates.rows)  # (updates,), seconds
        if (computation < 1e-6 * updates.seconds).all():  # least squares come this close to 0 if it is 0
            requirement = "the measurements must show how long a microbatch takes"
            raise value_error(requirement, "seconds that are all communication", "measure updates on one device, too")
        return cls(*fitted.tolist())

    @classmethod
    def from_csv(cls, path: str | os.PathLike[str], minibatch_size: int | None = None) -> Throughput:
        """Return the model that fits the updates of a run, from the `scalars.csv` of its `Tracker`.

        See `fit`. The seconds of an update of each number of ranks, batch size and number of microbatches are the
        median of its rows, so that an evaluation or a save between two rows does not matter if most rows are without.
        Rows between which the batch size has changed are left out. The model holds for the devices and batch sizes that
        the training had: let it run with one device and with several.

        Args:
            path: the file; its columns vbs/world_size, vbs/global_batch_size, vbs/num_microbatches,
                vbs/updates_per_second and vbs/samples_per_second.
            minibatch_size: rows of each microbatch, if the run had `fixed_shape=True`. Default: ceil(batch size /
                microbatches), as in runs without a fixed shape.

        Raises:
            OSError: if the file cannot be read.
            ModuleNotFoundError: if scipy is not installed.
            TypeError: if `minibatch_size` is not an integer.
            ValueError: if a column is missing, a cell is not a number, or no row has the seconds of updates of one
                batch size.
        """
        rows = None if minibatch_size is None else check_int(minibatch_size, "minibatch_size", 1)
        return cls.fit(updates_in(path, rows))

    def error(self, measured: npt.ArrayLike) -> float:
        """Return the root mean square of the relative errors of the seconds, for updates as in `fit`."""
        devices, rows, rounds, seconds = measured_updates(measured)
        return float(np.sqrt(np.mean((self.of_rounds(rounds * rows, rows, rounds, devices) / seconds - 1) ** 2)))


def _seconds(
    parameters: FloatArray, busiest: FloatArray, rows: FloatArray, rounds: FloatArray, devices: FloatArray
) -> FloatArray:
    """Return the seconds of updates, (updates,), by the equations of `Throughput`.

    Args:
        parameters: accum_base, accum_row, net_base, net_device and overlap, (5,).
        busiest: rows of all microbatches of the busiest device.
        rows: rows of its last microbatch, after which the devices communicate.
        rounds: number of its microbatches.
        devices: number of devices.
    """
    accum_base, accum_row, net_base, net_device, overlap = parameters
    before_last = accum_base * (rounds - 1) + accum_row * (busiest - rows)  # all microbatches but the last one
    accum = accum_base + accum_row * rows  # the last microbatch, which overlaps with the communication
    net = np.where(devices > 1, net_base + net_device * np.maximum(devices - 2, 0), 0.0)
    longest = np.maximum(np.maximum(accum, net), np.finfo(np.float64).tiny)  # factored out, so that no power overflows
    last_with_net = longest * ((accum / longest) ** overlap + (net / longest) ** overlap) ** (1 / overlap)
    seconds: FloatArray = before_last + last_with_net
    return seconds


@final
class Measured(NamedTuple):
    """Measured updates, all (updates,)."""

    devices: FloatArray
    rows: FloatArray  # of a microbatch
    rounds: FloatArray  # microbatches of the slowest device
    seconds: FloatArray


def measured_updates(values: npt.ArrayLike) -> Measured:
    """Return the columns of an array (updates, 4); raise if a value is not finite and > 0, or a count is not whole."""
    requirement, remedy = "the measurements must have the shape (updates, 4)", "pass devices, rows, rounds and seconds"
    try:
        table = np.asarray(values, np.float64)
    except (TypeError, ValueError):
        raise type_error(requirement, values, remedy) from None
    if table.ndim != 2 or table.shape[1] != 4 or len(table) == 0:
        raise value_error(requirement, f"the shape {table.shape}", remedy)
    wrong = ~(np.isfinite(table) & (table > 0))
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        raise value_error(f"{Measured._fields[column]} in row {row} must be finite and > 0", table[row, column], remedy)
    fractional = table[:, :3] % 1 > 0
    if fractional.any():  # the columns may be in another order
        row, column = np.argwhere(fractional)[0]
        raise value_error(f"{Measured._fields[column]} in row {row} must be whole", table[row, column], remedy)
    return Measured(*table.T)


def _fit_parameters(updates: Measured) -> FloatArray:
    """Return the parameters with the least squares of the relative errors, in the order of `Throughput`, (5,)."""
    devices, rows, rounds, seconds = updates
    on_several = devices > 1
    # How many different numbers of devices were measured.
    worlds, worlds_above_one = len(np.unique(devices)), len(np.unique(devices[on_several]))
    # Which parameters the measurements determine; the others keep their lowest value.
    fits_net_base = worlds_above_one > 0 and (worlds > worlds_above_one or len(np.unique(rounds)) > 1)
    is_fitted = np.array(
        [
            len(np.unique(rows)) > 1,  # accum_base
            True,  # accum_row
            fits_net_base,  # it counts once an update, and computation once a round
            worlds > 1 and worlds_above_one > 1,  # net_device
            worlds > 1 and len(np.unique(rows[on_several])) > 1,  # overlap: it shows where computation varies
        ]
    )
    # The search begins with half of the time of a round, a row, an update and a device, and with an overlap of 2.
    times = (seconds / rounds, seconds / rounds / rows, seconds, seconds / devices)
    halves = (np.median(time) / 2 for time in times)
    start, lowest, highest = np.array([*halves, 2.0]), np.array([0.0, 0, 0, 0, 1]), np.array([np.inf] * 4 + [10.0])

    def parameters(free: FloatArray) -> FloatArray:
        """Return all parameters, (5,), from those that are fitted."""
        values = lowest.copy()
        values[is_fitted] = free
        return values

    def errors(free: FloatArray) -> FloatArray:
        """Return the relative errors of the seconds, (updates,)."""
        return _seconds(parameters(free), rounds * rows, rows, rounds, devices) / seconds - 1

    bounds = (lowest[is_fitted], highest[is_fitted])
    scale = start[is_fitted]
    least_squares = import_extra("scipy.optimize", "evaluation").least_squares
    return parameters(least_squares(errors, scale, bounds=bounds, x_scale=scale, ftol=1e-12, xtol=1e-12, gtol=1e-12).x)
