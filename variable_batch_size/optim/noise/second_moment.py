"""Adam's second moment as at the reference batch size, from the squares of the gradients of microbatches.

The J microbatches of an update, of n_j samples, have the mean gradients g_j. Elementwise, with
G = sum_j (n_j / B) g_j and A = sum_j (n_j / B) g_j^2,

    E[G^2] = g^2 + sigma^2 / B,    E[A - G^2] = (J - 1) sigma^2 / B,

so that G^2 + a (A - G^2), a = (B / ref - 1) / (J - 1), has the expectation g^2 + sigma^2 / ref of a gradient of ref
samples, whatever the microbatches are. torch's Adam averages G^2: v <- beta2 v + (1 - beta2) G^2. Before its step,
a (1 - beta2) / beta2 (A - G^2) is added to v, which is never negative (Jensen's inequality).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Adam, Optimizer
from torch.utils.hooks import RemovableHandle

from variable_batch_size._validation import type_error, value_error
from variable_batch_size.backend import Backend
from variable_batch_size.data.batches import Batch
from variable_batch_size.data.dealer import Dealer
from variable_batch_size.optim.stage import Counted, MeasuredSquares, Needs, Stage, UpdateUnderWay
from variable_batch_size.optim.tensors.arithmetic import add_to, check_whole, multiply, widen, zero_unless
from variable_batch_size.optim.tensors.parameters import Gradients
from variable_batch_size.rules.base import needs_squares

_WAY_OUT = "pass a smaller minibatch_size (or max_tokens), which cuts it into more"
_SMALLEST_BETA = 2.0**-60  # a smaller one may take the quotient by it out of the range of float32


@final
class SecondMoment(Stage):
    """Adds to the second moment of an Adam what its gradients would have at the reference.

    Updates of at most the reference need nothing but on a device that compiles graphs, whose updates are all the same.
    """

    name = "second moments"
    compares_microbatches = True

    def __init__(self, inner: Optimizer, backend: Backend, reference: int) -> None:
        self._batch_size = 0  # samples of the step under way, over all ranks
        self._inner: Any = inner
        self._backend, self._reference = backend, reference
        self._sums: dict[Tensor, Tensor] = {}  # by parameter: sum of n_j g_j^2, then A - G^2
        self._watch: RemovableHandle | None = None

    def needs(self, batch: Batch | None) -> Needs:
        """Return that squares of elements are needed if an update is larger than the reference."""
        return Needs(elements=batch is None or self._needs_squares(batch.batch_size))

    def _needs_squares(self, batch_size: int) -> bool:
        """Return whether an update of this size needs squares of elements; the answer is the same on all ranks."""
        return self._backend.static_graph or batch_size > self._reference

    def scale(self, update: UpdateUnderWay) -> None:
        """Raise ValueError if the second moment of an update, or its beta2, cannot be as at the reference.

        A single microbatch gives no variance if the update is larger than the reference.
        """
        step = update.batch
        if step.batch_size <= self._reference:
            return
        if step.num_microbatches < 2:
            raise value_error(_requirement(self._reference), f"one of {step.batch_size} samples", _WAY_OUT)
        for group, rule, scaling in zip(self._inner.param_groups, update.rules, update.scalings, strict=True):
            beta = float(group["betas"][1])
            if needs_squares(rule) and (scaled := scaling.scaled_alpha(beta)) < _SMALLEST_BETA:
                raise value_error(
                    f"beta2 of an update must stay above {_SMALLEST_BETA:.0e}, but a rule changes {beta:g}",
                    f"{scaled:.0e}",
                    "limit the largest batch size of the trace, or choose a beta2 closer to 1",
                )

    def add(self, counted: Counted, squares: MeasuredSquares, like: Tensor) -> None:
        """Add n_j g_j^2 of a microbatch, elementwise, to the sum of each parameter.

        n_j is its number of samples, and g_j its gradient, whose squares were measured.
        """
        self._batch_size = counted.microbatch.batch_size
        # By parameter g_j^2; n_j, divided by the square of the weight of the loss; the scale of a GradScaler.
        _, elements, factor, scale = squares
        if not (self._needs_squares(self._batch_size) and elements and (factor or self._backend.static_graph)):
            return
        tensors = list(elements.values())
        multiply(tensors, factor, self._backend)
        if scale is not None:
            torch._foreach_div_(tensors, scale.to(tensors[0].dtype).square())
        add_to(self._sums, elements)

    def part(self, like: Sequence[Tensor]) -> list[Tensor]:
        """Return this rank's sums for the parameters that take part in the update; the ranks add them in place."""
        if not self._needs_squares(self._batch_size):
            return []
        groups = self._inner.param_groups
        parameters = dict.fromkeys(
            parameter for group in groups for parameter in group["params"] if parameter.grad is not None
        )
        missing = [parameter for parameter in parameters if parameter not in self._sums]
        self._sums |= {parameter: widen(torch.zeros_like(parameter)) for parameter in missing}
        self._sums = {parameter: self._sums[parameter] for parameter in parameters}  # in the same order on all ranks
        return list(self._sums.values())

    def measure(self, update: UpdateUnderWay) -> None:
        """Turn the sums over all ranks, B A = sum_j n_j g_j^2, into A - G^2, elementwise; G is the mean gradient.

        They become 0 if a device finds G not finite.
        """
        self._sums = {tensor: total for tensor, total in self._sums.items() if tensor.grad is not None}
        if not self._sums:
            return
        gradients = [widen(parameter.grad) for parameter in self._sums]  # type: ignore[arg-type]
        sums = list(self._sums.values())
        multiply(sums, 1 / update.batch.batch_size, self._backend)
        torch._foreach_addcmul_(sums, gradients, gradients, value=-1)
        torch._foreach_clamp_min_(sums, 0)  # by rounding alone it may be negative
        if isinstance(update.finite, Tensor):
            zero_unless(update.finite, sums)

    def clip(self, factor: Tensor) -> None:
        """Multiply the sums of squares as if the gradient of each microbatch had been clipped by this factor, 0-D."""
        multiply(list(self._sums.values()), factor.square(), self._backend)

    def begin_step(self, update: UpdateUnderWay) -> None:
        """Before Adam's step, add a (1 - beta2) / beta2 (A - G^2) to second moments of groups whose rule needs it.

        A - G^2 is the variance between microbatches, see `measure`, and a = (B / ref - 1) / (J - 1) for J of them: so
        the second moment becomes that of updates of `ref` samples.
        """
        step = update.batch
        weight = max(0.0, step.batch_size / self._reference - 1) / max(1, step.num_microbatches - 1)
        for group, rule in zip(self._inner.param_groups, update.rules, strict=True):
            parameters = [tensor for tensor in dict.fromkeys(group["params"]) if tensor in self._sums]
            if not (parameters and needs_squares(rule)):
                continue
            # Private: creates the state that torch's own first step would create, so that it can be added to.
            self._inner._init_group(group, [], [], [], [], [], [])
            beta = float(group["betas"][1])
            sums = [self._sums[parameter] for parameter in parameters]
            multiply(sums, weight * (1 - beta) / beta, self._backend)
            moments = [self._inner.state[parameter]["exp_avg_sq"] for parameter in parameters]
            torch._foreach_add_(
                moments, [tensor.to(moment.dtype) for tensor, moment in zip(sums, moments, strict=True)]
            )
        self._watch_hooks()

    def _watch_hooks(self) -> None:
        """If the inner optimizer has pre-hooks of its step, add a last one that raises if they change gradients."""
        if not self._inner._optimizer_step_pre_hooks:
            return
        parameters = list(self._sums)
        before = Gradients.of(parameters)

        def raise_if_changed(*_: object) -> None:
            if before.first_changed(Gradients.of(parameters)) is not None:
                raise RuntimeError(
                    "with a rule of Adam's second moment no step_pre_hook may change gradients, because their squares "
                    "stay as they were, but one did; clip with max_grad_norm=, or choose another rule"
                )

        self._watch = self._inner.register_step_pre_hook(raise_if_changed)

    def clear(self) -> None:
        """Discard the sums of squares of a step, after its update or because it starts over."""
        self._sums = {}
        if self._watch is not None:  # it holds the gradients
            self._watch.remove()
            self._watch = None


def create_second_moment(inner: Optimizer, reference: int | None, backend: Backend, sampler: Dealer) -> SecondMoment:
    """Return the stage that adds squares to Adam's second moment; raise an error if that is not possible."""
    if not _is_of_torch(inner):
        requirement = "a rule of Adam's second moment needs a torch.optim.Adam or AdamW, with torch's own step()"
        raise type_error(requirement, inner, "wrap one of these, or choose another rule")
    parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
    check_whole(parameters, "a rule of Adam's second moment", "choose another rule")
    devices = sorted({str(parameter.device) for parameter in parameters})
    refused = {
        "no ref_batchsize": reference is None,
        " and ".join(devices): len(devices) > 1,
        "a world that changes": backend.elastic,
        "complex parameters": any(tensor.is_complex() for tensor in parameters),
        "float16, in which squares overflow": any(tensor.dtype == torch.float16 for tensor in parameters),
    }
    if reference is None or any(refused.values()):
        raise value_error(
            "a rule of Adam's second moment needs a ref_batchsize, a fixed world, and real parameters on one device, "
            "in float32, say",
            ", ".join(words for words, wrong in refused.items() if wrong),
            "change that, or choose another rule",
        )
    if sampler.batches.reproducible:
        requirement = "reproducible=True needs a rule without the squares of elements"
        raise value_error(requirement, "invariant-adam", "choose another rule")
    _check_microbatches(reference, sampler)
    return SecondMoment(inner, backend, reference)


def _is_of_torch(inner: Optimizer) -> bool:
    """Return whether an optimizer is an Adam that stores its state as torch's does; its methods may be wrapped."""

    def functions_of(kind: type[Optimizer]) -> list[Any]:
        """Return the methods of a class that create and use its state, without wrappers of torch or torch._dynamo."""
        return [inspect.unwrap(getattr(kind, name)) for name in ("step", "_init_group")]

    return isinstance(inner, Adam) and functions_of(type(inner)) == functions_of(Adam)


def _check_microbatches(reference: int, sampler: Dealer) -> None:
    """Raise ValueError if an update that is larger than the reference may have a single microbatch."""
    if sampler.batches.arriving:
        return  # `SecondMoment.scale` sees the microbatches
    size = sampler.plan.minibatch_size
    if reference < min(size, sampler.max_batch_size):
        raise value_error(_requirement(reference), f"minibatch_size={size}", _WAY_OUT)


def _requirement(reference: int) -> str:
    return f"updates of more than ref_batchsize={reference} samples must have two or more microbatches"
