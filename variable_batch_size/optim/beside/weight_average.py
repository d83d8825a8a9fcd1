"""An exponential average of the weights whose horizon does not depend on the trace."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, final, get_args

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from variable_batch_size._validation import check_choice, check_number, suggests, type_error, value_error
from variable_batch_size.optim.optimizer import CustomOptimizer
from variable_batch_size.optim.properties import Commit
from variable_batch_size.optim.tensors.arithmetic import has_dtensor, is_narrow, local_parts
from variable_batch_size.optim.tensors.hooks import weakly
from variable_batch_size.optim.tensors.parameters import list_parameters

By = Literal["progress", "samples"]


@final
class WeightAverage:
    """The exponential moving average of weights, by how far each update moves the training and not by its number.

    After an update with progress p, in updates at `ref_batchsize`, avg = decay^p avg + (1 - decay^p) weights. A fixed
    decay for each update would average over k times as many samples where batches are k times as large. The averages
    are tensors of their own, at least in float32, sharded as the weights are; buffers are not averaged. Parameters that
    the optimizer gets later are averaged from then on.

    Source: the EMA scaling rule of Busbridge et al. 2023, arXiv 2307.13813, decay^k for a batch k times as large.

    Args:
        parameters: the weights, such as `model.parameters()`.
        decay: the decay of an update at `ref_batchsize`, in [0, 1).
        optimizer: the optimizer that updates them; each of its updates changes the averages.
        by: what p is: "progress", as the rule counts it, or "samples", B / ref_batchsize.

    Attributes:
        averages: the averages, in the order of `parameters`, then of those that the optimizer got later.

    Raises:
        TypeError: if `optimizer` is not a `CustomOptimizer`, or a parameter is no floating-point tensor.
        ValueError: if `decay` is out of range, there is no parameter, or `by="samples"` without a `ref_batchsize`; if
            FSDP2 has gathered a parameter.
    """

    @suggests
    def __init__(
        self, parameters: Iterable[Tensor], decay: float, optimizer: CustomOptimizer, *, by: By = "progress"
    ) -> None:
        if not isinstance(optimizer, CustomOptimizer):
            raise type_error("optimizer must be a vbs.CustomOptimizer", optimizer, "pass the wrapper")
        self._parameters = list(parameters)
        for parameter in self._parameters:
            if not (isinstance(parameter, Tensor) and parameter.is_floating_point()):
                raise type_error("parameters must be floating-point tensors", parameter, "pass model.parameters()")
        remedy = "pass one in [0, 1), such as 0.999"
        self.decay = check_number(decay, "decay", remedy)
        if not 0 <= self.decay < 1:
            raise value_error("decay must be in [0, 1)", decay, remedy)
        if not self._parameters:
            raise value_error("there must be weights to average", "none", "pass model.parameters()")
        check_choice(by, "by", get_args(By))
        if by == "samples" and optimizer.ref_batchsize is None:
            raise value_error('by="samples" needs a ref_batchsize', "none", "pass it to the optimizer")
        updated = list_parameters(optimizer.param_groups)
        _check_not_gathered(self._parameters, updated)
        self._by, self._optimizer, self._given = by, optimizer, len(self._parameters)
        self._known = {id(weight) for weight in (*self._parameters, *updated)}
        self.averages = [_copy_widened(weight) for weight in self._parameters]
        optimizer.register(self)
        # Before an update, after which the first weights are not known any more.
        optimizer.inner.register_step_pre_hook(weakly(self._add_new))

    @torch.no_grad()
    def commit(self, commit: Commit) -> None:
        """Move the averages toward the weights of the update that was just made, for the optimizer to call."""
        if not commit.updated:
            return
        weights, averages = local_parts(self._parameters), local_parts(self.averages)
        share = self._share_of_weights(commit, averages[0])
        weights = [weight.to(average.dtype) for weight, average in zip(weights, averages, strict=True)]
        changes = torch._foreach_sub(weights, averages)  # averages += share * (weights - averages)
        torch._foreach_mul_(changes, share)
        torch._foreach_add_(averages, changes)

    def discard(self) -> None:
        """Do nothing: only updates that are committed are averaged."""

    @torch.no_grad()
    def begin_anew(self) -> None:
        """Set the averages to the present weights, as `restore(strict=False)` does if a checkpoint has no averages."""
        self._add_new()
        for average, parameter in zip(self.averages, self._parameters, strict=True):
            average.copy_(parameter)

    def _add_new(self, *_: object) -> None:
        """Begin averages of parameters that the optimizer has got since the last call, with their present values."""
        parameters = list_parameters(self._optimizer.param_groups)
        new = [parameter for parameter in parameters if id(parameter) not in self._known]
        self._known |= set(map(id, new))
        self._parameters += new
        self.averages += map(_copy_widened, new)

    def _share_of_weights(self, commit: Commit, like: Tensor) -> Any:
        """Return 1 - decay^p, the share of the present weights in the average: a float, or 0-D.

        p is the progress of the update, in updates at the reference batch size. `like`: a tensor on the device.
        """
        progress = commit.scaling.progress
        if self._by == "samples":
            assert self._optimizer.ref_batchsize is not None
            progress = commit.batch.batch_size / self._optimizer.ref_batchsize
        if isinstance(progress, Tensor):
            return 1 - torch.pow(self.decay, progress)
        return self._optimizer.backend.scalar(1 - self.decay**progress, like, "average of the weights")

    @torch.no_grad()
    def copy_to(self, module: nn.Module | Iterable[Tensor]) -> None:
        """Write the averages into another module of the same structure, or into its parameters, in the same order.

        Where FSDP2 shards the model, all ranks call it, with a module that was built and sharded in the same way.
        Buffers stay as they are.

        Raises:
            ValueError: if the module has other parameters, or is the one that is trained; if the optimizer got
                parameters later, whose place in a module is not known.
        """
        self._add_new()
        trained = {id(parameter) for parameter in self._parameters}
        remedy = "pass parameters in the order of `averages`"
        if isinstance(module, nn.Module):
            if self._given < len(self.averages):
                got = f"a module, but the optimizer got {len(self.averages) - self._given} of them later"
                raise value_error("the order of the averaged parameters must be known", got, remedy)
            for part in module.modules():
                if isinstance(part, FSDPModule):
                    part.reshard()  # the root stays gathered after a forward without a backward
            module, remedy = module.parameters(), "pass a module that was built in the same way"
        targets = list(module)
        if any(id(parameter) in trained for parameter in targets):
            requirement = "the averages must be written to another module than the one that is trained"
            raise value_error(requirement, "its own parameters", "pass copy.deepcopy(model), or build a second one")
        _check_shapes("parameters to write to", targets, self.averages, remedy)
        for target, average in zip(targets, self.averages, strict=True):
            target.copy_(average)

    def state_dict(self) -> dict[str, Any]:
        """Return the averages, whole, by the numbers of the parameters; all ranks of a sharded model call it."""
        self._add_new()
        whole = [average.full_tensor() if isinstance(average, DTensor) else average for average in self.averages]
        return {"version": 1, "averages": {str(number): average for number, average in enumerate(whole)}}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the averages from a state, in the order of the parameters.

        Raises:
            ValueError: if it has other parameters.
        """
        self._add_new()
        saved = list(state_dict["averages"].values()) if state_dict.get("version") == 1 else []
        _check_shapes("averages of a state", saved, self.averages, "restore one of the same model")
        for average, saved_average in zip(self.averages, saved, strict=True):
            average.copy_(_placed_as(average, saved_average))


def _check_not_gathered(parameters: list[Tensor], updated: list[Tensor]) -> None:
    """Raise ValueError if a parameter is the gathered tensor of an FSDP2 forward pass, which no optimizer updates.

    Args:
        parameters: the parameters to average.
        updated: the parameters of the optimizer.
    """
    updated_ids = {id(parameter) for parameter in updated}
    not_updated = [parameter for parameter in parameters if id(parameter) not in updated_ids]
    if has_dtensor(updated) and any(not isinstance(parameter, DTensor) for parameter in not_updated):
        raise value_error(
            "parameters must be those that the optimizer updates",
            "one of a module that FSDP2 has gathered in a forward pass",
            "create the average before the first forward pass, or call reshard() of the module",
        )


def _check_shapes(what: str, tensors: list[Tensor], averages: list[Tensor], remedy: str) -> None:
    """Raise ValueError unless the tensors, called `what`, have the shapes of the averages, in the same order."""
    if [tensor.shape for tensor in tensors] != [tensor.shape for tensor in averages]:
        requirement = f"{what} must have the shapes of the {len(averages)} parameters that are averaged"
        raise value_error(requirement, f"{len(tensors)}, or other shapes", remedy)


def _copy_widened(parameter: Tensor) -> Tensor:
    """Return a copy of a parameter, at least in float32: a narrower average would lose the small changes of updates."""
    copy = parameter.detach().clone()
    return copy.float() if is_narrow(copy) else copy


def _placed_as(average: Tensor, whole: Tensor) -> Tensor:
    """Return a whole tensor, which every rank has, in a form that `average.copy_()` accepts.

    For a DTensor that is a replicated DTensor on the same mesh of ranks.
    """
    if not isinstance(average, DTensor):
        return whole
    mesh = average.device_mesh
    return DTensor.from_local(whole.to(average.to_local().device), mesh, [Replicate()] * mesh.ndim, run_check=False)
