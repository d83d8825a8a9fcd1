"""Means over a step: of what the loop logs, over its samples, and of the gradient, over its tokens (`count=`)."""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from types import NoneType
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from variable_batch_size._validation import check_number, type_error, value_error
from variable_batch_size.backend import Backend
from variable_batch_size.backend.agreement import Agreement
from variable_batch_size.backend.base import scalar_dtype
from variable_batch_size.data.plan.state import check_entries, check_items
from variable_batch_size.optim.checks.consistency import check_names
from variable_batch_size.optim.stage import FIRST_UPDATE, Counted, MeasuredSquares, Stage, UpdateUnderWay
from variable_batch_size.optim.tensors.arithmetic import multiply
from variable_batch_size.optim.tensors.hooks import uncompiled
from variable_batch_size.optim.tensors.late import copy_later

_WHOLE = 1e-3  # tolerance for the weights of a step, which sum to 1


class _Means(NamedTuple):
    """The means of an update: floats if this process makes it alone on a CPU, otherwise a tensor, (names,)."""

    names: tuple[str, ...]
    values: Tensor | list[float]
    dtype: torch.dtype  # to which floats are rounded when they are read

    def as_tensors(self) -> dict[str, Tensor]:
        """Return the means by name, 0-D."""
        return dict(zip(self.names, self._vector().unbind(), strict=True))

    def reader(self) -> Callable[[], dict[str, float]]:
        """Return a function that returns the means by name. Called some updates later, it avoids a wait."""
        read = copy_later(self._vector())
        return lambda: dict(zip(self.names, read().tolist(), strict=True))

    def _vector(self) -> Tensor:
        """Return the means as one tensor, (names,)."""
        if isinstance(self.values, Tensor):
            return self.values
        return torch.tensor(self.values, dtype=self.dtype, device="cpu")  # whatever torch's default device is


@final
class StepMeans(Stage):
    """Averages the values of `optimizer.log` over the microbatches of a step and all ranks, as the gradients.

    Of means v_j over rows: mean = sum_j n_j v_j / B, or with the counts c_j of `step(count=)` sum_j c_j v_j / sum_j
    c_j. With `reduction="sum"` v_j is a sum over the r_j rows: mean = sum_j (n_j / r_j) v_j / B, or / sum_j c_j; in
    `updates(counts=)` it is a part of the mean, sum_j (n_j / r_j) v_j. The sums travel in the message of the gradients.
    Nothing is read from a device.
    """

    name, by_microbatch = "means", True

    def __init__(self, backend: Backend, counts: TokenCount, reduction: str, *, by_rows_of_message: bool) -> None:
        """Create the means of no step. `by_rows_of_message`: whether `part` is called after each microbatch."""
        self._of_sums = reduction == "sum"
        # Whether it is not known here that a name has values of the whole step, or of nothing.
        self._sends_weights = by_rows_of_message or not backend.alone
        self.names: tuple[str, ...] | None = None  # those of the first update
        self._backend, self._counts = backend, counts
        self._current: dict[str, Tensor | float] = {}  # of the microbatch that the next `add` counts
        self._sums: dict[str, Any] = {}  # name -> sum of n_j v_j on this rank: a float, or 0-D on a device
        self._weight: Any = 0.0  # sum of n_j: that of each name, because each has a value in every microbatch
        self._microbatches: dict[str, int] = {}  # name -> how many have a value
        self._added = 0  # microbatches of the step
        self._last: _Means | None = None  # of the last update

    @uncompiled
    def log(self, values: Mapping[str, Any]) -> None:
        """Record values that the loop logs of the current microbatch; several calls may add different names."""
        for name, value in values.items():
            self._check_value(name, value)
            if not isinstance(value, Tensor):
                self._current[name] = float(value)
            elif self._backend.reads(value):
                self._current[name] = float(value.item())
            else:
                self._current[name] = value.detach()  # so that the graph of a loss is not kept

    def meet(self, agreement: Agreement) -> None:
        """Compare the names of the logged values over all ranks, before they sum values for the first time."""
        if agreement.world.size > 1:
            names = json.dumps(self._names_of_step or self.names or ())
            check_names("log()", [*map(json.loads, agreement.gather(FIRST_UPDATE, names))])

    def add(self, counted: Counted, squares: MeasuredSquares, like: Tensor) -> None:
        """Add the logged values of a microbatch, times its samples or its count, to the sums of the step.

        `counted`: the microbatch, and the count that `step(count=)` got. `like`: a tensor on the device.
        """
        microbatch = counted.microbatch
        weight = microbatch.samples if counted.count is None else self._counts.weight
        # The factor on the value, while `weight` measures how much of the step has values. Whole numbers: float32 adds
        # them exactly, so that the mean of a constant is the constant.
        value_weight = microbatch.distinct if self._of_sums or counted.divided else weight
        self._added += 1
        self._weight = self._weight + weight
        if self._current and self._backend.static_graph:
            value_weight = self._backend.number(value_weight, like, "weight of means")
        for name, value in self._current.items():
            self._microbatches[name] = self._microbatches.get(name, 0) + 1
            self._sums[name] = self._add_weighted(self._sums.get(name), value, value_weight, like)
        self._current = {}

    def part(self, like: Sequence[Tensor]) -> list[Tensor]:
        """Return, for the ranks to sum, the weighted sum of the values of each name, (names,), over this rank.

        Unless it is known that a name has values of all samples, also return the sum of the weights of each name: 0 if
        this rank has no value of it.
        """
        for name, number in self._microbatches.items():  # of microbatches that have a value of this name
            if number != self._added:
                raise RuntimeError(
                    f"log() must be called for every microbatch of a step, but {name!r} has {number} values for "
                    f"{self._added} microbatches; call it before each step() on every rank, replays too"
                )
        self.names = self._names_of_step if self.names is None else self.names
        if not self.names:
            return []
        if self._keeps_floats(like[0]):
            return []
        if not self._sends_weights:
            return [self._as_vector([self._sums.get(name, math.nan) for name in self.names], like[0])]
        sums = [self._sums.get(name, 0.0) for name in self.names]
        weights = [self._weight if name in self._sums else 0.0 for name in self.names]
        return [self._as_vector(sums, like[0]), self._as_vector(weights, like[0])]

    def _keeps_floats(self, like: Tensor) -> bool:
        """Return whether the sums stay floats, which take a tenth of the time of tensors: they are not sent to ranks.

        `like`: a tensor on the device of the gradients.
        """
        return not self._sends_weights and self._backend.reads(like)

    @property
    def _names_of_step(self) -> tuple[str, ...]:
        """The names that have values in this step."""
        return tuple(sorted(self._sums))

    def reduce(self, update: UpdateUnderWay) -> None:
        """Compute the means of the update from the sums over all ranks.

        Raise RuntimeError on every rank if a name has values for a part of the samples only, as on one rank. On a
        device, where the host does not know it, the mean is nan.
        """
        self.names = self.names if self.names is not None else self._names_of_step
        self._last = None
        has_totals = update.batch.totals is not None  # then the loop has divided its losses
        batch_size = float(update.batch.batch_size)
        message = update.message[self.name]
        if self.names and self._keeps_floats(update.parameters[0]):
            own_total = 1.0 if has_totals else batch_size if update.count is None else float(update.count)
            sums_of_step = (self._sums.get(name, math.nan) for name in self.names)
            means = [own / own_total if own_total else math.nan for own in sums_of_step]
            self._last = _Means(self.names, means, scalar_dtype(update.parameters[:1]))
        elif message:
            sums, *weights_if_sent = message
            total = self._backend.scalar(batch_size, sums, "divisor of means") if update.count is None else update.count
            mean = sums if has_totals else sums / total
            are_complete = [self._find_whole(weights / total) for weights in weights_if_sent]  # none or one
            if update.count is not None:
                are_complete.append(total > 0)  # without a token there is no mean
            for is_complete in are_complete:
                mean = torch.where(is_complete, mean, math.nan)
            self._last = _Means(self.names, mean, mean.dtype)
        if self._last is not None:
            update.read_means = self._last.as_tensors

    def _find_whole(self, shares: Tensor) -> Tensor:
        """Return for each name whether it has values for all samples of the update, (names,).

        Raise RuntimeError if the host can read that a name has values for a part of them. `shares`: for each name, the
        share of the samples that have a value, 1 up to rounding if all have, (names,).
        """
        is_whole = (shares - 1).abs() < _WHOLE
        if self._backend.reads(shares):
            for name, share, complete in zip(self.names or (), shares.tolist(), is_whole.tolist(), strict=True):
                if not complete and share > 0:
                    raise RuntimeError(
                        f"log() must be called for every microbatch of a step on every rank, but {name!r} has values "
                        f"for {share:.0%} of the samples of all ranks; call it before each step(), replays too"
                    )
        return is_whole

    def clear(self) -> None:
        """Discard the logged values of a step, after its update or because it starts over."""
        self._current, self._sums, self._microbatches, self._added, self._weight = {}, {}, {}, 0, 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return the names of logged values, if ranks may come and go: one that joins has to know them."""
        return {"logged": list(self.names)} if self._backend.elastic and self.names is not None else {}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if the names of logged values in a state are damaged."""
        if "logged" in state:
            check_entries(state, {"logged": (list,)})
            check_items(state["logged"], (str,), "logged")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the names of logged values; without an entry, the names of the next update must stay."""
        self.names = tuple(state["logged"]) if self._backend.elastic and "logged" in state else None
        self._last = None

    @property
    def last_means(self) -> dict[str, Tensor]:
        """The means of the last update, 0-D tensors on the device of the gradients; nan if nothing was logged."""
        return {} if self._last is None else self._last.as_tensors()

    def reader(self) -> Callable[[], dict[str, float]]:
        """Return a function that returns the means of the last update. Called some updates later, it avoids a wait."""
        return dict if self._last is None else self._last.reader()

    def _add_weighted(self, total: Any, value: Tensor | float, weight: Any, like: Tensor) -> Any:
        """Return `total`, None for none, plus `weight` times a logged value; a weight of 0, as of a replay, adds 0.

        It does so even if the value is not finite. All are floats or 0-D tensors. `like`: a tensor on the device to
        which values go.
        """
        if not isinstance(weight, Tensor) and not weight:
            return 0.0 if total is None else total
        value = self._backend.number(value, like)
        if isinstance(weight, Tensor):  # without numbers, which XLA would send each time
            value = torch.where(weight.bool(), value * weight, weight)
        elif isinstance(value, Tensor) and isinstance(total, Tensor):
            return torch.add(total, value, alpha=weight)  # one kernel
        else:
            value = value * weight
        return value if total is None else total + value

    def _as_vector(self, numbers: Sequence[Any], like: Tensor) -> Tensor:
        """Return floats and 0-D tensors as one tensor, (numbers,), in at least float32, on the device of `like`."""
        dtype = scalar_dtype([like])
        if any(isinstance(number, Tensor) for number in numbers):
            tensors = [number if isinstance(number, Tensor) else like.new_full((), number) for number in numbers]
            tensors = [tensor.to(dtype) for tensor in tensors]
            return torch.stack(tensors) if len(tensors) > 1 else tensors[0].reshape(1)  # which needs no kernel
        if self._backend.reads(like):
            return torch.tensor(numbers, dtype=dtype)
        example = like.new_empty(0, dtype=dtype)
        return self._backend.vectors([numbers], example, "sums of means")[0].clone()  # the ranks sum it in place

    def _check_value(self, name: str, value: object) -> None:
        """Raise an error unless a value can be logged, and its name has no value yet and was in the first update."""
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
                f"the names must be as in the first update, {', '.join(self.names) or 'none'}, but {name!r} is new; "
                f"log it from the first update on, on every rank"
            )
        check_mean(name, value)


def check_mean(name: str, value: object) -> None:
    """Raise an error unless a value of a microbatch is a number, or a tensor with one element."""
    if isinstance(value, Tensor):
        if value.is_complex():
            raise value_error(f"{name} must be a real number", f"a tensor of {value.dtype}", "pass its .abs() or .real")
        if value.numel() != 1:
            found = f"a tensor of shape {tuple(value.shape)}"
            raise value_error(f"{name} must be a mean over the rows of the microbatch", found, "pass its .mean()")
    elif isinstance(value, bool) or not isinstance(value, numbers.Real):
        remedy = "pass a mean over the rows of the microbatch"
        raise type_error(f"{name} must be a number or a tensor with one element", value, remedy)


@final
class TokenCount(Stage):
    """Sums the counts of `step(count=)`, by which the gradient of an update is divided.

    G = (sum_j d_j S_j) / (sum_j d_j c_j) over the microbatches j of all ranks: S_j is the gradient of the sum of the
    losses of a microbatch, c_j its count, and d_j its distinct samples divided by its rows, so that repeated rows count
    once and replays not at all. In a mean of the means S_j / c_j a token would weigh less in a longer microbatch.
    """

    name, by_microbatch = "counts", True

    def __init__(self, backend: Backend, reduction: str) -> None:
        self.used: bool | None = None  # whether the steps of this training have counts, once there was one
        self.weight: Any = 0.0  # d_j c_j of the last microbatch
        self.last: Tensor | None = None  # sum of the d_j c_j of all ranks in the last update, 0-D
        self.refused = ""  # why the steps cannot have counts
        self._backend, self._reduction = backend, reduction
        self._sum: Any = None  # of the weights of this rank's microbatches: a float, or 0-D on a device
        self._zero: Any = None  # with which it begins; kept, so that no graph changes

    def settings(self) -> dict[str, Any]:
        """Return whether the steps have counts."""
        return {"count= in step()": bool(self.used)}

    def check(self, counted: Counted) -> None:
        """Raise an error unless `step()` may be called with this count, None for none; nothing has changed yet."""
        count: object = counted.count
        if counted.divided and count is not None:
            raise RuntimeError(
                "a loss has one way to its denominators, but step() has count= in an update of vbs.updates(counts=); "
                "omit count=, and divide by update.counts"
            )
        if self.used is not None and self.used != (count is not None):
            raise RuntimeError(
                f"either every step() has a count, or none, but this one has {'one' if count is not None else 'none'}; "
                f"pass count= for every microbatch on every rank, replays too"
            )
        if count is None:
            return
        if self._reduction != "sum":
            requirement = "step(count=) needs a loss that is summed over the rows of a microbatch"
            raise value_error(
                requirement, f"reduction={self._reduction!r}", 'pass reduction="sum" to the loss and to the optimizer'
            )
        if self.refused:
            raise ValueError(f"step(count=) needs gradients that nothing else weighs or compares, but {self.refused}")
        if isinstance(count, Tensor) and (count.numel() != 1 or count.is_complex()):
            raise TypeError(
                f"count must be a number or a tensor with one element, got a tensor of shape {tuple(count.shape)}; "
                f"pass its .sum()"
            )
        if not isinstance(count, Tensor) or count.device.type == "cpu":
            number = count.item() if isinstance(count, Tensor) else count
            check_number(number, "count", "pass the number of tokens of the microbatch")

    def add(self, counted: Counted, squares: MeasuredSquares, like: Tensor) -> None:
        """Add the count that `step(count=)` got for a microbatch, if any, to that of the step, without repeated rows.

        `counted`: the microbatch, and its count. `like`: a tensor on the device.
        """
        count = counted.count
        self.used = count is not None
        if count is None:
            return
        count = self._backend.number(count, like)
        distinct = counted.microbatch.distinct  # the share of its rows that are not repeated; 0 for a replay
        self.weight = count * (self._backend.scalar(distinct, like) if isinstance(count, Tensor) else distinct)
        self._zero = self._backend.scalar(0.0, like) if self._zero is None else self._zero
        self._sum = (self._zero if self._sum is None else self._sum) + self.weight

    def part(self, like: Sequence[Tensor]) -> list[Tensor]:
        """Return the sum of this rank's counts in the step, (1,), for the ranks to sum; nothing without counts."""
        if not self.used:
            return []
        return [torch.as_tensor(self._sum, dtype=scalar_dtype(like[:1])).to(like[0].device).view(1)]

    def reduce(self, update: UpdateUnderWay) -> None:
        """Turn gradients that were divided by the samples into those that are divided by the counts.

        The update is skipped if nothing was counted on any rank, so that there is no gradient. On a device, where the
        host does not know it, the gradients become 0.
        """
        message, batch_size = update.message[self.name], update.batch.batch_size
        self.last = update.count = message[0][0] if message else None
        for total in message:  # one tensor, (1,): the sum of the counts over all ranks; none without counts
            if self._backend.reads(total):
                total_count = total.item()
                multiply(update.gradients, batch_size / total_count if total_count else 0.0, self._backend)
                update.skip(not total_count)
            else:
                factor = torch.as_tensor(self._backend.scalar(batch_size, total)) / total[0]
                multiply(update.gradients, torch.where(total[0] > 0, factor, 0.0), self._backend)

    def state_dict(self) -> dict[str, Any]:
        """Return whether the steps have counts."""
        return {"counts": self.used}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if its entry is damaged, or missing."""
        check_entries(state, {"counts": (bool, NoneType)})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        self.used = state.get("counts", self.used)

    def clear(self) -> None:
        """Discard the counts of the step."""
        self._sum = None
