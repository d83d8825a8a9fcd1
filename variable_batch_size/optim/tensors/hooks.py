"""Hooks that do not keep alive what they call, and code that runs outside of compiled graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, final
from weakref import WeakMethod, finalize

import torch
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

Function = TypeVar("Function", bound=Callable[..., Any])


def uncompiled(function: Function) -> Function:
    """Return a function that runs outside of the graphs of its callers; what it calls may be compiled by itself."""
    disabled: Function = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return disabled


def weakly(method: Callable[..., Any], *first: Any) -> Callable[..., Any]:
    """Return a function that calls a method, with these arguments first, and does nothing once its object is gone.

    For hooks: torch keeps the hook of a parameter, which must not keep an optimizer alive.
    """
    weak_method = WeakMethod(method)

    def call_while_alive(*args: Any) -> Any:
        live_method = weak_method()
        return None if live_method is None else live_method(*first, *args)

    return call_while_alive


def remove_with(owner: object, hooks: list[RemovableHandle]) -> None:
    """Remove the hooks in a list, also those that are added to it later, when `owner` is garbage-collected."""
    finalize(owner, remove_all, hooks).atexit = False


def remove_all(hooks: list[RemovableHandle]) -> None:
    """Remove hooks of torch by their handles, and empty the list of handles."""
    for hook in hooks:
        hook.remove()
    hooks.clear()


def bare(module: Module | None) -> Module | None:
    """Return a model without its DistributedDataParallel, if it is in one."""
    return module.module if isinstance(module, DistributedDataParallel) else module


def call_before_forward(
    module: Module | None, method: Callable[..., None], *args: object, first: bool = False, once: bool = False
) -> None:
    """Call a method before each forward pass of a module, if gradients are enabled, as long as its object lives.

    `method`: a bound method, which is referred to weakly. `first`: whether it is called before all other hooks.
    `once`: whether it is called before one forward pass only.
    """
    if module is None:
        return
    hook, owner = _Hook(WeakMethod(method), args), method.__self__  # type: ignore[attr-defined]
    handle = module.register_forward_pre_hook(hook, prepend=first)
    finalize(owner, handle.remove).atexit = False
    if once:
        hook.remove = handle.remove


@final
class _Hook:
    """Calls a method; a copy of the module has one that calls none."""

    def __init__(self, method: Callable[[], Any] = lambda: None, args: tuple[object, ...] = ()) -> None:
        self._method, self._args = method, args
        self.remove: Callable[[], None] = lambda: None

    @uncompiled
    def __call__(self, module: Module, args: Any) -> None:
        """Call the method, before a forward pass, if gradients are enabled and its object still lives."""
        method = self._method() if torch.is_grad_enabled() else None
        if method is not None:
            self.remove()  # does nothing unless the hook is called once only
            method(*self._args)

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        return _Hook, ()
