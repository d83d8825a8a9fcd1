"""A torch optimizer around another one: what it is made of stays the inner one's."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from torch import Tensor
from torch.optim import LBFGS, Optimizer, SparseAdam


class OptimizerWrapper(Optimizer):
    """Shares parameter groups, state, defaults and hooks with `inner`; to be given a `step`.

    Args:
        inner: any torch optimizer that steps without a closure, on dense gradients.

    Raises:
        TypeError: for anything else; the text says what to do.
    """

    _made = False  # until then torch's own constructor runs, which adds the groups that are there

    def __init__(self, inner: Optimizer) -> None:
        self.inner = _checked(inner)
        own = inner.defaults, inner.state, inner.param_groups
        super().__init__(inner.param_groups, inner.defaults)  # empties the inner one
        inner.defaults, inner.state, inner.param_groups = own
        for register in (name for name in dir(Optimizer) if name.startswith("register_")):
            setattr(self, register, getattr(inner, register))
        self._made = True

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's parameter groups."""
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
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
        """Add parameters to the inner optimizer."""
        if self._made:
            self.inner.add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: gradients are cleared after the update, and in between they are needed."""

    def __getstate__(self) -> dict[str, Any]:
        """Refuse copies and pickles, which would leave the model and the sampler behind."""
        raise TypeError(f"a {type(self).__name__} cannot be copied or pickled; make another and load its state_dict()")


def _checked(inner: Optimizer) -> Optimizer:
    remedies = {
        OptimizerWrapper: "wrap the optimizer inside it instead",
        LBFGS: "it runs the model itself, by a closure; use an optimizer that steps without one",
        SparseAdam: "it takes sparse gradients only; use Adam, and layers with sparse=False",
    }
    if not isinstance(inner, Optimizer):
        raise TypeError(f"the inner optimizer must be a torch.optim.Optimizer, got {type(inner).__name__}; make one")
    for kind, remedy in remedies.items():
        if isinstance(inner, kind):
            raise TypeError(f"{type(inner).__name__} cannot be the inner optimizer: {remedy}")
    return inner
