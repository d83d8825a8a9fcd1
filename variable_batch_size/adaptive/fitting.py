"""The parameters of `Throughput` that fit measured updates best."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, final

import numpy as np
import numpy.typing as npt

from variable_batch_size._extras import import_extra
from variable_batch_size._validation import FloatArray, type_error, value_error

_ROUNDING = 1e-9  # of relative errors: by so much a model without overlap may be worse
# The overlaps at which least squares begin, and by how much they raise the seconds of communication of the linear fit,
# which sees only what the computation does not hide.
_STARTS = ((1.5, 1.0), (3.0, 1.0), (3.0, 4.0), (6.0, 4.0))


@final
class Measured(NamedTuple):
    """Measured updates, all (updates,)."""

    devices: FloatArray
    rows: FloatArray  # of a microbatch
    rounds: FloatArray  # microbatches of the slowest device
    seconds: FloatArray


def measured_updates(values: npt.ArrayLike) -> Measured:
    """Return the columns of (updates, 4); raise if a value is not finite and > 0, or a count is not whole."""
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
    parts = table[:, :3] % 1 > 0
    if parts.any():  # the columns may be in another order
        row, column = np.argwhere(parts)[0]
        raise value_error(f"{Measured._fields[column]} in row {row} must be whole", table[row, column], remedy)
    return Measured(*table.T)


def fitted(seconds_of: Callable[[FloatArray], FloatArray], updates: Measured) -> FloatArray:
    """Return the parameters with the least squares of the relative errors, in the order of `Throughput`, (5,).

    At an overlap of 1 the seconds are linear in the other four, which non-negative least squares find. From there, and
    from larger overlaps, nonlinear least squares find all five.

    Args:
        seconds_of: the model: parameters -> seconds of the updates.
        updates: what was measured.
    """
    optimize = import_extra("scipy.optimize", "evaluation")
    devices, rows, rounds, seconds = updates
    several = devices > 1
    terms = np.stack([rounds, rounds * rows, several, np.maximum(devices - 2, 0)], axis=1) / seconds[:, None]
    numbers, above_one = len(np.unique(devices)), len(np.unique(devices[several]))
    sums = numbers > 1 or (above_one == 1 and len(np.unique(rounds)) > 1)  # they are once an update, not once a round
    known = np.array([len(np.unique(rows)) > 1, True, sums, numbers > 1 and above_one > 1, numbers > 1])
    scale = 1 / np.maximum(np.append(np.linalg.norm(terms, axis=0), 1.0), 1e-300)  # (5,): all are of the order of 1
    linear = np.zeros(4)
    linear[known[:4]] = optimize.nnls((terms * scale[:4])[:, known[:4]], np.ones_like(seconds))[0]
    candidates = [np.append(linear * scale[:4], 1.0)]
    lowest, highest = np.array([0.0, 0, 0, 0, 1]), np.array([np.inf] * 4 + [10.0])

    def parameters(free: FloatArray) -> FloatArray:
        values = lowest.copy()
        values[known] = free * scale[known]
        return values

    def errors(free: FloatArray) -> FloatArray:
        return seconds_of(parameters(free)) / seconds - 1

    for overlap, raised in _STARTS if numbers > 1 else ():
        start = np.append(np.maximum(linear, 1e-3) * [1, 1, raised, raised], overlap)[known]
        bounds = lowest[known], highest[known]
        found = optimize.least_squares(errors, start, bounds=bounds, ftol=1e-15, xtol=1e-15, gtol=1e-15)
        candidates.append(parameters(found.x))
    squares = [float(np.sum((seconds_of(values) / seconds - 1) ** 2)) for values in candidates]
    linear_is_as_good = squares[0] <= min(squares) + len(seconds) * _ROUNDING**2
    return candidates[0 if linear_is_as_good else int(np.argmin(squares))]
