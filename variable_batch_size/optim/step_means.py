"""Means of what the loop logs, such as the loss, over exactly the samples of each step."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch import Tensor

from variable_batch_size._validation import type_error, value_error
from variable_batch_size.backend import Backend
from variable_batch_size.optim.uncompiled import uncompiled

_WHOLE = 1e-3  # tolerance for the weights of a step, which sum to 1


@final
class StepMeans:
    """Averages the values of `optimizer.log` over the microbatches of a step and all ranks.

    mean = sum_j w_j v_j / sum_j w_j with w_j = n_j / B, or the counts of `step(count=)`. The sums travel in the message
    of the gradients. Nothing is read from a device.

    Args:
        backend: backend of the optimizer.

    Attributes:
        names: names of the values, those of the first update; None before it.
    """

    def __init__(self, backend: Backend) -> None:
        self.names: tuple[str, ...] | None = None
        self._backend = backend
        self._current: dict[str, Tensor | float] = {}  # of the microbatch that the next `add` counts
        self._sums: dict[str, tuple[Any, Any]] = {}  # name -> sum of w v and of w, on this rank
        self._zeros: dict[str, tuple[Any, Any]] = {}  # with which they begin; kept, so that no graph changes
        self._microbatches: dict[str, int] = {}  # name -> how many have a value
        self._added = 0  # microbatches of the step
        self._last: tuple[tuple[str, ...], Tensor] | None = None  # of the last update: names, and means, (names,)

    @uncompiled
    def log(self, values: Mapping[str, Any]) -> None:
        """Note values of the current microbatch; several calls may add different names.

        Raises:
            TypeError: if a value is neither a number nor a tensor.
            ValueError: if a tensor has not exactly one element, or a name is empty, "update" or begins with "vbs/".
            RuntimeError: if a name has a value already, or was not logged in the first update.
        """
        for name, value in values.items():
            self._check(name, value)
            self._current[name] = value.detach().reshape(()) if isinstance(value, Tensor) else float(value)

    def add(self, weight: Any, like: Tensor) -> None:
        """Add the values of a microbatch of this weight, a float or 0-D; a replay has weight 0."""
        self._added += 1
        if self._current and like.device.type != "cpu":
            weight = self._on_device(weight, like)
        for name, value in self._current.items():
            self._microbatches[name] = self._microbatches.get(name, 0) + 1
            if name not in self._zeros:
                self._zeros[name] = tuple(self._backend.scalars([0.0, 0.0], like))
            total, weights = self._sums.get(name, self._zeros[name])
            self._sums[name] = total + self._weighted(value, weight, like), weights + weight
        self._current = {}

    def message(self, like: Tensor) -> list[Tensor]:
        """Return what the ranks have to sum, (2 * names,); nothing if nothing is logged.

        Raises:
            RuntimeError: if a name has a value for some microbatches only.
        """
        for name, number in self._microbatches.items():
            if number != self._added:
                raise RuntimeError(
                    f"log() must be called for every microbatch of a step, but {name!r} has {number} values for "
                    f"{self._added} microbatches; call it before each step() on every rank, replays too"
                )
        names = self.names if self.names is not None else self.names_of_step
        if not names:
            return []
        sums = [self._sums.get(name, (0.0, 0.0))[part] for part in (0, 1) for name in names]
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        if not any(isinstance(number, Tensor) for number in sums):
            return [torch.tensor(sums, dtype=dtype).to(like.device)]
        return [torch.stack([torch.as_tensor(number, dtype=dtype, device=like.device) for number in sums])]

    @property
    def names_of_step(self) -> tuple[str, ...]:
        """The names that have values in this step."""
        return tuple(sorted(self._sums))

    def settle(self, message: list[Tensor], total: Tensor | None) -> None:
        """Keep the sums over all ranks as those of the last update.

        Args:
            message: the summed message.
            total: the counts of the step, 0-D; None if its samples count.

        Raises:
            RuntimeError: on every rank, if a name has values for a part of the samples only, as on one rank; on a
                device, where the host does not know it, its mean is nan.
        """
        self.names = self.names if self.names is not None else self.names_of_step
        self._last = None
        if not message:
            return
        sums, weights = message[0].view(2, -1)
        part = weights if total is None else weights / total
        whole = (part - 1).abs() < _WHOLE
        if message[0].device.type == "cpu":
            for name, share, complete in zip(self.names, part.tolist(), whole.tolist(), strict=True):
                if not complete and share > 0:
                    raise RuntimeError(
                        f"log() must be called for every microbatch of a step on every rank, but {name!r} has values "
                        f"for {share:.0%} of the samples of all ranks; call it before each step(), replays too"
                    )
        self._last = self.names, torch.where(whole, sums / weights, math.nan)

    def clear(self) -> None:
        """Discard the values of the step."""
        self._current, self._sums, self._microbatches, self._added = {}, {}, {}, 0

    @property
    def last(self) -> dict[str, Tensor]:
        """The means of the last update, 0-D tensors on the device of the gradients; nan if nothing was logged."""
        if self._last is None:
            return {}
        names, means = self._last
        return dict(zip(names, means.unbind(), strict=True))

    def later(self) -> Callable[[], dict[str, float]]:
        """Return a function that returns the means of the last update, to be called when that does not wait."""
        if self._last is None:
            return dict
        names, means = self._last
        return lambda: dict(zip(names, means.cpu().tolist(), strict=True))

    def _weighted(self, value: Tensor | float, weight: Any, like: Tensor) -> Any:
        """Return `weight` times the value; 0 for a weight of 0, even if the value is not finite."""
        if like.device.type == "cpu":
            return weight * (value.item() if isinstance(value, Tensor) else value) if weight else 0.0
        return torch.where(weight > 0, self._on_device(value, like) * weight, 0.0)

    def _on_device(self, number: Any, like: Tensor) -> Tensor:
        """Return a number as a 0-D tensor of float32, which is no constant of a graph."""
        number = number if isinstance(number, Tensor) else self._backend.scalar(number, like)
        return torch.as_tensor(number, dtype=torch.float32).to(like.device)

    def _check(self, name: str, value: object) -> None:
        if name in ("", "update") or name.startswith("vbs/"):
            requirement = 'a name must not be empty, "update" or begin with "vbs/", which the optimizer uses'
            raise value_error(requirement, repr(name), "choose another name")
        if name in self._current:
            raise RuntimeError(
                f"a microbatch has one value for each name, but {name!r} was logged twice; call log() once between two "
                f"calls of step(), and after an exception optimizer.discard_step()"
            )
        if self.names is not None and name not in self.names:
            raise RuntimeError(
                f"the names must be those of the first update, {', '.join(self.names) or 'none'}, but {name!r} is new; "
                f"log it from the first update on, on every rank"
            )
        if isinstance(value, Tensor):
            if value.numel() != 1:
                found = f"a tensor of shape {tuple(value.shape)}"
                raise value_error(f"{name} must be a mean over the rows of the microbatch", found, "pass its .mean()")
        elif isinstance(value, bool) or not isinstance(value, numbers.Real):
            remedy = "pass a mean over the rows of the microbatch"
            raise type_error(f"{name} must be a number or a tensor with one element", value, remedy)
