"""Apply the factors of a rule to the hyperparameters of an optimizer, for the length of one step of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.optim import ASGD, Optimizer, RAdam, Rprop

from variable_batch_size._validation import value_error
from variable_batch_size.backend import Backend
from variable_batch_size.optim.scaling.bias_correction import BiasCorrection, Group, Groups
from variable_batch_size.optim.tensors.arithmetic import local_parts
from variable_batch_size.optim.wrapper import lr_of
from variable_batch_size.rules import Scaling

CAPTURABLE = (RAdam, ASGD, Rprop)  # optimizers that compute on the device without a branch on the host if they are so


class _Decay(NamedTuple):
    """A decoupled weight decay of one step: parameters <- (1 - lr * factor) parameters."""

    parameters: list[Tensor]
    lr: Any
    factor: Any
    place: str = ""


@final
class HyperparameterScaling:
    """Scales the hyperparameters of an optimizer for one step, and restores the user's values after it.

    Around an Adam, lr, eps and a decoupled weight decay are also multiplied by what the bias correction needs if betas
    change, see `BiasCorrection`. A factor on lr that is a 0-D tensor is left to `DeferredLrFactor`
    where lr cannot be one itself.

    Args:
        inner: the inner optimizer.
        backend: the backend of the optimizer.
        deferred_lr: whether factors on lr may be tensors, which the host does not read.
        selects: whether a device decides which updates are skipped. Then the factors of the bias correction are 0-D
            tensors, and a hook makes the decoupled weight decay: torch's own compares it with 0 on the host.
        scale_betas: for each group, whether its rule may scale betas.
    """

    def __init__(
        self,
        inner: Optimizer,
        backend: Backend,
        *,
        deferred_lr: bool = False,
        selects: bool = False,
        scale_betas: Sequence[bool] = (),
    ) -> None:
        self._inner, self._backend = inner, backend
        self._bias_correction = BiasCorrection(inner, backend, on_device=selects, always=scale_betas)
        # Contexts in which numbers are inputs of compiled graphs and no constants: of the step, of bias terms.
        self._numbers_as_inputs = backend.numbers_as_inputs(inner, unread=selects)
        self._numbers_of_terms = backend.numbers_as_inputs(inner, unread=True)
        self._capturable = {"capturable": True} if selects and type(inner) in CAPTURABLE else {}
        self._lr_on_device = (deferred_lr or selects) and backend.static_graph and _takes_lr_on_device(inner)
        self._decays: list[_Decay] = []
        if selects:
            inner.register_step_pre_hook(self._apply_decays)
        self._deferred_lr = DeferredLrFactor(inner, backend) if deferred_lr and not self._lr_on_device else None

    @contextmanager
    def apply(self, scalings: Sequence[Scaling], skips: Tensor | None = None) -> Iterator[None]:
        """Scale the hyperparameters of each parameter group within a block that calls `inner.step()`.

        `skips`: whether the update is skipped, 0-D, where a device decides it.
        """
        groups = self._inner.param_groups
        _check_betas(groups, scalings)
        with nullcontext() if skips is None else self._numbers_of_terms:
            corrected = self._bias_correction.correct(scalings)
            indexed = enumerate(zip(groups, corrected, strict=True))
            changes = [
                self._plain_options(group) | self._scale_lr(index, group, scaling) | _scaled_others(group, scaling)
                for index, (group, scaling) in indexed
            ]
        by_group = enumerate(zip(groups, scalings, corrected, changes, strict=True))
        self._decays = [self._separate_decay(index, *of_group) for index, of_group in by_group]  # also alters `changes`
        _check_all_scaled(changes, corrected)
        saved = [{name: group[name] for name in change} for group, change in zip(groups, changes, strict=True)]
        try:
            _update_groups(groups, changes)
            if self._deferred_lr is not None:
                self._deferred_lr.save(groups, corrected)
            with self._numbers_as_inputs:
                yield
            _check_unchanged(groups, changes)
        finally:
            _update_groups(groups, saved)
            self._decays = []
            if self._deferred_lr is not None:
                self._deferred_lr.clear()
        self._bias_correction.commit(skips)

    def _separate_decay(self, index: int, group: Group, scaling: Scaling, corrected: Scaling, change: Group) -> _Decay:
        """Return the weight decay of a group that `_apply_decays` has to make, and set the optimizer's own to 0.

        It is empty unless a device corrects lr: torch compares the weight decay, which would be a tensor, with 0.
        `corrected`: `scaling` with Adam's bias correction. `change`: what the group gets for this step, by name.
        """
        eps: Any = corrected.eps  # a tensor if, and only if, lr is corrected on the device
        if not (isinstance(eps, Tensor) and group.get("decoupled_weight_decay") and group["weight_decay"]):
            return _Decay([], 0.0, 0.0)
        change["weight_decay"] = 0.0
        parameters = [parameter for parameter in dict.fromkeys(group["params"]) if parameter.grad is not None]
        factor = scaling.lr * group["weight_decay"] * scaling.weight_decay
        return _Decay(local_parts(parameters), lr_of(group), factor, f"decay of group {index}")

    @torch.no_grad()
    def _apply_decays(self, *_: object) -> None:
        """Before the optimizer's step, multiply parameters by 1 - lr * weight decay, where `_decays` has them."""
        for parameters, lr, factor, place in (decay for decay in self._decays if decay.parameters):
            like = parameters[0]
            if isinstance(lr, Tensor) and lr.device == like.device:
                remaining = 1 - lr * self._backend.scalar(factor, like, place)
            else:
                remaining = self._backend.scalar(1 - float(lr) * factor, like, place)
            for parameter in parameters:
                parameter.mul_(remaining)

    def _plain_options(self, group: Group) -> Group:
        """Return options of torch's optimizers for a device that compiles graphs, which a group gets for a step.

        `foreach` and `fused` are off, so that the step is made parameter by parameter; some need `capturable`.
        """
        if not self._backend.static_graph:
            return {**self._capturable}
        return {name: False for name in ("foreach", "fused") if name in group} | self._capturable

    def _scale_lr(self, index: int, group: Group, scaling: Scaling) -> Group:
        """Return {"lr": scaled value} for the step of a group, or {} if it has no lr.

        A factor that is a tensor is left out where `DeferredLrFactor` applies it after the step instead.
        """
        if group.get("lr") is None:
            if "lr" in group and _scales(scaling.lr):  # an Adafactor that finds its own
                requirement = "a rule that scales the learning rate needs one in each parameter group"
                raise value_error(requirement, f"None in group {index}", "pass a number, or use the constant rule")
            return {}
        lr = group["lr"]
        factor = scaling.lr
        # Three cases: lr is a tensor that the user has put on the device, a number, or a tensor because of its factor.
        if not (self._lr_on_device and isinstance(factor, Tensor)):
            factor = 1 if isinstance(factor, Tensor) else factor
            devices = [parameter.device for parameter in group.get("params", ())[:1]]
            if isinstance(lr, Tensor) and lr.device in devices:
                return {"lr": lr * self._backend.scalar(factor, lr, f"factor on lr of group {index}")}
            return {"lr": self._backend.hyperparameter(lr * factor)}
        return {"lr": factor * self._backend.number(lr, factor, f"lr of group {index}")}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the bias correction; an empty dict if there is none."""
        return self._bias_correction.state_dict()

    def regroup(self, before: Groups, after: Groups) -> None:
        """Keep the state of parameters whose groups have changed."""
        self._bias_correction.regroup(before, after)

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if the entry of the bias correction is damaged."""
        self._bias_correction.check_state(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; an empty one resets the bias correction."""
        self._bias_correction.load_state_dict(state)


@final
class DeferredLrFactor:
    """A factor on lr that stays on the device: w = w_old + factor (w_new - w_old) after the optimizer's own step.

    This equals a factor on lr if the change of the parameters is proportional to lr. It needs a copy of the scaled
    parameters during the step. It is the first post-hook of the step, so that hooks which are registered later see the
    final parameters; pre-hooks see the reference lr.
    """

    def __init__(self, inner: Optimizer, backend: Backend) -> None:
        self._backend = backend
        self._saved: list[tuple[list[Tensor], list[Tensor], Tensor]] = []  # parameters, their old values, factor (0-D)
        inner.register_step_post_hook(self._apply_factors)

    def save(self, groups: Sequence[Group], scalings: Sequence[Scaling]) -> None:
        """Before a step, copy the parameters of groups whose factor on lr is a tensor, to scale their change later."""
        for group, scaling in zip(groups, scalings, strict=True):
            parameters = [parameter for parameter in dict.fromkeys(group["params"]) if parameter.grad is not None]
            if parameters and isinstance(scaling.lr, Tensor):
                parts = local_parts(parameters)
                with torch.no_grad():  # a product with 1 is a copy, by one kernel for all of a list
                    old = [*map(torch.clone, parts)] if self._backend.static_graph else torch._foreach_mul(parts, 1)
                self._saved.append((parts, list(old), scaling.lr))

    def clear(self) -> None:
        """Drop the copies, after a step."""
        self._saved.clear()

    def _apply_factors(self, *_: object) -> None:
        """After a step, multiply its change of the saved parameters by their factor: old + factor (new - old)."""
        with torch.no_grad():
            for parameters, old, factor in self._saved:
                if self._backend.static_graph:  # there it takes a third of the time of the same in place to trace
                    changes = torch._foreach_mul(torch._foreach_sub(parameters, old), factor)
                    torch._foreach_copy_(parameters, torch._foreach_add(changes, old))
                    continue
                torch._foreach_sub_(parameters, old)
                torch._foreach_mul_(parameters, factor)
                torch._foreach_add_(parameters, old)


def scaling_if(made: Tensor, scaling: Scaling, backend: Backend, place: object) -> Scaling:
    """Return a scaling whose factor on lr and progress are 0 if a device skips the update, which the host cannot know.

    `made`: 1 if it is made, else 0, 0-D of a float dtype. `place`: a name by which a compiled graph finds the inputs
    that hold these numbers.
    """
    factors = {"lr": scaling.lr, "progress": scaling.progress}
    for name, factor in factors.items():
        is_tensor = isinstance(factor, Tensor)
        factors[name] = made * (factor if is_tensor else backend.scalar(factor, made, f"{name} {place}"))
    return replace(scaling, **factors)


@final
class LearningRateCheck:
    """Checks that learning rates stay constant within a step."""

    def __init__(self) -> None:
        self._last: list[object] = []

    def check(self, groups: Sequence[Group], *, inside_step: bool) -> None:
        """Raise RuntimeError if a learning rate has changed since the previous microbatch of the same step."""
        rates = [_identity_of_lr(group.get("lr")) for group in groups]
        if inside_step and rates != self._last:
            raise RuntimeError(
                "the learning rate must stay constant within a step, but it changed between two of its microbatches; "
                "call scheduler.step() only when optimizer.step() has returned True"
            )
        self._last = rates


def _takes_lr_on_device(inner: Optimizer) -> bool:
    """Return whether lr may be a 0-D tensor in the context `Backend.numbers_as_inputs`, which saves operations."""
    return type(inner) in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


def _update_groups(groups: Sequence[Group], values: Sequence[Group]) -> None:
    """Set hyperparameters of parameter groups: those that `values` has for each group, by name."""
    for group, new in zip(groups, values, strict=True):
        group.update(new)


def _scaled_others(group: Group, scaling: Scaling) -> Group:
    """Return the scaled weight decay, eps and betas of a group, by name: those that a rule scales; lr is left out."""
    changes: Group = {}
    for name, factor in (("weight_decay", scaling.weight_decay), ("eps", scaling.eps)):
        if _scales(factor) and isinstance(group.get(name), (int, float, Tensor)):  # the eps of Adafactor is a pair
            changes[name] = group[name] * factor
    return changes | _scaled_betas(group, scaling)


def _scales(factor: Any) -> bool:
    """Return whether a factor changes anything; the host does not know the value of a tensor."""
    return isinstance(factor, Tensor) or factor != 1


def _scaled_betas(group: Group, scaling: Scaling) -> Group:
    """Return the scaled betas of a group, or its alpha, as {name: value}; an empty dict if no beta is scaled."""
    if scaling.scales_betas and "betas" in group:
        return {"betas": scaling.scaled_betas(group["betas"])}
    if scaling.scales_betas and "alpha" in group and "lambd" not in group:  # as in RMSprop; an exponent in ASGD
        return {"alpha": scaling.scaled_alpha(group["alpha"])}
    return {}


def _check_betas(groups: Sequence[Group], scalings: Sequence[Scaling]) -> None:
    """Raise ValueError if the factors of a rule, one scaling for each group, take a beta of Adam out of [0, 1)."""
    for group, scaling in zip(groups, scalings, strict=True):
        for name, changed in _scaled_betas(group, scaling).items():
            # "betas" is a pair of numbers, "alpha" is one.
            pairs = zip(group[name], changed, strict=True) if name == "betas" else [(group[name], changed)]
            for beta, scaled in pairs:
                if not 0 <= scaled < 1:
                    raise ValueError(_message_of_beta(beta, scaled, scaling))


def _message_of_beta(beta: float, scaled: float, scaling: Scaling) -> str:
    """Return the error message for a beta that `scaling` has changed to `scaled`, outside of [0, 1)."""
    if not 0 <= scaling.scaled_beta(beta) < 1:
        cause = f"the factor {scaling.one_minus_beta:g} on 1 - beta"
        remedy = "limit the largest batch size of the trace, or choose a beta closer to 1"
    else:
        cause = f"beta1_power={scaling.beta1_power:g} and beta2_power={scaling.beta2_power:g}"
        remedy = "let the rule return larger exponents"
    return f"a rule must leave every beta in [0, 1), but {cause} changes {beta:g} to {scaled:g}; {remedy}"


def _check_all_scaled(changes: Sequence[Group], scalings: Sequence[Scaling]) -> None:
    """Raise ValueError if scalings change a hyperparameter that no parameter group has."""
    names = "lr", "weight_decay", "eps"
    requested = {
        **{name: any(_scales(getattr(scaling, name)) for scaling in scalings) for name in names},
        "betas": any(scaling.scales_betas for scaling in scalings),
    }
    scaled = {"betas" if name == "alpha" else name for change in changes for name in change}
    missing = [name for name, is_requested in requested.items() if is_requested and name not in scaled]
    if missing:
        raise ValueError(
            f"a rule can scale only hyperparameters that the optimizer has, but no parameter group has "
            f"{' or '.join(missing)}; use another rule with this optimizer"
        )


def _check_unchanged(groups: Sequence[Group], changes: Sequence[Group]) -> None:
    """Raise RuntimeError if a hyperparameter is not the one that was set for the step."""
    for group, change in zip(groups, changes, strict=True):
        changed = [name for name, value in change.items() if group[name] is not value]
        if changed:
            raise RuntimeError(
                f"hyperparameters stay constant within an update, but {' and '.join(changed)} changed in the inner "
                "optimizer's step(), as by a scheduler in a hook; call scheduler.step() after optimizer.step() has "
                "returned True"
            )


def _identity_of_lr(lr: object) -> object:
    """Return a value to compare that differs if a learning rate was changed, without reading a tensor from a device.

    For a tensor it is the object and its version, which counts changes in place.
    """
    return (id(lr), lr._version) if isinstance(lr, Tensor) else lr
