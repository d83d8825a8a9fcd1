"""The wrapper as a torch optimizer: inner optimizers, schedulers, hooks, GradScaler, and what it refuses."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.optim.swa_utils import SWALR

import variable_batch_size as vbs
from helpers.reference import REF, SGD, SIZES, Array, Training, assert_equal, batches, gradient, network, training, twin
from variable_batch_size.backend import Backend
from variable_batch_size.testing import run_ranks


def label(value: Any) -> str:
    return value.__name__ if isinstance(value, type) else "-".join(value)


# ---------------------------------------------------------------------------------------------- the inner optimizer

EVERY = {thing for thing in vars(torch.optim).values() if isinstance(thing, type) and issubclass(thing, Optimizer)}
REFUSED = {torch.optim.LBFGS, torch.optim.SparseAdam}
STEPPING = sorted(EVERY - REFUSED - {Optimizer}, key=label)
VARIANTS: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"foreach": True, "momentum": 0.9}),
    (torch.optim.SGD, {"fused": True, "momentum": 0.9, "nesterov": True}),
    (torch.optim.SGD, {"maximize": True, "dampening": 0.1, "momentum": 0.9}),
    (torch.optim.SGD, {"lr": torch.tensor(0.02, dtype=torch.float64)}),
    (torch.optim.Adam, {"foreach": True}),
    (torch.optim.Adam, {"fused": True}),
    (torch.optim.Adam, {"amsgrad": True, "lr": torch.tensor(0.02)}),
    (torch.optim.AdamW, {"fused": True, "lr": torch.tensor(0.02)}),
    (torch.optim.Adagrad, {"fused": True}),
    (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
]


def by_hand(make: Callable[..., Optimizer], hyperparameters: dict[str, Any]) -> list[Array]:
    """The linear rule around a plain optimizer, as a user would write it: one big batch an update."""
    run = training(inner=make, hyperparameters=hyperparameters)
    inner, lr = run.optimizer.inner, hyperparameters["lr"]
    for batch in batches(SIZES, 50):
        run.loss(batch.tolist()).backward()
        inner.param_groups[0]["lr"] = lr * (len(batch) / REF)
        inner.step()
        inner.zero_grad()
    return run.weights()


@pytest.mark.parametrize(("kind", "options"), [(kind, {}) for kind in STEPPING] + VARIANTS, ids=label)
def test_every_torch_optimizer_steps_as_it_would_by_itself(kind: type[Optimizer], options: dict[str, Any]) -> None:
    def make(parameters: Iterable[Tensor], **hyperparameters: Any) -> Optimizer:
        return kind([p for p in parameters if p.ndim == 2 or kind is not torch.optim.Muon], **hyperparameters)

    hyperparameters = {"lr": 0.02} | options
    run = training(inner=make, hyperparameters=hyperparameters).run(len(SIZES))
    tolerance = 1e-2 if kind is torch.optim.Muon else 1e-10  # Muon's iteration runs in bfloat16
    assert_equal(run.weights(), by_hand(make, hyperparameters), tolerance)
    assert run.optimizer.param_groups[0]["lr"] is hyperparameters["lr"]
    assert run.optimizer.progress == pytest.approx(sum(map(len, batches(SIZES, 50))) / REF)


@pytest.mark.parametrize("kind", sorted(REFUSED, key=label), ids=label)
def test_optimizers_that_cannot_accumulate_are_refused(kind: type[Optimizer]) -> None:
    with pytest.raises(TypeError, match=f"^{kind.__name__} cannot be the inner optimizer: .*; use"):
        training(inner=kind, hyperparameters={})


def test_named_parameters_are_kept() -> None:
    run = training(inner=lambda _, **options: torch.optim.SGD(network().named_parameters(), **options))
    assert run.optimizer.param_groups[0]["param_names"] == ["0.weight", "0.bias", "2.weight", "2.bias"]


def test_wrapping_leaves_the_inner_optimizer_as_it_was() -> None:
    run = training(inner=torch.optim.Adagrad, hyperparameters={"lr": 0.1, "initial_accumulator_value": 0.5})
    plain = torch.optim.Adagrad(network().parameters(), lr=0.1, initial_accumulator_value=0.5)
    assert_same_state(run.optimizer.inner.state_dict(), plain.state_dict())


def test_a_group_that_is_added_later_trains_from_then_on() -> None:
    def first_layer(parameters: Iterable[Tensor], **hyperparameters: float) -> Optimizer:
        return torch.optim.SGD(list(parameters)[:2], **hyperparameters)

    def train(backend: Backend) -> Training:
        run = training(vbs.ConstantOptimizer, SIZES, inner=first_layer, backend=backend).run(2)
        run.optimizer.add_param_group({"params": list(run.model.parameters())[2:], "lr": 0.1})
        return run.run(2)

    model = network()
    plain = first_layer(model.parameters(), **SGD)
    run = training(model=model)
    for step, batch in enumerate(batches(SIZES[:4], 50)):
        if step == 2:
            plain.add_param_group({"params": list(model.parameters())[2:], "lr": 0.1})
        model.zero_grad()
        run.loss(batch.tolist()).backward()
        plain.step()
    for rank in run_ranks(train, 2):
        assert_equal(rank.weights(), run.weights())


def test_gradients_from_before_the_wrapper_do_not_count() -> None:
    model = network()
    model(torch.ones(1, 3).double()).sum().backward()
    assert_equal(training(model=model).run(2).weights(), twin(vbs.LinearRuleOptimizer, SIZES[:2]))


def test_a_group_that_is_added_in_the_middle_of_a_step_is_refused_and_not_added() -> None:
    run = training()
    next(run.turns())
    with pytest.raises(RuntimeError, match=r"^add_param_group\(\) needs whole steps"):
        run.optimizer.add_param_group({"params": [torch.zeros(1, requires_grad=True)]})
    assert len(run.optimizer.param_groups) == 1


# ------------------------------------------------------------------------------------------------------- schedulers

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
def test_every_scheduler_of_torch_is_in_the_list() -> None:
    named = {thing for key, thing in vars(lr_scheduler).items() if isinstance(thing, type) and not key.startswith("_")}
    schedulers = {thing for thing in named if issubclass(thing, lr_scheduler.LRScheduler)}
    assert schedulers - {lr_scheduler.LRScheduler} == SCHEDULERS.keys() - {SWALR}


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam], ids=label)
@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=label)
def test_schedulers_do_to_the_wrapper_what_they_do_to_a_plain_optimizer(scheduler: Any, kind: type[Optimizer]) -> None:
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


def test_a_scheduler_moves_a_rate_that_is_a_tensor() -> None:
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
def test_a_scheduler_that_steps_at_every_microbatch_is_refused(lr: Any) -> None:
    run = training(hyperparameters={"lr": lr})
    scheduler = lr_scheduler.ExponentialLR(run.optimizer, 0.9)
    turns = run.turns()
    next(turns)
    scheduler.step()
    with pytest.raises(
        RuntimeError, match=r"learning rate must stay within a step.*call scheduler\.step\(\) only when"
    ):
        next(turns)


def test_a_scheduler_that_steps_in_a_hook_of_the_update_is_refused() -> None:
    run = training()
    scheduler = lr_scheduler.ExponentialLR(run.optimizer, 0.9)
    run.optimizer.register_step_post_hook(lambda *_: scheduler.step())
    with pytest.raises(RuntimeError, match=r"must stay within an update, but lr changed .*; call scheduler\.step\(\)"):
        run.run(1)
    assert run.optimizer.param_groups[0]["lr"] == SGD["lr"]


# ------------------------------------------------------------------------------------------------------------ hooks


def test_step_hooks_run_once_an_update_with_the_whole_gradient() -> None:
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


def test_hooks_of_all_optimizers_run_once_an_update() -> None:
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


# ------------------------------------------------------------------------------------------------------- GradScaler


def scaled_turns(run: Training, scaler: torch.amp.GradScaler, spoil: int = -1, **unscale: bool) -> Iterator[bool]:
    """The rest of an epoch under a GradScaler; the loss of microbatch number `spoil` is infinite."""
    for number, indices in enumerate(run.sampler):
        loss = run.loss(indices) * (torch.inf if number == spoil else 1)
        scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(run.optimizer)
        yield scaler.step(run.optimizer)  # type: ignore[misc]
        scaler.update()


def grad_scaler(growth_interval: int = 2) -> torch.amp.GradScaler:
    """One whose scale grows at every second microbatch."""
    return torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=growth_interval)


@pytest.mark.parametrize("unscale", [{}, {"unscale": True}], ids=["", "unscale_"])
@pytest.mark.parametrize("kind", [vbs.RootRuleOptimizer, vbs.LinearRuleMomentumOptimizer], ids=label)
def test_a_scale_that_changes_within_a_step_leaves_the_update_exact(kind: Any, unscale: dict[str, bool]) -> None:
    def train(backend: Backend) -> Training:
        run = training(kind, SIZES[:4], 61, backend=backend, max_grad_norm=0.5)
        scaler = grad_scaler()
        assert sum(scaled_turns(run, scaler, **unscale)) == 4
        assert scaler.get_scale() > 2.0**8
        return run

    for run in run_ranks(train, 3):
        assert_equal(run.weights(), twin(kind, SIZES[:4], 61, max_grad_norm=0.5))
        assert run.optimizer.progress == pytest.approx(61 / REF)


def test_an_overflow_on_one_rank_skips_the_update_on_all() -> None:
    def train(backend: Backend) -> tuple[Training, list[bool]]:
        run = training(vbs.RootRuleOptimizer, SIZES[:4], 61, backend=backend)
        return run, list(scaled_turns(run, grad_scaler(), spoil=0 if backend.world.rank == 1 else -1))

    for run, returned in run_ranks(train, 3):
        assert_equal(run.weights(), twin(vbs.RootRuleOptimizer, SIZES[:4], 61, skipped={0}))
        assert sum(returned) == 3
        assert run.optimizer.progress == pytest.approx((61 - SIZES[0]) / REF)
        assert (run.optimizer.updates, run.optimizer.samples) == (4, 61)


def test_an_overflow_in_a_replay_counts_for_nothing() -> None:
    def train(backend: Backend) -> Training:
        run = training(sizes=SIZES[:4], dataset_size=61, backend=backend)
        list(scaled_turns(run, grad_scaler(), spoil=3 if backend.world.rank == 1 else -1))  # its turn in the step of 1
        return run

    for run in run_ranks(train, 3):
        assert_equal(run.weights(), twin(vbs.LinearRuleOptimizer, SIZES[:4], 61))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_scaler_and_autocast_train(dtype: torch.dtype) -> None:
    run = training(sizes=SIZES[:4], dataset_size=61, dtype=torch.float32)
    whole_loss = run.loss

    def loss(indices: Any) -> Tensor:
        with torch.autocast("cpu", dtype=dtype):
            return whole_loss(indices)

    run.loss = loss  # type: ignore[method-assign]
    assert sum(scaled_turns(run, grad_scaler(growth_interval=8))) == 4
    assert_equal(run.weights(), twin(vbs.LinearRuleOptimizer, SIZES[:4], 61), 1e-2)


def test_a_scaler_that_is_switched_off_changes_nothing() -> None:
    run = training(sizes=SIZES[:4], dataset_size=61)
    assert sum(scaled_turns(run, torch.amp.GradScaler("cpu", enabled=False))) == 4
    assert_equal(run.weights(), twin(vbs.LinearRuleOptimizer, SIZES[:4], 61))


# ------------------------------------------------------------------------------------------------------------ state


def assert_same_state(found: dict[str, Any], expected: dict[str, Any]) -> None:
    torch.testing.assert_close(found.pop("state"), expected.pop("state"), rtol=0, atol=0)
    assert found == expected


def test_the_state_of_a_plain_optimizer_is_refused_or_taken_over_alone() -> None:
    plain = torch.optim.SGD(network().parameters(), lr=0.3, momentum=0.5)
    run = training().run(2)
    before = copy.deepcopy(run.optimizer.state_dict())
    with pytest.raises(ValueError, match=r'"vbs".*pass strict=False to take over the inner optimizer.s state alone'):
        run.optimizer.load_state_dict(plain.state_dict())
    assert_same_state(run.optimizer.state_dict(), before)
    run.optimizer.load_state_dict(plain.state_dict(), strict=False)
    assert run.optimizer.param_groups[0]["lr"] == 0.3
    assert run.optimizer.param_groups is run.optimizer.inner.param_groups
    assert run.optimizer.state_dict()["vbs"] == before["vbs"]


@pytest.mark.parametrize(
    ("other", "differs"),
    [
        ({"dataset_size": 60}, "dataset_size was 60 and is 50"),
        ({"sampling": {"seed": 1}}, "seed was 1 and is 0"),
        ({"sizes": (20, 8)}, "trace was"),
        ({"sampling": {"shuffle": False}}, "shuffle was False and is True"),
    ],
)
def test_the_state_of_other_samples_is_refused_and_changes_nothing(other: dict[str, Any], differs: str) -> None:
    run, state = training().run(2), training(**other).run(4).optimizer.state_dict()
    before, weights = copy.deepcopy(run.optimizer.state_dict()), run.weights()
    with pytest.raises(ValueError, match=f"{differs}.*strict=False"):
        run.optimizer.load_state_dict(state)
    assert_same_state(run.optimizer.state_dict(), before)
    run.optimizer.load_state_dict(state, strict=False)
    assert run.optimizer.updates == run.sampler.clock.step == 4
    assert_equal(run.weights(), weights, 0)


def test_the_state_of_another_model_is_refused_and_changes_nothing() -> None:
    run, other = (
        training().run(2),
        training(inner=lambda ps, **options: torch.optim.SGD(list(ps)[:1], **options)).run(4),
    )
    before = copy.deepcopy(run.optimizer.state_dict())
    with pytest.raises(ValueError, match="size of optimizer's group"):
        run.optimizer.load_state_dict(other.optimizer.state_dict())
    assert_same_state(run.optimizer.state_dict(), before)


def test_a_state_that_is_loaded_in_the_middle_of_a_step_drops_its_beginning() -> None:
    run = training(vbs.RootRuleOptimizer, SIZES)
    state = run.optimizer.state_dict()
    next(run.turns())
    run.optimizer.load_state_dict(state)
    assert_equal(run.run(4).weights(), twin(vbs.RootRuleOptimizer, SIZES[:4]))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps], ids=["copy", "deepcopy", "pickle"])
def test_copies_are_refused(copied: Callable[[object], object]) -> None:
    with pytest.raises(TypeError, match=r"cannot be copied or pickled; make another and load its state_dict"):
        copied(training().optimizer)


# --------------------------------------------------------------------------------------------------- the user's loop


def test_the_microbatch_that_is_due_tells_its_weight_in_a_mean() -> None:
    def weights(backend: Backend) -> list[int]:
        run, samples = training(sizes=SIZES, dataset_size=sum(SIZES), backend=backend), [0] * len(SIZES)
        for indices in run.sampler:
            due = run.optimizer.microbatch
            assert due.rows == len(indices) == 4
            assert due.samples in (0, len(set(indices)))  # 0 in a replay
            samples[due.step] += due.samples
            run.loss(indices).backward()
            assert run.optimizer.microbatch == due
            assert run.optimizer.step() == due.ends_step
        return samples

    ranks = run_ranks(weights, 3)
    assert tuple(map(sum, zip(*ranks, strict=True))) == SIZES


@pytest.mark.parametrize("missing", [0, 1, 4, 5, 8])
def test_a_step_without_backward_is_refused(missing: int) -> None:
    run = training()
    turns = iter(run.sampler)
    for _ in range(missing):
        run.loss(next(turns)).backward()
        run.optimizer.step()
    next(turns)
    with pytest.raises(RuntimeError, match=r"no gradient has come since the last one; call loss\.backward\(\) first"):
        run.optimizer.step()


def test_a_replay_may_do_without_backward() -> None:
    def train(backend: Backend) -> Training:
        run = training(sizes=SIZES[:4], dataset_size=61, backend=backend)
        for indices in run.sampler:
            if run.optimizer.microbatch.samples:
                run.loss(indices).backward()
            run.optimizer.step()
        return run

    for run in run_ranks(train, 4):
        assert_equal(run.weights(), twin(vbs.LinearRuleOptimizer, SIZES[:4], 61))


def test_several_losses_may_add_to_one_microbatch() -> None:
    run = training()
    for indices in run.sampler:
        loss = run.loss(indices)
        (0.25 * loss).backward(retain_graph=True)
        (0.75 * loss).backward()
        run.optimizer.step()
    assert_equal(run.weights(), twin(vbs.LinearRuleOptimizer, SIZES[:4]))


@pytest.mark.parametrize(
    "clear",
    [
        lambda run: run.model.zero_grad(),
        lambda run: run.model[2].zero_grad(),
        lambda run: run.optimizer.inner.zero_grad(),
        lambda run: setattr(run.model[0].weight, "grad", torch.zeros(4, 3).double()),
    ],
    ids=["model", "layer", "inner", "replaced"],
)
def test_gradients_that_are_cleared_within_a_step_are_refused(clear: Callable[[Training], None]) -> None:
    run = training()
    turns = run.turns()
    while not next(turns):
        pass
    clear(run)  # between updates nothing is lost
    next(turns)
    clear(run)
    with pytest.raises(
        RuntimeError, match=r"accumulated in \.grad .* but they were cleared .*; leave out model\.zero_grad"
    ):
        next(turns)


@pytest.mark.filterwarnings("ignore:Using backward.* with create_graph=True")
def test_gradients_with_a_graph_of_their_own_accumulate() -> None:
    run = training()
    for indices in run.sampler:
        run.loss(indices).backward(create_graph=True)
        run.optimizer.step()
    assert_equal(run.weights(), twin(vbs.LinearRuleOptimizer, SIZES[:4]))


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"ref_batchsize": None}, ValueError, r"LinearRule\(\) needs ref_batchsize, .*; pass it"),
        ({"ref_batchsize": 0}, ValueError, "ref_batchsize must be an integer >= 1, got 0; pass"),
        ({"ref_batchsize": 64.0}, ValueError, r"ref_batchsize must be an integer >= 1, got 64\.0 .*; pass"),
        ({"ref_batchsize": "64"}, ValueError, "ref_batchsize must be an integer >= 1, got '64' .*; pass"),
        ({"reduction": "none"}, ValueError, 'reduction must be "mean" or "sum".*, got \'none\'; pass'),
        ({"max_grad_norm": 0}, ValueError, "max_grad_norm must be a number > 0, got 0; leave it out"),
        ({"max_grad_norm": float("nan")}, ValueError, "max_grad_norm must be a number > 0, got nan; leave it out"),
        ({"max_grad_norm": "1"}, ValueError, "max_grad_norm must be a number > 0, got '1'; leave it out"),
        ({"log_steps": 0}, ValueError, "log_steps must be an integer >= 1, got 0; pass"),
        ({"log_steps": 2.5}, ValueError, r"log_steps must be an integer >= 1, got 2\.5 .*; pass"),
        ({"tracker": "runs"}, TypeError, r"tracker must be a vbs\.Tracker, got 'runs'; pass one"),
        ({"backend": "gloo"}, TypeError, r"backend must be a vbs\.Backend, got 'gloo'; pass one"),
        ({"rule": vbs.RootRule}, TypeError, r"rule must be an object to call, such as LinearRule\(\), got <class"),
        ({"rule": "linear"}, TypeError, r"rule must be an object to call, such as LinearRule\(\), got 'linear'; pass"),
        ({"sampler": [[0, 1]]}, TypeError, r"sampler must be the vbs\.CustomSampler .* got list; make one"),
        ({"sampler": vbs.CustomSampler(50, 20, 3, 2)}, ValueError, "deals for rank 2 of 3 .* is rank 0 of 1; pass"),
        ({"inner": nn.Linear(1, 1)}, TypeError, r"inner optimizer must be a torch\.optim\.Optimizer, got Linear; make"),
    ],
    ids=str,
)
def test_a_wrong_argument_is_refused_with_the_way_out(
    options: dict[str, Any], error: type[Exception], text: str
) -> None:
    right = {
        "inner": torch.optim.SGD(network().parameters()),
        "sampler": vbs.CustomSampler(50, 20, 1, 0),
        "ref_batchsize": 64,
        "rule": vbs.LinearRule(),
    }
    with pytest.raises(error, match=text):
        vbs.CustomOptimizer(**(right | options))


def test_the_momentum_rule_takes_sgd_alone() -> None:
    with pytest.raises(TypeError, match=r"must be torch\.optim\.SGD, got Adam; use LinearRuleOptimizer"):
        training(vbs.LinearRuleMomentumOptimizer, inner=torch.optim.Adam, hyperparameters={})


def test_numpy_numbers_are_numbers() -> None:
    run = training(ref_batchsize=np.int32(64), max_grad_norm=np.float64(0.5)).run(3)
    assert_equal(run.weights(), twin(vbs.LinearRuleOptimizer, SIZES[:3], max_grad_norm=0.5))
    assert type(run.optimizer.ref_batchsize) is int
