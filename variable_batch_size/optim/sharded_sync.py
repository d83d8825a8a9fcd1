"""FSDP2 sums the gradients of a step, into the shards that each rank has, also with replicas (HSDP).

The loss of a microbatch carries its n_j samples, and the sum is divided by B in the dtype of the parameters: a loss in
bfloat16 that is multiplied by n_j / B would be off by up to 2^-9. FSDP2 divides by nothing, and sums only.

Every rank computes the same number of microbatches, because each forward gathers the parameters. By default FSDP2
scatters the sum of each microbatch, which takes the least memory; replicas sum once in a step. Where replicas come and
go, an elastic backend sums their shards after the last `backward()`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from variable_batch_size.backend import Backend, DistributedBackend
from variable_batch_size.backend.agreement import Agreement
from variable_batch_size.optim.accumulation import Aside
from variable_batch_size.optim.hooks import call_before_forward
from variable_batch_size.optim.sharded_squares import Squares
from variable_batch_size.optim.sync import Sync, Watch
from variable_batch_size.optim.tensors import is_narrow


@final
class ShardedSync(Sync):
    """FSDP2 sums in `backward()`; `between` sums what comes of it over replicas that come and go."""

    in_backward = True
    loss_weighed = "a model that fully_shard() has sharded"
    keeps_apart = True

    def __init__(
        self, backend: Backend, module: FSDPModule, *, accumulates_shards: bool, between: Backend | None = None
    ) -> None:
        group = data_parallel_group(module)
        own = DistributedBackend(group)
        self.needs_counts = _ranks(backend) != own.ranks
        super().__init__(own if self.needs_counts else backend)
        self.module: Any = module
        self._between = between
        self._accumulates_shards = accumulates_shards
        self._parts = _parts(module)
        self._groups = [group for part in self._parts for group in param_groups(part)]
        self._replicated = self._groups[0].mesh_info.mesh.ndim > 1
        self._narrow = _narrow_dtype(self._groups)
        self._weight, self._parameters = 1.0, list[Tensor]()
        self._summed = self._unread = False  # whether there was a backward() in this step, and since the last step()
        self._squares: Squares | None = None
        self._watch = Watch(self._backend)
        self._only_sum()

    def meet(self, agreement: Agreement) -> None:
        """Let the ranks agree on what they call."""
        if agreement.world.size > 1:
            names = ((name, part) for name, part in self.module.named_modules() if isinstance(part, FSDPModule))
            self._forwards = SameForwards(names, agreement)

    def use(self, parameters: Sequence[Tensor]) -> None:
        """Sum the gradients of these parameters from now on, all of the optimizer."""
        own = {id(one.sharded_param) for group in self._groups for one in group.fsdp_params}
        for number, parameter in enumerate(parameters):
            if id(parameter) not in own:
                raise ValueError(
                    f"the model that is passed as model= must shard all parameters of the optimizer, but parameter "
                    f"{number}, of shape {tuple(parameter.shape)}, is not sharded by it; call fully_shard() on the "
                    f"root module, without ignored_params, and create the optimizer after that"
                )
        if self.measures and not self._accumulates_shards:
            raise ValueError(
                "a rule or a controller that reads the gradient noise needs the gradients of single microbatches, but "
                "sharded_accumulation=False adds them up before they are seen; omit it"
            )
        self._parameters = list(parameters)
        if self.measures:
            self._squares = Squares([(part, param_groups(part)) for part in self._parts], parameters)

    def before(self, *, last: bool, weight: float, aside: Aside) -> None:
        """Choose what the next `backward()` sums."""
        if not last and self._narrow is not None:
            raise RuntimeError(
                f"the gradients of several microbatches must be added with at least 32 bits, but FSDP2 adds them in "
                f"{self._narrow}; keep the parameters in float32, and pass MixedPrecisionPolicy(param_dtype="
                f"torch.bfloat16, reduce_dtype=torch.float32) to fully_shard(), or choose a minibatch_size for which "
                f"each rank has one microbatch a step"
            )
        if self._groups[0].device.type == "cpu":
            self._watch.begin()
        # By default each backward() scatters its sum, and replicas are summed in the last one only. Otherwise whole
        # gradients stay on the rank until the last backward(), which sums them over all ranks. A GradScaler reads
        # `.grad` after each microbatch, so that each backward() then sums over the replicas, too.
        now = last or self.scaled
        if not self._summed:
            self._only_sum()
        for part in self._parts:  # which a loop written for FSDP2 sets, too
            part.set_requires_gradient_sync(now or self._accumulates_shards, recurse=False)
        if self._accumulates_shards and self._replicated:
            self.module.set_requires_all_reduce(now)

    def _only_sum(self) -> None:
        """Let FSDP2 divide by nothing, whatever the loop has set."""
        for part in self._parts:
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)

    def loss_weight(self, samples: float, batch_size: int) -> float:
        """Return the factor on a microbatch's loss: its samples."""
        if self._squares is not None:
            if self._unread:
                raise RuntimeError(
                    "the gradient noise needs one backward() for each microbatch of a sharded model, but there is "
                    "another one; add the losses, and call optimizer.backward() once"
                )
            self._squares.begin(measured=samples > 0 or self._backend.static_graph)
        self._weight, self._summed, self._unread = samples, True, True
        return samples

    def sum_weight(self, batch_size: int) -> float:
        """Return the factor on the sum: 1 / B."""
        return 1 / batch_size

    def square(self) -> Tensor | None:
        """Return the square of the gradient of the last microbatch, 0-D; None of a replay."""
        self._unread = False
        if self._squares is None or not (self._weight or self._backend.static_graph):
            return None
        total = self._squares.total()
        return total / self._backend.scalar(self._weight**2 or 1.0, total, "samples")  # type: ignore[no-any-return]

    def sum(self, gradients: Sequence[Tensor], others: Sequence[Tensor]) -> None:
        """Sum what travels with the gradients, which `backward()` has summed; both over replicas that come and go."""
        self._watch.end()
        if self.loss_scale is not None and gradients:
            torch._foreach_div_(list(gradients), self.loss_scale)
        if others:
            self._all_reduce(others)
        if self._between is not None:
            self._between.all_reduce_sum([*gradients, *others])

    def reset(self) -> None:
        """Let FSDP2 expect a forward, whatever an exception has interrupted."""
        _reset(self.module, self._groups)

    def restart(self) -> None:
        """Forget what an exception has interrupted: every rank loads a state."""
        super().restart()
        self.reset()

    def clear(self) -> None:
        """Forget the step, after its update or to start it over."""
        super().clear()
        self._watch.end()
        self._summed = self._unread = False
        if self._squares is not None:
            self._squares.clear()

    def drop(self) -> None:
        """Check that no rank has summed gradients that this one forgets."""
        if self._summed and any(parameter.grad is not None for parameter in self._parameters):
            raise RuntimeError(
                "the gradients that FSDP2 has summed over the ranks cannot be dropped, because other ranks may have "
                "summed others; call zero_grad() of no optimizer, and after an exception discard_step() on all ranks"
            )


def data_parallel_group(module: FSDPModule) -> dist.ProcessGroup | None:
    """Return the ranks over which a module is sharded and replicated; None if these are all."""
    meshes = {group.mesh_info.mesh: None for part in _parts(module) for group in param_groups(part)}
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
    """Return what communicates together of a module's own parameters."""
    state = part._get_fsdp_state()
    if (groups := getattr(state, "_fsdp_param_groups", None)) is not None:
        return list(groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]  # torch < 2.12


def _parts(module: Any) -> list[FSDPModule]:
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


def _ranks(backend: Backend) -> list[int]:
    return backend.ranks if isinstance(backend, DistributedBackend) else []


def _narrow_dtype(groups: Sequence[Any]) -> torch.dtype | None:
    """Return a dtype of fewer than 32 bits in which gradients would be added, if there is one."""
    for group in groups:
        for one in group.fsdp_params:
            policy, parameter = one.mp_policy, one.sharded_param
            reduced = policy.reduce_dtype or policy.param_dtype or parameter.dtype
            for dtype in (reduced, parameter.dtype):
                if parameter.requires_grad and is_narrow(torch.empty((), dtype=dtype)):
                    return dtype  # type: ignore[no-any-return]
    return None


def _reset(module: FSDPModule, groups: Sequence[Any]) -> None:
    """Let a module expect a forward, whatever an exception has interrupted."""
    state = module._get_fsdp_state()
    if state._is_root is None:  # no forward has begun
        return
    for parameter in (one for group in groups for one in group.fsdp_params):
        parameter.unsharded_accumulated_grad = None  # which reset_iter_state() of torch 2.14 leaves
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None
    if hasattr(module, "reset_iter_state"):
        module.reset_iter_state()
        return
    context = state._state_ctx  # what reset_iter_state() does in later versions of torch
    for one in context.all_states:
        one._training_state = type(one._training_state).IDLE
        one._modules_to_run_forward.clear()
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
            call_before_forward(part, self._compare, name or "the root", first=True, once=True)  # before that of FSDP2

    def _compare(self, name: str) -> None:
        self._agreement.gather(f"the first forward of {name} in a sharded model", "", _PATIENCE, within=True)
