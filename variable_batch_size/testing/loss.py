"""Is the loss a mean over rows? A loss that depends on the microbatch is found by cutting one in two."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from variable_batch_size._log import log, stacklevel_of_user
from variable_batch_size._validation import FloatArray, IntArray, in_documentation, value_error
from variable_batch_size.data.streams import rows
from variable_batch_size.testing.undisturbed import undisturbed_evaluation

# Relative differences that rounding explains, of losses and of gradients; autocast rounds more within a backward pass.
# Models in float64 may use float32 within.
_TOLERANCES: Final = {torch.float64: (1e-6, 1e-4), torch.float32: (1e-4, 1e-2)}
_NARROW: Final = (1e-2, 2e-2)  # of all other dtypes
_ON_DEVICES: Final = (2e-3, 2e-2)  # at least, off the CPU: TF32, and other kernels for other numbers of rows
_ROUNDING: Final = np.array([1e-6, 1e-5])  # relative to the largest loss and gradient so far, if both are nearly 0 now
_DIRECTIONS: Final = 8  # random directions in which gradients are compared
_SCALE: Final = 2.0**12  # by which losses are multiplied: gradients may be too small for float16
REMEDY: Final = (
    'pass counts= with lengths=; else return the sum of what it averages, pass reduction="sum" to the optimizer and '
    f"how many they are to step(count=), {in_documentation('Means over tokens')}; a loss that compares rows with one "
    "another cannot be cut into microbatches"
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
    """Warn if the loss of a batch is not the mean loss of its parts, weighed by what their rows count.

    So must be its gradient, which tells them apart where all rows have nearly the same loss. Both are computed five
    times, with the model in evaluation mode; `.grad`, modes, attributes, buffers and random numbers are as before
    afterwards. Models that FSDP2 shards are compared without gradients. A line of the log says why nothing was
    compared, as for a loss that draws random numbers, which the whole batch shows twice. Every rank calls it, with a
    batch of its own.

    Args:
        model: the model.
        loss_fn: returns the loss of some rows of the batch, 0-D, given the model and these rows.
        batch: tensors whose first dimension is the rows, in a tuple or dict; or a list of rows, for a `loss_fn` that
            collates them. One row is not compared.
        counts: what each row counts, such as its tokens, (rows,). Default: all alike.
        reduction: "mean", or "sum" if the loss of the batch has to be the sum over its parts.
        tolerance: the relative difference that rounding explains. Default: by dtypes and devices.
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
    compared = compare_parts(model, loss_of, order, counts=None if counts is None else weights, **options)
    if compared.left_out:
        log(f"The loss was not checked: {compared.left_out}.")
    compared.warn()


class Compared(NamedTuple):
    """The result of a comparison; both texts are "" if the loss is a mean.

    Attributes:
        left_out: why nothing was compared.
        message: the warning about a loss that is no mean.
    """

    left_out: str = ""
    message: str = ""

    def warn(self) -> None:
        """Warn if there is a message.

        It is a call of its own, because an error from the comparison is caught: a warning that is an error is not.
        """
        if self.message:
            warnings.warn(self.message, UserWarning, stacklevel=stacklevel_of_user())


def compare_parts(
    model: nn.Module,
    loss_of: Callable[[nn.Module, IntArray], Tensor],
    order: IntArray,
    *,
    counts: FloatArray | IntArray | None,
    reduction: Literal["mean", "sum"],
    tolerance: float | None,
    remedy: str,
    largest: FloatArray | None = None,
) -> Compared:
    """Compare the loss of all rows with the losses of parts of them, weighed by what their rows count: `check_loss`.

    Args:
        model: see `check_loss`, as `reduction`, `tolerance` and `remedy`.
        loss_of: returns the loss of some rows, given the model and their numbers, (rows,).
        order: the numbers of the rows in the order in which they are cut into parts, (rows,).
        counts: what each row counts, (rows,); None if all count alike.
        largest: the largest loss and norm of a gradient so far, (2,); changed in place.
    """
    number = len(order)
    weights = np.ones(number) if counts is None else counts
    # The first sixth of the rows, the next third and the other half: unequal, so that a mean of means shows.
    whole, parts = np.arange(number), [part for part in np.split(order, [number // 6 or 1, number // 2]) if len(part)]
    # Five forward passes with any number of rows: they may communicate with ranks that have more.
    forwards = [whole, whole, *(parts if number > 1 else []), whole, whole][:5]
    # A forward pass of a DistributedDataParallel itself would wait for a backward().
    model = model.module if isinstance(model, DistributedDataParallel) else model
    with undisturbed_evaluation(model):
        first, expected, *part_losses = [_Derived.of(loss_of, model, part) for part in forwards]
    part_losses = part_losses[: len(parts)]
    if number < 2:
        return Compared("a single row cannot be cut")
    if not all(math.isfinite(loss.value) for loss in (expected, *part_losses)):
        return Compared("it is not finite")
    if first.value != expected.value:  # both are of all rows
        return Compared(
            "two forward passes of the same rows differ: it draws random numbers, or changes what it depends on"
        )
    shares = _weights_of_parts([weights[part].sum() for part in parts], reduction)
    by_parts = float(shares @ [loss.value for loss in part_losses])
    slopes = shares @ [loss.slopes for loss in part_losses]
    # The differences, sizes and tolerances are those of the loss and of its gradient, (2,) each.
    differences = np.array([abs(by_parts - expected.value), np.linalg.norm(slopes - expected.slopes)])
    sizes = np.max([(abs(loss.value), loss.norm) for loss in (expected, *part_losses)], axis=0)
    tolerances = expected.tolerances(model) if tolerance is None else tolerance
    largest = sizes if largest is None else np.maximum(largest, sizes, out=largest)
    explained = np.maximum(tolerances * sizes, _ROUNDING * largest)
    if not (differences > explained).any():  # nan, as of a part that counts nothing, is not larger
        return Compared()
    counted = "rows" if counts is None else "what the rows count"
    of_gradients = f", with gradients that differ by {differences[1] / sizes[1]:.2g} of their size" if sizes[1] else ""
    message = (
        f"the loss of a microbatch must be a {reduction} over {counted}, but that of {number} rows is "
        f"{expected.value:.6g} and the {reduction} of those of parts of them {by_parts:.6g}{of_gradients}: updates "
        f"depend on how they are cut into microbatches; {remedy}"
    )
    return Compared(message=message)


class _Derived(NamedTuple):
    """A loss, and the products of its gradient with some directions."""

    value: float
    dtype: torch.dtype
    slopes: FloatArray  # (directions,); nan if torch.autograd.grad can give no gradient
    norm: float  # of the gradient

    @classmethod
    def of(cls, loss_of: Callable[[nn.Module, IntArray], Tensor], model: nn.Module, part: IntArray) -> _Derived:
        """Return the loss of the rows of a part; under FSDP2, which sums gradients over ranks, slopes are nan."""
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        has_gradient = trained != [] and not any(isinstance(parameter, DTensor) for parameter in trained)
        with torch.set_grad_enabled(has_gradient):
            loss = loss_of(model, part)
        slopes, norm = np.full(_DIRECTIONS, np.nan), 0.0
        if has_gradient and not loss.requires_grad:  # such as that of rows without labels
            slopes = np.zeros(_DIRECTIONS)
        elif has_gradient:
            with suppress(Exception):  # such as an LSTM of cuDNN in evaluation mode, whose losses are compared
                slopes, norm = _project(torch.autograd.grad(_SCALE * loss, trained, materialize_grads=True))
        return cls(float(loss.detach()), loss.dtype, slopes, norm)

    def tolerances(self, model: nn.Module) -> FloatArray:
        """Return the differences that rounding explains, relative to the loss and to the norm of its gradient, (2,)."""
        floating = [parameter for parameter in model.parameters() if parameter.is_floating_point()]
        dtypes = {self.dtype, *(parameter.dtype for parameter in floating)}
        by_dtype = [_TOLERANCES.get(dtype, _NARROW) for dtype in dtypes]
        on_cpu = all(parameter.device.type == "cpu" for parameter in floating)
        return np.asarray(np.max([*by_dtype, *([] if on_cpu else [_ON_DEVICES])], axis=0), np.float64)


@torch.no_grad()
def _project(gradients: Sequence[Tensor]) -> tuple[FloatArray, float]:
    """Return products of a gradient with random directions, (directions,), and its norm.

    The directions are the same in each call. Each has only a share of the elements, so that all are drawn at once.
    """
    slopes, square = np.zeros(_DIRECTIONS), 0.0
    for number, gradient in enumerate(gradients):
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        flat = (torch.view_as_real(dense) if dense.is_complex() else dense).flatten()
        flat = (flat if flat.dtype == torch.float64 else flat.float()) / _SCALE
        generator = torch.Generator(flat.device).manual_seed(number)
        drawn = torch.randn(len(flat), generator=generator, dtype=flat.dtype, device=flat.device)
        products = (drawn * flat).tensor_split(_DIRECTIONS)  # one tensor for each direction
        slopes += torch.stack([part.sum() for part in products]).double().cpu().numpy()
        square += float(flat.square().sum())
    return slopes, math.sqrt(square)


def unlike_rows(batch: Any, number: int) -> IntArray:
    """Return the numbers of the rows in an order in which parts of them differ as much as possible, (rows,).

    Rows are sorted by how often they have the most frequent integer of the batch, such as padding: if lengths decide
    what rows count, parts of long and of short rows differ most. Rows that have it equally often are sorted by a field
    with one integer for each row, such as its class.
    """
    if rows.is_list_of_rows(batch):
        return np.arange(number)
    fields = [leaf for leaf in rows.leaves(batch) if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == number]
    integers = [leaf.flatten(1 if leaf.dim() > 1 else 0).cpu().long() for leaf in fields if _is_integer(leaf)]
    padded, classes = list[Any](), list[Any]()  # candidates for the two keys, (rows,) each
    for field in integers:
        if field.dim() == 1:
            classes.append(field.numpy())
        elif field.numel():
            padded.append((field == field.flatten().mode().values).sum(1).numpy())
    alike = np.zeros(number)
    # The field that varies most is the key; lexsort takes the first key last.
    return np.lexsort((max(classes, key=np.std, default=alike), max(padded, key=np.std, default=alike)))


def _is_integer(tensor: Tensor) -> bool:
    """Return whether a tensor has integers or bools."""
    return not (tensor.is_floating_point() or tensor.is_complex())


def _weights_of_parts(counts: Sequence[float], reduction: str) -> FloatArray:
    """Return by what the losses of parts of a batch are multiplied to add up to its loss, (parts,).

    `counts`: what the rows of each part count together. A part that counts nothing gets nan: its mean is not known.
    """
    if reduction == "sum":
        return np.ones(len(counts))
    counted = np.array(counts, np.float64)
    return np.asarray(np.where(counted > 0, counted, np.nan) / counted.sum(), np.float64)
