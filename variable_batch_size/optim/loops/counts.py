"""What the terms of a loss are divided by: counts of all microbatches of an update, which the ranks sum before it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, TypeAlias, final

import torch
from torch import Tensor

from variable_batch_size._validation import check_number, type_error, value_error
from variable_batch_size.backend import Backend
from variable_batch_size.backend.agreement import Agreement
from variable_batch_size.backend.base import scalar_dtype
from variable_batch_size.data.batches import Batch
from variable_batch_size.data.training import Training
from variable_batch_size.optim.stage import LoopStage, Stage, UpdateUnderWay
from variable_batch_size.optim.sums.base import NOT_DIVIDED
from variable_batch_size.optim.sums.ranks import Ranks
from variable_batch_size.optim.tensors.arithmetic import local_parts

Count: TypeAlias = "Callable[[Any], Mapping[str, Tensor | float]]"
Totals: TypeAlias = "Mapping[str, Tensor | float]"

_CALL = "the next update of vbs.updates(counts=)"
_REMEDY = 'return a dict such as {"tokens": (labels != -100).sum(), "rows": len(labels)}'


def check_counts(count: object, backend: Backend, *, measures: bool) -> None:
    """Raise TypeError or ValueError unless `updates(counts=)` is possible.

    Args:
        count: what the user has passed as `counts=`.
        backend: the backend of the optimizer.
        measures: whether the optimizer measures the gradients of microbatches, as for the noise.
    """
    if not callable(count):
        raise type_error("counts must be a function of a microbatch", count, f"pass one, which must {_REMEDY}")
    if measures:
        raise ValueError(
            "counts= needs a rule that does not measure the gradients of microbatches, but this one does, as AdaScale, "
            "or a controller or noise= does; choose another rule or controller, or omit noise="
        )
    if backend.elastic:
        requirement, remedy = "counts= needs ranks that stay", 'divide by one count: reduction="sum" and step(count=)'
        raise value_error(requirement, "an elastic backend", remedy)


@final
class ByName(dict[str, Any]):
    """The totals of an update, by name."""

    def __missing__(self, name: object) -> NoReturn:
        raise KeyError(f"update.counts must be asked for a name that counts= returns, got {name!r}; use {_words(self)}")


@final
class Counts(Stage, LoopStage):
    """Sums what the microbatches of an update count, before the first forward of it.

    C_t = sum_j d_j c_tj over the microbatches j of all ranks, by name t: d_j is the number of distinct samples of a
    microbatch divided by that of its rows, so that repeated rows count once and replays not at all. A total of 0 is
    given as inf: a term that is divided by it is 0, and so is its gradient, where 0 / 0 would be nan.

    The totals are floats where the host reads the gradients, and 0-D tensors on other devices. `whole`: counts have to
    be whole numbers, whose sum has no order.
    """

    def __init__(self, training: Training, ranks: Ranks, example: Tensor, *, whole: bool) -> None:
        self._training, self._backend, self._ranks, self._whole = training, ranks.backend, ranks, whole
        self._parameter = example  # a parameter, for the device and the dtype of totals
        self.load_state_dict({})

    def begin_backward(self, member: object, loss: Tensor, *, divided: bool) -> None:
        """Raise ValueError unless a loss is `divided` by totals if, and only if, its update has totals."""
        has_totals = self._training.batch_of(member).totals is not None
        if divided and not has_totals:
            raise ValueError(
                "backward(divided=True) needs a loss whose terms are divided by update.counts, but this update has "
                "none; loop over vbs.updates(loader, optimizer, counts=function)"
            )
        if has_totals and not divided:
            raise ValueError(NOT_DIVIDED.format("backward() came without divided=True"))

    def reduce(self, update: UpdateUnderWay) -> None:
        """Skip an update in which nothing was counted on any rank, if the host knows the totals.

        A total of 0 is stored as inf. On other devices the host does not read the totals, which are tensors.
        """
        totals = () if update.batch.totals is None else update.batch.totals.values()
        host_knows = not any(isinstance(total, Tensor) for total in totals)
        if totals and host_knows and all(total == math.inf for total in totals):
            update.skip(True)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Forget the names of the counts and the last totals: the ranks exchange both again, as all load a state."""
        self._names: list[str] = []  # of the counts; the ranks have agreed on them
        # The last update: how many came before it, its batch, what this rank has counted in it, and the totals.
        self._last: tuple[int, Batch, dict[str, Any], Totals] | None = None

    @torch.no_grad()
    def sum_counts(
        self,
        count: Count,
        microbatches: Iterable[Any],
        batch: Batch,
        agreement: Agreement,
        *,
        compares: bool,
        may_repeat: bool,
    ) -> Totals:
        """Return the totals of an update over all ranks, by name; every rank has to call it.

        Args:
            count: function that returns what a microbatch counts, by name.
            microbatches: the microbatches of this rank, as the loader has yielded them.
            batch: the update.
            agreement: how ranks compare the names.
            compares: whether they do so in any case, and not only if the names of this rank have changed.
            may_repeat: whether one rank alone may discard an update and read it again. It then gets the same totals,
                because the other ranks do not take part in another sum.

        Raises:
            TypeError, ValueError: if `count` returns anything but finite numbers >= 0 by name.
            RuntimeError: on every rank, if the names differ; or if this rank counts something else when it reads an
                update again.
        """
        counted = self._count_microbatches(count, microbatches, batch)
        updates = self._training.updates  # of all stages: the first batches of two may be equal
        if may_repeat and self._last is not None and self._last[:2] == (updates, batch):
            *_, counted_before, totals = self._last
            if not any(isinstance(number, Tensor) for number in counted.values()) and counted != counted_before:
                raise RuntimeError(
                    f"update {batch.step} was read again and counts {counted} on this rank, but the other ranks have "
                    f"the totals with {counted_before}; let the counts depend on the samples alone, or load a state on "
                    f"every rank"
                )
            return totals
        if compares or [*counted] != self._names:
            self._compare_names([*counted], agreement)
        totals = self._sum_over_ranks(counted)
        if self._ranks.number > 1:
            self._last = updates, batch, counted, totals
        return totals

    def _count_microbatches(self, count: Count, microbatches: Iterable[Any], batch: Batch) -> dict[str, Any]:
        """Return what this rank's microbatches count together, by name in alphabetical order.

        A repeated row counts in part, so that each sample counts once. The numbers are floats, or 0-D tensors where the
        host does not read the device.
        """
        counted = dict[str, Any]()
        for loaded, microbatch in zip(microbatches, batch.microbatches, strict=True):
            counts = _checked_counts(count(loaded))
            if counted and counted.keys() != counts.keys():
                requirement = "counts= must return the same names for every microbatch"
                raise value_error(
                    requirement, f"{_words(counted)}, then {_words(counts)}", "return 0 for what has none"
                )
            for name in sorted(counts):
                number = self._checked_number(name, counts[name])
                if isinstance(number, Tensor):
                    share = self._backend.scalar(microbatch.distinct, number)
                    counted[name] = number * share + counted.get(name, 0.0)
                else:  # `samples / rows` leaves out repeated rows
                    counted[name] = number * microbatch.samples / microbatch.rows + counted.get(name, 0.0)
            if any(isinstance(number, Tensor) for number in counted.values()):
                self._backend.mark_step()  # there may be any number of microbatches: each is a graph of its own
        return counted

    def _checked_number(self, name: str, value: object) -> Tensor | float:
        """Return a finite count >= 0: a float, or a 0-D tensor on a device that the host does not read."""
        if isinstance(value, Tensor):
            if value.numel() != 1 or value.is_complex():
                raise TypeError(
                    f"the count {name!r} of a microbatch must be a number or a tensor with one element, got a tensor "
                    f"of shape {tuple(value.shape)}; pass its .sum()"
                )
            value = value.item() if value.device.type == "cpu" else self._backend.number(value, self._example)
            if isinstance(value, Tensor):
                return value
        number = check_number(value, f"the count {name!r} of a microbatch", "count its tokens, rows or weights")
        if self._whole and number % 1:
            requirement = f"with reproducible=True the count {name!r} must be a whole number, whose sum has no order"
            raise value_error(requirement, number, "count tokens or rows")
        return number

    def _compare_names(self, names: list[str], agreement: Agreement) -> None:
        """Store the names of the counts. Raise RuntimeError on every rank if they differ between ranks."""
        by_rank = [json.loads(text) for text in agreement.gather(_CALL, json.dumps(names))]
        for rank, other in enumerate(by_rank):
            if other != by_rank[0]:
                raise RuntimeError(
                    f"counts= must return the same names on every rank, but rank 0 has {_words(by_rank[0])} and rank "
                    f"{rank} has {_words(other)}; pass the same function on all ranks"
                )
        self._names = names

    def _sum_over_ranks(self, counted: Mapping[str, Any]) -> Totals:
        """Return the sums of the counts over all ranks, by name, with inf in the place of 0.

        `counted`: what this rank counts, by name: floats, or 0-D tensors where the host does not read the device.
        """
        example = self._example
        if self._backend.reads(example):  # the host reads such tensors without delay, as on the CPU
            message = torch.tensor([*counted.values()], dtype=torch.float64)  # (names,)
            self._ranks.all_reduce([message])
            return ByName({name: total or math.inf for name, total in zip(counted, message.tolist(), strict=True)})
        # Floats go to the device together; what is a tensor there already takes the place of a 0 among them.
        floats = [0.0 if isinstance(number, Tensor) else number for number in counted.values()]
        (sent,) = self._backend.vectors([floats], example, "counts")
        pairs = zip(counted.values(), sent.unbind(), strict=True)
        numbers = [number if isinstance(number, Tensor) else from_host for number, from_host in pairs]
        message = torch.stack(numbers)  # (names,)
        self._backend.mark_step()  # ends the graph, which may differ between ranks
        self._ranks.all_reduce([message])
        totals = torch.where(message > 0, message, math.inf)
        self._backend.mark_step()
        return ByName(zip(counted, totals.unbind(), strict=True))

    @property
    def _example(self) -> Tensor:
        """An empty tensor, 0-D, which shows the device of the parameters and the dtype of sums there."""
        (local_part,) = local_parts([self._parameter])
        return local_part.new_empty((), dtype=scalar_dtype([local_part]))


def _checked_counts(counts: object) -> Mapping[str, Any]:
    """Return what a user's function `counts=` has returned for a microbatch; raise an error unless it has names."""
    requirement = "counts= must return a dict from names to numbers"
    if not isinstance(counts, Mapping):
        raise type_error(requirement, counts, _REMEDY)
    if not counts:
        raise value_error(requirement, "an empty one", _REMEDY)
    for name in counts:
        if not isinstance(name, str):
            raise type_error(f"{requirement}, whose keys are strings", name, _REMEDY)
    return counts


def _words(names: Iterable[str]) -> str:
    return ", ".join(names)
