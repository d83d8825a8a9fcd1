"""What is the gradient of a training loop made of? Weights of the rows of a batch, for loops of any library.

The gradient v that reaches the optimizer is explained by the gradients r_i of the rows: the weights w of
v = sum_i w_i r_i are found by least squares. A loop that trains on the mean over n rows has w_i = 1 / n.
"""

from __future__ import annotations

import copy
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from variable_batch_size._validation import FloatArray, IntArray, value_error
from variable_batch_size.data.streams import rows
from variable_batch_size.testing import update_gradients


@final
@dataclass(frozen=True)
class GradientReport:
    """What the gradient of an update is made of; `print` it.

    Attributes:
        exact: whether each row weighs what it has to, up to a common factor > 0.
        factor: the common factor, the mean of the absolute weights: 1, unless a loop clips, scales or sums.
        weights: of each row over what it has to weigh, without the factor, (rows,); nan if it counts nothing.
        parts: weights of parts by name; without parts, of rows of the same weight, if they are few.
        residual: norm(v - sum_i w_i r_i) / norm(v): what no weights explain.
        resolution: what rounding of this precision may change: a larger residual is not explained.
        cleared: whether the step clears its gradient, before it or after it.
    """

    exact: bool
    factor: float
    weights: FloatArray
    parts: Mapping[str, float]
    residual: float
    resolution: float
    cleared: bool

    def __str__(self) -> str:
        if not self.cleared:
            return "not exact: the gradient of the step before is added to this one; call zero_grad() in each step"
        if self.residual > self.resolution:
            return (
                f"not explained: {self.residual:.2g} of the gradient is no weighted sum of those of rows: it has other "
                "rows, or an earlier step (zero_grad() is missing), or the loss is another one, random, or mixes rows, "
                "or the loop computes in half precision (check it without autocast)"
            )
        scaled = abs(self.factor - 1) > max(1e-4, self.resolution)
        factor = f", all times {self.factor:.4g} (clipped, scaled or summed?)" if scaled else ""
        if self.exact:
            return f"exact: each row weighs what it has to{factor}"
        shown = np.nanmin(self.weights), np.nanmax(self.weights), *self.parts.values()
        least, most, *weights = (f"{round(weight, 6) + 0.0:.5g}" for weight in shown)
        lines = [f"  {name}: {weight}" for name, weight in zip(self.parts, weights, strict=True)]
        return "\n".join([f"not exact: rows weigh from {least} to {most} of what they have to{factor}", *lines])


def check_gradient(
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    batch: Any,
    step: Callable[[], object],
    *,
    trained: nn.Module | None = None,
    counts: Sequence[float] | Tensor | None = None,
    parts: Mapping[str, Sequence[int]] | None = None,
) -> GradientReport:
    """Explain the gradient that a training step gives to its optimizer by the gradients of the rows of its batch.

    A hook reads the gradients right before `optimizer.step()`, in any loop, also with DistributedDataParallel, FSDP2,
    or a trainer. Call it on every rank, with the whole batch. Dropout layers are off during the check.

    Args:
        model: a model without a wrapper, with the weights before the step; it can be the model that is trained.
        loss_fn: returns the mean loss over some rows of the batch, 0-D, given a model and these rows.
        batch: all rows of the update, of all ranks: tensors whose first dimension is the rows, in a tuple or dict.
        step: runs one update of the loop, with one call of `optimizer.step()`.
        trained: the model that `step` trains, with parameters of the same names. Default: `model`.
        counts: what each row has to count, such as its tokens, (rows,). Default: all alike.
        parts: all rows by name, each once, as each rank's rows: their weights are found, where weights of rows cannot
            be.

    Raises:
        ValueError: if the weights cannot be found, or parts do not have each row once.
        RuntimeError: if `step` makes no update, or several.

    >>> model, x = torch.nn.Linear(9, 1).double(), torch.randn(8, 9, dtype=torch.float64)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> def step():  # a mean of the means of 6 and 2 rows
    ...     optimizer.zero_grad()
    ...     (0.5 * (model(x[:6]).square().mean() + model(x[6:]).square().mean())).backward()
    ...     optimizer.step()
    >>> print(check_gradient(model, lambda model, x: model(x).square().mean(), x, step))
    not exact: rows weigh from 0.66667 to 2 of what they have to
      rows 0 to 5: 0.66667
      rows 6 to 7: 2
    """
    num_rows = rows.count_rows(batch)
    trained = model if trained is None else trained
    reference = copy.deepcopy(model)
    required = _required_weights(counts, num_rows)
    counted_rows = np.flatnonzero(required).tolist()
    groups = _rows_of_parts(parts, num_rows) if parts else [[row] for row in counted_rows]  # each gets one weight
    with _without_dropout(reference, trained):
        step_gradients, cleared = update_gradients.gradients_of_step(step, trained)
        gradient = _random_sums(step_gradients, 4 * num_rows)  # (sums,)
        by_row = np.zeros((num_rows, len(gradient)))
        for row in counted_rows:
            reference.zero_grad()
            loss_fn(reference, rows.take_rows(batch, np.array([row]))).backward()  # type: ignore[no-untyped-call]
            row_gradients = update_gradients.gradients_of_model(reference, lambda name, _: name in step_gradients)
            by_row[row] = _random_sums(row_gradients, 4 * num_rows)
    dtypes = {parameter.dtype for parameter in trained.parameters() if parameter.is_floating_point()}
    resolution = 3 * max(torch.finfo(dtype).eps for dtype in dtypes) ** 0.5
    # A weight of 1 means that the rows of a group weigh what they have to.
    by_group, error, residual = _fit_weights(np.stack([required[group] @ by_row[group] for group in groups]), gradient)
    if error >= max(1e-3, resolution / 5) and residual <= resolution:
        remedy = "pass parts=, such as the rows of each rank, other rows, or a larger model"
        raise value_error("rows (or parts) must be told apart by their gradients", "some that are alike, or 0", remedy)
    weights = np.full(num_rows, np.nan)
    tolerance = max(resolution, 5 * error)
    for group, weight in zip(groups, by_group, strict=True):
        weights[group] = np.where(required[group] > 0, weight, np.nan)
    factor = float(np.nansum(np.abs(weights) * required)) or 1.0
    weights /= factor
    ascending = np.argsort(weights)[: np.isfinite(weights).sum()]  # rows by their weights; nan is last, and left out
    exact = cleared and residual <= resolution and bool((np.abs(weights[ascending] - 1) <= tolerance).all())
    # Without parts, the report shows groups of rows of nearly the same weight, unless there are many groups.
    ends_of_groups = np.flatnonzero(np.diff(weights[ascending]) > min(10 * tolerance, 0.5)) + 1
    alike = np.split(ascending, ends_of_groups)
    few = sorted(map(np.sort, alike), key=min) if len(alike) <= 12 else []
    reported = parts or {_describe_rows(numbers): numbers.tolist() for numbers in few}
    by_part = {name: float(np.nanmean(weights[list(part)])) for name, part in reported.items()}
    return GradientReport(exact, factor, weights, by_part, residual, resolution, cleared)


def _required_weights(counts: Sequence[float] | Tensor | None, number: int) -> FloatArray:
    """Return what each of `number` rows has to weigh in a mean, (rows,), with the sum 1; ValueError if nothing counts.

    `counts`: what each row counts, such as its tokens; None if all count alike.
    """
    required = np.ones(number) if counts is None else np.asarray(torch.as_tensor(counts).cpu(), dtype=np.float64)
    if required.shape != (number,) or (required < 0).any() or not required.sum() > 0:
        raise value_error("a batch must have rows that count something", f"counts {required}", "pass one for each row")
    weights: FloatArray = required / required.sum()
    return weights


def _rows_of_parts(parts: Mapping[str, Sequence[int]], number: int) -> list[list[int]]:
    """Return the rows of each part; raise ValueError unless the parts have each of the batch's `number` rows once."""
    try:
        groups = [[operator.index(row) for row in part] for part in parts.values()]
    except (AttributeError, TypeError):
        groups = []
    times = Counter(row for group in groups for row in group)
    for row in sorted({*range(number), *times}):
        if times[row] != (1 if 0 <= row < number else 0):
            remedy = 'pass all rows by name, such as {"rank 0": range(16), "rank 1": range(16, 26)}'
            raise value_error(f"parts must have each of {number} rows once", f"row {row} {times[row]} times", remedy)
    return groups


def _fit_weights(columns: FloatArray, gradient: FloatArray) -> tuple[FloatArray, float, float]:
    """Return the weights with which gradients of groups of rows add up to a gradient, by least squares.

    Args:
        columns: the gradients of the groups, (groups, sums).
        gradient: the gradient that they explain, (sums,).

    Returns:
        The weights, (groups,), their standard error (infinite if they are not unique), and the norm of what they do not
        explain, relative to the norm of `gradient`.
    """
    if not (np.isfinite(columns).all() and np.isfinite(gradient).all()):
        raise value_error("all gradients must be finite", "some that are not", "check the loss, and the scale of it")
    weights, _, rank, singular = np.linalg.lstsq(columns.T, gradient, rcond=1e-12)
    unexplained = float(np.linalg.norm(gradient - weights @ columns))
    is_unique = rank == len(weights) < len(gradient)  # each group counts, and there are more sums than weights
    error = unexplained / (len(gradient) - rank) ** 0.5 / float(singular[-1]) if is_unique else np.inf
    return np.asarray(weights, np.float64), error, unexplained / (float(np.linalg.norm(gradient)) or 1.0)


def _random_sums(gradients: Mapping[str, FloatArray], least: int) -> FloatArray:
    """Return the elements of a gradient, with random signs, added up to at most 4099 or `least` sums.

    The sums stand for the gradient, which may have billions of elements. The signs are the same at each call, so that
    the sums of two gradients add up as the gradients do.

    Args:
        gradients: the gradients of parameters, flat, by name.
        least: how many sums are needed, at least.
    """
    flat = np.concatenate([gradients[name] for name in sorted(gradients)])
    signs = np.random.default_rng(0).choice([-1.0, 1.0], len(flat))
    return np.asarray(np.bincount(np.arange(len(flat)) % max(4099, least), flat * signs), np.float64)


@contextmanager
def _without_dropout(*models: nn.Module) -> Iterator[None]:
    """Set the rates of all dropout layers of the models to 0 within a block, and restore them after it."""
    kinds = (_DropoutNd, nn.MultiheadAttention, nn.RNNBase)  # layers with a rate named `p` or `dropout`
    layers = [layer for model in models for layer in model.modules() if isinstance(layer, kinds)]
    rates = [(layer, name, vars(layer)[name]) for layer in layers for name in ("p", "dropout") if name in vars(layer)]
    try:
        for layer, name, _ in rates:
            setattr(layer, name, 0.0)
        yield
    finally:
        for layer, name, rate in rates:
            setattr(layer, name, rate)


def _describe_rows(numbers: IntArray) -> str:
    """Return ascending numbers of rows in words, such as "rows 0 to 5, 7"."""
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)  # of consecutive numbers
    return "rows " + ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
