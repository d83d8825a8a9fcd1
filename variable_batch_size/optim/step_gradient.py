"""The gradient of a step: from this rank's microbatches to the sum over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from variable_batch_size.backend import Backend, ElasticBackend
from variable_batch_size.backend.agreement import Agreement
from variable_batch_size.data.deal import Step
from variable_batch_size.microbatching import Microbatch
from variable_batch_size.optim.accumulation import (
    Accumulation,
    BufferedAccumulation,
    InPlaceAccumulation,
    check_dense,
    collect_gradients,
    multiply,
)
from variable_batch_size.optim.backward_check import BackwardCheck
from variable_batch_size.optim.gradient_noise import GradientNoise
from variable_batch_size.optim.means import StepMeans, TokenCount
from variable_batch_size.optim.options import UpdateOptions
from variable_batch_size.optim.participation import AloneParticipation, Participation, create_participation
from variable_batch_size.optim.second_moment import SecondMoment
from variable_batch_size.optim.sync import Sync
from variable_batch_size.optim.tensors import is_narrow, local


@final
class StepGradient:
    """Accumulates this rank's microbatches of a step, and sums them over the ranks, with what travels with them."""

    accumulation: Accumulation

    def __init__(
        self,
        parameters: Sequence[Tensor],
        backend: Backend,
        options: UpdateOptions,
        noise: GradientNoise | None,
        second_moment: SecondMoment | None,
        sync: Sync,
    ) -> None:
        self.token_count, self.step_means = TokenCount(backend), StepMeans(backend)
        self.sync = sync
        self._backend, self._options, self._noise, self._second_moment = backend, options, noise, second_moment
        self.refresh(parameters)

    def refresh(self, parameters: Sequence[Tensor], *, keep: bool = False) -> None:
        """Start over with these parameters; `keep`: the gradients of a first microbatch are in `.grad`."""
        backend, options = self._backend, self._options
        self.parameters = list(parameters)
        buffered = self._measures or options.accumulation == "buffered" or any(map(is_narrow, parameters))
        buffered &= not self.sync.loss_weighed  # the sum is that of .grad
        self.accumulation = (BufferedAccumulation if buffered else InPlaceAccumulation)(parameters, backend)
        self.check = BackwardCheck(parameters, sums=not backend.alone and not self.sync.in_backward)
        self.sync.use(parameters)
        if self.sync.in_backward:  # which finds unused parameters by itself
            self.participation: Participation = AloneParticipation(parameters, backend)
        else:
            self.participation = create_participation(parameters, backend, find_unused=options.find_unused_parameters)
        self.agreed = False
        self._found_inf: Tensor | None = None  # 0-D: number of non-finite microbatches under a GradScaler
        self._scale: Tensor | None = None  # of the losses of this step under a GradScaler, 0-D
        self._due: Microbatch | None = None  # whose forward has begun
        self._replay = False  # whether this rank has only a replay in the step
        self._fresh: list[bool] = []  # which parameters have gradients of the last microbatch
        self._square_factor: float | None = None  # on the square of the last microbatch, if it was not added
        if not keep:
            self.accumulation.clear()
        self.check.begin(several=True)

    @property
    def _measures(self) -> bool:
        return self._noise is not None or self._second_moment is not None

    def begin(self, *, several: bool) -> None:
        """Begin the next step, which has several microbatches on this rank, or one."""
        self.check.begin(several=several)

    def clear(self) -> None:
        """Discard the accumulated microbatches, after an update or to start the step over."""
        self.accumulation.clear()
        self.sync.clear()
        self.check.remember()
        self._found_inf, self._square_factor, self._scale = None, None, None
        self.token_count.clear()
        self.step_means.clear()
        if self._second_moment is not None:
            self._second_moment.clear()

    def before(self, microbatch: Microbatch | None) -> None:
        """Prepare for a forward: that of a microbatch, or another one."""
        last, weight = False, 1.0
        if microbatch is not None:
            last, weight = microbatch.ends_step, self._gradient_weight(microbatch)
        self._due = microbatch
        if last and self.sync.in_backward and self.accumulation.keeps_grad:
            self.check.check_kept()
        aside = self.accumulation.aside()
        missing = [parameter for parameter in aside.gradients if parameter.grad is None]
        self.sync.before(last=last, weight=weight, aside=aside)
        if any(parameter.grad is not None for parameter in missing):
            self.check.remember()

    def backward(self, loss: Tensor, scaler: GradScaler | None, **options: Any) -> None:
        """Call `loss.backward()`, of a loss that is scaled if there is a `GradScaler`."""
        if options.get("create_graph") and self.sync.in_backward:
            raise RuntimeError(
                "create_graph=True needs gradients that nothing changes in place, but a DistributedDataParallel or "
                "FSDP2 sums them in backward(); omit it, or train the bare model, without model=, after "
                "vbs.broadcast_parameters(model)"
            )
        self.check.before_backward()
        if scaler is not None and scaler.is_enabled():
            present = scaler.scale(torch.ones((), device=loss.device))
            if self._scale is None:
                self._scale = self.sync.loss_scale = present
            elif self._found_inf is not None:  # then the step is skipped: no further microbatch has to overflow
                present = torch.where(self._found_inf > 0, present, self._scale)
            else:
                present = self._scale
            loss = loss * present
        if self.sync.loss_weighed and self._due is not None:
            weight = self.sync.loss_weight(self._due.samples / self._divisor(self._due), self._due.batch_size)
            loss = loss * self._backend.scalar(weight, loss, "loss")
        try:
            loss.backward(**options)  # type: ignore[no-untyped-call]
        except RuntimeError:
            if self.sync.in_backward:
                self._backend.while_waiting()  # a rank that does not take part may have said why
            raise
        self.check.after_backward()

    def add(
        self,
        microbatch: Microbatch,
        following: Microbatch | None,
        *,
        inside_step: bool,
        found_inf: Tensor | None,
        grad_scale: Tensor | None,
        count: Any = None,
    ) -> None:
        """Accumulate a microbatch, whose `backward()` has run.

        Args:
            following: the next microbatch of this rank in the same step; None after the last one.
            inside_step: whether it is not the first one of the step.
            found_inf: under a `GradScaler`, whether the gradient is non-finite, 0-D.
            grad_scale: the scale of the loss under a `GradScaler` that has not yet divided by it, 0-D.
            count: of the microbatch, if its loss counts something else than samples; see `TokenCount`.
        """
        if not (self.agreed or inside_step):
            check_dense(self.parameters)
        self.token_count.check(count, self._options.reduction, noise=self._measures)
        if count is None and self.sync.needs_counts:
            raise RuntimeError(
                "where ranks compute parts of the same samples, as in context parallelism, a step needs counts, but "
                'there is none; pass reduction="sum" to loss and optimizer, and step(count=) with the tokens that this '
                "rank has computed"
            )
        self._replay = microbatch.samples == 0
        unscaled = found_inf is not None and grad_scale is None
        if self._scale is not None:
            if grad_scale is None:
                raise RuntimeError(
                    "the gradients of optimizer.backward(loss, scaler=scaler) must reach step() as they are, but "
                    "scaler.unscale_() has changed them, or step() was not called by the scaler; call "
                    "scaler.step(optimizer) without unscale_(), and clip with max_grad_norm="
                )
            grad_scale = self._scale
        elif found_inf is not None and self.sync.in_backward:
            raise RuntimeError(
                "with a DistributedDataParallel or FSDP2, which sum in backward(), the scale of a loss must be known "
                "there; call optimizer.backward(loss, scaler=scaler) instead of scaler.scale(loss).backward(), and "
                "train all parameters of the model by one optimizer"
            )
        self._fresh = fresh = self.check.fresh()
        summed = self.sync.in_backward and following is None
        if summed and self._replay and not any(fresh):
            raise RuntimeError(
                f"with a DistributedDataParallel or FSDP2 each rank must sum in a backward() of each step, also if it "
                f"has only a replay, but in step {microbatch.step} this one has not; call loss.backward() before "
                f"step() for replays, too, whose weight is 0"
            )
        if self.sync.loss_weighed and not self.check.ours:
            raise RuntimeError(
                f"with {self.sync.loss_weighed} each loss must carry its weight, but backward() was called on the loss "
                f"itself, or by another optimizer; call optimizer.backward(loss), and let one optimizer, with groups, "
                f"update the parameters of a model"
            )
        accumulating = inside_step and self.accumulation.keeps_grad and not summed
        unseen = self._replay or self.sync.keeps_apart  # whether there may be no new gradients
        changed = summed or (unscaled and self._backend.static_graph)  # where unscale_ is that of another scaler
        self.check.check(fresh, replay=unseen, accumulating=accumulating, changed=changed, unscaled=unscaled)
        if found_inf is not None:
            if not self.sync.loss_weighed:
                self._use_buffer(inside_step)
            found_inf = found_inf * (not self._replay)
            self._found_inf = found_inf if self._found_inf is None else self._found_inf + found_inf
            grad_scale = torch.ones_like(found_inf) if grad_scale is None else grad_scale
        self._square_factor = self._square_factor_for(microbatch)
        if self._second_moment is not None:
            self._second_moment.batch_size = microbatch.batch_size
        if summed or self.sync.keeps_apart:
            self._add_last_square(grad_scale)
        elif following is not None or found_inf is not None or self._backend.static_graph:
            self._add_square(grad_scale)
        (like,) = local(self.parameters[:1])
        # Before the gradients of any microbatch get their weight: another order would be another graph.
        self.token_count.add(count, microbatch, like)
        weight = microbatch.samples / microbatch.batch_size if count is None else self.token_count.weight
        self.step_means.add(weight, like)
        if not summed:
            next_weight = None if following is None else self._gradient_weight(following)
            scale = None if self.sync.in_backward else grad_scale  # which the sum is divided by
            own = self._gradient_weight(microbatch)
            pair = (1.0, 1.0) if self.sync.loss_weighed else (own, next_weight)
            self.accumulation.add(fresh, *pair, scale)
        self.check.remember()

    def drop_current(self, *, inside_step: bool) -> None:
        """Drop the gradients that have come since the last microbatch, as `zero_grad()` does."""
        if not (inside_step and self.accumulation.keeps_grad):
            self.sync.drop()
            self.accumulation.drop_current()
            self.check.remember()
        elif any(self.check.fresh()):
            raise RuntimeError(
                "zero_grad() within a step must leave the microbatches that step() has accumulated, but a backward() "
                'has added to their gradients in .grad since; pass accumulation="buffered" to the optimizer, which '
                "keeps them apart, or set requires_grad_(False) for these parameters during that backward(); after an "
                "exception call discard_step()"
            )

    # The sum over the ranks. -------------------------------------------------------------------------------------

    def agree(self, agreement: Agreement) -> None:
        """Agree with the other ranks on the parameters that have gradients; every rank has to call it."""
        used = self._fresh if self._replay else self.accumulation.has_gradient
        if self._replay and agreement.world.size == 1 and not any(used):
            raise RuntimeError(
                "where the world may change, a rank must call backward() for replays, too, but in its first update "
                "this one has not; call it before step()"
            )
        self.participation.agree(used, agreement, replay=self._replay)

    def reduce(self, step: Step, factor: float | None, squares: list[Tensor] | None = None) -> list[Tensor] | None:
        """Return `factor` (None: there is none in any update) times the gradient, summed over the ranks.

        It is None if the update is skipped: a `GradScaler` found it non-finite, or nothing was counted. The list
        `squares` gets the sum of the weighted squares over all ranks, (1,).
        """
        used = self.accumulation.has_gradient
        self._add_square()
        self.check.forget()
        members = self.participation.select(used)
        if self.sync.in_backward:
            shares = local(collect_gradients(self.parameters))
        else:
            shares = local(self.accumulation.finish(factor, members))
        if not shares:
            raise RuntimeError(
                "an update needs a gradient of at least one parameter, but backward() gave none to the parameters of "
                "this optimizer; compute the loss from them, and set requires_grad"
            )
        found_inf = [] if self._found_inf is None else [self._found_inf]  # 0-D
        message = self.participation.message(used, replay=self._replay)
        counts, means = self.token_count.message(shares[0]), self.step_means.message(shares[0])
        if squares is not None and self._noise is not None:
            squares.append(self._noise.local_squares(shares))
        sums: list[Tensor] = []
        if self._second_moment is not None:
            sums = self._second_moment.message([one for one in self.parameters if one.grad is not None])
        if isinstance(self._backend, ElasticBackend):
            present = "".join("01"[parameter.grad is not None] for parameter in self.parameters)
            self._backend.facts["parameters that have gradients"] = present
        self.sync.sum(shares, [*(squares or ()), *sums, *found_inf, *message, *counts, *means])
        if self.sync.in_backward:
            factor = (1.0 if factor is None else factor) * self.sync.sum_weight(step.batch_size)
            multiply(shares, factor, self._backend)
        found = self.participation.settle(message)
        self.step_means.settle(means, self.token_count.total(counts))
        if found is not None:
            self.accumulation.exclude(found)
        gradients = collect_gradients(self.parameters)
        counted = self.token_count.settle(counts, gradients, step.batch_size)
        if not counted or any(self._backend.host(found).item() for found in found_inf):
            return None
        return gradients

    # State. ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what the ranks have agreed on, and whether the steps have counts."""
        self.participation.check()
        names = self.step_means.names if self._backend.elastic else None
        logged = {} if names is None else {"logged": list(names)}
        return {"counts": self.token_count.used, **logged, **self.participation.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state; what it lacks is agreed on again."""
        self.participation.load_state_dict(state)
        self.agreed, logged = False, state.get("logged") if self._backend.elastic else None
        self.step_means.names = None if logged is None else tuple(logged)
        self.token_count.used = state.get("counts", self.token_count.used)

    # Details. ----------------------------------------------------------------------------------------------------

    def _use_buffer(self, inside_step: bool) -> None:
        """Accumulate in a buffer from this step on: a `GradScaler` may change its scale between microbatches."""
        if not self.accumulation.keeps_grad:
            return
        if inside_step:
            raise RuntimeError(
                "all microbatches of a step must reach the optimizer through the GradScaler, or none, but the first "
                "ones of this step did not; call scaler.step(optimizer) for each of them"
            )
        self.accumulation = BufferedAccumulation(self.parameters, self._backend)

    def _add_square(self, grad_scale: Tensor | None = None) -> None:
        """Add the square of the last microbatch to those of the step, unless this was done."""
        if self._noise is not None and self._square_factor is not None:
            self._noise.add(collect_gradients(self.parameters), self._square_factor, grad_scale)
        if self._second_moment is not None and self._square_factor is not None:
            gradients = {one: one.grad for one in self.parameters if one.grad is not None}
            self._second_moment.add(gradients, self._square_factor, grad_scale)
        self._square_factor = None

    def _add_last_square(self, grad_scale: Tensor | None) -> None:
        """Add the square of the last microbatch; `.grad` holds its sum over the ranks already."""
        square, factor = self.sync.square(), self._square_factor
        if self._noise is not None and square is not None and factor is not None:
            self._noise.add_square(square, factor, grad_scale)
        if self._second_moment is not None and factor is not None:
            self._second_moment.add(self.sync.last, factor, grad_scale)
            self.sync.last = {}
        self._square_factor = None

    def _square_factor_for(self, microbatch: Microbatch) -> float | None:
        """Return the factor on the square of a microbatch; None if that is of no use, on all ranks."""
        only = microbatch.samples == microbatch.batch_size and self._backend.alone
        if only and not self._backend.static_graph:  # without it the graph would be another one
            return None  # the only microbatch of a step gives no estimate
        return microbatch.samples / self._divisor(microbatch) ** 2

    def _gradient_weight(self, microbatch: Microbatch) -> float:
        """Return the factor on a microbatch's gradient such that the sum over the step is its mean over samples."""
        return microbatch.samples / (microbatch.batch_size * self._divisor(microbatch))

    def _divisor(self, microbatch: Microbatch) -> int:
        return microbatch.rows if self._options.reduction == "sum" else 1
