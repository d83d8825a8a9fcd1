"""`zero_grad()` clears what other backwards have added: those of a validation, or of a GAN's generator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import variable_batch_size as vbs
from helpers.properties import examples
from helpers.reference import SGD, SIZES, Array, assert_equal, filled, training, twin
from variable_batch_size.backend import Backend
from variable_batch_size.testing import run_ranks

OPTIONS: list[dict[str, Any]] = [{}, {"noise": "microbatches"}, {"dtype": torch.float32}]
LEAK = (
    r"zero_grad\(\) within a step .*; call zero_grad\(\) before each microbatch, from the first one on, or pass inputs="
)


def between_steps(run: Any, leak_at: set[int]) -> Iterator[int]:
    """Train; before some updates other backwards run, whose gradients are clipped, followed by zero_grad()."""
    for indices in run.sampler:
        step = run.optimizer.updates
        if not run.optimizer.inside_step and step in leak_at:
            run.loss(indices).backward()
            nn.utils.clip_grad_norm_(run.model.parameters(), 1e-3)
            (run.loss(indices) * 3).backward()
            run.optimizer.zero_grad()
        run.loss(indices).backward()
        if run.optimizer.step():
            yield run.optimizer.updates


@given(
    leak_at=st.sets(st.integers(0, 3)),
    minibatch_size=st.sampled_from([1, 4, 50]),
    world=st.integers(1, 2),
    options=st.sampled_from(OPTIONS[:2]),
)
@examples(40)
def test_a_backward_before_zero_grad_between_steps_has_no_effect(
    leak_at: set[int], minibatch_size: int, world: int, options: dict[str, Any]
) -> None:
    def train(backend: Backend) -> list[Array]:
        run = training(minibatch_size=minibatch_size, backend=backend, **options)
        assert list(between_steps(run, leak_at)) == [1, 2, 3, 4]
        return run.weights()

    for weights in run_ranks(train, world):
        assert_equal(weights, twin(vbs.LinearRuleOptimizer, SIZES[:4]))


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("carried", [True, False])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_within_a_step_what_step_has_accumulated_stays(
    options: dict[str, Any], carried: bool, set_to_none: bool
) -> None:
    run = training(**options)
    for indices in run.sampler:
        (run.loss(indices) * 7).backward()
        run.optimizer.zero_grad(set_to_none)
        run.optimizer.backward(run.loss(indices)) if carried else run.loss(indices).backward()
        run.optimizer.step()
    assert_equal(run.weights(), twin(vbs.LinearRuleOptimizer, SIZES[:4]), 1e-6 if "dtype" in options else 1e-12)


def test_a_loop_that_clears_only_at_first_adds_what_was_kept_apart() -> None:
    run = training()
    for number, indices in enumerate(run.sampler):
        if number % 2 == 0:
            run.optimizer.zero_grad()
        run.loss(indices).backward()
        run.optimizer.step()
    assert_equal(run.weights(), twin(vbs.LinearRuleOptimizer, SIZES[:4]))


def test_within_a_step_gradients_in_place_cannot_be_told_apart() -> None:
    run = training()
    batches = iter(run.sampler)
    for _ in range(2):
        run.loss(next(batches)).backward()
        assert not run.optimizer.step()
        run.optimizer.zero_grad()  # nothing has come since: as in the ordinary loop
    indices = next(batches)
    run.loss(indices).backward()
    with pytest.raises(RuntimeError, match=LEAK):
        run.optimizer.zero_grad()
    run.optimizer.step()  # what was refused has changed nothing
    for indices in batches:
        run.loss(indices).backward()
        run.optimizer.step()
    assert_equal(run.weights(), twin(vbs.LinearRuleOptimizer, SIZES[:4]))


# -------------------------------------------------------------------------------------------------------------- a GAN


class Gan:
    """A generator and a discriminator of the same samples, each with an optimizer."""

    def __init__(self, seed: int) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.generator, self.discriminator = nn.Linear(2, 3).double(), nn.Linear(3, 1).double()
            self.real, self.noise = torch.randn(40, 3).double(), torch.randn(40, 2).double()

    def loss_d(self, rows: Any) -> Tensor:
        fake = self.generator(self.noise[rows]).detach()
        return (self.discriminator(self.real[rows]) - 1).square().mean() + self.discriminator(fake).square().mean()

    def loss_g(self, rows: Any) -> Tensor:
        """Its backward also adds to the gradients of the discriminator."""
        loss: Tensor = (self.discriminator(self.generator(self.noise[rows])) - 1).square().mean()
        return loss

    def weights(self) -> list[Array]:
        return [p.detach().numpy() for p in (*self.generator.parameters(), *self.discriminator.parameters())]


def plain_gan(gan: Gan, sizes: list[int]) -> list[Array]:
    """With torch alone, one big batch an update."""
    inner_d, inner_g = (torch.optim.SGD(one.parameters(), **SGD) for one in (gan.discriminator, gan.generator))
    for rows in vbs.CustomSampler(40, sizes, 1, 0, 40, on_end="cycle", fixed_shape=False):
        for inner, loss in ((inner_d, gan.loss_d), (inner_g, gan.loss_g)):
            inner.zero_grad()
            loss(rows).backward()
            inner.step()
    return gan.weights()


@given(seed=st.integers(0, 9), sizes=st.lists(st.integers(1, 8), min_size=1, max_size=5))
@examples(20)
def test_the_ordinary_gan_loop_with_one_microbatch_a_step(seed: int, sizes: list[int]) -> None:
    gan, plain = Gan(seed), Gan(seed)
    sampler = vbs.CustomSampler(40, sizes, 1, 0, 8, on_end="cycle", fixed_shape=False)
    inners = [torch.optim.SGD(one.parameters(), **SGD) for one in (gan.discriminator, gan.generator)]
    optimizer_d, optimizer_g = (vbs.ConstantOptimizer(inner, sampler) for inner in inners)
    for rows in sampler:
        optimizer_d.zero_grad()
        gan.loss_d(rows).backward()
        optimizer_d.step()
        optimizer_g.zero_grad()
        gan.loss_g(rows).backward()
        optimizer_g.step()
    assert_equal(gan.weights(), plain_gan(plain, sizes))


@given(seed=st.integers(0, 9), sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5))
@examples(20)
def test_the_ordinary_gan_loop_with_several_microbatches(seed: int, sizes: list[int]) -> None:
    """The generator's step comes after the discriminator's, also when both are updated by the same microbatch."""
    gan, plain = Gan(seed), Gan(seed)
    sampler = vbs.CustomSampler(40, sizes, 1, 0, 4, on_end="cycle", fixed_shape=False)
    inners = [torch.optim.SGD(one.parameters(), **SGD) for one in (gan.discriminator, gan.generator)]
    optimizer_d, optimizer_g = (vbs.ConstantOptimizer(inner, sampler) for inner in inners)
    plain_d, plain_g = (torch.optim.SGD(one.parameters(), **SGD) for one in (plain.discriminator, plain.generator))
    sums: list[dict[Any, Tensor]] = [{}, {}]
    for rows in sampler:
        microbatch = optimizer_d.microbatch
        weight = microbatch.samples / microbatch.batch_size
        optimizer_d.zero_grad()
        gan.loss_d(rows).backward()
        optimizer_d.step()
        optimizer_g.zero_grad()
        gan.loss_g(rows).backward()
        optimizer_g.step()
        parts = (plain.discriminator, plain.loss_d, plain_d), (plain.generator, plain.loss_g, plain_g)
        for (module, loss, inner), total in zip(parts, sums, strict=True):
            parameters = list(module.parameters())
            for parameter, gradient in zip(parameters, torch.autograd.grad(loss(rows), parameters), strict=True):
                total[parameter] = total.get(parameter, 0) + weight * gradient
            if microbatch.ends_step:
                for parameter in parameters:
                    parameter.grad = total.pop(parameter)
                inner.step()
    assert_equal(gan.weights(), plain.weights())


def test_the_gan_loop_in_place_is_refused_and_not_wrong() -> None:
    gan = Gan(0)
    sampler = vbs.CustomSampler(40, 8, 1, 0, 4)
    optimizer_d = vbs.ConstantOptimizer(torch.optim.SGD(gan.discriminator.parameters()), sampler)
    batches = iter(sampler)
    rows = next(batches)
    gan.loss_d(rows).backward()
    optimizer_d.step()
    gan.loss_g(rows).backward()
    with pytest.raises(RuntimeError, match=LEAK):
        optimizer_d.zero_grad()


def test_gradients_of_an_unrelated_model_stay() -> None:
    other = filled(nn.Linear(3, 2).double())
    other(torch.ones(1, 3).double()).sum().backward()
    run = training().run(1)
    run.optimizer.zero_grad()
    assert all(parameter.grad is not None for parameter in other.parameters())
