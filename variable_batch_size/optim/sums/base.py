"""How the gradients of a step are summed, over its microbatches and over the ranks.

    Plain         autograd adds to `.grad`; the backend sums it over the ranks after the last backward of each
    Widened       the same for parameters in half precision, whose gradients are added in float32
    DDP           DistributedDataParallel averages in the last backward of each rank (`ddp.py`)
    Sharded       FSDP2 scatters the sum of each microbatch into the shards (`sharded.py`)
    Reproducible  integers are added, for the same bits in any world (`reproducible.py`)

The loss of a microbatch carries its weight: `backward` multiplies it by n_j / B, or by what the strategy needs. On the
plain road `loss.backward()` is right, too: there `.grad` holds the sum in units of the weight of the last microbatch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, final

import torch
from torch import OutOfMemoryError, Tensor
from torch.amp.grad_scaler import GradScaler
from torch.nn import Module

from variable_batch_size.backend import Backend
from variable_batch_size.backend.agreement import AbsentRankError, Agreement
from variable_batch_size.data.batches import Batch
from variable_batch_size.microbatching import Microbatch
from variable_batch_size.optim.message import Message
from variable_batch_size.optim.sums.backward_check import BackwardCheck
from variable_batch_size.optim.sums.participation import Participation
from variable_batch_size.optim.sums.squares import Needs, Squares
from variable_batch_size.optim.tensors.arithmetic import (
    add_to,
    collect_gradients,
    has_dtensor,
    local_parts,
    multiply,
    scalar_dtype,
    sum_over_parts,
    widen,
)

RESTART = "so that the ranks may have made different updates; restart all ranks from the last checkpoint"


def absent_rank_error(error: Exception) -> RuntimeError:
    """Return the error of ranks that wait for one that does not come."""
    return RuntimeError(f"a rank does not take part in the sum of the gradients, {RESTART}: {error}")


class MeasuredSquares(NamedTuple):
    """The squares of a microbatch's gradient g, of any scale.

    Attributes:
        norm: |g|^2, 0-D; None if it is not needed.
        elements: g^2 by parameter, if it is needed.
        factor: by which they must be multiplied, to be n_j times those of the gradient of the mean loss.
    """

    norm: Tensor | None
    elements: dict[Tensor, Tensor]
    factor: float


class Sum(ABC):
    """Sums the gradients of a step: `prepare`, forward, `backward`, `measure`, `add` of each microbatch, then `finish`.

    Args:
        backend: how the ranks communicate.
        by_rows: whether a loss is a sum over the rows of its microbatch, and not a mean.
        needs: says what the next microbatch is measured for; None: no microbatch is measured.
    """

    module: Module | None = None  # before whose forward `prepare` has to be called, if there is one
    _sums_alone = False  # whether nothing else may sum the gradients over several ranks

    def __init__(self, backend: Backend, *, by_rows: bool, needs: Callable[[], Needs] | None) -> None:
        self._backend, self._by_rows, self._needs = backend, by_rows, needs
        self.message = Message()  # what the ranks sum besides
        self._begun = False  # whether the other ranks may have a sum that an exception has interrupted here

    def use_parameters(self, parameters: Sequence[Tensor], *, keep: bool = False) -> None:
        """Sum the gradients of these parameters from now on; `keep`: those of a first microbatch are in `.grad`."""
        self.parameters = list(parameters)
        self._squares = None if self._needs is None else Squares(parameters, self._needs)
        self._watch_gradients(self._squares)
        self._check = BackwardCheck(parameters, sums=self._sums_alone)
        self._factor: float | None = None  # of the gradients that `backward` has left, of that of the mean loss
        self._begin_step()
        if not keep:
            self._drop_gradients()
        self._check.begin(several=True)

    def _begin_step(self) -> None:
        self._inside = False  # whether a microbatch of the step was added
        self._weighted = False  # whether the losses of the step are divided by all that they must be
        self._scaled: bool | None = None  # whether the losses of the step are scaled; None: there was none
        self._scale: Tensor | None = None  # that of a GradScaler in this step, 0-D

    def _watch_gradients(self, squares: Squares | None) -> None:
        if squares is not None:
            squares.add_hooks()

    @property
    def ranks(self) -> int:
        """The number of ranks over which is summed."""
        return self._backend.world.size

    def dealing(self, **cut: bool) -> dict[str, bool]:
        """Return how steps must be cut, see `Dealer.attach`, if the model needs them cut like this."""
        return cut

    def meet(self, agreement: Callable[[], Agreement]) -> None:  # noqa: B027 (a no-op unless ranks compute together)
        """Let the ranks agree, before the first forward; every rank has to call it."""

    def begin_next_step(self, *, several: bool) -> None:
        """Begin the next step, which has several microbatches on this rank, or one."""
        self._check.begin(several=several)

    def prepare(self, microbatch: Microbatch | None) -> None:  # noqa: B027 (a no-op unless `backward()` sums)
        """Prepare for a forward: that of a microbatch, or another one; any number of times."""

    # A microbatch. -------------------------------------------------------------------------------------------------

    @abstractmethod
    def _loss_factor(self, microbatch: Microbatch) -> float:
        """Return the factor on the loss, if that is the mean over the rows of a microbatch."""

    def _divisor(self, microbatch: Microbatch) -> int:
        """Return B; 1 if the losses of the step are weighted."""
        return 1 if self._weighted else microbatch.batch_size

    @property
    def _is_sum(self) -> bool:
        """Whether the loss of a microbatch is a sum over its rows."""
        return self._by_rows or self._weighted

    def _weight_of_loss(self, microbatch: Microbatch) -> float:
        """Return the factor on the loss as it is."""
        factor = self._loss_factor(microbatch)
        return factor / microbatch.rows if self._is_sum else factor

    @property
    def carries_weight(self) -> bool:
        """Whether `backward` has run since the last `add`."""
        return self._factor is not None

    @property
    def scale(self) -> Tensor | None:
        """The scale of the losses of the step under a `GradScaler`, 0-D."""
        return self._scale

    def backward(
        self,
        loss: Tensor,
        microbatch: Microbatch,
        scaler: GradScaler | None,
        others: Sequence[Sum],
        *,
        weighted: bool = False,
        **options: Any,
    ) -> None:
        """Call `backward()` of a loss of a microbatch, with its weight, and a scale if there is a `GradScaler`.

        `others` are those of optimizers whose parameters the loss has, too; `options` those of `Tensor.backward`. A
        `weighted` loss is a part of that of the update: its weight is 1, but for repeated rows.
        """
        every = (self, *others)
        scale = self._begin_scaling(loss, scaler, every)
        for total in every:
            total._weighted = weighted
        factor = self._loss_factor(microbatch)
        for total in every:
            total._check_factor(microbatch, factor)
            total._before_backward(microbatch)
        weight = self._weight_of_loss(microbatch)
        if weight != 1 or self._backend.static_graph:
            loss = loss * self._backend.scalar(weight, loss, "loss")
        (loss if scale is None else loss * scale).backward(**options)  # type: ignore[no-untyped-call]
        for total in every:
            total._after_backward(microbatch, factor)

    def _begin_scaling(self, loss: Tensor, scaler: GradScaler | None, every: Sequence[Sum]) -> Tensor | None:
        """Return the scale of a loss, 0-D, which is that of the first one of the step; None without a scaler."""
        scaled = scaler is not None and scaler.is_enabled()
        for total in every:
            if total._scaled not in (None, scaled):
                raise RuntimeError(
                    "all losses of a step must be scaled, or none, but some have a scaler= and others have not; pass "
                    "it to each backward() of the step, and call discard_step() first"
                )
            total._scaled = scaled
        if scaler is not None and scaled:
            scale = self._scale
            if scale is None:
                scale = self._common_scale(scaler.scale(torch.ones((), device=loss.device)))
            for total in every:
                total._scale = scale
        return self._scale

    def note_other_backward(self) -> AbstractContextManager[None]:
        """Note whether the `backward()` of an optimizer that does not know this one adds to its gradients."""
        return self._check.note_other_backward()

    def _check_factor(self, microbatch: Microbatch, factor: float) -> None:
        """Raise ValueError unless a loss of this factor suits this sum, too."""
        if factor != self._loss_factor(microbatch):
            raise ValueError(
                "all optimizers of a loss must weigh it alike, but one has parameters in half precision, or sharded "
                "ones, and the other has not; call backward() of the one with parameters in float32, with the other in "
                "others=, or keep all parameters in float32"
            )

    def _before_backward(self, microbatch: Microbatch) -> None:
        """Check the gradients."""
        self._check.before_backward()
        if self._factor is None:
            self._forget_squares()  # of whatever came before

    def _after_backward(self, microbatch: Microbatch, factor: float) -> None:
        self._check.after_backward()
        self._factor = factor

    @abstractmethod
    def measure(self, microbatch: Microbatch, *, counted: bool) -> MeasuredSquares:
        """Check that the backward of a microbatch has run, and nothing else, and return its squares."""

    def _take_squares(self, microbatch: Microbatch, fresh: Sequence[bool], factor: float) -> MeasuredSquares:
        """Return the squares of a microbatch whose loss has carried `factor`; `fresh`: see `Squares.total_square`."""
        if self._squares is None:
            return MeasuredSquares(None, {}, 0.0)
        norm = self._squares.total_square(fresh)
        elements = self._squares.elements
        n = microbatch.samples
        self._squares.clear()
        if n == 0 and not self._backend.static_graph:  # a replay, whose squares may be non-finite: 0 * inf is nan
            return MeasuredSquares(None, {}, 0.0)
        return MeasuredSquares(norm, elements, n / factor**2 if n else 0.0)

    def add(self, microbatch: Microbatch, following: Microbatch | None) -> None:
        """Count a microbatch that was measured; `following` is the next one of this rank in the step, if any."""
        self._inside, self._factor = True, None
        self._check.remember()

    def _forget_squares(self) -> None:
        if self._squares is not None:
            self._squares.clear()

    def _set_grads(self, gradients: Sequence[Tensor | None] | None) -> None:
        for number, parameter in enumerate(self.parameters):
            parameter.grad = None if gradients is None else gradients[number]

    def flush(self) -> None:
        """Let later microbatches find no overflow of this step, which is skipped."""
        if gradients := local_parts(collect_gradients(self.parameters)):
            torch._foreach_zero_(gradients)
        self._check.remember()

    def zero_grad(self) -> None:
        """Drop the gradients that there are if no microbatch was added; otherwise do nothing.

        Raises:
            RuntimeError: if another backward has added to what `.grad` has accumulated.
        """
        if not self._inside:
            self._drop_gradients()
        elif any(self._check.find_fresh()):
            raise RuntimeError(
                "zero_grad() within a step must leave the microbatches that step() has accumulated, but a backward() "
                "has added to their gradients in .grad since; pass inputs=list(model.parameters()) to the backward() "
                "of the other loss, with its own parameters; after an exception call discard_step()"
            )

    # The step. -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def finish(self, batch: Batch, factor: float | None) -> list[Tensor]:
        """Leave `factor` times G in `.grad`, sum the message, and return the gradients that there are.

        Args:
            batch: the update.
            factor: None if there is none in any update.
        """

    def _collect_message(self, batch: Batch) -> list[Tensor]:
        """Return what the ranks sum besides: not in the graph of a microbatch, of which a step may have any number."""
        return self.message.collect(batch.num_microbatches, local_parts(self.parameters))

    def _remaining_factor(self, factor: float | None) -> float | Tensor:
        """Return what the sum of the step must still be multiplied by."""
        self._check.forget()
        scaled_by = 1.0 if factor is None else factor
        return scaled_by if self._scale is None else scaled_by / self._scale.to(scalar_dtype(self.parameters))

    def _common_scale(self, scale: Tensor) -> Tensor:
        """Return the scale of a `GradScaler` for the step, 0-D, which the ranks whose gradients are summed share."""
        return scale

    def clear(self) -> None:
        """Forget the step, after its update or to start it over."""
        self._begin_step()
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        self._factor = None
        self._forget_squares()
        self._set_grads(None)
        self._check.remember()

    def restart(self) -> None:
        """Forget a sum that was interrupted: every rank loads a state."""
        self._begun = False

    @abstractmethod
    def discard(self, agreement: Callable[[], Agreement], timeout: float) -> None:
        """Check that the step can be discarded."""

    @property
    def participation(self) -> Participation | None:
        """Which parameters take part, where it does not follow from what wraps the model."""
        return None

    def agree(self, agreement: Agreement) -> None:  # noqa: B027 (a no-op where nothing is agreed on)
        """Agree with the other ranks on the parameters that have gradients; every rank has to call it."""

    @final
    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        """Sum tensors over the ranks whose gradients are summed, in place; every rank has to call it."""
        self._begun = self._backend.world.size > 1
        try:
            self._backend.all_reduce_sum(tensors)
        except (AbsentRankError, OutOfMemoryError):
            raise
        except RuntimeError as error:
            if self._backend.elastic:  # which says what is wrong, and whose other ranks go on without this one
                self._begun = False
                raise
            raise absent_rank_error(error) from error
        self._begun = False


class Plain(Sum):
    """Autograd adds to `.grad`, and the backend sums that over the ranks by one collective for each dtype."""

    _takes_out = False  # whether `.grad` holds the present microbatch alone

    def __init__(self, backend: Backend, *, find_unused: bool = False, **options: Any) -> None:
        super().__init__(backend, **options)
        self._find_unused, self._sums_alone = find_unused, not backend.alone

    def use_parameters(self, parameters: Sequence[Tensor], *, keep: bool = False) -> None:
        """Sum the gradients of these parameters from now on."""
        self._participation = Participation(parameters, self._backend, find_unused=self._find_unused)
        self._partial = has_dtensor(parameters)
        super().use_parameters(parameters, keep=keep)

    def _begin_step(self) -> None:
        super()._begin_step()
        self._used = [False] * len(self.parameters)  # by a microbatch of this step that counts, on this rank
        self._raw: bool | None = None  # whether losses carry no weight in this step
        self._weight = 1.0  # by which what is accumulated of such losses must still be multiplied

    @property
    def participation(self) -> Participation:
        """Which parameters take part."""
        return self._participation

    def _loss_factor(self, microbatch: Microbatch) -> float:
        """Return n_j / B."""
        return microbatch.samples / self._divisor(microbatch)

    def measure(self, microbatch: Microbatch, *, counted: bool) -> MeasuredSquares:
        """Check that the backward of a microbatch has run, and nothing else, and return its squares."""
        fresh = self._check.find_fresh()
        ours = self._check.has_backward
        replay = microbatch.samples == 0
        accumulating = self._inside and not self._takes_out
        self._check.check(fresh, needed=not replay, accumulating=accumulating)
        if ours or any(fresh):
            if self._raw is ours:
                raise RuntimeError(
                    "a step must have losses of one kind, but there are both; call optimizer.backward(loss) for all "
                    "losses of a step, or loss.backward() for all"
                )
            self._raw = not ours
        if not replay or self._backend.static_graph:  # there the ranks' graphs must be equal
            self._used = [known or new for known, new in zip(self._used, fresh, strict=True)]
        return self._take_squares(microbatch, fresh, self._present_factor(microbatch))

    def _present_factor(self, microbatch: Microbatch) -> float:
        """Return by what the gradients of the microbatch are larger than that of the mean loss."""
        raw = float(microbatch.rows) if self._is_sum else 1.0
        return raw if self._factor is None else self._factor

    def add(self, microbatch: Microbatch, following: Microbatch | None) -> None:
        """Count a microbatch; one of `loss.backward()` gets its weight now, by Horner's scheme."""
        if self._partial:
            gradients = [(parameter.grad, parameter) for parameter in self.parameters]
            self._set_grads(
                [grad if grad is None else sum_over_parts(grad, parameter) for grad, parameter in gradients]
            )
        self._accumulate(microbatch, following)
        super().add(microbatch, following)

    def _accumulate(self, microbatch: Microbatch, following: Microbatch | None) -> None:
        """Give losses without a weight theirs."""
        if microbatch.samples == 0 and not self._backend.static_graph:
            self._set_grads(None)  # only replays come first: they may be non-finite, and 0 * inf is nan
        elif self._raw:
            # sum_j w_j g_j = (...((g_1 w_1 / w_2 + g_2) w_2 / w_3 + g_3)...) w_J: `.grad` always lacks the weight of
            # the last microbatch that is in it. Equal weights cost nothing, and `finish` multiplies by w_J.
            self._weight = weight = self._weight_of_loss(microbatch)
            coming = weight if following is None else self._weight_of_loss(following)
            if following is not None and (weight != coming or self._backend.static_graph):
                self._multiply_gradients(weight / (coming or 1.0), "microbatch")
        elif self._backend.static_graph:
            self._multiply_gradients(1.0, "microbatch")  # which leaves no views

    def _multiply_gradients(self, factor: float | Tensor, place: str) -> None:
        """Multiply `.grad` by a factor, without views on a static graph; `place` names it there."""
        present = [parameter for parameter in self.parameters if parameter.grad is not None]
        gradients = collect_gradients(present)
        if not self._backend.static_graph or not gradients:
            multiply(gradients, factor, self._backend)
            return
        # There the gradient of a linear layer, as backward leaves it, is a view of its transpose. Changed in place,
        # both would be results of the graph: 1.4 times the time of a backward of linear layers, on XLA:CPU.
        factor = factor if isinstance(factor, Tensor) else self._backend.scalar(factor, gradients[0], place)
        for parameter, gradient in zip(present, torch._foreach_mul(gradients, factor), strict=True):
            parameter.grad = gradient

    def finish(self, batch: Batch, factor: float | None) -> list[Tensor]:
        """Sum `.grad` and the message; a parameter that takes no part in the update has no gradient afterwards.

        Operations that may differ between ranks are executed before: they must not be in the graph of the collective.
        """
        members = self._participation.select(self._used)
        self._complete_gradients(members, factor)
        self._clear_excluded(members)
        self._backend.mark_step()
        used = self._participation.message(self._used, replay=not any(self._used))
        self.all_reduce([*local_parts(collect_gradients(self.parameters)), *used, *self._collect_message(batch)])
        self._clear_excluded(self._participation.find_used(used) or members)
        return collect_gradients(self.parameters)

    def _complete_gradients(self, members: Sequence[bool], factor: float | None) -> None:
        """Leave `factor` times the share of this rank in `.grad`."""
        for parameter, member in zip(self.parameters, members, strict=True):
            if member and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        left = self._remaining_factor(factor)
        if self._raw or factor is not None or isinstance(left, Tensor):
            self._multiply_gradients(left * self._weight if self._raw else left, "update")

    def _clear_excluded(self, members: Sequence[bool]) -> None:
        for parameter, member in zip(self.parameters, members, strict=True):
            if not member:
                parameter.grad = None

    def discard(self, agreement: Callable[[], Agreement], timeout: float) -> None:
        """Check that the step can be discarded: what was summed cannot be called back."""
        if self._begun:
            raise RuntimeError(
                f"a step must be discarded before its gradients are summed over the ranks, but an exception came while "
                f"they were, {RESTART}, or load a state on every rank"
            )

    def agree(self, agreement: Agreement) -> None:
        """Agree with the other ranks on the parameters that have gradients; every rank has to call it."""
        self._participation.agree(self._used, agreement, replay=not any(self._used))


class TakenOut(Plain):
    """The gradient of each microbatch leaves `.grad`, and is weighed where it is added."""

    _takes_out = True

    def _loss_factor(self, microbatch: Microbatch) -> float:
        """Return what leaves the loss as it is: half precision may not hold another weight."""
        return float(microbatch.rows) if self._is_sum else 1.0

    def _check_factor(self, microbatch: Microbatch, factor: float) -> None:
        """Do nothing: gradients of any factor are weighed here."""

    def zero_grad(self) -> None:
        """Clear the gradients that have come since the last `add`."""
        self._drop_gradients()


@final
class Widened(TakenOut):
    """Parameters in half precision: each microbatch is added to a buffer, in float32."""

    def _begin_step(self) -> None:
        super()._begin_step()
        self._buffer: dict[Tensor, Tensor] = {}

    def _accumulate(self, microbatch: Microbatch, following: Microbatch | None) -> None:
        """Add the weighted gradients to the buffer, and drop them from `.grad`."""
        present = [parameter for parameter in self.parameters if parameter.grad is not None]
        new = list(map(widen, collect_gradients(present)))
        self._set_grads(None)
        if not new or not (microbatch.samples or self._backend.static_graph):  # a replay may be non-finite
            return
        weight = microbatch.samples / self._divisor(microbatch) / (self._present_factor(microbatch) or 1.0)
        torch._foreach_mul_(local_parts(new), self._backend.scalar(weight, new[0], "microbatch"))
        add_to(self._buffer, dict(zip(present, new, strict=True)))

    def _complete_gradients(self, members: Sequence[bool], factor: float | None) -> None:
        """Leave `factor` times the share of this rank in `.grad`."""
        for parameter, member in zip(self.parameters, members, strict=True):
            if member and parameter not in self._buffer:
                self._buffer[parameter] = widen(torch.zeros_like(parameter))
        multiply(list(self._buffer.values()), self._remaining_factor(factor), self._backend)
        for parameter, total in self._buffer.items():
            parameter.grad = total.to(parameter.dtype)

    def flush(self) -> None:
        """Let later microbatches find no overflow of this step, which is skipped."""
        torch._foreach_zero_(local_parts(self._buffer.values()))


class InBackward(Sum):
    """What wraps the model sums in `backward()`, so that each loss must carry its weight."""

    wrapper: str  # in words

    @staticmethod
    def _check_members(parameters: Sequence[Tensor], members: Iterable[Tensor], words: str) -> None:
        """Raise ValueError if a parameter of the optimizer is not in what sums, in these words."""
        known = set(map(id, members))
        for number, parameter in enumerate(parameters):
            if id(parameter) not in known:
                raise ValueError(words.format(f"parameter {number}, of shape {tuple(parameter.shape)},"))

    def meet(self, agreement: Callable[[], Agreement]) -> None:
        """Create what the ranks agree by while all of them are here."""
        agreement()

    def backward(
        self, loss: Tensor, microbatch: Microbatch, scaler: GradScaler | None, others: Sequence[Sum], **options: Any
    ) -> None:
        """Call `backward()` of a loss with its weight; torch's timeout ends a wait for a rank that takes no part."""
        if options.get("create_graph"):
            raise RuntimeError(
                "create_graph=True needs gradients that nothing changes in place, but a DistributedDataParallel or "
                "FSDP2 sums them in backward(); omit it, or train the bare model, without model=, after "
                "vbs.broadcast_parameters(model)"
            )
        try:
            super().backward(loss, microbatch, scaler, others, **options)
        except RuntimeError as error:
            self._backend.while_waiting()  # a rank that does not take part may have said why
            if any(word in str(error) for word in ("gloo", "NCCL")):
                raise absent_rank_error(error) from error
            raise

    def _check_carried(self, fresh: Sequence[bool], *, needed: bool) -> float:
        """Return the factor that the loss of a microbatch has carried, and check that nothing else came."""
        if self._factor is None:
            raise RuntimeError(
                f"with {self.wrapper} each loss must carry its weight, also that of a microbatch that this rank only "
                f"repeats, but step() came without optimizer.backward(); call optimizer.backward(loss) in the place of "
                f"loss.backward(), with others= if several optimizers update the parameters of a model"
            )
        self._check.check(fresh, needed=needed)
        return self._factor

    def _scale_and_sum_message(self, batch: Batch, factor: float | None) -> tuple[list[Tensor], Sequence[Tensor]]:
        """Multiply what was summed, sum the message, and return both."""
        gradients = collect_gradients(self.parameters)
        multiply(gradients, self._remaining_factor(factor), self._backend)
        if message := self._collect_message(batch):
            self.all_reduce(message)
        return gradients, message

    def _common_scale(self, scale: Tensor) -> Tensor:
        """Return the scale of rank 0: the scalers of others have seen other microbatches."""
        backend = self._backend.job
        if backend.world.size > 1:
            scale = scale * (backend.world.rank == 0)
            backend.all_reduce_sum([scale.view(1)])
        return scale

    def discard(self, agreement: Callable[[], Agreement], timeout: float) -> None:
        """Check that all ranks discard the step: what some have summed cannot be called back by one."""
        agreement().gather("discard_step()", "", timeout)
        self.reset()

    def restart(self) -> None:
        """Forget what an exception has interrupted: every rank loads a state."""
        super().restart()
        self.reset()

    @abstractmethod
    def reset(self) -> None:
        """Let the model expect a forward, whatever an exception has interrupted."""
