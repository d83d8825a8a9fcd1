"""Which parameters take part in an update: those that have a gradient, update by update, in any world."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import variable_batch_size as vbs
from helpers.models import half_frozen
from helpers.properties import examples
from helpers.reference import ADAM, SGD, SIZES, Array, Training, assert_equal, batches, filled, network, training
from variable_batch_size.backend import Backend, LocalBackend
from variable_batch_size.backend.sent_numbers import SentNumbers
from variable_batch_size.optim.participation import READ_EVERY, Participation
from variable_batch_size.testing import run_ranks


class Sparse(nn.Module):
    """A sample uses a layer if the layer's number is below `limit * x[0]`; some updates use none but the first."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.limit = limit
        self.layers = nn.ModuleList(nn.Linear(3, 2).double() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers[0](x)
        for number, layer in enumerate(self.layers[1:]):
            chosen = x[:, 0] * self.limit > number
            if chosen.any():
                y = y.index_add(0, chosen.nonzero()[:, 0], layer(x[chosen]))
        return y


INNER: dict[str, Any] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, **SGD),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, **ADAM),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
}


def plain(model: nn.Module, sizes: Sequence[int], inner: str, skip: int = 0) -> list[Array]:
    """One big batch an update, with torch alone."""
    run, optimizer = training(model=model), INNER[inner](model.parameters())
    for batch in list(batches(sizes, 50))[skip:]:
        optimizer.zero_grad()
        run.loss(batch.tolist()).backward()
        optimizer.step()
    return run.weights()


def ours(model: nn.Module, sizes: Sequence[int], inner: str, backend: Backend, **options: Any) -> Training:
    return training(
        vbs.ConstantOptimizer,
        sizes,
        model=model,
        backend=backend,
        inner=lambda parameters, **_: INNER[inner](parameters),
        **options,
    )


@given(
    sizes=st.lists(st.integers(1, 12), min_size=2, max_size=8),
    minibatch_size=st.sampled_from([1, 2, 4, 8]),
    limit=st.sampled_from([0.5, 1.0, 2.0, 4.0]),
    inner=st.sampled_from(sorted(INNER)),
    world=st.integers(1, 3),
    options=st.sampled_from([{}, {}, {"noise": "microbatches"}, {"noise": "differenced"}]),
)
@examples(150)
def test_a_parameter_takes_part_where_it_does_in_plain_torch(
    sizes: list[int], minibatch_size: int, limit: float, inner: str, world: int, options: dict[str, Any]
) -> None:
    def train(backend: Backend) -> Training:
        run = ours(filled(Sparse(limit)), sizes, inner, backend, minibatch_size=minibatch_size, **options)
        return run.run(len(sizes))

    expected = plain(filled(Sparse(limit)), sizes, inner)
    for run in run_ranks(train, world):
        assert_equal(run.weights(), expected)


@pytest.mark.parametrize("scaler", [False, True], ids=["", "GradScaler"])
def test_parameters_are_unfrozen_and_frozen_as_in_plain_torch(scaler: bool) -> None:
    def change(model: Any, update: int) -> None:
        model[0].requires_grad_(update in (2, 3, 6))

    model: Any = half_frozen()
    run = training(vbs.ConstantOptimizer, [*SIZES, 74], model=model, dataset_size=200)  # one epoch
    driver = torch.amp.GradScaler("cpu", enabled=scaler)
    change(model, 0)
    for indices in run.sampler:
        run.optimizer.backward(run.loss(indices), scaler=driver)
        if driver.step(run.optimizer):
            change(model, run.optimizer.updates)
        driver.update()
    expected: Any = half_frozen()
    reference, inner = training(model=expected), torch.optim.SGD(expected.parameters(), **SGD)
    reference.x, reference.target = run.x, run.target
    for update, batch in enumerate(batches([*SIZES, 74], 200)):
        change(expected, update)
        inner.zero_grad()
        reference.loss(batch.tolist()).backward()
        inner.step()
    assert_equal(run.weights(), reference.weights())


# ------------------------------------------------------------------------------------------------------ several ranks


@pytest.mark.parametrize("kind", [vbs.LinearRuleOptimizer, vbs.AdaScaleOptimizer])
def test_a_change_raises_on_all_ranks_before_the_weights_change(kind: type[vbs.CustomOptimizer]) -> None:
    def train(backend: Backend) -> tuple[str, bool]:
        model: Any = network()
        run = training(kind, (20, 7, 33), model=model, backend=backend).run(2)
        before = copy.deepcopy(run.weights())
        model[2].requires_grad_(backend.world.rank == 0)
        with pytest.raises(RuntimeError, match="must train with the same parameters that require") as caught:
            run.run(1)
        with pytest.raises(RuntimeError, match="was interrupted by an exception"):
            run.optimizer.state_dict()
        return str(caught.value), all(np.array_equal(a, b) for a, b in zip(before, run.weights(), strict=True))

    (first, same), (second, also) = run_ranks(train, 2)
    assert same
    assert also
    assert first == second
    assert "but it is [0, 1, 2, 3] on rank 0 and [0, 1] on rank 1; freeze the same on all ranks" in first


def test_ranks_that_differ_at_the_first_update_raise() -> None:
    def train(backend: Backend) -> str:
        model: Any = network()
        model[2].weight.requires_grad_(backend.world.rank == 0)
        run = training(model=model, backend=backend)
        with pytest.raises(RuntimeError, match=r"it is \[0, 1, 2, 3\] on rank 0 and \[0, 1, 3\] on rank 1") as caught:
            run.run(1)
        return str(caught.value)

    first, second = run_ranks(train, 2)
    assert first == second


class Device(LocalBackend):
    """A rank of several, on a device that the host does not read."""

    alone = False  # type: ignore[assignment]


@pytest.mark.parametrize("late", [False, True])
def test_a_flag_that_is_not_read_at_once_raises_some_updates_later(late: bool) -> None:
    """As on a device; saving a state reads it."""
    parameters = [torch.zeros(2, requires_grad=True), torch.zeros(3, requires_grad=True)]
    agreed = Participation(parameters, Device(sent=SentNumbers("cpu")), find_unused=False)
    agreed.load_state_dict({"has_gradient": [1, 0]})

    def update(*has_gradient: bool) -> None:
        (flag,) = agreed.message(has_gradient, replay=False)
        agreed.settle([flag])

    for _ in range(100):
        update(True, False)
    agreed.check()
    update(True, True)
    changed = r"in every update as in the first one, but parameter 1, of shape \(3,\), on rank 0 has one; pass"
    if not late:
        with pytest.raises(RuntimeError, match=changed):
            agreed.check()
        return
    with pytest.raises(RuntimeError, match=changed):  # noqa: PT012 (in one of these updates)
        for _ in range(2 * READ_EVERY):
            update(True, False)


def test_every_inner_optimizer_gets_no_gradient_of_an_unused_parameter() -> None:
    seen: list[list[bool]] = []

    class Spy(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            seen.append([parameter.grad is None for parameter in self.param_groups[0]["params"]])
            return super().step(closure)

    def make(parameters: Iterable[Tensor], **_: Any) -> torch.optim.Optimizer:
        return Spy(parameters, lr=0.1)

    run = training(vbs.ConstantOptimizer, [2] * 6, model=filled(Sparse(1.0)), inner=make)
    run.run(6)
    assert {tuple(row) for row in seen} > {(False, False, *(True,) * 6)}
