"""Is the loss a mean over rows? A loss that depends on the microbatch is found by cutting one in two."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

import numpy as np
import torch
from torch import Tensor, nn

from variable_batch_size._log import log, stacklevel_of_user
from variable_batch_size._validation import FloatArray, IntArray, in_documentation, value_error
from variable_batch_size.data.streams import rows
from variable_batch_size.testing.undisturbed import undisturbed_evaluation

_TOLERANCES: Final = {torch.float64: 1e-6, torch.float32: 2e-3}  # relative; of losses that models round to float32
_NARROW: Final = 1e-2
REMEDY: Final = (
    'return the sum of what it averages, such as tokens, pass reduction="sum" to the optimizer and how many they are '
    f"to step(count=), {in_documentation('Means over tokens')}; a loss that compares rows with one another cannot be "
    "cut into microbatches"
)


def check_loss(
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    batch: Any,
    *,
    counts: Sequence[float] | Tensor | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    tolerance: float | None = None,
    remedy: str = REMEDY,
) -> None:
    """Warn if the loss of a batch is not the mean of those of parts of it, weighed by what their rows count.

    The loss is computed five times, without gradients and with the model in evaluation mode; modes, buffers and random
    numbers are as before afterwards. A line of the log says why nothing was compared, as for a loss that draws random
    numbers, which the whole batch shows twice. Every rank calls it, with a batch of its own.

    Args:
        model: the model.
        loss_fn: returns the loss of some rows of the batch, 0-D, given the model and these rows.
        batch: tensors whose first dimension is the rows, in a tuple or dict; or a list of rows, for a `loss_fn` that
            collates them. One row is not compared.
        counts: what each row counts, such as its tokens, (rows,). Default: all alike.
        reduction: "mean", or "sum" if the loss of the batch has to be the sum of those of its parts.
        tolerance: the relative difference that rounding explains. Default: by the dtype of the parameters.
        remedy: what the warning says in the end.

    Raises:
        TypeError: if a field of the batch has no rows.
        ValueError: if fields have unequal numbers of rows, or `counts` another number.

    >>> model, texts = torch.nn.Embedding(9, 9), torch.tensor([[1, 2, 3], [4, 5, 0]])
    >>> def loss_fn(model, texts):  # a mean over the tokens that are not 0
    ...     return torch.nn.functional.cross_entropy(model(texts[:, :-1]).mT, texts[:, 1:], ignore_index=0)
    >>> check_loss(model, loss_fn, texts, counts=(texts[:, 1:] != 0).sum(1))  # says nothing
    """
    number = len(batch) if rows.is_list_of_rows(batch) else rows.count_rows(batch)
    weights = np.ones(number) if counts is None else np.asarray(torch.as_tensor(counts).cpu(), dtype=np.float64)
    if weights.shape != (number,):
        raise value_error(f"counts must have a number for each of {number} rows", weights.shape, "pass one for each")

    def loss_of(model: nn.Module, part: IntArray) -> Tensor:
        return loss_fn(model, rows.take_rows(batch, part))

    options: Any = {"reduction": reduction, "tolerance": tolerance, "remedy": remedy}
    order = unlike_rows(batch, number)
    why = compare_parts(model, loss_of, order, counts=None if counts is None else weights, **options)
    if why:
        log(f"The loss was not checked: {why}.")


def compare_parts(
    model: nn.Module,
    loss_of: Callable[[nn.Module, IntArray], Tensor],
    order: IntArray,
    *,
    counts: FloatArray | IntArray | None,
    reduction: Literal["mean", "sum"],
    tolerance: float | None,
    remedy: str,
) -> str:
    """Warn as `check_loss`, and return why nothing was compared, or "".

    Args:
        model: see `check_loss`, as `reduction`, `tolerance` and `remedy`.
        loss_of: returns the loss of some rows, given the model and their numbers, (rows,).
        order: of the rows, which are cut into parts, (rows,).
        counts: what each row counts, (rows,); None if all count alike.
    """
    number = len(order)
    weights = np.ones(number) if counts is None else counts
    whole, parts = np.arange(number), [part for part in np.split(order, [number // 6 or 1, number // 2]) if len(part)]
    forwards = [whole, whole, *(parts if number > 1 else []), whole, whole]
    with torch.no_grad(), undisturbed_evaluation(model):  # five, as on ranks with more rows
        again, expected, *losses = (float(loss_of(model, part)) for part in forwards[:5])
    losses = losses[: len(parts)]
    if number < 2:
        return "a single row cannot be cut"
    if not all(map(math.isfinite, (expected, *losses))):
        return "it is not finite"
    if again != expected:
        return "two forwards of the same rows differ: it draws random numbers, or changes what it depends on"
    by_parts = float(np.dot(_weights_of_parts([weights[part].sum() for part in parts], reduction), losses))
    if tolerance is None:
        kinds = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
        tolerance = max((_TOLERANCES.get(kind, _NARROW) for kind in kinds), default=_NARROW)
    largest = max(map(abs, (expected, *losses)))
    if abs(by_parts - expected) > tolerance * largest:  # False for nan: a part counts nothing
        counted = "rows" if counts is None else "what the rows count"
        message = (
            f"the loss of a microbatch must be a {reduction} over {counted}, but that of {number} rows is "
            f"{expected:.6g} and the {reduction} of those of parts of them {by_parts:.6g}: updates depend on how "
            f"they are cut into microbatches; {remedy}"
        )
        warnings.warn(message, UserWarning, stacklevel=stacklevel_of_user())
    return ""


def unlike_rows(batch: Any, number: int) -> IntArray:
    """Return the rows in the order of how often they have the most frequent integer, such as padding, (rows,).

    If lengths decide what rows count, parts of long and of short ones differ most. Rows that have it equally often, or
    batches without such a field, are in the order of an integer for each row, such as its class.
    """
    if rows.is_list_of_rows(batch):
        return np.arange(number)
    fields = [leaf for leaf in rows.leaves(batch) if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == number]
    whole = [leaf.flatten(1 if leaf.dim() > 1 else 0).cpu().long() for leaf in fields if _is_integer(leaf)]
    padded = [(one == one.flatten().mode().values).sum(1).numpy() for one in whole if one.dim() > 1 and one.numel()]
    classes = [one.numpy() for one in whole if one.dim() == 1]
    alike = np.zeros(number)
    return np.lexsort((max(classes, key=np.std, default=alike), max(padded, key=np.std, default=alike)))


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _weights_of_parts(counts: Sequence[float], reduction: str) -> FloatArray:
    """Return the weights of parts of a batch in its loss, (parts,); nan for one that counts nothing."""
    if reduction == "sum":
        return np.ones(len(counts))
    counted = np.array(counts, np.float64)
    return np.asarray(np.where(counted > 0, counted, np.nan) / counted.sum(), np.float64)
