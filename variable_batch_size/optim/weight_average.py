"""An exponential average of the weights whose horizon does not depend on the trace."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, final, get_args

import torch
from torch import Tensor

from variable_batch_size._validation import check_choice, check_number, type_error, value_error
from variable_batch_size.optim.optimizer import CustomOptimizer
from variable_batch_size.optim.tensors import is_narrow, local

By = Literal["progress", "samples"]
_OUTSIDE = "a state must be {} outside the block of applied(); leave it first"


@final
class WeightAverage:
    """The exponential moving average of weights, by how far each update moves the training and not by its number.

    After an update with progress p, in updates at `ref_batchsize`, avg = decay^p avg + (1 - decay^p) weights. A fixed
    decay for each update would average over k times as many samples where batches are k times as large. The averages
    are tensors of their own, at least in float32, sharded as the weights are; buffers are not averaged.

    Source: the EMA scaling rule of Busbridge et al. 2023, arXiv 2307.13813, decay^k for a batch k times as large.

    Args:
        parameters: the weights, such as `model.parameters()`.
        decay: the decay of an update at `ref_batchsize`, in [0, 1).
        optimizer: the optimizer that updates them; each of its updates changes the averages.
        by: what p is: "progress", as the rule counts it, or "samples", B / ref_batchsize.

    Raises:
        TypeError: if `optimizer` is not a `CustomOptimizer`, or a parameter is no floating-point tensor.
        ValueError: if `decay` is out of range, there is no parameter, or `by="samples"` without a `ref_batchsize`.
    """

    def __init__(
        self, parameters: Iterable[Tensor], decay: float, optimizer: CustomOptimizer, *, by: By = "progress"
    ) -> None:
        if not isinstance(optimizer, CustomOptimizer):
            raise type_error("optimizer must be a vbs.CustomOptimizer", optimizer, "pass the wrapper")
        self._parameters = list(parameters)
        for parameter in self._parameters:
            if not (isinstance(parameter, Tensor) and parameter.is_floating_point()):
                raise type_error("parameters must be floating-point tensors", parameter, "pass model.parameters()")
        remedy = "pass one in [0, 1), such as 0.999"
        self.decay = check_number(decay, "decay", remedy)
        if not 0 <= self.decay < 1:
            raise value_error("decay must be in [0, 1)", decay, remedy)
        if not self._parameters:
            raise value_error("there must be weights to average", "none", "pass model.parameters()")
        check_choice(by, "by", get_args(By))
        if by == "samples" and optimizer.ref_batchsize is None:
            raise value_error('by="samples" needs a ref_batchsize', "none", "pass it to the optimizer")
        self._by, self._optimizer, self._seen = by, optimizer, optimizer.updates
        copies = (parameter.detach().clone() for parameter in self._parameters)
        self.averages = [one.float() if is_narrow(one) else one for one in copies]
        optimizer._watch(self)

    @torch.no_grad()
    def commit(self, *, updated: bool) -> None:
        """Average the weights of the update that was just made; the optimizer calls it."""
        optimizer = self._optimizer
        if self._seen == optimizer.updates:  # called again after an interrupt
            return
        if updated:
            parts, averages = local(self._parameters), local(self.averages)
            share = self._share(averages[0])
            parts = [part.to(average.dtype) for part, average in zip(parts, averages, strict=True)]
            changes = torch._foreach_sub(parts, averages)
            torch._foreach_mul_(changes, share)
            torch._foreach_add_(averages, changes)
        self._seen = optimizer.updates

    def discard(self) -> None:
        """Follow the optimizer, which has discarded a step or loaded a state."""
        self._seen = self._optimizer.updates

    def _share(self, like: Tensor) -> Any:
        """Return 1 - decay^p, a float or 0-D."""
        optimizer = self._optimizer
        progress = optimizer._updater.last_scaling.progress
        if self._by == "samples":
            made, reference = optimizer._loop.made, optimizer.ref_batchsize
            assert made is not None
            assert reference is not None
            progress = made.batch_size / reference
        if isinstance(progress, Tensor):
            return 1 - torch.pow(self.decay, progress)
        return optimizer.backend.scalar(1 - self.decay**progress, like, "average of the weights")

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Put the averages in the place of the weights within a block, for an evaluation.

        Training, saving and restoring within the block raise RuntimeError.
        """
        if self._applied:
            raise RuntimeError("the averages are applied already; leave that block first")
        kept = [parameter.detach().clone() for parameter in local(self._parameters)]
        self._put(local(self.averages))
        self._optimizer._loop.averages.add(self)
        try:
            yield
        finally:
            self._put(kept)
            self._optimizer._loop.averages.remove(self)

    @property
    def _applied(self) -> bool:
        return self in self._optimizer._loop.averages

    @torch.no_grad()
    def _put(self, values: list[Tensor]) -> None:
        torch._foreach_copy_(local(self._parameters), values)

    def state_dict(self) -> dict[str, Any]:
        """Return the averages, by the numbers of the parameters.

        Raises:
            RuntimeError: within a block of `applied()`.
        """
        if self._applied:
            raise RuntimeError(_OUTSIDE.format("taken"))
        return {"version": 1, "averages": {str(number): one for number, one in enumerate(self.averages)}}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the averages of a state.

        Raises:
            ValueError: if it has other parameters.
            RuntimeError: within a block of `applied()`.
        """
        if self._applied:
            raise RuntimeError(_OUTSIDE.format("loaded"))
        averages = state_dict.get("averages", {}) if state_dict.get("version") == 1 else {}
        shapes = [tuple(one.shape) for one in averages.values()]
        if shapes != [tuple(one.shape) for one in self.averages]:
            requirement = f"a state of averages must be of the {len(self.averages)} parameters here, in their shapes"
            raise value_error(requirement, f"{len(shapes)}, or other shapes", "restore one of the same model")
        for average, saved in zip(self.averages, averages.values(), strict=True):
            average.copy_(saved)
        self._seen = self._optimizer.updates
