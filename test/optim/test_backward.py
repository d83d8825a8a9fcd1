"""Loops that change gradients between two calls of `step()`, `optimizer.backward(loss)`, and `zero_grad()`."""

import dataclasses
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import variable_batch_size as vbs
from helpers.models import Gan
from helpers.pages import DOCS
from helpers.properties import examples
from helpers.reference import SGD, SIZES, assert_equal, filled, training, twin
from variable_batch_size.optim.checks.backward_check import WATCHED
from variable_batch_size.testing import run_ranks

REFUSED = r"only backward\(\) may change gradients.*|must stay in \.grad until .*|must follow the backward\(\).*"


def parameters(run):
    return list(run.model.parameters())


def clip(run):
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1e-3)


def halve(run):
    for parameter in run.model.parameters():
        if parameter.grad is not None:
            parameter.grad *= 0.5


def replace(run):
    parameters(run)[2].grad = parameters(run)[2].grad * 0.5


AFTER_BACKWARD = {
    "clip_grad_norm_": clip,
    "clip_grad_value_": lambda run: torch.nn.utils.clip_grad_value_(run.model.parameters(), 1e-3),
    "in place": halve,
    "replaced": replace,
}
BEFORE_BACKWARD = {
    "zero_grad(set_to_none=False)": lambda run: run.model.zero_grad(set_to_none=False),
    "zero_grad()": lambda run: run.model.zero_grad(),
    "inner.zero_grad": lambda run: run.optimizer.inner.zero_grad(set_to_none=False),
    "zero_grad() of a layer": lambda run: run.model[2].zero_grad(),
    "zeros": lambda run: setattr(run.model[0].weight, "grad", torch.zeros(4, 3).double()),
    "halved": halve,
}


def wrong_loop(run, change, *, after_backward, updates):
    for indices in run.sampler:
        if not after_backward and run.optimizer.inside_step:
            change(run)
        run.loss(indices).backward()
        if after_backward:
            change(run)
        run.optimizer.step()
        if run.optimizer.updates == updates:
            return


@given(
    change=st.sampled_from(sorted(AFTER_BACKWARD) + sorted(BEFORE_BACKWARD)),
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=6),
    minibatch_size=st.integers(1, 8),
    world=st.integers(1, 2),
    options=st.sampled_from([{}, {}, {"noise": "microbatches"}]),
)
@examples(150)
def test_a_wrong_loop_is_refused_or_has_no_effect(change, sizes, minibatch_size, world, options):
    after = change in AFTER_BACKWARD

    def train(backend):
        run = training(sizes=sizes, dataset_size=200, minibatch_size=minibatch_size, backend=backend, **options)
        wrong_loop(run, (AFTER_BACKWARD | BEFORE_BACKWARD)[change], after_backward=after, updates=len(sizes))
        return run

    try:
        runs = run_ranks(train, world)
    except RuntimeError as error:
        if not re.search(REFUSED, str(error)):
            raise
        return
    assert not after
    for run in runs:  # there was nothing to change: each step had one microbatch
        assert_equal(run.weights(), twin(vbs.LinearRuleOptimizer, sizes, dataset_size=200))


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("change", [*AFTER_BACKWARD, *BEFORE_BACKWARD])
def test_the_error_names_the_remedy(change, late):
    """Also where steps get several microbatches late, from which on gradients that are cleared before are lost."""
    after = change in AFTER_BACKWARD
    run = training(sizes=[4] * 40 + [40], dataset_size=400) if late else training()
    with pytest.raises(RuntimeError, match=REFUSED) as caught:
        wrong_loop(run, (AFTER_BACKWARD | BEFORE_BACKWARD)[change], after_backward=after, updates=60)
    assert run.optimizer.updates == (40 if late and not after else 0)
    for remedy in ("max_grad_norm=", "leave zero_grad() to step()", 'see "Mistakes"'):
        assert remedy in str(caught.value)
    page = (DOCS / "loops.md").read_text().split("## Mistakes")[1].split("\n## ")[0]
    assert all(remedy in page for remedy in ("register_step_pre_hook", "`step()` clears", "inputs=", "outside()"))


def test_hooks_are_removed_after_some_updates():
    def hooks(run):
        return sum(bool(parameter._post_accumulate_grad_hooks) for parameter in parameters(run))

    run = training(sizes=[8], dataset_size=200)
    assert hooks(run) == 4
    run.run(WATCHED)
    assert hooks(run) == 0
    run.run(3)
    assert hooks(run) == 0
    dropped = training()
    model = dropped.model
    del dropped
    model(torch.ones(1, 3).double()).sum().backward()  # the hooks of an optimizer that is gone do nothing


# optimizer.backward(loss). --------------------------------------------------------------------------------------------


CHANGES = {
    **BEFORE_BACKWARD,
    "clip_grad_norm_": clip,
    "loss.backward()": lambda run: run.loss([0, 1]).backward(),
    "replaced": lambda run: setattr(parameters(run)[0], "grad", torch.ones_like(parameters(run)[0])),
}
MEASURED = [{}, {"noise": "differenced"}, {"max_grad_norm": 0.1}]
FOREIGN = r"the gradient of parameter \d, of shape .*, has changed outside optimizer\.backward\(\); clip"


@given(
    change=st.sampled_from(sorted(CHANGES)),
    update=st.integers(0, 12),
    sizes=st.lists(st.integers(1, 14), min_size=1, max_size=4),
    after=st.booleans(),
    options=st.sampled_from(MEASURED),
)
@examples(150)
def test_a_foreign_change_is_seen_in_any_update(change, update, sizes, after, options):
    """After the backward of the last microbatch, or before it; unless there is nothing to change."""
    run = training(sizes=sizes, dataset_size=400, **options)
    for indices in run.sampler:
        here = run.optimizer.updates == update and run.optimizer.microbatch.ends_step
        if here:
            nothing = all(parameter.grad is None for parameter in parameters(run))
            if not after:
                if nothing and change not in ("loss.backward()", "replaced"):
                    return
                if update == 0 and not run.optimizer.inside_step:
                    return  # what a loop that was left has left is dropped at the first microbatch of the next one
                CHANGES[change](run)
            before = run.weights()
            with pytest.raises(RuntimeError, match=f"{FOREIGN}|must follow the backward"):  # noqa: PT012
                run.optimizer.backward(run.loss(indices))
                if after:
                    CHANGES[change](run)
                run.optimizer.step()
            assert_equal(run.weights(), before, 0)
            run.optimizer.discard_step()
            return
        run.optimizer.backward(run.loss(indices))
        run.optimizer.step()


def test_an_unscaled_gradient_names_max_grad_norm():
    run, scaler = training(), torch.amp.GradScaler("cpu", init_scale=8.0)
    for indices in run.sampler:
        run.optimizer.backward(run.loss(indices), scaler=scaler)
        scaler.unscale_(run.optimizer)
        with pytest.raises(RuntimeError, match=r"unscale_\(\) has changed them; call .*, and clip with max_grad_norm="):
            scaler.step(run.optimizer)
        return


def test_a_backward_after_an_exception_in_a_step_is_refused():
    run = training()
    indices = next(iter(run.sampler))
    run.optimizer.backward(run.loss(indices))
    with pytest.raises(ValueError, match="needs a loss that is summed"):
        run.optimizer.step(count=3)
    with pytest.raises(
        RuntimeError, match=r"^backward\(\) must be called in an intact step, but step 0 was interrupted"
    ):
        run.optimizer.backward(run.loss(indices))


@pytest.mark.parametrize("first", [torch.float32, torch.bfloat16], ids=str)
def test_optimizers_of_one_loss_weigh_it_alike_or_raise(first):
    """Of which one has parameters in half precision, whose gradients are weighed in a buffer."""
    wide, narrow = torch.zeros(3, requires_grad=True), torch.zeros(3, dtype=torch.bfloat16, requires_grad=True)
    sampler = vbs.CustomSampler(60, [7, 20, 3, 30], 1, 0, 4, fixed_shape=False)
    by_dtype = {one.dtype: vbs.ConstantOptimizer(torch.optim.SGD([one], lr=0.5), sampler) for one in (wide, narrow)}
    own = by_dtype.pop(first)
    (other,) = by_dtype.values()
    values, expected = torch.arange(60.0) / 64, torch.zeros(3)
    for indices in sampler:
        microbatch = own.microbatch
        loss = ((wide + narrow.float()) * values[indices].mean()).sum()
        if first is torch.bfloat16:
            with pytest.raises(ValueError, match=r"must weigh it alike, but one .*; call backward\(\) of the one in"):
                own.backward(loss, others=[other])
            return
        own.backward(loss, others=[other])
        expected -= 0.5 * microbatch.samples / microbatch.batch_size * values[indices].mean()
        assert own.step() == other.step()
    torch.testing.assert_close(wide.detach(), expected)
    torch.testing.assert_close(narrow.detach().float(), expected, rtol=2e-2, atol=0)


@pytest.mark.parametrize("clears", [False, True])
def test_an_optimizer_that_a_loss_does_not_name_raises_unless_it_clears(clears):
    """Its gradients have the weight of the other's microbatch, which it would give them once more."""
    first, second = torch.zeros(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    sampler = vbs.CustomSampler(60, 20, 1, 0, 4, fixed_shape=False)
    own, other = (vbs.ConstantOptimizer(torch.optim.SGD([one], lr=0.5), sampler) for one in (first, second))
    next(iter(sampler))
    own.backward((first * second.exp()).sum())
    own.step()
    if clears:  # as the loop of a GAN
        other.zero_grad()
        (second.sum() * 3).backward()
        assert other.step() is False
    else:
        with pytest.raises(RuntimeError, match=r"backward\(\) of another optimizer of the sampler has added to these"):
            other.step()


@pytest.mark.parametrize("by", ["losses", "reentrant"])
def test_noise_of_a_microbatch_with_several_backward_passes_is_that_of_their_sum(by):
    once, several = training(vbs.AdaScaleOptimizer), training(vbs.AdaScaleOptimizer)

    def ends(run, indices):
        layer, x = next(iter(run.model.children())), run.x[indices].requires_grad_()
        segments = [checkpoint(layer, x * factor, use_reentrant=run is several).sum() for factor in (1.0, 2.0)]
        return segments[0] * segments[1]

    for run in (once, several):
        for indices, _ in zip(run.sampler, range(12), strict=False):
            if by == "reentrant":  # a layer in several segments that are computed again
                run.optimizer.backward(1e-3 * ends(run, indices))
            elif run is once:
                run.optimizer.backward(run.loss(indices))
            else:
                run.optimizer.backward(run.loss(indices) / 4)
                run.optimizer.backward(run.loss(indices) * 3 / 4)
            run.optimizer.step()
    assert once.optimizer.updates > 2
    found = [dataclasses.astuple(run.optimizer.noise()) for run in (once, several)]
    assert found[0] == pytest.approx(found[1], rel=1e-9)
    assert_equal(once.weights(), several.weights(), 1e-12)


# zero_grad() drops what other backwards have left between two steps; within one it raises. ----------------------------


LEAK = r"zero_grad\(\) keeps accumulated .*; remove it, .* and pass inputs= to another loss's backward\(\)"


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


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5), carried=st.booleans())
@examples(20)
def test_the_generator_leaves_the_gradients_of_the_discriminator_alone(sizes, carried):
    """With inputs=, in one turn for each microbatch, also when both are updated by the same one."""
    gan, plain = Gan(), Gan()
    sampler = vbs.CustomSampler(40, sizes, 1, 0, 4, on_end="cycle", fixed_shape=False)
    inners = [torch.optim.SGD(one.parameters(), **SGD) for one in (gan.discriminator, gan.generator)]
    optimizer_d, optimizer_g = (vbs.ConstantOptimizer(inner, sampler) for inner in inners)
    plain_d, plain_g = (torch.optim.SGD(one.parameters(), **SGD) for one in (plain.discriminator, plain.generator))
    sums = [{}, {}]
    turns = (optimizer_d, gan.discriminator, gan.loss_d), (optimizer_g, gan.generator, gan.loss_g)
    for rows in sampler:
        microbatch = optimizer_d.microbatch
        weight = microbatch.samples / microbatch.batch_size
        for optimizer, module, loss in turns:
            optimizer.zero_grad()
            inputs = list(module.parameters())
            optimizer.backward(loss(rows), inputs=inputs) if carried else loss(rows).backward(inputs=inputs)
            optimizer.step()
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


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5))
@examples(20)
def test_the_generator_may_meet_the_new_critic_in_a_second_pass(sizes):
    """As in public scripts, by which an update trains the critic first; both optimizers share a sampler."""
    gan, plain = Gan(), Gan()
    sampler = vbs.CustomSampler(40, sizes, 1, 0, 4, on_end="cycle", fixed_shape=False, max_updates=7)
    inners = [torch.optim.SGD(one.parameters(), **SGD) for one in (gan.discriminator, gan.generator)]
    optimizers = [vbs.ConstantOptimizer(inner, sampler) for inner in inners]
    models, losses = (gan.discriminator, gan.generator), (gan.loss_d, gan.loss_g)
    batches = []
    for _ in vbs.remaining_epochs(sampler, optimizers):
        for update in vbs.updates(sampler, optimizers[0]):
            microbatches = list(update)
            batches.append(sorted({row for rows in microbatches for row in rows}))
            for optimizer, model, loss in zip(optimizers, models, losses, strict=True):
                for rows in microbatches:
                    optimizer.backward(loss(rows), inputs=list(model.parameters()))
                    optimizer.step()
    turns = [(torch.optim.SGD(plain.discriminator.parameters(), **SGD), plain.loss_d)]
    turns += [(torch.optim.SGD(plain.generator.parameters(), **SGD), plain.loss_g)]
    for rows in batches:
        for inner, loss in turns:
            inner.zero_grad()
            loss(rows).backward()
            inner.step()
    assert_equal(gan.weights(), plain.weights())


def test_gradients_of_an_unrelated_model_stay():
    other = filled(nn.Linear(3, 2).double())
    other(torch.ones(1, 3).double()).sum().backward()
    run = training().run(1)
    run.optimizer.zero_grad()
    assert all(parameter.grad is not None for parameter in other.parameters())


def test_gradients_that_are_assigned_in_an_update_of_one_microbatch_count():
    run = training(vbs.ConstantOptimizer, sizes=[4], inner=torch.optim.SGD, hyperparameters={"lr": 0.5})
    next(iter(run.sampler))
    before = run.weights()
    for parameter in parameters(run):
        parameter.grad = torch.ones_like(parameter)
    assert run.optimizer.step()
    assert_equal(run.weights(), [weight - 0.5 for weight in before])
