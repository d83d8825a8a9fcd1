"""How the gradients of a step are summed, over its microbatches and over the ranks: what all strategies have in common.

    Plain         autograd adds to `.grad`; the backend sums it over the ranks after the last backward (`plain.py`)
    Buffered      the same where microbatches are measured, each of which leaves `.grad`
    Widened       the same for parameters in half precision, whose gradients are added in float32
    DDP           DistributedDataParallel averages in the last backward of each rank (`ddp.py`)
    Sharded       FSDP2 scatters the sum of each microbatch into the shards (`sharded.py`)
    IntegerSum    integers are added, for the same bits in any world (`optim/reproducible/`)

The loss of a microbatch carries its weight: `backward` multiplies it by n_j / B, or by what the strategy needs. With
`Plain` a loop may also call `loss.backward()`: then `.grad` holds the sum divided by the weight of the last microbatch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, final

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.nn import Module

from variable_batch_size.backend.base import scalar_dtype
from variable_batch_size.data.batches import Batch
from variable_batch_size.microbatching import Microbatch
from variable_batch_size.optim.checks.backward_check import BackwardCheck
from variable_batch_size.optim.message import Message
from variable_batch_size.optim.stage import Counted, MeasuredSquares, Needs, Stage
from variable_batch_size.optim.sums.overflows import Overflows, Scaled
from variable_batch_size.optim.sums.ranks import Ranks
from variable_batch_size.optim.sums.squares import Squares, SquaresOfGrad
from variable_batch_size.optim.tensors.arithmetic import collect_gradients, local_parts
from variable_batch_size.optim.tensors.parameters import Parameters

NOT_DIVIDED = (
    "in an update of vbs.updates(counts=) each loss is divided by update.counts, and must not be weighed by samples, "
    "but {}; call optimizer.backward(loss, divided=True) for all losses"
)


class Sum(ABC):
    """Sums the gradients of a step: `prepare`, forward, `backward`, `add`; then `finish`, and `clear`.

    Args:
        ranks: the ranks over which gradients are summed.
        parameters: the parameters whose gradients are summed.
        by_rows: whether a loss is a sum over the rows of its microbatch, and not a mean.
        needs: function that says what the next microbatch is measured for; None if no microbatch is ever measured.

    Attributes:
        module: the model before whose forward `prepare` has to be called; None if that is not needed.
        message: small tensors that the ranks sum together with the gradients.
        stages: stages of updates that this sum brings.
    """

    module: Module | None = None
    stages: Sequence[Stage] = ()
    _sums_alone = False  # whether nothing else may sum the gradients over several ranks

    def __init__(
        self, ranks: Ranks, parameters: Parameters, *, by_rows: bool, needs: Callable[[], Needs] | None
    ) -> None:
        self.parameters = parameters
        self._ranks, self._backend, self._by_rows = ranks, ranks.backend, by_rows
        self.message = self._create_message()
        self._overflows = Overflows(ranks.backend)
        self.message.entries.append(self._overflows)
        self._squares = None if needs is None else self._create_squares(needs)
        self._check = BackwardCheck(parameters, sums=self._sums_alone)
        # By what the last `backward` has multiplied the gradient of the mean loss; None if there was none since `add`.
        self._factor: float | None = None
        self._begin_step()
        self._check.begin(several=True)

    @property
    def has_backward(self) -> bool:
        """Whether `backward` has been called since the last `add`."""
        return self._factor is not None

    @property
    def has_uncounted(self) -> bool:
        """Whether a backward has come, by `backward` or by the loop, that no `add` has counted."""
        return self.has_backward or any(self._check.find_fresh())

    def _create_message(self) -> Message:
        """Return an empty message."""
        return Message()

    def _begin_step(self) -> None:
        """Reset what is known of the step under way: at its beginning, and when it starts over."""
        self._inside = False  # whether a microbatch of the step was added
        self._divided = False  # whether the loop has divided the losses by the totals of the update, so that B is not
        self._scaled: bool | None = None  # whether the losses of the step are scaled; None before the first one
        self._scale: Tensor | None = None  # scale of a GradScaler in this step, 0-D

    def _create_squares(self, needs: Callable[[], Needs]) -> Squares | SquaresOfGrad:
        """Return what measures the squares of a microbatch's gradient: here by hooks in `backward()`."""
        squares = Squares(self.parameters, needs)
        squares.add_hooks()
        return squares

    def dealing(self, **cut: bool) -> dict[str, bool]:
        """Return how steps must be split, as arguments of `Dealer.attach`: `cut`, for the model, and for this sum."""
        return cut

    def prepare(self, microbatch: Microbatch | None, *, forward: bool = False) -> None:
        """Prepare for a microbatch, before its forward pass or its backward.

        Args:
            microbatch: the next microbatch; None if it is not known.
            forward: whether a forward pass begins now, of the microbatch or of anything else, any number of times.
        """
        if not forward:
            self._check.begin(several=microbatch is None or not microbatch.ends_step)

    # A microbatch. -------------------------------------------------------------------------------------------------

    @abstractmethod
    def _loss_factor(self, microbatch: Microbatch) -> float:
        """Return the weight by which `backward` multiplies the mean loss over the rows of a microbatch."""

    def _divisor(self, microbatch: Microbatch) -> int:
        """Return what the sum of gradients is divided by: B, or 1 if the loop has divided the losses itself."""
        return 1 if self._divided else microbatch.batch_size

    @property
    def _is_sum(self) -> bool:
        """Whether the loss of a microbatch is a sum over its rows."""
        return self._by_rows or self._divided

    def _weight_of_loss(self, microbatch: Microbatch) -> float:
        """Return the factor by which `backward` multiplies the loss that the loop has computed, a mean or a sum."""
        factor = self._loss_factor(microbatch)
        return factor / microbatch.rows if self._is_sum else factor

    @final
    def backward(
        self,
        loss: Tensor,
        microbatch: Microbatch,
        scaler: GradScaler | None,
        others: Sequence[Sum] = (),
        unnamed: Sequence[Sum] = (),
        *,
        divided: bool = False,
        **options: Any,
    ) -> None:
        """Call `backward()` of a loss of a microbatch, with its weight, and a scale if there is a `GradScaler`.

        Args:
            loss: the loss.
            microbatch: the microbatch.
            scaler: the scaler, if there is one.
            others: the sums of other optimizers whose parameters the loss has, too, as the loop has said.
            unnamed: the sums of all remaining optimizers; they note whether the backward gives them gradients.
            divided: whether the loop has divided the loss: its weight is 1 then, unless rows are repeated.
            **options: as for `Tensor.backward`.
        """
        sums = (self, *others)
        self._prepare_backward(microbatch, scaler, options)
        with ExitStack() as stack:
            stack.enter_context(self._name_absent_ranks())
            scale = self._begin_scaling(loss, scaler, sums)
            for gradient_sum in sums:
                gradient_sum._divided = divided
            factor = self._loss_factor(microbatch)  # on the mean loss over rows
            for gradient_sum in sums:
                gradient_sum._check_factor(microbatch, factor)
                gradient_sum._before_backward(microbatch)
            weight = self._weight_of_loss(microbatch)  # on the loss itself, which may be a sum over rows
            if weight != 1 or self._backend.static_graph:  # where another graph would compile for a weight of 1
                loss = loss * self._backend.scalar(weight, loss, "loss")
            for gradient_sum in unnamed:
                stack.enter_context(gradient_sum._check.note_other_backward())
            (loss if scale is None else loss * scale).backward(**options)  # type: ignore[no-untyped-call]
            for gradient_sum in sums:
                gradient_sum._after_backward(microbatch, factor)

    def _prepare_backward(  # noqa: B027 (a no-op unless `backward()` sums)
        self, microbatch: Microbatch, scaler: GradScaler | None, options: Mapping[str, Any]
    ) -> None:
        """Check that `backward()` can be called with these options, and choose what it sums."""

    def _name_absent_ranks(self) -> AbstractContextManager[None]:
        """Return a context for a backward, in which an error says so if another rank does not take part."""
        return nullcontext()

    def _begin_scaling(self, loss: Tensor, scaler: GradScaler | None, every: Sequence[Sum]) -> Tensor | None:
        """Return the factor by which a `GradScaler` multiplies a loss, 0-D. None without a scaler.

        All losses of a step have the scale of the first one, because their gradients are added. `every`: the sums that
        get gradients of the loss.
        """
        scaled = scaler is not None and scaler.is_enabled()
        for one in every:
            if one._scaled not in (None, scaled):
                raise RuntimeError(
                    "all losses of a step must be scaled, or none, but some have a scaler= and others have not; pass "
                    "it to each backward() of the step, and call discard_step() first"
                )
            one._scaled = scaled
        if scaler is not None and scaled:
            scale = self._scale
            if scale is None:
                scale = self._common_scale(scaler.scale(torch.ones((), device=loss.device)))  # 1 times the scale
            for one in every:
                one._scale = scale
        return self._scale

    def _common_scale(self, scale: Tensor) -> Tensor:
        """Return the scale of a step, 0-D, from this rank's: ranks that add scaled gradients must use one scale."""
        return scale

    def _check_factor(self, microbatch: Microbatch, factor: float) -> None:
        """Raise ValueError unless a loss that another sum has multiplied by this factor suits this sum, too."""
        if factor != self._loss_factor(microbatch):
            raise ValueError(
                "the optimizers of a loss must weigh it alike, but one has parameters in half precision, or sharded "
                "ones; call backward() of the one in float32, with the other in others=, or keep all in float32"
            )

    def _before_backward(self, microbatch: Microbatch) -> None:
        """Check, before a `backward()`, that gradients are as the last one has left them, and begin to measure."""
        self._check.before_backward()
        if self._factor is None:  # the first backward of this microbatch: earlier squares do not belong to it
            self._forget_squares()

    def _after_backward(self, microbatch: Microbatch, factor: float) -> None:
        """Record that a `backward()` of a microbatch has run, and the factor by which it has weighed the mean loss."""
        self._check.after_backward()
        self._factor = factor

    @final
    def add(
        self,
        counted: Counted,
        following: Microbatch | None,
        scaled: Scaled,
        take: Callable[[MeasuredSquares, Tensor], None],
    ) -> None:
        """Add the gradients of a microbatch to the step, and check that nothing but its backward has changed them.

        Args:
            counted: the microbatch, and its count.
            following: the next microbatch of this rank in the step; None if there is none.
            scaled: what a `GradScaler` has passed to `step()`.
            take: function that is given the squares of the microbatch, and a tensor like the parameters. It is called
                before the gradients get their weight: on a device, another order would be another graph.
        """
        microbatch = counted.microbatch
        if counted.divided and microbatch.samples and self._factor is None:
            raise RuntimeError(NOT_DIVIDED.format("step() came without optimizer.backward()"))
        self._divided = counted.divided  # also of a replay whose loss the loop has not computed
        scaled.check(self._scale)
        example = local_parts(self.parameters[:1])  # one tensor, for the device and the dtype of what stages add
        take(self._measure(microbatch, counted=counted.divided or counted.count is not None), example[0])
        self.message.count(microbatch, example)
        self._add_gradients(microbatch, following)
        self._inside, self._factor = True, None
        if scaled.found_inf is not None and self._overflows.add(microbatch, scaled.found_inf):
            self._zero()  # the update will be skipped, otherwise each later microbatch would count as an overflow, too
        self._check.remember()

    @abstractmethod
    def _measure(self, microbatch: Microbatch, *, counted: bool) -> MeasuredSquares:
        """Return the squares of a microbatch's gradient, after a check that only its `backward()` has changed it.

        `counted`: whether its loss is divided by a count, as of tokens, and not by its samples.
        """

    def _take_squares(self, microbatch: Microbatch, fresh: Sequence[bool], factor: float) -> MeasuredSquares:
        """Return the squares of a gradient, and the factor that makes them n_j times those of the mean loss.

        Args:
            microbatch: the microbatch.
            fresh: for each parameter, whether the microbatch has changed its gradient.
            factor: by what the gradient of the mean loss is multiplied in the gradients.
        """
        nothing = MeasuredSquares(None, {}, 0.0, self._scale)
        if self._squares is None:
            return nothing
        squared_norm = self._squares.total_square(fresh)
        elements = self._squares.elements
        samples = microbatch.samples
        self._squares.clear()
        # A microbatch without samples repeats others with weight 0. Its squares may be non-finite, and 0 * inf is nan.
        if samples == 0 and not self._backend.static_graph:
            return nothing
        return MeasuredSquares(squared_norm, elements, samples / factor**2 if samples else 0.0, self._scale)

    def _add_gradients(self, microbatch: Microbatch, following: Microbatch | None) -> None:  # noqa: B027
        """Weigh the gradients of a microbatch, where its loss was not weighed."""

    def _zero(self) -> None:
        """Set the sum of the step so far to 0, because a gradient was not finite: the update will be skipped."""
        gradients = local_parts(collect_gradients(self.parameters))
        if gradients:
            torch._foreach_zero_(gradients)

    def _forget_squares(self) -> None:
        if self._squares is not None:
            self._squares.clear()

    def _set_grads(self, gradients: Sequence[Tensor | None] | None) -> None:
        """Set `.grad` of each parameter to the gradient at its index; `gradients=None` sets all to None."""
        for number, parameter in enumerate(self.parameters):
            parameter.grad = None if gradients is None else gradients[number]

    def _clear_uncounted(self) -> None:
        """Drop the gradients that came since the last `add`, which no `step()` has counted; `zero_grad()` calls it.

        After the first microbatch of a step `.grad` also has earlier ones: then raise RuntimeError if any came.
        """
        if not self._inside:
            self._drop_gradients()
        elif any(self._check.find_fresh()):
            raise RuntimeError(
                "zero_grad() keeps accumulated microbatches, but a backward() has added to them since; remove it, "
                "because step() clears, and pass inputs= to another loss's backward(); after an exception "
                "discard_step()"
            )

    # The step. -----------------------------------------------------------------------------------------------------

    @final
    def finish(self, batch: Batch, factor: float | None) -> list[Tensor] | None:
        """Leave `factor` times G in `.grad`, sum the message over the ranks, and return all gradients but None.

        G is the gradient of the mean loss over the batch. The message has small tensors that stages sum over the ranks.
        The result is None if a `GradScaler` has found a gradient non-finite, on any rank.

        Args:
            batch: the update.
            factor: a factor on the gradient; None if no update has one.
        """
        gradients = self._reduce(batch, factor)
        return None if self._overflows.found(self.message[self._overflows.name]) else gradients

    @abstractmethod
    def _reduce(self, batch: Batch, factor: float | None) -> list[Tensor]:
        """Leave `factor` times G in `.grad`, sum the message over the ranks, and return all gradients but None."""

    def _collect_message(self, batch: Batch) -> list[Tensor]:
        """Return the tensors that stages sum over the ranks, once a step, outside the graphs of microbatches."""
        return self.message.collect(batch.num_microbatches, local_parts(self.parameters))

    def _remaining_factor(self, factor: float | None) -> float | Tensor:
        """Return what the sum of the step must still be multiplied by: `factor`, divided by the scale of the losses.

        The scale is that of a `GradScaler`, 0-D. `factor`: a rule's factor on the gradient; None if it has none.
        """
        self._check.forget()  # releases the gradients, which the sum over the ranks replaces
        scaled_by = 1.0 if factor is None else factor
        return scaled_by if self._scale is None else scaled_by / self._scale.to(scalar_dtype(self.parameters))

    @final
    def clear(self, *, uncounted: bool = False) -> None:
        """Forget the step, after its update or to start it over.

        Args:
            uncounted: drop only gradients that have come since the last `add`; within a step do nothing.

        Raises:
            RuntimeError: if these were added to what `.grad` has accumulated, or summed over the ranks.
        """
        if uncounted:
            self._clear_uncounted()
            return
        self._begin_step()
        self._overflows.clear()
        self.message.clear()
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        """Set `.grad` of all parameters to None, and forget what was measured of a microbatch that was not counted."""
        self._factor = None
        self._forget_squares()
        self._set_grads(None)
        self._check.remember()

    def reset(self, timeout: float | None = None) -> None:
        """Let the step start over, whatever an exception has interrupted.

        Args:
            timeout: seconds to wait for other ranks that have to do the same; None if every rank loads a state.

        Raises:
            RuntimeError: if the other ranks have summed, or may have summed, what this one would drop.
        """
        if timeout is None:
            self._ranks.interrupted = False
        self._ranks.check_not_interrupted()
