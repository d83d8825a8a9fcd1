"""`zero_grad()` clears what other backwards have added: those of a validation, or of a GAN's generator."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import variable_batch_size as vbs
from helpers.properties import examples
from helpers.reference import SGD, SIZES, assert_equal, filled, training, twin

OPTIONS = [{}, {"noise": "microbatches"}, {"dtype": torch.float32}]
LEAK = (
    r"zero_grad\(\) within a step .*; call zero_grad\(\) before each microbatch, from the first one on, or pass inputs="
)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("carried", [True, False])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_within_a_step_what_step_has_accumulated_stays(options, carried, set_to_none):
    run = training(**options)
    for indices in run.sampler:
        (run.loss(indices) * 7).backward()
        run.optimizer.zero_grad(set_to_none)
        run.optimizer.backward(run.loss(indices)) if carried else run.loss(indices).backward()
        run.optimizer.step()
    assert_equal(run.weights(), twin(vbs.LinearRuleOptimizer, SIZES[:4]), 1e-6 if "dtype" in options else 1e-12)


def test_a_loop_that_clears_only_at_first_adds_what_was_kept_apart():
    run = training()
    for number, indices in enumerate(run.sampler):
        if number % 2 == 0:
            run.optimizer.zero_grad()
        run.loss(indices).backward()
        run.optimizer.step()
    assert_equal(run.weights(), twin(vbs.LinearRuleOptimizer, SIZES[:4]))


def test_within_a_step_gradients_in_place_cannot_be_told_apart():
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

    def __init__(self, seed):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.generator, self.discriminator = nn.Linear(2, 3).double(), nn.Linear(3, 1).double()
            self.real, self.noise = torch.randn(40, 3).double(), torch.randn(40, 2).double()

    def loss_d(self, rows):
        fake = self.generator(self.noise[rows]).detach()
        return (self.discriminator(self.real[rows]) - 1).square().mean() + self.discriminator(fake).square().mean()

    def loss_g(self, rows):
        """Its backward also adds to the gradients of the discriminator."""
        return (self.discriminator(self.generator(self.noise[rows])) - 1).square().mean()

    def weights(self):
        return [p.detach().numpy() for p in (*self.generator.parameters(), *self.discriminator.parameters())]


@given(seed=st.integers(0, 9), sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5))
@examples(20)
def test_the_ordinary_gan_loop_with_several_microbatches(seed, sizes):
    """The generator's step comes after the discriminator's, also when both are updated by the same microbatch."""
    gan, plain = Gan(seed), Gan(seed)
    sampler = vbs.CustomSampler(40, sizes, 1, 0, 4, on_end="cycle", fixed_shape=False)
    inners = [torch.optim.SGD(one.parameters(), **SGD) for one in (gan.discriminator, gan.generator)]
    optimizer_d, optimizer_g = (vbs.ConstantOptimizer(inner, sampler) for inner in inners)
    plain_d, plain_g = (torch.optim.SGD(one.parameters(), **SGD) for one in (plain.discriminator, plain.generator))
    sums = [{}, {}]
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


def test_gradients_of_an_unrelated_model_stay():
    other = filled(nn.Linear(3, 2).double())
    other(torch.ones(1, 3).double()).sum().backward()
    run = training().run(1)
    run.optimizer.zero_grad()
    assert all(parameter.grad is not None for parameter in other.parameters())
