"""Skip updates whose gradient is too large: the decision, its books, and the selection on devices that compile graphs.

Where the host may read a number, it reads the norm of the gradient, and nothing that would follow runs. On a device
that compiles graphs every update issues the same operations: the update is made, and `torch.where` then selects each
parameter, and each tensor of the optimizer's state, from before it or after it. There the number of updates t in
1 - beta^t has to be on the device, because the host does not know how many were skipped.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, Muon, NAdam, Optimizer, RMSprop

from variable_batch_size._log import stacklevel_of_user
from variable_batch_size._validation import value_error
from variable_batch_size.backend import Backend
from variable_batch_size.data.plan.state import check_entries
from variable_batch_size.optim.options import NormLimit, check_norm
from variable_batch_size.optim.scaling.scaling import CAPTURABLE
from variable_batch_size.optim.stage import Stage, UpdateUnderWay
from variable_batch_size.optim.tensors.arithmetic import local_parts, squared_norm
from variable_batch_size.optim.tensors.late import LateReader

_IN_A_ROW = 20  # skipped updates, after which the user is warned
_SELECTABLE = (SGD, Adam, AdamW, NAdam, Adamax, Adagrad, Adadelta, RMSprop, Muon, *CAPTURABLE)


class _Books(NamedTuple):
    """What the host knows of skipped updates, as one value: an interrupt leaves the old one or the new one."""

    skipped: int = 0  # number of skipped updates
    in_a_row: int = 0  # number of these since the last update that was made
    skips: bool | Tensor | None = None  # whether the update under way is skipped, 0-D on a device; None: not decided
    on_device: Tensor | None = None  # what the device has counted: skipped, in a row, and the longest row so far, (3,)


@final
class LargeGradients(Stage):
    """Decides which updates are skipped, and counts them.

    An update of B samples is skipped unless |G| <= limit(B). The first update of a training is made if its
    gradient is finite; so is, on a device that compiles graphs, one with which the optimizer begins to keep a state of
    a parameter.

    Where the host does not read, what a skipped update leaves as it was is selected around the inner step.
    """

    reads_gradient = True

    def __init__(self, limit: NormLimit, inner: Optimizer, backend: Backend, parameters: Sequence[Tensor]) -> None:
        _check_can_skip(inner, backend, parameters)
        self._limit, self._inner, self._backend = limit, inner, backend
        self.skips_on_device = backend.static_graph
        self._books = _Books()
        self._warned = False
        self._late = LateReader()  # of what the device has counted
        self._saved: list[tuple[Tensor, Tensor]] = []  # tensors and their values before the update
        if self.skips_on_device:
            inner.register_step_post_hook(self._select_tensors)  # hooks that are registered later see what was selected

    @property
    def skipped(self) -> int:
        """The number of updates that were skipped, as far as the host knows."""
        return self._books.skipped

    @property
    def _skips_on_device(self) -> Tensor | None:
        """Whether the update under way is skipped, a 0-D tensor where the device decides; None where the host does."""
        skips = self._books.skips
        return skips if isinstance(skips, Tensor) else None

    def _limit_of(self, batch_size: int) -> float:
        """Return the largest norm of the gradient with which an update of this batch size, in samples, is made."""
        if not callable(self._limit):  # the user has passed a number, and no function of the batch size
            return self._limit
        return check_norm(self._limit(batch_size), f"skip_grad_norm({batch_size})", "return a number > 0, or math.inf")

    def begin(self, update: UpdateUnderWay) -> None:
        """Compute the largest norm with which this update is made, and let the ranks compare it.

        `update.facts` has what must be equal on all ranks.
        """
        update.facts["skip_grad_norm"] = self._limit_of(update.batch.batch_size)

    def judge(self, update: UpdateUnderWay) -> None:
        """Skip the update if the norm of its gradient, summed over the ranks, is above the limit."""
        if update.square is None:  # |G|^2, which another stage may have computed
            update.norm = squared_norm(update.gradients).sqrt()
        else:
            dtype = None if isinstance(update.square, Tensor) else torch.float64
            update.norm = torch.as_tensor(update.square, dtype=dtype).sqrt()
        limit, first = update.facts["skip_grad_norm"], update.asked.samples == 0
        update.skip(self._is_too_large(update.norm, limit, first=first))

    def _is_too_large(self, norm: Tensor, limit: float, *, first: bool) -> bool | Tensor:
        """Return whether an update is skipped, the same on all ranks; 0-D on a device that compiles graphs.

        Args:
            norm: |G|, 0-D; if it is not a number, it is too large.
            limit: the largest norm with which an update is made.
            first: whether the update is the first one of the training.
        """
        if self.skips_on_device:
            # Skipping selects old values of the optimizer's state, so that there must be a state already.
            numbers = [limit, float(not (first or self._begins_state()))]
            largest, may_skip = self._backend.scalars(numbers, norm, "skip_grad_norm")
            skips: bool | Tensor = ~(norm <= largest) & may_skip.bool()  # not `norm > largest`, which nan is not
        else:
            number = self._backend.host(norm).item()
            is_made = number <= limit or (first and math.isfinite(number))
            skips = self._decision_of_rank_0(not is_made)
        self._books = self._books._replace(skips=skips)
        return skips

    def _decision_of_rank_0(self, skips: bool) -> bool:
        """Return what rank 0 has decided: the last bit of a norm may differ between ranks of different processors."""
        job = self._backend.job
        if job.world.size == 1:
            return skips
        decision = torch.full((1,), float(skips and job.world.rank == 0), device=job.device)  # 0 on other ranks
        job.all_reduce_sum([decision])
        return bool(decision.item())

    # The books. --------------------------------------------------------------------------------------------------

    def end(self, update: UpdateUnderWay) -> None:
        """Count the update as made or skipped, unless another stage has skipped it before a decision."""
        books = self._books  # how many updates were skipped, and the decision about this one, None without one
        if isinstance(books.skips, Tensor):
            self._commit_on_device(books, books.skips)
        elif books.skips is not None:
            self._books = _Books(books.skipped + books.skips, books.in_a_row + 1 if books.skips else 0)
            self._warn_if_many(self._books.in_a_row)

    def _commit_on_device(self, books: _Books, skips: Tensor) -> None:
        """Count an update that the device may skip, on the device, and read what it has counted some updates ago.

        `skips`: whether it is skipped, 0-D. `books`: the counts so far.
        """
        skip = skips.to(torch.float32)  # 1 if the update is skipped, else 0
        counts = books.on_device
        if counts is None:
            start = [books.skipped, books.in_a_row, books.in_a_row]
            (counts,) = self._backend.vectors([start], skip, "skipped updates")
        total, in_a_row, longest = counts.unbind()
        in_a_row = in_a_row * skip + skip  # one more if `skip` is 1, else 0
        counts = torch.stack([total + skip, in_a_row, torch.maximum(longest, in_a_row)])
        self._books = books._replace(skips=None, on_device=counts)
        earlier_counts = self._late.read(counts)
        if earlier_counts is not None:
            self._read_counts(earlier_counts)

    def _read_counts(self, counts: Tensor) -> None:
        """Read what the device has counted, (3,): skipped updates, in a row now, and the longest row; warn if long."""
        skipped, in_a_row, longest = map(int, counts.cpu().tolist())  # without a step marker, which would cut the graph
        self._books = self._books._replace(skipped=skipped, in_a_row=in_a_row)
        self._warn_if_many(longest)

    def _warn_if_many(self, in_a_row: int) -> None:
        """Warn once if so many updates in a row were skipped that something must be wrong."""
        if in_a_row < _IN_A_ROW or self._warned:
            return
        self._warned = True
        if self._backend.leads:
            warnings.warn(
                f"Skipped {in_a_row} updates in a row, because the norm of their gradients was above skip_grad_norm or "
                f"not a number; pass a larger one, or restore an earlier checkpoint",
                RuntimeWarning,
                stacklevel=stacklevel_of_user(),
            )

    def clear(self) -> None:
        """Forget the decision about an update that is not made."""
        self._books = self._books._replace(skips=None)

    def state_dict(self) -> dict[str, Any]:
        """Return how many updates were skipped, in all and in a row now, as ints; reads them from a device."""
        if self._books.on_device is not None:
            self._read_counts(self._books.on_device)
        return {"skipped": {"updates": self._books.skipped, "in_a_row": self._books.in_a_row}}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if the numbers of skipped updates in a state are damaged."""
        if "skipped" in state:
            check_entries(state, {"skipped": (dict,)})
            check_entries(state["skipped"], {"updates": (int,), "in_a_row": (int,)}, "skipped.")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore how many updates were skipped; 0 if the state has no entry."""
        saved = state.get("skipped", {})
        self._books = _Books(saved.get("updates", 0), saved.get("in_a_row", 0))
        self._late = LateReader()

    # The selection. ----------------------------------------------------------------------------------------------

    @contextmanager
    def around(self, update: UpdateUnderWay) -> Iterator[None]:
        """Let a device undo, within a block that calls `inner.step()`, the step of an update that it skips."""
        if self.skips_on_device:
            self._save_tensors()
        try:
            yield
        finally:
            self._saved.clear()

    def _save_tensors(self) -> None:
        """Before the optimizer's step, copy the parameters and the tensors of its state, which the step may change.

        A number that the optimizer keeps on the host, such as its count of steps, is sent to the device first.
        """
        for parameter in (parameter for group in self._inner.param_groups for parameter in group["params"]):
            if parameter.grad is None:
                continue
            state = self._inner.state.get(parameter, {})
            (local_part,) = local_parts([parameter])
            for name, value in state.items():
                if isinstance(value, Tensor) and value.device != local_part.device:
                    state[name] = self._backend.scalar(value.item(), local_part)
            tensors = local_parts([parameter, *(value for value in state.values() if isinstance(value, Tensor))])
            self._saved += [(tensor, tensor.detach().clone()) for tensor in tensors]

    def _select_tensors(self, *_: object) -> None:
        """After the optimizer's step, give saved tensors their values from before it if the device skips the update."""
        skips = self._skips_on_device
        if skips is None:
            return
        with torch.no_grad():
            for tensor, before in self._saved:
                tensor.copy_(torch.where(skips, before, tensor))

    def _begins_state(self) -> bool:
        """Return whether the optimizer has no state yet of a parameter that has a gradient: the step will create it."""
        for group in self._inner.param_groups:
            if type(self._inner) is SGD and group["momentum"] == 0:  # which has no state
                continue
            if any(
                parameter.grad is not None and not self._inner.state.get(parameter) for parameter in group["params"]
            ):
                return True
        return False


def _check_can_skip(inner: Optimizer, backend: Backend, parameters: Sequence[Tensor]) -> None:
    """Raise an error unless updates of this optimizer can be skipped (`skip_grad_norm`) with this backend."""
    if backend.elastic:
        raise value_error(
            "skip_grad_norm needs a fixed world, whose ranks take one decision in a sum of its own",
            f"a {type(backend).__name__}, which has one sum an update",
            "clip with max_grad_norm=",
        )
    device = parameters[0].device.type
    kinds = [kind for kind in _SELECTABLE if device == "xla" or kind not in CAPTURABLE]
    if backend.static_graph and type(inner) not in kinds:
        raise TypeError(
            f"on {device} skip_grad_norm needs an optimizer whose state it can select on the device, "
            f"{', '.join(kind.__name__ for kind in kinds)}, but {type(inner).__name__} is another one; use one of "
            "these, or clip with max_grad_norm="
        )
