"""The gradient of a step, and the message that travels with it: squares, overflows, counts, means."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from variable_batch_size.backend import Backend
from variable_batch_size.data.batches import Batch
from variable_batch_size.microbatching import Microbatch
from variable_batch_size.optim import limbs
from variable_batch_size.optim.counts import counts_nothing
from variable_batch_size.optim.gradient_noise import GradientNoise
from variable_batch_size.optim.means import StepMeans, TokenCount
from variable_batch_size.optim.options import UpdateOptions
from variable_batch_size.optim.same_updates import Facts, SameUpdates
from variable_batch_size.optim.second_moment import SecondMoment
from variable_batch_size.optim.sums import Sum
from variable_batch_size.optim.tensors import check_dense, local_parts, scalar_dtype

NOT_WEIGHTED = (
    "in an update of vbs.updates(counts=) each loss is divided by update.counts, and must not be weighed by samples, "
    "but {}; call optimizer.backward(loss, weighted=True) for all losses"
)


@final
class StepGradient:
    """Counts this rank's microbatches of a step, and sums them over the ranks, with what travels with them."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        backend: Backend,
        options: UpdateOptions,
        noise: GradientNoise | None,
        second_moment: SecondMoment | None,
        total: Sum,
    ) -> None:
        self.token_count = TokenCount(backend)
        self.step_means = StepMeans(backend)
        self.sum = total
        self._backend, self._options, self._noise, self._second_moment = backend, options, noise, second_moment
        self.use_parameters(parameters)

    def use_parameters(self, parameters: Sequence[Tensor], *, keep: bool = False) -> None:
        """Start over with these parameters; `keep`: the gradients of a first microbatch are in `.grad`."""
        self.parameters = list(parameters)
        self.sum.use_parameters(parameters, keep=keep)
        self._await_agreement()
        self._scaled: bool | None = None  # whether the losses of this step are scaled; None: there was none
        self._scale: Tensor | None = None  # of the losses of this step under a GradScaler, 0-D
        self._overflows: Any = None  # number of non-finite microbatches under a GradScaler; 0-D on a static graph
        self._by_microbatch: dict[int, Tensor] = {}  # what was measured of each, by number, if that stays apart
        self._integers: Tensor | None = None  # its sums, (2, numbers), on devices that compile
        self._widths: list[int] = []  # of its parts

    def _await_agreement(self) -> None:
        self.agreed = False  # whether the ranks have compared themselves before a first update
        self._same_updates = SameUpdates(self._backend)

    def clear(self) -> None:
        """Discard the accumulated microbatches, after an update or to start the step over."""
        self.sum.clear()
        self._scaled = self._scale = self._overflows = None
        self._by_microbatch, self._integers = {}, None
        self.token_count.clear()
        self.step_means.clear()
        if self._second_moment is not None:
            self._second_moment.clear()

    def backward(
        self,
        loss: Tensor,
        microbatch: Microbatch,
        scaler: GradScaler | None,
        others: Sequence[StepGradient],
        **options: Any,
    ) -> None:
        """Call `loss.backward()`, of a loss that carries its weight, and a scale if there is a `GradScaler`.

        `options` are those of `Sum.backward`.
        """
        scale = None
        scaled = scaler is not None and scaler.is_enabled()
        for step_gradient in (self, *others):
            if step_gradient._scaled not in (None, scaled):
                raise RuntimeError(
                    "all losses of a step must be scaled, or none, but some have a scaler= and others have not; pass "
                    "it to each backward() of the step, and call discard_step() first"
                )
            step_gradient._scaled = scaled
        if scaler is not None and scaled:
            scale = self._scale
            if scale is None:
                scale = self.sum.common_scale(scaler.scale(torch.ones((), device=loss.device)))
            for step_gradient in (self, *others):
                step_gradient._scale = scale
        self.sum.backward(loss, microbatch, scale, [other.sum for other in others], **options)

    def add(
        self,
        microbatch: Microbatch,
        following: Microbatch | None,
        *,
        inside_step: bool,
        found_inf: Tensor | None,
        grad_scale: Tensor | None,
        count: Any = None,
        weighted: bool = False,
    ) -> None:
        """Count a microbatch, whose `backward()` has run.

        Args:
            microbatch: the microbatch.
            following: the next one of this rank in the same step; None after the last one.
            inside_step: whether it is not the first one of the step.
            found_inf: under a `GradScaler`, whether the gradient is non-finite, 0-D.
            grad_scale: the scale of the loss under a `GradScaler` that has not yet divided by it, 0-D.
            count: of the microbatch, if its loss counts something else than samples; see `TokenCount`.
            weighted: whether the losses of the step are divided by totals of the update, see `Counts`.
        """
        if not (self.agreed or inside_step):
            check_dense(self.parameters)
        self._check_count(microbatch, count, weighted=weighted)
        self._check_scaler(found_inf, grad_scale)
        if self._second_moment is not None:
            self._second_moment.batch_size = microbatch.batch_size
        norm, elements, factor = self.sum.measure(microbatch, counted=weighted or count is not None)
        if self._noise is not None and norm is not None:
            self._noise.add_square(norm, factor, self._scale)
        if self._second_moment is not None:
            self._second_moment.add(elements, factor, self._scale)
        (like,) = local_parts(self.parameters[:1])
        # Before the gradients of any microbatch get their weight: another order would be another graph.
        self.token_count.add(count, microbatch, like)
        weight = microbatch.samples / microbatch.batch_size if count is None else self.token_count.weight
        self.step_means.add(weight, like)
        if self.sum.by_microbatch:
            self._keep_apart(microbatch, like)
        self.sum.add(microbatch, following)
        if found_inf is not None:
            self._note_overflow(found_inf * (microbatch.samples > 0))

    def _check_count(self, microbatch: Microbatch, count: Any, *, weighted: bool) -> None:
        """Raise an error unless a microbatch may have this count, and its loss has carried its weight."""
        measures = self._noise is not None or self._second_moment is not None
        if weighted and microbatch.samples and not self.sum.carries_weight:
            raise RuntimeError(NOT_WEIGHTED.format("step() came without optimizer.backward()"))
        if weighted and count is not None:
            raise RuntimeError(
                "a loss has one way to its denominators, but step() has count= in an update of vbs.updates(counts=); "
                "omit count=, and divide by update.counts"
            )
        self.token_count.check(count, self._options.reduction, noise=measures)

    def _check_scaler(self, found_inf: Tensor | None, grad_scale: Tensor | None) -> None:
        """Raise RuntimeError unless scaled losses, and no others, come to `step()` by their `GradScaler`."""
        if found_inf is not None and (self._scale is None or grad_scale is None):
            raise RuntimeError(
                "the gradients of optimizer.backward(loss, scaler=scaler) must reach step() as they are, but the loss "
                "was scaled in the loop, or scaler.unscale_() has changed them; call optimizer.backward(loss, "
                "scaler=scaler) and scaler.step(optimizer), and clip with max_grad_norm="
            )
        if self._scale is not None and found_inf is None:
            raise RuntimeError(
                "the gradients of optimizer.backward(loss, scaler=scaler) must reach step() by the scaler, but step() "
                "was called without it; call scaler.step(optimizer), and scaler.update()"
            )

    def _keep_apart(self, microbatch: Microbatch, like: Tensor) -> None:
        """Take what was measured of a microbatch out of the sums, so that no rounding depends on the world."""
        self.step_means.names = self.step_means.names or self.step_means.names_of_step
        parts = [part.to(torch.float64) for part in self._measured_sums([like])]
        self._widths = list(map(len, parts))
        if parts and self._backend.static_graph:  # where a row of a table would be another graph for each number
            row = torch.cat(parts)
            self._integers = (
                row.new_zeros((2, len(row)), dtype=torch.int64) if self._integers is None else self._integers
            )
            limbs.add(self._integers, row)
        elif parts and microbatch.samples:
            self._by_microbatch[microbatch.number] = torch.cat(parts)
        self.token_count.clear()
        self.step_means.clear()
        if self._noise is not None:
            self._noise.clear()

    def _measured_sums(self, like: Sequence[Tensor]) -> list[Tensor]:
        """Return what the ranks sum of what was counted: squares, counts and means, each (n,)."""
        squares = [] if self._noise is None else [self._noise.local_squares(like)]
        return [*squares, *self.token_count.message(like[0]), *self.step_means.message(like[0])]

    def _table_of_bits(self, microbatches: int, like: Tensor) -> list[Tensor]:
        """Return what was kept apart, (microbatches, numbers), as bits, so that adding zeros of others is exact."""
        if not self._widths or self._integers is not None:
            return [] if self._integers is None else [self._integers]
        table = like.new_zeros((microbatches, sum(self._widths)), dtype=torch.float64)
        for number, row in self._by_microbatch.items():
            table[number] = row
        return [table.view(torch.int64)]

    def _sum_microbatches(self, table: Sequence[Tensor]) -> list[Tensor]:
        """Return the sums over the microbatches, in their order."""
        if self._integers is not None:
            sums = [
                limbs.value(integers, 1.0, torch.empty_like(integers[0], dtype=torch.float64)) for integers in table
            ]
        else:
            sums = [bits.view(torch.float64).sum(0) for bits in table]
        return [part for total in sums for part in torch.split(total, self._widths)]

    def _note_overflow(self, found_inf: Tensor) -> None:
        """Count a microbatch whose gradient is non-finite, if `found_inf`, 0-D, says so."""
        if self._backend.static_graph:
            self._overflows = found_inf if self._overflows is None else self._overflows + found_inf
            return
        overflows = found_inf.item()  # as torch's own scaler reads it for optimizers that do not
        self._overflows = (self._overflows or 0.0) + overflows
        if overflows:
            self.sum.flush()

    def reduce(
        self, step: Batch, factor: float | None, facts: Callable[[], Facts], squares: list[Tensor] | None = None
    ) -> list[Tensor] | None:
        """Return `factor` (None: there is none in any update) times the gradient, summed over the ranks.

        It is None if the update is skipped here: a `GradScaler` found it non-finite, or nothing was counted. The list
        `squares` gets the sum of the weighted squares over all ranks, (1,).

        Raises:
            RanksDifferError: on every rank, if the facts differ between ranks, or did some updates ago.
        """
        like, same_updates = local_parts(self.parameters), self._same_updates
        found_inf, measured, compared = list[Tensor](), list[Tensor](), list[Tensor]()
        apart = self.sum.by_microbatch

        def message() -> list[Tensor]:  # not in the graph of a microbatch: a step may have any number of them
            measured.extend(self._table_of_bits(step.num_microbatches, like[0]) if apart else self._measured_sums(like))
            sums = list[Tensor]()
            if self._overflows is not None:
                overflows = torch.as_tensor(self._overflows, dtype=torch.float32, device=like[0].device)
                found_inf.append(overflows.view(1))
            if self._second_moment is not None:
                members = [parameter for parameter in self.parameters if parameter.grad is not None]
                sums = self._second_moment.message(members)
            if same_updates.compares:
                dtype = torch.int64 if apart else scalar_dtype(like)  # that of the gradients as they are summed
                compared.append(same_updates.message(facts(), like[0], dtype))
            return [*measured, *sums, *found_inf, *([] if same_updates.apart else compared)]

        gradients = self.sum.finish(step.batch_size, factor, message)
        for sums in compared:
            same_updates.compare(sums)
        summed = iter(self._sum_microbatches(measured) if apart else measured)
        if squares is not None:
            squares.append(next(summed))
        counts = [next(summed)] if self.token_count.used else []
        means = [*summed]
        self.step_means.compute_means(means, self.token_count.total(counts))
        counted = self.token_count.divide_by_counts(counts, gradients, step.batch_size)
        if not counted or counts_nothing(step) or any(self._backend.host(number).item() for number in found_inf):
            return None
        if not gradients:
            raise RuntimeError(
                "an update needs a gradient of at least one parameter, but backward() gave none to the parameters of "
                "this optimizer; compute the loss from them, and set requires_grad"
            )
        return gradients

    # State. ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what the ranks have agreed on, and whether the steps have counts."""
        names = self.step_means.names if self._backend.elastic else None
        logged = {} if names is None else {"logged": list(names)}
        agreed: dict[str, Any] = {}
        self._same_updates.check()
        if (participation := self.sum.participation) is not None:
            participation.check()
            agreed = participation.state_dict()
        return {"counts": self.token_count.used, **logged, **agreed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state; what it lacks is agreed on again."""
        if self.sum.participation is not None:
            self.sum.participation.load_state_dict(state)
        self._await_agreement()
        logged = state.get("logged") if self._backend.elastic else None
        self.step_means.names = None if logged is None else tuple(logged)
        self.token_count.used = state.get("counts", self.token_count.used)
