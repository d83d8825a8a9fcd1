"""`optimizer.backward(loss)`: the gradients of `loss.backward()`, and every foreign change of them is seen."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import variable_batch_size as vbs
from helpers.properties import examples
from helpers.reference import assert_equal, training


def parameters(run):
    return list(run.model.parameters())


def scale(run):
    for parameter in parameters(run):
        if parameter.grad is not None:
            parameter.grad *= 0.5


CHANGES = {
    "clip_grad_norm_": lambda run: torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1e-3),
    "zero_grad(set_to_none=False)": lambda run: run.model.zero_grad(set_to_none=False),
    "zero_grad()": lambda run: run.model.zero_grad(),
    "scaled": scale,
    "loss.backward()": lambda run: run.loss([0, 1]).backward(),
    "replaced": lambda run: setattr(parameters(run)[0], "grad", torch.ones_like(parameters(run)[0])),
}
OPTIONS = [{}, {"noise": "differenced"}, {"max_grad_norm": 0.1}]
REFUSED = (
    r"only optimizer.backward\(\) may change gradients .* something else has changed that of parameter \d, of shape"
)


@given(
    change=st.sampled_from(sorted(CHANGES)),
    update=st.integers(0, 12),
    sizes=st.lists(st.integers(1, 14), min_size=1, max_size=4),
    after=st.booleans(),
    options=st.sampled_from(OPTIONS),
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
            with pytest.raises(RuntimeError, match=f"{REFUSED}|must follow the backward"):  # noqa: PT012
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
            with pytest.raises(ValueError, match=r"must weigh it alike, but one .*; call backward\(\) of the one with"):
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
def test_noise_of_a_microbatch_with_several_backward_passes_raises_before_the_weights_change(by):
    run = training(vbs.AdaScaleOptimizer)
    before, indices = run.weights(), next(iter(run.sampler))
    if by == "losses":
        run.optimizer.backward(run.loss(indices) / 2)
        run.optimizer.backward(run.loss(indices) / 2)
    else:  # a layer in several segments that are computed again
        layer = next(iter(run.model.children()))
        x = run.x[indices].requires_grad_()
        ends = [checkpoint(layer, x * factor, use_reentrant=True).sum() for factor in (1.0, 2.0)]
        run.optimizer.backward(ends[0] * ends[1])
    with pytest.raises(RuntimeError, match=r"but there were several; add its losses, call backward\(\) once, and reco"):
        run.optimizer.step()
    assert_equal(run.weights(), before, 0)
