"""FSDP2 sums the gradients of a step, into the shards that each rank has, also with replicas (HSDP).

The loss of a microbatch carries its n_j samples, and the sum is divided by B in the dtype of the parameters: a loss in
bfloat16 that is multiplied by n_j / B would be off by up to 2^-9. FSDP2 divides by nothing, and sums only.

Every rank computes the same number of microbatches, because each forward gathers the parameters. By default FSDP2
scatters the sum of each microbatch, which takes the least memory; replicas sum once in a step. Where replicas come and
go, an elastic backend sums their shards after the last `backward()`.

Hooks of the parameters that FSDP2 gathers see the gradient of a microbatch before it is summed, also where a single
rank has the shard, and under tensor parallelism, where they are DTensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp import FSDPModule

from variable_batch_size.backend import Backend
from variable_batch_size.backend.agreement import Agreement
from variable_batch_size.data.batches import Batch
from variable_batch_size.microbatching import Microbatch
from variable_batch_size.optim.stage import MeasuredSquares, Needs
from variable_batch_size.optim.sums.in_backward import InBackward
from variable_batch_size.optim.sums.ranks import Ranks
from variable_batch_size.optim.sums.squares import Squares
from variable_batch_size.optim.tensors.arithmetic import is_narrow, local_parts
from variable_batch_size.optim.tensors.hooks import call_before_forward, remove_with, weakly
from variable_batch_size.optim.tensors.parameters import Parameters


@final
class Sharded(InBackward):
    """FSDP2 sums in `backward()`.

    Args:
        ranks: the ranks over which the model is sharded and replicated.
        parameters: the parameters, which are shards.
        agreement: how all ranks compare values.
        module: the root module, after `fully_shard`.
        accumulates_shards: whether each backward scatters its sum, and not only the last one of a step.
        needs_counts: whether steps need a count, because several ranks compute parts of the same samples.
        between: sums the result over replicas that come and go; None if there are none.
    """

    wrapper = "a model that fully_shard() has sharded"
    _squares: Squares | None

    def __init__(
        self,
        ranks: Ranks,
        parameters: Parameters,
        agreement: Agreement,
        module: Any,
        *,
        accumulates_shards: bool,
        needs_counts: bool,
        between: Backend | None = None,
        **options: Any,
    ) -> None:
        self._needs_counts = needs_counts
        self.module: Any = module
        self._between = between
        self._accumulates_shards = accumulates_shards
        self._sharded_parts = _sharded_parts(module)
        self._groups = [group for part in self._sharded_parts for group in param_groups(part)]
        self._replicated = self._groups[0].mesh_info.mesh.ndim > 1  # HSDP: a dimension of replicas, and one of shards
        self._narrow = _narrow_dtype(self._groups)
        self._reads_grads = False  # whether a GradScaler reads `.grad` after each microbatch
        self._watched = set[int]()  # numbers of the parameters that have hooks, when they are gathered
        message = (
            "the model that is passed as model= must shard all parameters of the optimizer, but {} is not sharded by "
            "it; call fully_shard() on the root module, without ignored_params, and create the optimizer after that"
        )
        sharded = (fsdp_parameter.sharded_param for group in self._groups for fsdp_parameter in group.fsdp_params)
        self._check_members(parameters, sharded, message)
        self._number_of = {id(parameter): number for number, parameter in enumerate(parameters)}
        super().__init__(ranks, parameters, agreement, **options)
        self._only_sum()
        for sharded_module in self._sharded_parts:
            call_before_forward(sharded_module, self._watch_gathered, param_groups(sharded_module))
        if agreement.world.size > 1:
            names = ((name, part) for name, part in self.module.named_modules() if isinstance(part, FSDPModule))
            self._forwards = SameForwards(names, agreement)

    def dealing(self, **cut: bool) -> dict[str, bool]:
        """Return how the sampler must split steps: `padded` gives each rank equally many microbatches."""
        return {**cut, "padded": True}

    def _begin_step(self) -> None:
        super()._begin_step()
        self._summed = False  # whether there was a backward() in this step
        self._seen = set[int]()  # numbers of the parameters to which a microbatch of this step has given a gradient

    def _create_squares(self, needs: Callable[[], Needs]) -> Squares:
        """Return the squares without hooks: `_watch_gathered` adds them to the parameters that FSDP2 gathers."""
        return Squares(self.parameters, needs)

    def _watch_gathered(self, groups: Sequence[Any]) -> None:
        """Add hooks that measure gradients to parameters that FSDP2 has gathered, each the first time it exists."""
        if self._squares is None:
            return
        for fsdp_parameter in (fsdp_parameter for group in groups for fsdp_parameter in group.fsdp_params):
            number = self._number_of.get(id(fsdp_parameter.sharded_param))
            if number is None or number in self._watched or not fsdp_parameter.sharded_param.requires_grad:
                continue
            self._watched.add(number)
            hook = weakly(self._squares.measure_accumulated, number)
            handle = fsdp_parameter.unsharded_param.register_post_accumulate_grad_hook(hook)
            remove_with(self._squares, [handle])

    def prepare(self, microbatch: Microbatch | None, *, forward: bool = False) -> None:
        """Before a forward pass, tell FSDP2 over which ranks the next `backward()` sums gradients."""
        super().prepare(microbatch, forward=forward)
        if not forward:
            return
        is_last = microbatch is not None and microbatch.ends_step
        if not is_last and self._narrow is not None and microbatch is not None:
            raise RuntimeError(
                f"several microbatches a step need at least 32 bits, but FSDP2 adds them in {self._narrow}; keep "
                "parameters in float32, with MixedPrecisionPolicy(reduce_dtype=torch.float32), or a larger "
                "minibatch_size"
            )
        # By default each backward() scatters its sum, and replicas are summed in the last one only. Otherwise whole
        # gradients stay on the rank until the last backward(), which sums them over all ranks. A GradScaler reads
        # `.grad` after each microbatch, so that each backward() then sums over the replicas, too. A backward() outside
        # the training (no microbatch) must leave nothing for the next update.
        sums_over_all = is_last or self._reads_grads or microbatch is None
        if not self._summed:
            self._only_sum()
        for sharded_module in self._sharded_parts:  # each time, because a loop that was written for FSDP2 also sets it
            sharded_module.set_requires_gradient_sync(sums_over_all or self._accumulates_shards, recurse=False)
        if self._accumulates_shards and self._replicated:
            self.module.set_requires_all_reduce(sums_over_all)

    def _only_sum(self) -> None:
        """Let FSDP2 add gradients without dividing them by the number of ranks, whatever the loop has set."""
        for part in self._sharded_parts:
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)

    def _loss_factor(self, microbatch: Microbatch) -> float:
        """Return n_j, the samples of the microbatch: the sum is divided by B at the end of the step."""
        return float(microbatch.samples)

    def _prepare_backward(self, microbatch: Microbatch, scaler: GradScaler | None, options: Mapping[str, Any]) -> None:
        """Choose what `backward()` sums, and check that gradients of this microbatch can be measured."""
        self._reads_grads = scaler is not None and scaler.is_enabled()
        if self._factor is not None and self._squares is not None and any(self._squares.needs):
            raise RuntimeError(
                "the gradient noise needs one backward() for each microbatch of a sharded model, but there is another "
                "one; add the losses, and call optimizer.backward() once"
            )
        self.prepare(microbatch, forward=True)
        super()._prepare_backward(microbatch, scaler, options)

    def _before_backward(self, microbatch: Microbatch) -> None:
        super()._before_backward(microbatch)
        self._summed = True

    def _measure(self, microbatch: Microbatch, *, counted: bool) -> MeasuredSquares:
        """Check that the loss of a microbatch was multiplied by its samples, and return the gradient's squares.

        `counted`: whether the loss is divided by a count, such as of tokens, that `step(count=)` gets.
        """
        if not counted and self._needs_counts:
            raise RuntimeError(
                "ranks compute parts of the same samples, as in context parallelism, but the step has no count; pass "
                'reduction="sum" to loss and optimizer, and step(count=) with the tokens that this rank has computed'
            )
        factor = self._check_carried(self._check.find_fresh(), needed=False)
        # A parameter may get its `.grad` after the microbatch that was measured, because replicas sum only in the last
        # backward() of a step: it must have been measured in any microbatch of the step.
        self._seen.update(() if self._squares is None else self._squares.seen)
        pairs = enumerate(self.parameters)
        never_measured = [parameter.grad is not None and number not in self._seen for number, parameter in pairs]
        return self._take_squares(microbatch, never_measured, factor)

    def _reduce(self, batch: Batch, factor: float | None) -> list[Tensor]:
        """Divide the gradients, which `backward()` has summed, by B, multiply them by `factor`, and sum the message.

        With an elastic backend, both are also summed over the replicas of the model, which may come and go.
        """
        divisor = 1 if self._divided else batch.batch_size
        gradients, message = self._scale_and_sum_message(batch, (1.0 if factor is None else factor) / divisor)
        if self._between is not None:
            self._between.all_reduce_sum([*local_parts(gradients), *message])
        return gradients

    def _clear_uncounted(self) -> None:
        """Clear the gradients that have come since the last `add`; raise RuntimeError if ranks may have summed them."""
        if not self._inside and self._summed and any(parameter.grad is not None for parameter in self.parameters):
            raise RuntimeError(
                "the gradients that FSDP2 has summed over the ranks cannot be dropped, because other ranks may have "
                "summed others; call zero_grad() of no optimizer, and after an exception discard_step() on all ranks"
            )
        super()._clear_uncounted()

    def _expect_forward(self) -> None:
        """Reset FSDP2, so that a forward pass can begin after an exception has interrupted it or a backward."""
        _reset_fsdp(self.module, self._groups)


def data_parallel_group(module: FSDPModule) -> dist.ProcessGroup | None:
    """Return the process group over which FSDP2 shards and replicates a module, None if it contains all ranks."""
    # A dict, as a set that keeps its order: the meshes of ranks over which the parts of the model are sharded.
    meshes = {group.mesh_info.mesh: None for part in _sharded_parts(module) for group in param_groups(part)}
    if not meshes:
        raise ValueError("the model must have parameters, but fully_shard() found none; create them before")
    if len(meshes) > 1:
        raise ValueError(
            f"all parts of the model must be sharded over the same mesh, but there are {len(meshes)}: "
            f"{', '.join(map(str, meshes))}; pass the same mesh to each fully_shard()"
        )
    (mesh,) = meshes
    if mesh.size() == dist.get_world_size():
        return None
    return (mesh if mesh.ndim == 1 else mesh._flatten()).get_group()  # type: ignore[no-any-return]


def param_groups(part: FSDPModule) -> list[Any]:
    """Return FSDP2's groups of parameters that it gathers together. `part`: a module that `fully_shard` has sharded."""
    state = part._get_fsdp_state()  # private, as all of FSDP2's groups are
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return list(groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]  # torch < 2.12


def _sharded_parts(module: Any) -> list[Any]:
    """Return the modules to which `fully_shard` was applied."""
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


def _narrow_dtype(groups: Sequence[Any]) -> torch.dtype | None:
    """Return a dtype of fewer than 32 bits in which gradients would be added over ranks or microbatches, if any."""
    for group in groups:
        for fsdp_parameter in group.fsdp_params:
            policy, parameter = fsdp_parameter.mp_policy, fsdp_parameter.sharded_param
            reduce_dtype = policy.reduce_dtype or policy.param_dtype or parameter.dtype
            for dtype in (reduce_dtype, parameter.dtype):
                if parameter.requires_grad and is_narrow(torch.empty((), dtype=dtype)):
                    return dtype  # type: ignore[no-any-return]
    return None


def _reset_fsdp(module: FSDPModule, groups: Sequence[Any]) -> None:
    """Reset FSDP2's private state, so that a forward pass can begin after an exception has interrupted one.

    Gradients that were not summed yet are dropped. `groups`: those of all parts of the module.
    """
    state = module._get_fsdp_state()
    if state._is_root is None:  # no forward pass has begun
        return
    for fsdp_parameter in (fsdp_parameter for group in groups for fsdp_parameter in group.fsdp_params):
        fsdp_parameter.unsharded_accumulated_grad = None  # which reset_iter_state() of torch 2.14 leaves
        if hasattr(fsdp_parameter, "_unsharded_param"):
            fsdp_parameter._unsharded_param.grad = None
    if hasattr(module, "reset_iter_state"):
        module.reset_iter_state()
        return
    context = state._state_ctx  # what reset_iter_state() does in later versions of torch
    for state_of_part in context.all_states:
        state_of_part._training_state = type(state_of_part._training_state).IDLE
        state_of_part._modules_to_run_forward.clear()
    for group in groups:
        group._training_state = type(group._training_state).IDLE
        group.finalize_backward()
        group._partial_reduce_output = None
        group._to_sharded()
    state._comm_ctx.all_gather_state = state._comm_ctx.reduce_scatter_state = None
    state._comm_ctx.post_forward_order.clear()
    context.iter_forward_root, context.post_backward_final_callback_queued = None, False


_PATIENCE = 120.0  # seconds to wait for a rank that does not call the same part; it may compile an earlier one


@final
class SameForwards:
    """Compares the ranks at the first forward of each part of a model, whose parameters FSDP2 gathers from all of them.

    Ranks that differ would wait for one another in torch, or mistake the parameters of one part for those of another.
    """

    def __init__(self, parts: Iterable[tuple[str, Any]], agreement: Agreement) -> None:
        self._agreement = agreement
        for name, part in parts:
            # First: before the hook by which FSDP2 gathers the parameters.
            call_before_forward(part, self._compare, name or "the root", first=True, once=True)

    def _compare(self, name: str) -> None:
        """Wait until all ranks call the forward pass of this part of the model. Raise an error if one does not."""
        self._agreement.gather(f"the first forward pass of {name} in a sharded model", "", _PATIENCE)
