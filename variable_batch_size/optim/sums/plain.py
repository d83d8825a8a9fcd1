"""The backend sums: parameters of any dtype, in one process or in bare ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor

from variable_batch_size.data.batches import Batch
from variable_batch_size.microbatching import Microbatch
from variable_batch_size.optim.stage import MeasuredSquares, Needs
from variable_batch_size.optim.sums.base import Sum
from variable_batch_size.optim.sums.participation import Participation
from variable_batch_size.optim.sums.ranks import Ranks
from variable_batch_size.optim.sums.squares import SquaresOfGrad
from variable_batch_size.optim.tensors.arithmetic import (
    add_to,
    collect_gradients,
    has_dtensor,
    local_parts,
    multiply,
    sum_over_parts,
    widen,
)
from variable_batch_size.optim.tensors.parameters import Parameters


class Plain(Sum):
    """Autograd adds to `.grad`, and the backend sums that over the ranks by one collective for each dtype."""

    _takes_out = False  # whether `.grad` holds the present microbatch alone

    def __init__(self, ranks: Ranks, parameters: Parameters, *, find_unused: bool = False, **options: Any) -> None:
        self._sums_alone = not ranks.backend.alone  # whether nothing else may sum gradients over ranks
        self._participation = Participation(parameters, ranks.backend, find_unused=find_unused)
        self._partial = has_dtensor(parameters)  # whether summands of a gradient may be on several ranks
        super().__init__(ranks, parameters, **options)
        self.stages = [self._participation]

    def _begin_step(self) -> None:
        super()._begin_step()
        self._participation.forget_use()
        # Whether losses carry no weight, because the loop calls loss.backward(); None before the first microbatch.
        self._raw: bool | None = None
        self._weight = 1.0  # by which the accumulated gradients of such losses must still be multiplied

    def _loss_factor(self, microbatch: Microbatch) -> float:
        """Return n_j / B."""
        return microbatch.samples / self._divisor(microbatch)

    def _measure(self, microbatch: Microbatch, *, counted: bool) -> MeasuredSquares:
        """Return the squares of a microbatch's gradient, after a check that only its `backward()` has changed it."""
        fresh = self._check.find_fresh()  # for each parameter, whether its gradient has changed
        by_optimizer = self._check.has_backward  # by optimizer.backward(), and not by loss.backward()
        replay = microbatch.samples == 0  # repeats others with weight 0, so that ranks communicate equally often
        accumulating = self._inside and not self._takes_out  # whether `.grad` also has earlier microbatches
        self._check.check(fresh, needed=not replay, accumulating=accumulating)
        if by_optimizer or any(fresh):
            if self._raw is by_optimizer:  # `_raw` would have to be its opposite, or None in the first microbatch
                raise RuntimeError(
                    "a step must have losses of one kind, but there are both; call optimizer.backward(loss) for all "
                    "losses of a step, or loss.backward() for all"
                )
            self._raw = not by_optimizer
        if not replay or self._backend.static_graph:  # with a static graph all ranks must run the same operations
            self._participation.note_used(fresh)
        return self._take_squares(microbatch, fresh, self._present_factor(microbatch))

    def _factor_as_is(self, microbatch: Microbatch) -> float:
        """Return by what the loop's loss exceeds the mean over rows: 1 if it is a mean, the rows if it is a sum."""
        return float(microbatch.rows) if self._is_sum else 1.0

    def _present_factor(self, microbatch: Microbatch) -> float:
        """Return by what the gradient of the mean loss of a microbatch was multiplied to become `.grad`.

        Without `optimizer.backward()` (`_factor` is None) the loss was not weighed.
        """
        return self._factor_as_is(microbatch) if self._factor is None else self._factor

    def _add_gradients(self, microbatch: Microbatch, following: Microbatch | None) -> None:
        """Add the gradients of a microbatch to the step; first sum DTensors whose summands are on several ranks."""
        if self._partial:  # some parameters are DTensors
            pairs = [(parameter.grad, parameter) for parameter in self.parameters]
            self._set_grads([grad if grad is None else sum_over_parts(grad, parameter) for grad, parameter in pairs])
        self._accumulate(microbatch, following)

    def _accumulate(self, microbatch: Microbatch, following: Microbatch | None) -> None:
        """Weigh the gradients of losses that carried no weight, by Horner's scheme, so that `.grad` holds the sum."""
        if microbatch.samples == 0 and not self._backend.static_graph:
            # Replays come first, so that `.grad` has nothing else. It may be non-finite, and 0 * inf is nan.
            self._set_grads(None)
        elif self._raw:
            # sum_j w_j g_j = (...((g_1 w_1 / w_2 + g_2) w_2 / w_3 + g_3)...) w_J: `.grad` always lacks the weight of
            # the last microbatch that is in it. Equal weights cost nothing, and `finish` multiplies by w_J.
            self._weight = weight = self._weight_of_loss(microbatch)
            next_weight = weight if following is None else self._weight_of_loss(following)
            if following is not None and (weight != next_weight or self._backend.static_graph):
                self._multiply_gradients(weight / (next_weight or 1.0), "microbatch")  # a replay has weight 0
        elif self._backend.static_graph and following is not None:
            self._multiply_gradients(1.0, "microbatch")  # replaces gradients that are views

    def _multiply_gradients(self, factor: float | Tensor, place: str) -> None:
        """Multiply `.grad` of all parameters by a factor. On a static graph, the results are new tensors.

        `place`: a name of the factor, by which such a graph finds the input tensor that holds its value.
        """
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

    def _reduce(self, batch: Batch, factor: float | None) -> list[Tensor]:
        """Sum `factor` times `.grad`, and the message, over the ranks. Return the summed gradients.

        A parameter of which no rank has a gradient has none afterwards.
        """
        takes_part = self._participation.select()  # for each parameter, whether it is summed: the same on all ranks
        self._complete_gradients(takes_part, factor)
        self._clear_excluded(takes_part)
        self._backend.mark_step()  # on XLA: operations so far may differ between ranks, the graph of the sum must not
        used = self._participation.message()
        self._sum_over_ranks(local_parts(collect_gradients(self.parameters)), [*used, *self._collect_message(batch)])
        self._clear_excluded(self._participation.find_used(used) or takes_part)
        return collect_gradients(self.parameters)

    def _sum_over_ranks(self, gradients: Sequence[Tensor], message: Sequence[Tensor]) -> None:
        """Sum gradients, and what travels with them, over the ranks in place, by one collective for each dtype."""
        self._ranks.all_reduce([*gradients, *message])

    def _complete_gradients(self, members: Sequence[bool], factor: float | None) -> None:
        """Leave `factor` times this rank's part of the gradient of the update in `.grad`.

        `members`: for each parameter, whether it is summed over the ranks. One without a gradient here brings zeros.
        """
        for parameter, member in zip(self.parameters, members, strict=True):
            if member and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        remaining = self._remaining_factor(factor)
        # On a static graph each microbatch is multiplied once: a lone one has the graph of the first of several.
        if self._raw or factor is not None or isinstance(remaining, Tensor) or self._backend.static_graph:
            self._multiply_gradients(remaining * self._weight if self._raw else remaining, "update")

    def _clear_excluded(self, members: Sequence[bool]) -> None:
        """Set `.grad` to None where a parameter takes no part in the update. `members`: whether it does."""
        for parameter, member in zip(self.parameters, members, strict=True):
            if not member:
                parameter.grad = None


class TakenOut(Plain):
    """A base class: the gradient of each microbatch is taken out of `.grad`, and weighed where it is added."""

    _takes_out = True

    def _create_squares(self, needs: Callable[[], Needs]) -> SquaresOfGrad:
        return SquaresOfGrad(self.parameters, needs)

    def _check_factor(self, microbatch: Microbatch, factor: float) -> None:
        """Do nothing: each gradient gets its weight when it is added, whatever factor its loss had."""

    def _clear_uncounted(self) -> None:
        """Clear the gradients that have come since the last `add`: `.grad` has no others, as each `add` takes them."""
        self._drop_gradients()


class Buffered(TakenOut):
    """Each microbatch is added to a buffer, in at least float32; it is measured in `.grad`, without hooks."""

    def _begin_step(self) -> None:
        super()._begin_step()
        self._buffer: dict[Tensor, Tensor] = {}  # by parameter: the sum of its gradients

    def _accumulate(self, microbatch: Microbatch, following: Microbatch | None) -> None:
        """Add a microbatch's gradients, times its weight, to the buffer, and drop them from `.grad`.

        The weight is n_j / B, its samples over those of the update, divided by the factor that its loss had.
        """
        present = [parameter for parameter in self.parameters if parameter.grad is not None]
        gradients = list(map(widen, collect_gradients(present)))
        self._set_grads(None)
        is_replay = microbatch.samples == 0
        if not gradients or (is_replay and not self._backend.static_graph):  # non-finite perhaps, and 0 * inf is nan
            return
        weight = microbatch.samples / self._divisor(microbatch) / (self._present_factor(microbatch) or 1.0)
        if self._backend.static_graph:  # multiplies into new tensors, see `_multiply_gradients`
            weight_on_device = self._backend.scalar(weight, gradients[0], "microbatch")
            gradients, weight = list(torch._foreach_mul(gradients, weight_on_device)), 1.0
        add_to(self._buffer, dict(zip(present, gradients, strict=True)), weight)

    def _complete_gradients(self, members: Sequence[bool], factor: float | None) -> None:
        """Leave `factor` times this rank's part of the gradient of the update in `.grad`.

        `members`: for each parameter, whether it is summed over the ranks. One without a gradient here brings zeros.
        """
        for parameter, member in zip(self.parameters, members, strict=True):  # all ranks must sum the same tensors
            if member and parameter not in self._buffer:
                self._buffer[parameter] = widen(torch.zeros_like(parameter))
        remaining = self._remaining_factor(factor)
        if factor is not None or isinstance(remaining, Tensor):
            self._backend.mark_step()  # so that the last microbatch has the graph of the others
            multiply(list(self._buffer.values()), remaining, self._backend)
        for parameter, total in self._buffer.items():
            parameter.grad = total.to(parameter.dtype)

    def _zero(self) -> None:
        torch._foreach_zero_(local_parts(self._buffer.values()))


@final
class Widened(Buffered):
    """Parameters in half precision: their losses carry no weight, because a gradient times n_j / B may underflow."""

    def _loss_factor(self, microbatch: Microbatch) -> float:
        """Return the factor that leaves the loss as it is."""
        return self._factor_as_is(microbatch)
