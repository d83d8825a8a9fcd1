"""The gradient of a step: from this rank's microbatches to the sum over the ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any, final

import torch
from torch import Tensor

from variable_batch_size.backend import Backend
from variable_batch_size.data.microbatching import Microbatch
from variable_batch_size.data.plan import Step
from variable_batch_size.optim.accumulation import (
    Accumulation,
    BufferedAccumulation,
    InPlaceAccumulation,
    check_dense,
    gradients_of,
    is_narrow,
)
from variable_batch_size.optim.backward_check import BackwardCheck
from variable_batch_size.optim.buckets import Bucket
from variable_batch_size.optim.gradient_noise import GradientNoise
from variable_batch_size.optim.loop import Upcoming
from variable_batch_size.optim.options import UpdateOptions
from variable_batch_size.optim.participation import participation
from variable_batch_size.optim.reduction import Reduction
from variable_batch_size.optim.rounds import Rounds
from variable_batch_size.optim.step_means import StepMeans
from variable_batch_size.optim.token_count import TokenCount


@final
class StepGradient:
    """Accumulates this rank's microbatches of one step, and sums them over the ranks, with all that travels with them.

    Args:
        parameters: all parameters of the optimizer, in the order of its groups.
        backend: backend of the optimizer.
        options: the checked options.
        noise: the measured noise; None if it is not measured.
        shared_factor: function that returns the factor on the gradients of all parameters in an update.
        as_views: whether `.grad` may be a view of a message, which the next update overwrites.

    Attributes:
        parameters: all parameters of the optimizer, in the order of its groups.
        accumulation: this rank's share of the gradient.
        check: what has changed the gradients since the last microbatch.
        participation: which parameters take part in an update.
        reduction: the sums in buckets, while `backward()` runs.
        token_count: counts by which the gradient is divided, if they are not its samples.
        step_means: means of logged values.
        agreed: whether the ranks were compared.
        upcoming: function that returns what the next `step()` counts, if it is known.
    """

    accumulation: Accumulation

    def __init__(
        self,
        parameters: Sequence[Tensor],
        backend: Backend,
        options: UpdateOptions,
        noise: GradientNoise | None,
        *,
        shared_factor: weakref.WeakMethod[Callable[[Upcoming], float]],
        as_views: bool,
    ) -> None:
        self.token_count, self.step_means = TokenCount(backend), StepMeans(backend)
        self.upcoming: Callable[[], Upcoming | None] = lambda: None
        self._backend, self._options, self._noise = backend, options, noise
        self._shared_factor, self._as_views, self._rounds = shared_factor, as_views, Rounds(backend)
        self.refresh(parameters)

    def refresh(self, parameters: Sequence[Tensor]) -> None:
        """Start over with these parameters."""
        backend, options = self._backend, self._options
        self.parameters = list(parameters)
        buffered = self._noise is not None or options.accumulation == "buffered" or any(map(is_narrow, parameters))
        self.accumulation = (BufferedAccumulation if buffered else InPlaceAccumulation)(parameters, backend)
        self.check = BackwardCheck(parameters)
        self.participation = participation(parameters, backend, find_unused=options.find_unused_parameters)
        self._rounds.void()
        self.reduction = Reduction(parameters, backend, self, options, self._rounds, as_views=self._as_views)
        self.agreed = False
        self._found_inf: Tensor | None = None  # 0-D: number of non-finite microbatches under a GradScaler
        self._replay = False  # whether this rank has only a replay in the step
        self._factor = 1.0  # on the gradients of all parameters, when they are summed
        self._square_factor: float | None = None  # on the square of the last microbatch, if it was not added
        self.accumulation.clear()
        self.check.begin(several=True)

    def begin(self, *, several: bool) -> None:
        """Begin the next step, which has several microbatches on this rank, or one."""
        self.check.begin(several=several)
        self.reduction.watch()

    def clear(self, *, discarded: bool = False) -> None:
        """Discard the accumulated microbatches, after an update or, if `discarded`, to start the step over."""
        self.reduction.void(discarded=discarded)
        self.accumulation.clear()
        self.check.remember()
        self._found_inf, self._square_factor = None, None
        self.token_count.clear()
        self.step_means.clear()

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
            microbatch: the microbatch.
            following: the next microbatch of this rank in the same step; None after the last one.
            inside_step: whether it is not the first one of the step.
            found_inf: under a `GradScaler`, whether the gradient is non-finite, 0-D.
            grad_scale: the scale of the loss under a `GradScaler` that has not yet divided by it, 0-D.
            count: of the microbatch, if its loss counts something else than samples; see `TokenCount`.

        Raises:
            TypeError: if a gradient is sparse.
            RuntimeError: if there was no `backward()`, or something else has changed the gradients.
        """
        if not (self.agreed or inside_step):
            check_dense(self.parameters)
        self.token_count.check(count, self._options.reduction, noise=self._noise is not None)
        self._replay = microbatch.samples == 0
        unscaled = found_inf is not None and grad_scale is None
        fresh = self.check.fresh()
        accumulating = inside_step and self.accumulation.keeps_grad
        self.check.check(fresh, replay=self._replay, accumulating=accumulating, unscaled=unscaled)
        self.reduction.after_microbatch(microbatch, scaled=found_inf is not None)
        if found_inf is not None:
            self._use_buffer(inside_step)
            found_inf = found_inf * (not self._replay)
            self._found_inf = found_inf if self._found_inf is None else self._found_inf + found_inf
            grad_scale = torch.ones_like(found_inf) if grad_scale is None else grad_scale
        self._square_factor = self._square_factor_of(microbatch)
        if following is not None or found_inf is not None or self._backend.static_graph:
            self._add_square(grad_scale)
        like = self.parameters[0]
        # Before the gradients of any microbatch get their weight: another order would be another graph.
        self.token_count.add(count, microbatch, like)
        weight = microbatch.samples / microbatch.batch_size if count is None else self.token_count.weight
        self.step_means.add(weight, like)
        next_weight = None if following is None else self._weight_of(following)
        self.accumulation.add(fresh, self._weight_of(microbatch), next_weight, grad_scale)
        self.check.remember()

    def drop_current(self, *, inside_step: bool) -> None:
        """Drop the gradients that have come since the last microbatch, as `zero_grad()` does.

        Raises:
            RuntimeError: if they cannot be told from the microbatches of the step, which are in `.grad`, too, or were
                sent to other ranks by an accelerator.
        """
        if not (inside_step and self.accumulation.keeps_grad):
            self.reduction.drop_current()
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

    def agree(self) -> None:
        """Agree with the other ranks on the parameters that have gradients; every rank has to call it."""
        used = self.accumulation.has_gradient
        self.participation.agree(used, replay=self._replay)
        self.reduction.agree(self.participation.summed(used))

    def prepare_last(self) -> bool:
        """Return whether the next `step()` counts the last microbatch of this rank in a step, and prepare for it."""
        upcoming = self.upcoming() if self.agreed and self._found_inf is None else None
        shared_factor = self._shared_factor()
        if upcoming is None or not upcoming.microbatch.ends_step or shared_factor is None:
            return False
        try:
            self._factor = shared_factor(upcoming)
        except Exception:  # of a rule: `step()` raises it
            return False
        self.accumulation.prepare(self._weight_of(upcoming.microbatch))
        self._square_factor = self._square_factor_of(upcoming.microbatch)
        return True

    def fill(self, bucket: Bucket) -> Tensor | None:
        """Write this rank's share of the gradients to a bucket; return the weighted squares of the last microbatch."""
        squares = None
        if self._noise is not None and self._square_factor is not None:
            squares = self._noise.square(gradients_of(bucket.parameters), self._square_factor)
        self.accumulation.fill(bucket.parameters, bucket.flat, self._factor)
        return squares

    def reduce(self, step: Step, factor: float | None, squares: list[Tensor] | None = None) -> list[Tensor] | None:
        """Return `factor` times the gradient, summed over the ranks.

        It is None if the update is skipped: a `GradScaler` found it non-finite, or nothing was counted.

        Args:
            step: the accumulated step.
            factor: a factor on all gradients; None if there is none in any update.
            squares: gets the sum of the weighted squares over all ranks, (1,).
        """
        accumulation, used = self.accumulation, self.accumulation.has_gradient
        summed, in_buckets = self.participation.summed(used), bool(self.reduction.buckets)
        self._factor = 1.0 if factor is None else factor
        if in_buckets:
            like = list(compress(self.parameters, summed))
        else:
            self._add_square()
            self.check.forget()
            like = accumulation.finish(factor, summed)
        if not like:
            raise RuntimeError(
                "an update needs a gradient of at least one parameter, but backward() gave none to the parameters of "
                "this optimizer; compute the loss from them, and set requires_grad"
            )
        found_inf = [] if self._found_inf is None else [self._found_inf]  # 0-D
        # Messages of buckets have one length, with or without a `GradScaler`: a rank that voids a round sends the last.
        room = [like[0].new_zeros(())] if in_buckets and not found_inf else []
        message = self.participation.message(used, replay=self._replay)
        counts, means = self.token_count.message(like[0]), self.step_means.message(like[0])

        def others(more: Sequence[Tensor] = ()) -> list[Tensor]:
            """Return what travels with the gradients; `more`: squares that were not added."""
            if squares is not None and self._noise is not None:
                squares.append(self._noise.local_squares(like, more))
            return [*(squares or ()), *found_inf, *room, *message, *counts, *means]

        if in_buckets:
            accumulation.exclude(summed)
            self.reduction.reduce(others)
        else:
            self._backend.all_reduce_sum([*like, *others()])
        members = self.participation.settle(message)
        self.step_means.settle(means, self.token_count.total(counts))
        if members is not None:
            accumulation.exclude(members)
        gradients = gradients_of(self.parameters)
        counted = self.token_count.settle(counts, gradients, step.batch_size)
        if not counted or any(self._backend.host(found).item() for found in found_inf):
            return None
        return gradients

    # State. ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what the ranks have agreed on, and whether the steps have counts."""
        self.participation.check()
        return {"counts": self.token_count.used, **self.participation.state_dict(), **self.reduction.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state; what it lacks is agreed on again."""
        self.participation.load_state_dict(state)
        self.reduction.load_state_dict(state)
        self.agreed, self.step_means.names = False, None
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
            self._noise.add(gradients_of(self.parameters), self._square_factor, grad_scale)
        self._square_factor = None

    def _square_factor_of(self, microbatch: Microbatch) -> float | None:
        """Return the factor on the square of a microbatch; None if that is of no use, on all ranks."""
        only = microbatch.samples == microbatch.batch_size and self._backend.world.size == 1
        if only and not self._backend.static_graph:  # without it the graph would be another one
            return None  # the only microbatch of a step gives no estimate
        return microbatch.samples / self._divisor(microbatch) ** 2

    def _weight_of(self, microbatch: Microbatch) -> float:
        """Return the factor on a microbatch's gradient such that the sum over the step is its mean over samples."""
        return microbatch.samples / (microbatch.batch_size * self._divisor(microbatch))

    def _divisor(self, microbatch: Microbatch) -> int:
        """Return the number by which to divide a microbatch's gradient to get that of its mean loss."""
        return microbatch.rows if self._options.reduction == "sum" else 1
