"""What is the gradient of a training loop made of? Weights of the rows of a batch, for loops of any library.

The gradient v that reaches the optimizer is explained by the gradients r_i of the rows: the weights w of
v = sum_i w_i r_i are found by least squares. A loop that trains on the mean over n rows has w_i = 1 / n; one that
takes the mean of the means of unequal parts has not.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import MultiheadAttention
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.rnn import RNNBase
from torch.optim.optimizer import register_optimizer_step_pre_hook

from variable_batch_size._validation import FloatArray, IntArray, type_error, value_error
from variable_batch_size.data import rows

_SHOWN = 12  # parts
_COORDINATES = 4096  # of the gradient that are compared, at least; four for each row
_RESOLVED = 1e-3  # largest standard error of a relative weight that is reported, but for half precision

Parts = Mapping[str, Sequence[int]]


@final
@dataclass(frozen=True)
class GradientReport:
    """What the gradient of an update is made of; `print` it.

    Attributes:
        exact: whether the rows weigh as they have to, up to a common factor > 0.
        factor: the common factor, the mean of the absolute weights: 1, unless a loop clips, scales or sums.
        weights: of each row over what it has to weigh, without the factor, (rows,); nan where only parts are known.
        parts: those of parts, by name.
        residual: norm of v - sum_i w_i r_i over that of v: what no weights of rows explain.
        error: standard error of the weights that are reported.
        resolution: what rounding of this precision may change: a larger residual is not explained.
    """

    exact: bool
    factor: float
    weights: FloatArray
    parts: Mapping[str, float]
    residual: float
    error: float
    resolution: float

    def __str__(self) -> str:
        if self.residual > self.resolution:
            return (
                f"not explained: {self.residual:.2g} of the gradient is no weighted sum of the gradients of the rows. "
                f"It has other rows in it, or those of an earlier step (zero_grad() is missing); or the loss mixes "
                f"rows, as batch normalization does, is random, or is another one"
            )
        same = abs(self.factor - 1) < max(self.resolution, 5 * self.error)
        factor = "" if same else f", all times {self.factor:.4g} (clipped, scaled or summed?)"
        if self.exact:
            return f"exact: each row weighs what it has to{factor}"
        lines = [f"not exact: rows weigh from {self._range} of what they have to{factor}"]
        lines += [f"  {name}: {_short(weight)}" for name, weight in self.parts.items()]
        near = max(_RESOLVED, self.resolution)
        used = self.weights[np.abs(self.weights) > near]
        usual = float(np.median(used)) if len(used) else 1.0
        for what, number in {"not used": 0, "twice as much as most": 2}.items():
            found = np.flatnonzero(np.abs(self.weights / usual - number) < near)
            if 0 < len(found) < len(self.weights):
                lines.append(f"  {what}: rows {_ranges(found)}")
        return "\n".join(lines)

    @property
    def _range(self) -> str:
        finite = self.weights[np.isfinite(self.weights)]
        known = finite if len(finite) else np.array([*self.parts.values()])
        return f"{_short(known.min())} to {_short(known.max())}"


def _short(weight: float) -> str:
    return f"{round(weight, 6) + 0.0:.5g}"


def check_gradient(
    model: torch.nn.Module,
    loss_fn: Callable[[torch.nn.Module, Any], Tensor],
    batch: Any,
    step: Callable[[], object],
    *,
    trained: torch.nn.Module | None = None,
    counts: Sequence[float] | Tensor | None = None,
    parts: Parts | Sequence[int] | None = None,
    seed: int = 0,
) -> GradientReport:
    """Explain the gradient that a training step gives to its optimizer by the gradients of the rows of its batch.

    It works for any loop, also with DistributedDataParallel, FSDP2, accumulation, a GradScaler or a trainer: a hook
    reads the gradients right before `optimizer.step()`. In a distributed training every rank calls it, with the whole
    batch. Layers of dropout are off meanwhile. The weights of the model change as `step` changes them.

    Args:
        model: a bare model with the weights that the step begins with; it may be the one that is trained.
        loss_fn: returns the mean loss over some rows of the batch, 0-D, given a model and these rows.
        batch: all rows of the update, of all ranks and microbatches: tensors whose first dimension is the rows, in a
            tuple or dict.
        step: runs one update of the loop, with one call of `optimizer.step()`.
        trained: the model that `step` trains, with parameters of the same names. Default: `model`.
        counts: what each row has to count, such as its tokens, (rows,). Default: all alike.
        parts: rows of each rank or microbatch by name, or the sizes of consecutive ones: their weights are reported,
            and are found where those of rows cannot be, because the model has fewer parameters than the batch has rows.
        seed: seed of the coordinates that are compared, of a model that has many.

    Raises:
        TypeError: if `model` is not a Module.
        ValueError: if the weights cannot be found, or the loss is not deterministic.
        RuntimeError: if `step` makes no update, or several.

    >>> model, x = torch.nn.Linear(3, 1).double(), torch.randn(8, 3, dtype=torch.float64)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> def step():  # a mean of the means of 6 and 2 rows
    ...     (0.5 * (model(x[:6]).square().mean() + model(x[6:]).square().mean())).backward()
    ...     optimizer.step()
    >>> print(check_gradient(model, lambda model, x: model(x).square().mean(), x, step, parts=[6, 2]))
    not exact: rows weigh from 0.66667 to 2 of what they have to
      rows 0 to 5: 0.66667
      rows 6 to 7: 2
    """
    if not isinstance(model, torch.nn.Module):
        raise type_error("model must be a torch.nn.Module", model, "pass the bare model")
    number = rows.count(batch)
    required = _required(counts, number)
    chosen, named = np.flatnonzero(required), _named_parts(parts, number)
    trained, reference = model if trained is None else trained, copy.deepcopy(model)

    def backward(row: int) -> float:
        reference.zero_grad()
        loss = loss_fn(reference, rows.take(batch, np.array([row])))
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    touched, losses, by_row = dict[str, Tensor](), list[float](), list[dict[str, FloatArray]]()
    with _no_dropout(reference), _no_dropout(trained):
        for row in chosen.tolist():  # which coordinates are of use?
            losses.append(backward(row))
            _touch(touched, reference)
        drawn = _draw(touched, max(_COORDINATES, 4 * number), seed)
        for row, loss in zip(chosen.tolist(), losses, strict=True):
            if not np.isclose(backward(row), loss, rtol=1e-5, equal_nan=True):
                raise value_error(
                    "the loss must be deterministic",
                    f"another loss of row {row} when it was computed again",
                    "switch off dropout and other random layers",
                )
            by_row.append(_values(reference, drawn))
        reached, elsewhere = _run(step, trained, drawn, touched)
    of_rows = np.stack([np.concatenate([own[name] for name in reached]) for own in by_row])  # (rows, coordinates)
    found = np.concatenate([*reached.values()])
    if not (np.isfinite(of_rows).all() and np.isfinite(found).all()):
        raise value_error("all gradients must be finite", "some that are not", "check the loss, and the scale of it")
    resolution = 3 * max(torch.finfo(one.dtype).eps for one in trained.parameters() if one.is_floating_point()) ** 0.5
    return _explain(of_rows, found, required, chosen, named, resolution, elsewhere)


def _required(counts: Sequence[float] | Tensor | None, number: int) -> FloatArray:
    """Return what each row has to weigh, (rows,); they sum to 1."""
    known = np.ones(number) if counts is None else np.asarray(torch.as_tensor(counts).cpu(), dtype=np.float64)
    if known.shape != (number,) or (known < 0).any() or not known.sum() > 0:
        remedy = "pass a batch of all rows, and counts of them"
        raise value_error("a batch must have rows that count something", f"counts of shape {known.shape}", remedy)
    required: FloatArray = known / known.sum()
    return required


def _named_parts(parts: Parts | Sequence[int] | None, number: int) -> dict[str, IntArray]:
    if parts is None:
        return {}
    if isinstance(parts, Mapping):
        return {name: np.asarray(list(own), dtype=np.int64) for name, own in parts.items()}
    if sum(parts) != number:
        raise value_error(f"the sizes of parts must sum to the {number} rows", sum(parts), "pass that of each part")
    ends = np.cumsum(parts)
    own = [np.arange(end - size, end) for end, size in zip(ends, parts, strict=True) if size]
    return {f"rows {_ranges(rows_of_part)}": rows_of_part for rows_of_part in own}


def _ranges(numbers: IntArray) -> str:
    """Return ascending numbers in words.

    >>> _ranges(np.array([0, 1, 2, 5, 7, 8]))
    '0 to 2, 5, 7 to 8'
    """
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
    return ", ".join(f"{run[0]}" if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)


@contextmanager
def _no_dropout(model: torch.nn.Module) -> Iterator[None]:
    parts: list[Any] = [*model.modules()]
    before: list[tuple[Any, str, float]] = [(part, "p", part.p) for part in parts if isinstance(part, _DropoutNd)]
    before += [(part, "dropout", part.dropout) for part in parts if isinstance(part, (MultiheadAttention, RNNBase))]
    try:
        for part, name, _ in before:
            setattr(part, name, 0.0)
        yield
    finally:
        for part, name, p in before:
            setattr(part, name, p)


# The gradients. ------------------------------------------------------------------------------------------------------


def _named(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the parameters that are trained by the names that they have without wrappers."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield re.sub(r"\b(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.", "", name), parameter


def _touch(touched: dict[str, Tensor], model: torch.nn.Module) -> None:
    """Add the coordinates of parameters, (size,), bool, at which the gradients of a model are not 0."""
    for name, parameter in _named(model):
        gradient = _whole(parameter.grad)
        if gradient is not None:
            own = gradient.reshape(-1) != 0
            touched[name] = touched[name].logical_or_(own) if name in touched else own


def _draw(touched: Mapping[str, Tensor], most: int, seed: int) -> dict[str, IntArray]:
    """Return coordinates of parameters by name: all that some row touches, or `most` of them."""
    used = {name: one.nonzero()[:, 0].cpu().numpy() for name, one in touched.items()}
    sizes = {name: len(one) for name, one in used.items()}
    total = sum(sizes.values())
    numbers = np.arange(total)
    if total > most:
        numbers = np.sort(np.random.default_rng(seed).choice(total, most, replace=False))
    ends = np.cumsum([*sizes.values()])
    bounds = np.searchsorted(numbers, [0, *ends])
    drawn = {}
    for name, begin, end, last in zip(sizes, bounds, bounds[1:], ends, strict=False):
        if end > begin:
            drawn[name] = used[name][numbers[begin:end] - (last - sizes[name])]
    return drawn


def _whole(gradient: Any) -> Any:
    """Return a gradient as a dense tensor, of all ranks."""
    if gradient is None:
        return None
    gradient = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return gradient.to_dense() if gradient.layout is not torch.strided else gradient


def _values(model: torch.nn.Module, drawn: Mapping[str, IntArray]) -> dict[str, FloatArray]:
    """Return the gradients of parameters at coordinates."""
    return {name: _at(_whole(one.grad), drawn[name]) for name, one in _named(model) if name in drawn}


def _at(gradient: Tensor | None, coordinates: IntArray) -> FloatArray:
    """Return a gradient at coordinates; 0 if there is none."""
    if gradient is None:
        return np.zeros(len(coordinates))
    index = torch.from_numpy(coordinates).to(gradient.device)
    values: FloatArray = gradient.detach().reshape(-1)[index].double().cpu().numpy()
    return values


def _run(
    step: Callable[[], object], trained: torch.nn.Module, drawn: Mapping[str, IntArray], touched: Mapping[str, Tensor]
) -> tuple[dict[str, FloatArray], float]:
    """Return the gradients with which `step` calls its optimizers, of the parameters that these have.

    And the share of their norm that is where no row has a gradient.
    """
    reached, squares = dict[str, FloatArray](), np.zeros(2)  # elsewhere, and in all

    def look(optimizer: torch.optim.Optimizer, arguments: Any, options: Any) -> Any:
        closure = options.get("closure", arguments[1] if len(arguments) > 1 else None)
        if not callable(closure):
            keep(optimizer)
            return None
        calls: list[object] = []

        def first_kept() -> object:  # the gradients are there after it
            loss = closure()
            if not calls:
                keep(optimizer)
            calls.append(loss)
            return loss

        return (arguments[0], first_kept), {name: one for name, one in options.items() if name != "closure"}

    def keep(optimizer: torch.optim.Optimizer) -> None:
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for name, parameter in _named(trained):
            if id(parameter) not in own:
                continue
            gradient = _whole(parameter.grad)
            if name in reached:
                raise RuntimeError("step must make one update, but it makes several; let it end after the first")
            if name in drawn:
                reached[name] = _at(gradient, drawn[name])
            if gradient is not None:
                every = gradient.detach().reshape(-1).double().square()
                elsewhere = every[~touched[name].to(every.device)] if name in touched else every
                squares[:] += [float(elsewhere.sum()), float(every.sum())]

    hook = register_optimizer_step_pre_hook(look)
    try:
        step()
    finally:
        hook.remove()
    if not reached:
        raise RuntimeError(
            "step must call step() of an optimizer that has parameters of the model, but no call was seen; pass "
            "trained= if the model that it trains is another one, and a step that makes a whole update"
        )
    return reached, float((squares[0] / (squares[1] or 1.0)) ** 0.5)


# The weights. --------------------------------------------------------------------------------------------------------


def _explain(
    of_rows: FloatArray,
    reached: FloatArray,
    required: FloatArray,
    chosen: IntArray,
    named: Mapping[str, IntArray],
    resolution: float,
    elsewhere: float,
) -> GradientReport:
    """Return the report of a gradient, (coordinates,), by those of the chosen rows, (chosen, coordinates)."""
    resolved = max(_RESOLVED, resolution / 5)
    weights = np.full(len(required), np.nan)  # (rows,), over those that are required
    found, error, residual = _fit(of_rows * required[chosen, None], reached)
    residual = float(np.hypot(residual, elsewhere))
    if error < resolved or (residual > resolution and not named):
        weights[chosen] = found
        factor = float(np.abs(found * required[chosen]).sum())
        parts = named or _runs(weights, min(5 * error + 10 * resolution, 0.5))
        by_part = {
            name: float(np.nansum((weights * required)[own]) / required[own].sum()) for name, own in parts.items()
        }
    elif named:
        place = {row: index for index, row in enumerate(chosen.tolist())}
        columns = [[place[row] for row in own.tolist() if row in place] for own in named.values()]
        sums = np.stack([(of_rows[own] * required[chosen[own], None]).sum(axis=0) for own in columns])
        found, error, residual = _fit(sums, reached)
        residual = float(np.hypot(residual, elsewhere))
        if not error < resolved and residual < resolution:
            raise value_error("the gradients of the parts must differ", "parts that are alike", "pass another batch")
        by_part = dict(zip(named, found.tolist(), strict=True))
        sizes = (abs(weight) * required[own].sum() for weight, own in zip(found, named.values(), strict=True))
        factor = float(sum(sizes))
    else:
        raise value_error(
            "the weights of the rows must be told apart by their gradients",
            f"{len(of_rows)} rows of which some are alike up to rounding, have a gradient of 0, or of more than "
            f"{of_rows.shape[1]} coordinates",
            "pass parts=, such as the rows of each rank, other rows, or a larger model",
        )
    factor = factor or 1.0
    exact = residual <= resolution and bool((np.abs(found / factor - 1) <= max(resolution, 5 * error)).all())
    by_part = {name: one / factor for name, one in by_part.items()}
    return GradientReport(exact, factor, weights / factor, by_part, residual, error, resolution)


def _fit(columns: FloatArray, reached: FloatArray) -> tuple[FloatArray, float, float]:
    """Return weights of rows (or parts) by least squares, their largest standard error, and the relative residual.

    Args:
        columns: (rows, coordinates).
        reached: (coordinates,).
    """
    left, singular, right = np.linalg.svd(columns, full_matrices=False)
    rank = int((singular > singular[0] * 1e-12).sum())
    weights = left[:, :rank] @ ((right[:rank] @ reached) / singular[:rank])
    rest = reached - weights @ columns
    residual = float(np.linalg.norm(rest) / (np.linalg.norm(reached) or 1.0))
    freedom = columns.shape[1] - rank
    if rank < len(columns) or freedom <= 0:
        return weights, np.inf, residual
    deviation = np.linalg.norm(rest) / freedom**0.5
    return weights, float(deviation * np.linalg.norm(left / singular, axis=1).max()), residual


def _runs(weights: FloatArray, tolerance: float) -> dict[str, IntArray]:
    """Return consecutive rows of equal weight as parts, if they are few."""
    known = np.flatnonzero(np.isfinite(weights))
    runs = np.split(known, np.flatnonzero(np.abs(np.diff(weights[known])) > tolerance) + 1)
    return {f"rows {_ranges(run)}": run for run in runs} if len(runs) <= _SHOWN else {}
