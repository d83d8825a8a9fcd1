"""Gradients that are summed in buckets while `backward()` runs: the same updates as without, and when they leave."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import variable_batch_size as vbs
from helpers.properties import examples
from helpers.reference import (
    ADAM,
    HYPERPARAMETERS,
    REF,
    SGD,
    SIZES,
    Training,
    assert_equal,
    filled,
    network,
    training,
    twin,
)
from variable_batch_size.backend import Backend
from variable_batch_size.testing import run_ranks

TINY = 4e-5  # MB: buckets of some parameters


class Odd(nn.Module):
    """Layers of two dtypes, some of them tied, and one for rare samples; their order is not that of their names."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        self.layers = nn.ModuleList(nn.Linear(4, 4).to(rng.choice([torch.float32, torch.float64])) for _ in range(5))
        self.calls = [rng.randrange(4) for _ in range(rng.randint(1, 7))]  # the last layer is the rare one
        self.first, self.last, self.unused = nn.Linear(3, 4).double(), nn.Linear(4, 2).double(), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x)
        for number in self.calls:
            layer = self.layers[number]
            y = y + torch.tanh(layer(y.to(layer.weight.dtype))).double()  # type: ignore[operator, arg-type]
        chosen = x[:, 0] > 1
        if chosen.any():
            layer = self.layers[4]
            y = y.index_add(0, chosen.nonzero()[:, 0], layer(y[chosen].to(layer.weight.dtype)).double())  # type: ignore[operator, arg-type]
        return self.last(y)  # type: ignore[no-any-return]


INNER: dict[str, Any] = {
    "SGD": lambda parameters, **_: torch.optim.SGD(parameters, **SGD),
    "AdamW": lambda parameters, **_: torch.optim.AdamW(parameters, **ADAM),
    "RMSprop": lambda parameters, **_: torch.optim.RMSprop(parameters, **HYPERPARAMETERS[torch.optim.RMSprop]),
}
RULES: list[tuple[str, Any]] = [
    *((rule, "SGD") for rule in ("constant", "linear", "linear-momentum", "root", "adascale")),
    ("sqrt-sde", "RMSprop"),
    ("adamscale", "AdamW"),
]


def odd(backend: Backend, seed: int, sizes: Sequence[int], rule: str, inner: str, **options: Any) -> Training:
    return training(
        vbs.CustomOptimizer,
        sizes,
        model=filled(Odd(seed)),
        inner=INNER[inner],
        hyperparameters={},
        backend=backend,
        rule=rule,
        ref_batchsize=REF,
        **{"find_unused_parameters": True, "minibatch_size": 3, "bucket_cap_mb": TINY, **options},
    )


def loop(run: Training, updates: int, *, count: bool = False, log: bool = False) -> list[Tensor]:
    """Train, and return what was logged."""
    logged: list[Tensor] = []
    while run.optimizer.updates < updates:
        run.sampler.set_epoch(run.optimizer.epoch)
        run.optimizer.set_epoch(run.optimizer.epoch)
        for indices in run.sampler:
            loss = run.loss(indices)
            loss.backward()
            if log:
                run.optimizer.log(loss=loss / len(indices), first=indices[0])
            run.optimizer.step(**({"count": sum(indices) + 1} if count else {}))
            if not run.optimizer.inside_step:
                logged += [*run.optimizer.logged.values()]
                logged += [] if run.optimizer.grad_norm is None else [run.optimizer.grad_norm]
                if run.optimizer.updates >= updates:
                    break
    return logged


@given(
    seed=st.integers(0, 99),
    sizes=st.lists(st.integers(1, 30), min_size=2, max_size=6),
    rule=st.sampled_from(RULES),
    world=st.sampled_from([2, 2, 3]),
    megabytes=st.sampled_from([0, TINY, 25]),
    log=st.booleans(),
    options=st.sampled_from(
        [
            {},
            {"max_grad_norm": 0.5},
            {"grad_norm": True},
            {"accumulation": "buffered"},
            {"noise": "differenced"},
            {"noise": "microbatches"},
            {"reduction": "sum"},
            {"reduction": "sum", "count": True},
        ]
    ),
)
@examples(30)
def test_updates_are_those_without_overlap(
    seed: int,
    sizes: list[int],
    rule: tuple[str, str],
    world: int,
    megabytes: float,
    log: bool,
    options: dict[str, Any],
) -> None:
    options = dict(options)
    count = options.pop("count", False)
    if count and "scale" in rule[0]:
        return

    def train(backend: Backend, overlap: bool) -> tuple[dict[str, Tensor], list[Tensor]]:
        run = odd(backend, seed, sizes, *rule, overlap=overlap, bucket_cap_mb=megabytes, **options)
        logged = loop(run, len(sizes), count=count, log=log)
        return run.model.state_dict(), logged

    without = run_ranks(lambda backend: train(backend, False), world)
    for rank, other in zip(run_ranks(lambda backend: train(backend, True), world), without, strict=True):
        # The squares of the noise are added in another order.
        torch.testing.assert_close(rank, other, rtol=1e-6 if "scale" in rule[0] else 0, atol=0, equal_nan=True)


# ------------------------------------------------------------------------------------------------- what is learnt


def order_of(run: Training) -> Any:
    return run.optimizer.state_dict()["vbs"].get("order_of_gradients")


def test_the_order_is_that_of_the_first_backward_agreed_and_saved() -> None:
    def train(backend: Backend) -> list[Any]:
        run = training(backend=backend)
        found = [order_of(run), order_of(run.run(1)), order_of(run.run(2))]
        other = training(backend=backend, overlap=False)
        other.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
        return [*found, order_of(other.run(1))]

    for found in run_ranks(train, 3):
        assert found == [None, [3, 2, 1, 0], [3, 2, 1, 0], None]
    assert train(vbs.LocalBackend()) == 4 * [None]


def test_ranks_that_load_other_orders_are_told() -> None:
    def train(backend: Backend) -> str:
        run = training(backend=backend).run(2)
        state = copy.deepcopy(run.optimizer.state_dict())
        if backend.world.rank:
            del state["vbs"]["order_of_gradients"]
        run.optimizer.load_state_dict(state)
        with pytest.raises(RuntimeError) as error:
            run.run(1)
        return str(error.value)

    for message in run_ranks(train, 2):
        assert "the same order of gradients" in message
        assert "restore the same checkpoint on every rank" in message


def scaled(run: Training, updates: int) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for indices in run.sampler:
        scaler.scale(run.loss(indices)).backward()
        scaler.step(run.optimizer)
        scaler.update()
        if run.optimizer.updates == updates:
            return


@pytest.mark.parametrize("options", [{}, {"noise": "microbatches"}], ids=str)
@pytest.mark.parametrize("first", [0, 2])
def test_a_grad_scaler_switches_it_off(first: int, options: dict[str, Any]) -> None:
    """From the first update on, or later, when some gradients have left before the scaler is known."""

    def train(backend: Backend) -> Training:
        run = training(backend=backend, **options)
        loop(run, first)
        scaled(run, 4)
        assert order_of(run) == ([3, 2, 1, 0] if first else [])
        return run

    for run in run_ranks(train, 2):
        assert_equal(run.weights(), twin(vbs.LinearRuleOptimizer, SIZES[:4]))


def test_parameters_that_are_added_later() -> None:
    def train(backend: Backend, overlap: bool) -> list[Any]:
        model = network()
        run = training(
            vbs.CustomOptimizer,
            model=model,
            rule="linear",
            ref_batchsize=REF,
            inner=lambda parameters, **_: torch.optim.SGD(list(parameters)[:2], **SGD),
            hyperparameters={},
            backend=backend,
            overlap=overlap,
        ).run(2)
        run.model.zero_grad()
        run.optimizer.add_param_group({"params": list(model.parameters())[2:]})
        return run.run(3).weights()

    expected = run_ranks(lambda backend: train(backend, False), 2)[0]
    for found in run_ranks(lambda backend: train(backend, True), 2):
        assert_equal(found, expected, 0)


@given(
    seed=st.integers(0, 99),
    rule=st.sampled_from(RULES),
    stops=st.sets(st.integers(1, 5), min_size=1, max_size=3),
    world=st.integers(2, 3),
)
@examples(12)
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(
    seed: int, rule: tuple[str, str], stops: set[int], world: int
) -> None:
    sizes = [9, 20, 4, 30, 2, 12]

    def train(backend: Backend) -> None:
        whole, run = (odd(backend, seed, sizes, *rule) for _ in range(2))
        loop(whole, len(sizes))
        for stop in sorted(stops):
            loop(run, stop)
            state = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict()))
            run = odd(backend, seed, sizes, *rule)
            run.model.load_state_dict(state[0])
            run.optimizer.load_state_dict(state[1])
        loop(run, len(sizes))
        torch.testing.assert_close(run.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)
        assert run.optimizer.lr_factor() == whole.optimizer.lr_factor()

    run_ranks(train, world)


# -------------------------------------------------------------------------------------------------- wrong and odd loops


class Keeping(torch.optim.Optimizer):
    """Not of torch: it keeps the gradient of the last update, as it may if `.grad` is set to None."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            last = self.state[parameter].get("last", 0)
            with torch.no_grad():
                parameter -= self.param_groups[0]["lr"] * (parameter.grad + 0.5 * last)
            self.state[parameter]["last"] = parameter.grad


def test_an_optimizer_that_keeps_gradients_gets_tensors_of_its_own() -> None:
    def train(backend: Backend, overlap: bool) -> list[Any]:
        options: dict[str, Any] = {"inner": Keeping, "hyperparameters": {"lr": 0.02}, "overlap": overlap}
        return training(vbs.ConstantOptimizer, backend=backend, **options).run(5).weights()

    expected = run_ranks(lambda backend: train(backend, False), 2)[0]
    assert_equal(run_ranks(lambda backend: train(backend, True), 2)[0], expected, 0)


@pytest.mark.parametrize("where", ["the rule", "log"])
def test_an_exception_between_backward_and_the_sum_is_discarded_on_one_rank_alone(where: str) -> None:
    def train(backend: Backend) -> Training:
        run = training(vbs.LinearRuleMomentumOptimizer, backend=backend)
        failing = backend.world.rank == 0
        while run.optimizer.updates < 6:
            epoch = run.optimizer.epoch
            run.sampler.set_epoch(epoch)
            run.optimizer.set_epoch(epoch)
            for indices in run.sampler:
                run.loss(indices).backward()
                due = run.optimizer.microbatch
                run.optimizer.log(one=1)
                if failing and run.optimizer.updates == 3 and due.ends_step:
                    failing = False
                    if where == "log":
                        run.optimizer._updater.gradient.step_means._microbatches = {"one": 99}
                    else:
                        known = run.optimizer._updater._scalings
                        assert known is not None  # the rule was called in backward
                        run.optimizer._updater._scalings = known[0], ValueError("log() planted")
                    with pytest.raises((RuntimeError, ValueError), match=r"log\(\)"):
                        run.optimizer.step()
                    run.optimizer.discard_step()
                    break
                run.optimizer.step()
                if run.optimizer.updates == 6:
                    break
        return run

    for run in run_ranks(train, 3):
        assert_equal(run.weights(), twin(vbs.LinearRuleMomentumOptimizer, SIZES[:6]))


def test_no_hook_is_left_of_an_optimizer_that_is_gone() -> None:
    def train(backend: Backend) -> None:
        model = network()
        run = training(model=model, backend=backend, overlap=False).run(3)
        run.optimizer._updater.gradient.check.stop()
        for overlap in (True, False):
            run = training(model=model, backend=backend, overlap=overlap)
            run.optimizer._updater.gradient.check.stop()
            assert [hooks(parameter) for parameter in model.parameters()] == [overlap] * 4
            run.run(1)
            run.optimizer._updater.gradient.check.stop()
        del run
        assert [hooks(parameter) for parameter in model.parameters()] == [0] * 4

    run_ranks(train, 2)


def hooks(parameter: Any) -> int:
    return len(parameter._post_accumulate_grad_hooks or {})


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"overlap": 1}, TypeError, r"overlap must be True or False, got 1 \(int\); pass one, or omit it"),
        ({"bucket_cap_mb": -1}, ValueError, r"bucket_cap_mb must be a finite number >= 0, got -1; pass a size in MB"),
        ({"bucket_cap_mb": "25"}, TypeError, r"bucket_cap_mb must be a finite number >= 0, got '25' \(str\)"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        training(**options)
