"""A torch optimizer that wraps another one and shares its parameter groups, state, defaults and hooks."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer, SparseAdam

from variable_batch_size._validation import type_error
from variable_batch_size.backend import Backend
from variable_batch_size.data.dealer import Dealer
from variable_batch_size.data.plan.state import check_entries, check_items

_stepping: set[int] = set()  # ids of the inner optimizers whose step a wrapper has called


@contextmanager
def stepping(inner: Optimizer) -> Iterator[None]:
    """Allow `inner.step()` within a block, for the wrapper of `inner`. Elsewhere a hook of it raises an error."""
    _stepping.add(id(inner))
    try:
        yield
    finally:
        _stepping.discard(id(inner))


def _check_stepped_by_wrapper(wrapper: weakref.ref[OptimizerWrapper], inner: Optimizer, *_: object) -> None:
    """Raise RuntimeError if `step()` of a wrapped optimizer is called by anything but a wrapper."""
    if wrapper() is not None and id(inner) not in _stepping and not _creates_state(inner):
        raise RuntimeError(
            f"a wrapped optimizer must be stepped by its wrapper, but step() of the inner {type(inner).__name__} was "
            f"called; call step() of the vbs optimizer"
        )


def _creates_state(inner: Optimizer) -> bool:
    """Return whether this step seems to be one of torch.distributed.checkpoint: it creates a state, with lr 0."""
    return not inner.state and all(float(lr_of(group)) == 0 for group in inner.param_groups)


def _add_param_group(
    wrapper: weakref.ref[OptimizerWrapper], inner: weakref.ref[Optimizer], param_group: dict[str, Any]
) -> None:
    """Add a parameter group through the wrapper, as long as it lives: it replaces `add_param_group` of `inner`."""
    live_inner, live_wrapper = inner(), wrapper()
    if live_wrapper is not None:
        live_wrapper.add_param_group(param_group)
    elif live_inner is not None:
        type(live_inner).add_param_group(live_inner, param_group)


def wrapper_of(inner: object) -> OptimizerWrapper | None:
    """Return the `OptimizerWrapper` around an optimizer of torch, or None.

    A wrapper replaces the method `add_param_group` of its inner optimizer by a partial that refers to the wrapper.
    """
    method = vars(inner).get("add_param_group") if isinstance(inner, Optimizer) else None
    if not (isinstance(method, partial) and method.func is _add_param_group):
        return None
    wrapper: OptimizerWrapper | None = method.args[0]()  # a weak reference
    return wrapper


class OptimizerWrapper(Optimizer):
    """A wrapper that shares parameter groups, state, defaults and hooks with `inner`. Subclasses define `step`.

    Args:
        inner: any torch optimizer that steps without a closure, on dense gradients.

    Raises:
        TypeError: if `inner` is not a `torch.optim.Optimizer`, or a wrapper, LBFGS, SparseAdam or SAM.
    """

    _initialized = False  # torch's constructor calls add_param_group for the groups that `inner` has already

    def __init__(self, inner: Optimizer) -> None:
        self.inner = _check_inner(inner)
        # Both are one optimizer to a user: the properties below read and write these three of the inner one.
        shared = inner.defaults, inner.state, inner.param_groups
        super().__init__(inner.param_groups, inner.defaults)  # replaces these three by empty ones
        inner.defaults, inner.state, inner.param_groups = shared
        # Hooks belong to the inner optimizer, whose step() runs them once an update.
        for register in (name for name in dir(Optimizer) if name.startswith("register_")):
            setattr(self, register, getattr(inner, register))
        # Weak references: the inner optimizer must not keep its wrapper alive.
        inner.add_param_group = partial(_add_param_group, weakref.ref(self), weakref.ref(inner))  # type: ignore[method-assign]
        inner.register_step_pre_hook(partial(_check_stepped_by_wrapper, weakref.ref(self)))
        self._initialized = True

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's parameter groups."""
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        """Replace the groups, as a resumed fine-tuning does; train their parameters if these are others."""
        if self._initialized and not _same_parameters(groups, self.inner.param_groups):
            assign = partial(setattr, self.inner, "param_groups", groups)
            self._change_groups("the setter of param_groups", len(groups), assign)
        else:
            self.inner.param_groups = groups

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """The inner optimizer's state by parameter."""
        return self.inner.state

    @state.setter
    def state(self, state: defaultdict[Tensor, Any]) -> None:
        self.inner.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """The inner optimizer's default hyperparameters."""
        return self.inner.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.inner.defaults = defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, the same on every rank. The next update determines which parameters have gradients.

        The inner optimizer's own `add_param_group` does the same.

        Raises:
            RuntimeError: in the middle of a step.
            ValueError: if each group has a rule of its own.
        """
        if self._initialized:
            add = partial(type(self.inner).add_param_group, self.inner, param_group)
            self._change_groups("add_param_group()", len(self.param_groups) + 1, add)

    def _change_groups(self, caller: str, number: int, change: Callable[[], None]) -> None:
        """Call `change`, after which there are `number` parameter groups. `caller` is named in errors."""
        change()

    def __getattr__(self, name: str) -> Any:
        """Return the inner optimizer's `train` and `eval`, which schedule-free ones have."""
        if name in ("train", "eval") and "inner" in vars(self):
            return getattr(self.inner, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _load_inner(self, state_dict: dict[str, Any]) -> None:
        """Load the state of the inner optimizer; raise ValueError if it cannot be, and leave it as it was."""
        check_hyperparameters(self.inner, state_dict)
        state, groups = self.inner.state, self.inner.param_groups
        try:
            self.inner.load_state_dict({key: value for key, value in state_dict.items() if key != "vbs"})
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            self.inner.state, self.inner.param_groups = state, groups
            raise ValueError(
                f"a state must be as {type(self.inner).__name__} has saved it, but its load_state_dict() raises "
                f"{type(error).__name__}: {error}; restore one as it was saved"
            ) from error
        # The run that saved the state has made steps: otherwise the first one of torch's schedulers would warn.
        self._opt_called = self.inner._opt_called = True  # type: ignore[attr-defined]

    def __getstate__(self) -> dict[str, Any]:
        """Raise TypeError: a copy or a pickle would lose the model and the sampler."""
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled; create another one and load its state_dict(), and "
            f"call optimizer.step() in the place of xm.optimizer_step(optimizer), which asks for a copy"
        )


def lr_of(group: dict[str, Any]) -> Any:
    """Return the learning rate of a parameter group; 1.0 if the optimizer has none, or finds its own."""
    lr = group.get("lr")
    return 1.0 if lr is None else lr


def run_closure(closure: Callable[[], object], *, scaled: bool) -> None:
    """Run the closure that a user has passed to `step()`, with gradients enabled; it calls `backward()`.

    `scaled`: whether a `GradScaler` has called `step()`, which needs the gradients before.
    """
    if not callable(closure):
        raise type_error("closure must be a function", closure, "pass a count as step(count=...)")
    if scaled:
        raise RuntimeError(
            "a GradScaler needs the gradients before step(), but a closure computes them in it; call "
            "optimizer.backward(loss, scaler=scaler) first, and step() without a closure"
        )
    with torch.set_grad_enabled(True):
        closure()


def check_kind(inner: Optimizer, saved: str) -> None:
    """Check that a state is that of an optimizer of this class: the moments of another one mean something else."""
    if type(inner).__name__ != saved:
        raise ValueError(
            f"the state was saved of {saved}, but this optimizer is {type(inner).__name__}; create the optimizer that "
            "was saved, or pass strict=False if both have the same hyperparameters"
        )


def check_hyperparameters(inner: Optimizer, state_dict: dict[str, Any]) -> None:
    """Check that a state has the groups and the hyperparameters of an optimizer, before anything of it is loaded.

    torch would miss a hyperparameter only in the next step. Flags may be missing: newer versions of torch add some.
    """
    check_entries(state_dict, {"state": (dict,), "param_groups": (list,)})
    check_items(state_dict["param_groups"], (dict,), "param_groups")
    if type(inner).load_state_dict is Optimizer.load_state_dict:
        saved, present = (  # number of parameters of each group
            [len(group.get("params", ())) for group in groups]
            for groups in (state_dict["param_groups"], inner.param_groups)
        )
        if saved != present:
            raise ValueError(
                f"a state must have as many parameters in each group as the optimizer, but it has {saved} and the "
                f"optimizer {present}; create the same groups before it is loaded, as for unfrozen parameters"
            )
    needed = {name for name, value in inner.defaults.items() if isinstance(value, (float, int, tuple, Tensor))}
    needed -= {name for name, value in inner.defaults.items() if isinstance(value, bool)}
    for number, group in enumerate(state_dict["param_groups"]):
        missing = sorted(needed - group.keys())
        if missing:
            raise ValueError(
                f"a state must come from an optimizer of the same kind, but its parameter group {number} has no "
                f"{' and no '.join(missing)}, which {type(inner).__name__} needs; create the optimizer that was saved"
            )
    terms = state_dict.get("vbs", {}).get("bias_correction", ())  # for each group, [] if it has none
    for number, (group, terms_of_group) in enumerate(zip(state_dict["param_groups"], terms, strict=False)):
        if terms_of_group and not any(parameter in state_dict["state"] for parameter in group.get("params", ())):
            raise ValueError(
                f"a state must hold the averages whose bias a rule corrects, but it has none of parameter group "
                f"{number}; restore one as it was saved"
            )


def _same_parameters(groups: list[dict[str, Any]], others: list[dict[str, Any]]) -> bool:
    """Return whether both have the same tensors, as objects. `==` would compare the elements of tensors."""
    ids, other_ids = ([[id(tensor) for tensor in group["params"]] for group in listed] for listed in (groups, others))
    return ids == other_ids


def _check_inner(inner: Optimizer) -> Optimizer:
    """Return the inner optimizer if it can be wrapped; raise TypeError for others, such as LBFGS."""
    remedies = {
        OptimizerWrapper: "wrap the optimizer inside it instead",
        LBFGS: "it needs a closure that runs the model; use an optimizer that steps without one",
        SparseAdam: "it accepts only sparse gradients; use Adam, and layers with sparse=False",
    }
    if not isinstance(inner, Optimizer):
        raise TypeError(f"the inner optimizer must be a torch.optim.Optimizer, got {type(inner).__name__}; pass one")
    if not hasattr(inner, "_optimizer_step_pre_hooks"):
        raise TypeError(
            f"the inner optimizer must have called the constructor of torch.optim.Optimizer, but a "
            f"{type(inner).__name__} has not; pass the optimizer that it wraps, such as prepared.optimizer"
        )
    if hasattr(inner, "first_step"):  # as SAM has, of any of its authors
        remedies[type(inner)] = "it needs a second backward within its step; use the optimizer that it wraps"
    for kind, remedy in remedies.items():
        if isinstance(inner, kind):
            raise TypeError(f"{type(inner).__name__} cannot be the inner optimizer: {remedy}")
    return inner


def check_sampler(sampler: object) -> None:
    """Raise TypeError unless the sampler of an optimizer is a `CustomSampler`, or `ArrivingBatches`."""
    if not isinstance(sampler, Dealer):
        raise TypeError(
            f"the sampler must be the vbs.CustomSampler that feeds the loop, got {type(sampler).__name__}; create one "
            f"and pass it to the loader as batch_sampler, or pass vbs.ArrivingBatches"
        )


def check_world(sampler: Dealer, backend: Backend) -> None:
    """Raise ValueError unless a sampler deals microbatches for the same rank and number of ranks as the backend."""
    if sampler.world != backend.world:
        dealt, here = (f"rank {world.rank} of {world.size}" for world in (sampler.world, backend.world))
        kind = type(backend).__name__
        raise ValueError(
            f"the sampler deals for {dealt}, but the optimizer's {kind} is {here}; pass num_replicas and rank of this "
            "process, and initialize torch.distributed (or move the model to its XLA device) before"
        )
