"""Lists of parameters that the user changes in place: adopted between steps, refused within one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import variable_batch_size as vbs
from helpers.properties import examples
from variable_batch_size.backend import Backend
from variable_batch_size.testing import run_ranks

UNUSED = {"find_unused_parameters": True}
CHANGES = ["append", "extend", "replace an item", "replace the list", "append a group", "pop a group", "remove"]


class Problem:
    """A sum of linear maps, of which each parameter may be trained or not, and its gradients by autograd.

    Before each inner step, `.grad` of every trained parameter is compared with the gradient of the mean loss over the
    samples of the step, at the present weights.
    """

    def __init__(self, sizes: Sequence[int], backend: Backend, number: int = 6, **options: Any) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(200, 4, generator=generator, dtype=torch.float64)
        self.weights = [self.new(seed) for seed in range(number)]
        world = backend.world
        self.sampler = vbs.CustomSampler(
            200, list(sizes), world.size, world.rank, minibatch_size=3, on_end="hold", fixed_shape=False
        )
        inner = torch.optim.SGD([self.weights[0], self.weights[1]], lr=0.01, momentum=0.5)
        self.optimizer = vbs.LinearRuleOptimizer(inner, self.sampler, 4, backend=backend, **options)
        self.optimizer.register_step_pre_hook(self._check)
        self.checked = 0

    @staticmethod
    def new(seed: int) -> nn.Parameter:
        return nn.Parameter(torch.randn(4, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))

    def loss(self, indices: Sequence[int]) -> Tensor:
        rows = sum(torch.tanh(self.x[indices] @ weight) * (1 + number) for number, weight in enumerate(self.weights))
        assert isinstance(rows, Tensor)
        return rows.square().sum(dim=1).mean()

    def trained(self) -> list[nn.Parameter]:
        return list(dict.fromkeys(p for group in self.optimizer.param_groups for p in group["params"]))

    def _check(self, *_: Any) -> None:
        batches, due = self.sampler.batches, self.sampler.due
        step, order = batches.step(due), batches.order(due.epoch)
        samples = [int(order(i)) for i in range(step.start, step.start + step.batch_size)]  # type: ignore[call-overload]
        with torch.enable_grad():
            expected = torch.autograd.grad(self.loss(samples), self.trained())
        for parameter, gradient in zip(self.trained(), expected, strict=True):
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-12, atol=1e-12)
        self.checked += 1

    def change(self, kind: str, number: int) -> None:
        """Change the lists of the optimizer, the same on every rank; parameter 0 stays."""
        groups = self.optimizer.param_groups
        known = {id(p) for p in self.trained()}
        idle = [p for p in self.weights if id(p) not in known]
        if kind == "append" and idle:
            groups[0]["params"].append(idle[number % len(idle)])
        elif kind == "extend":
            groups[0]["params"].extend(idle)
        elif kind == "replace an item" and len(groups[0]["params"]) > 1:
            old = groups[0]["params"][1]
            new = self.new(100 + number)
            groups[0]["params"][1] = new
            self.weights = [new if weight is old else weight for weight in self.weights]
        elif kind == "replace the list":
            groups[0]["params"] = [*groups[0]["params"], *idle[:1]]
        elif kind == "append a group" and idle:
            groups.append({**(groups[0] if number % 2 else {}), "params": idle[:1]})  # what is missing is the default
        elif kind == "pop a group" and len(groups) > 1:
            groups.pop()
        elif kind == "remove" and len(groups[0]["params"]) > 1:
            groups[0]["params"].pop()


@given(
    sizes=st.lists(st.integers(1, 14), min_size=1, max_size=5),
    changes=st.lists(st.tuples(st.sampled_from(CHANGES), st.integers(0, 9)), min_size=1, max_size=6),
    world=st.integers(1, 3),
    options=st.sampled_from([{}, {"max_grad_norm": 1e9}, {"find_unused_parameters": True}]),
    by=st.sampled_from(["loss", "optimizer"]),
)
@examples(60)
def test_lists_that_are_changed_between_steps_are_adopted(
    sizes: list[int], changes: list[tuple[str, int]], world: int, options: dict[str, Any], by: str
) -> None:
    def train(backend: Backend) -> Problem:
        problem, left = Problem(sizes, backend, **options), list(changes)
        for indices in problem.sampler:
            loss = problem.loss(indices)
            loss.backward() if by == "loss" else problem.optimizer.backward(loss)
            for parameter in problem.weights:  # as plain torch needs it for those that it does not train
                if id(parameter) not in map(id, problem.trained()):
                    parameter.grad = None
            if problem.optimizer.step():
                if not left:
                    break
                problem.change(*left.pop(0))
        return problem

    first, *others = run_ranks(train, world)
    assert first.checked == len(changes) + 1
    for other in others:
        for own, weight in zip(first.weights, other.weights, strict=True):
            torch.testing.assert_close(own, weight, rtol=0, atol=0)


@pytest.mark.parametrize("kind", CHANGES)
def test_lists_that_are_changed_within_a_step_are_refused(kind: str) -> None:
    problem = Problem([12], vbs.backend.LocalBackend())
    problem.change("append a group", 0)
    batches = iter(problem.sampler)
    problem.loss(next(batches)).backward()
    problem.optimizer.step()
    problem.change(kind, 0)
    problem.loss(next(batches)).backward()
    with pytest.raises(RuntimeError, match=r"lists of param_groups were changed in step 0; change them when"):
        problem.optimizer.step()
    problem.optimizer.discard_step()
    for indices in problem.sampler:
        problem.optimizer.zero_grad()
        problem.loss(indices).backward()
        if problem.optimizer.step():
            break
    assert problem.checked == 1


@given(
    sizes=st.lists(st.integers(1, 14), min_size=1, max_size=4),
    world=st.integers(1, 2),
    groups=st.integers(1, 2),
    rule=st.sampled_from(["linear", "linear-momentum", "adascale"]),
)
@examples(30)
def test_a_parameter_that_is_listed_twice_counts_once(sizes: list[int], world: int, groups: int, rule: str) -> None:
    """As in `list(encoder.parameters()) + list(decoder.parameters())` with a tied weight."""

    def train(backend: Backend) -> int:
        problem = Problem(sizes, backend)
        first, second = problem.weights[:2]
        others = [{"params": [problem.weights[2]]}] * (groups - 1)
        inner = torch.optim.SGD([{"params": [first, second, first]}, *others], lr=0.001)

        def check(*_: Any) -> None:
            for parameter in problem.trained():  # undo what the rule multiplies
                assert parameter.grad is not None
                if rule == "linear-momentum":
                    parameter.grad = parameter.grad / (sizes[optimizer.updates] / 4)
            problem._check()

        optimizer = vbs.CustomOptimizer(inner, problem.sampler, 4, rule=rule, backend=backend)
        problem.optimizer = optimizer
        optimizer.register_step_pre_hook(check)
        for indices in problem.sampler:
            problem.loss(indices).backward()
            if optimizer.step() and optimizer.updates == len(sizes):
                break
        return problem.checked

    with warnings.catch_warnings():  # of all threads
        warnings.filterwarnings("ignore", "optimizer contains a parameter group with duplicate parameters")
        assert run_ranks(train, world) == [len(sizes)] * world


def test_a_rule_for_each_group_names_the_group_that_is_missing() -> None:
    weights = [Problem.new(0), Problem.new(1)]
    sampler = vbs.CustomSampler(20, 4, 1, 0)
    inner = torch.optim.SGD([{"params": [weight]} for weight in weights], lr=0.1)
    optimizer = vbs.CustomOptimizer(inner, sampler, 4, rule=["linear", "root"])
    change: Callable[[], Any] = optimizer.param_groups.pop
    change()
    next(iter(sampler))
    weights[0].sum().backward()
    with pytest.raises(ValueError, match="a sequence of rules must hold one for each parameter group, got 2 for 1"):
        optimizer.step()
