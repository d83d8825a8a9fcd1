"""Schedulers and hooks of torch work on the wrapper as on any optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.optim.swa_utils import SWALR

from helpers.reference import REF, SGD, SIZES, Array, assert_equal, batches, gradient, network, training
from variable_batch_size.backend import Backend
from variable_batch_size.testing import run_ranks


def label(value: Any) -> str:
    return value.__name__ if isinstance(value, type) else "-".join(value)


# ----------------------------------------------------------------------------------------------------------- schedulers

SCHEDULERS: dict[Any, Callable[[Optimizer], Any]] = {
    lr_scheduler.LambdaLR: lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)),
    lr_scheduler.MultiplicativeLR: lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    lr_scheduler.StepLR: lambda o: lr_scheduler.StepLR(o, 2),
    lr_scheduler.MultiStepLR: lambda o: lr_scheduler.MultiStepLR(o, [1, 4]),
    lr_scheduler.ConstantLR: lambda o: lr_scheduler.ConstantLR(o, total_iters=3),
    lr_scheduler.LinearLR: lambda o: lr_scheduler.LinearLR(o, total_iters=3),
    lr_scheduler.ExponentialLR: lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    lr_scheduler.PolynomialLR: lambda o: lr_scheduler.PolynomialLR(o, total_iters=5),
    lr_scheduler.CosineAnnealingLR: lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    lr_scheduler.CosineAnnealingWarmRestarts: lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    lr_scheduler.CyclicLR: lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.05, step_size_up=2),
    lr_scheduler.OneCycleLR: lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=8),
    lr_scheduler.ReduceLROnPlateau: lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    lr_scheduler.SequentialLR: lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.StepLR(o, 2)], milestones=[3]
    ),
    lr_scheduler.ChainedScheduler: lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ExponentialLR(o, 0.8), lr_scheduler.StepLR(o, 2)], optimizer=o
    ),
    SWALR: lambda o: SWALR(o, 0.05, anneal_epochs=3),
}


@pytest.mark.skipif(not torch.__version__.startswith("2.9."), reason="a newer torch may have more")
def test_the_list_has_every_scheduler_of_torch() -> None:
    named = {thing for key, thing in vars(lr_scheduler).items() if isinstance(thing, type) and not key.startswith("_")}
    schedulers = {thing for thing in named if issubclass(thing, lr_scheduler.LRScheduler)}
    assert schedulers - {lr_scheduler.LRScheduler} == SCHEDULERS.keys() - {SWALR}


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam], ids=label)
@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=label)
def test_schedulers_work_as_on_a_plain_optimizer(scheduler: Any, kind: type[Optimizer]) -> None:
    extra = {"momentum": 0.9} if kind is torch.optim.SGD else {"betas": (0.9, 0.99)}
    hyperparameters = {"lr": 0.02} | extra
    plain = kind(network().parameters(), **hyperparameters)  # type: ignore[arg-type]
    run = training(inner=kind, hyperparameters=hyperparameters)
    ours, theirs = SCHEDULERS[scheduler](run.optimizer), SCHEDULERS[scheduler](plain)
    metric = [1.0] if scheduler is lr_scheduler.ReduceLROnPlateau else []
    for _ in range(7):
        run.run(1)
        plain.step()
        ours.step(*metric)
        theirs.step(*metric)
        found, expected = run.optimizer.param_groups[0], plain.param_groups[0]
        assert {key: found[key] for key in found if key != "params"} == {
            key: expected[key] for key in expected if key != "params"
        }


def test_a_scheduler_changes_a_tensor_lr() -> None:
    lr = torch.tensor(0.02, dtype=torch.float64)
    run = training(hyperparameters={"lr": lr})
    scheduler = lr_scheduler.ExponentialLR(run.optimizer, 0.5)
    run.run(2)
    scheduler.step()
    assert run.optimizer.param_groups[0]["lr"] is lr
    assert lr.item() == pytest.approx(0.01)
    assert run.optimizer.current_lr() == pytest.approx(0.02 * 7 / REF)
    run.run(1)
    assert run.optimizer.current_lr() == pytest.approx(0.01 * 1 / REF)


def test_a_scheduler_of_the_inner_optimizer_works_as_well() -> None:
    schedulers = []

    def scheduled(parameters: Iterable[Tensor], **hyperparameters: float) -> Optimizer:
        inner = torch.optim.SGD(parameters, **hyperparameters)
        schedulers.append(lr_scheduler.ExponentialLR(inner, 0.5))
        return inner

    run = training(inner=scheduled).run(1)
    schedulers[0].step()
    run.run(1)
    assert run.optimizer.current_lr() == pytest.approx(0.5 * SGD["lr"] * 7 / REF)


@pytest.mark.parametrize("lr", [0.02, torch.tensor(0.02)], ids=["float", "tensor"])
def test_raises_if_a_scheduler_steps_at_every_microbatch(lr: Any) -> None:
    run = training(hyperparameters={"lr": lr})
    scheduler = lr_scheduler.ExponentialLR(run.optimizer, 0.9)
    steps = run.steps()
    next(steps)
    scheduler.step()
    with pytest.raises(
        RuntimeError, match=r"learning rate must stay within a step.*call scheduler\.step\(\) only when"
    ):
        next(steps)


def test_raises_if_a_scheduler_steps_in_a_step_hook() -> None:
    run = training()
    scheduler = lr_scheduler.ExponentialLR(run.optimizer, 0.9)
    run.optimizer.register_step_post_hook(lambda *_: scheduler.step())
    with pytest.raises(RuntimeError, match=r"must stay within an update, but lr changed .*; call scheduler\.step\(\)"):
        run.run(1)
    assert run.optimizer.param_groups[0]["lr"] == SGD["lr"]


# ---------------------------------------------------------------------------------------------------------------- hooks


def test_step_hooks_run_once_an_update_with_the_reduced_gradient() -> None:
    def look(backend: Backend) -> list[tuple[str, list[Array], list[Array]]]:
        run = training(backend=backend)
        seen = []

        def hook(when: str) -> Callable[..., None]:
            def note(inner: Optimizer, args: object, kwargs: object) -> None:
                assert inner is run.optimizer.inner
                gradients = [p.grad.numpy().copy() for p in run.model.parameters() if p.grad is not None]
                seen.append((when, [weight.copy() for weight in run.weights()], gradients))

            return note

        run.optimizer.register_step_pre_hook(hook("before"))
        run.optimizer.register_step_post_hook(hook("after")).remove()
        run.optimizer.register_step_post_hook(hook("after"))
        run.run(3)
        return seen

    x, target = training().x.numpy(), training().target.numpy()
    for seen in run_ranks(look, 3):
        assert [when for when, _, _ in seen] == 3 * ["before", "after"]
        for (_, weights, gradients), batch in zip(seen[::2], batches(SIZES[:3], 50), strict=True):
            assert_equal(gradients, gradient(weights, x[batch], target[batch]))
        assert_equal(seen[1][1], seen[2][1], 0)  # nothing happens between two updates


def test_global_optimizer_hooks_run_once_an_update() -> None:
    run = training()
    seen: list[object] = []
    handles = [
        register(lambda optimizer, args, kwargs: seen.append(optimizer))
        for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook)
    ]
    run.run(3)
    for handle in handles:
        handle.remove()
    assert seen == 6 * [run.optimizer.inner]


def test_state_hooks_of_the_wrapper_run() -> None:
    run = training().run(1)
    optimizer, calls = run.optimizer, []
    optimizer.register_state_dict_pre_hook(lambda *_: calls.append("save"))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "note": 1})
    optimizer.register_load_state_dict_pre_hook(lambda _, state: calls.append(state["note"]))
    optimizer.register_load_state_dict_post_hook(lambda *_: calls.append("loaded"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["save", 1, "loaded"]
