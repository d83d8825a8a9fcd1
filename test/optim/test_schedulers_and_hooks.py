"""Schedulers and hooks of torch work on the wrapper as on any optimizer."""

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

from helpers import schedules
from helpers.reference import REF, SGD, SIZES, assert_equal, batches, gradient, network, training
from variable_batch_size.testing import run_ranks

SCHEDULERS = {
    **schedules.SCHEDULERS,
    "SWALR": lambda optimizer: SWALR(optimizer, 0.05, anneal_epochs=3),
    "ReduceLROnPlateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=1),
}


# ----------------------------------------------------------------------------------------------------------- schedulers


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_work_as_on_a_plain_optimizer(name, kind):
    extra = {"momentum": 0.9} if kind is torch.optim.SGD else {"betas": (0.9, 0.99)}
    hyperparameters = {"lr": 0.02} | extra
    plain = kind(network().parameters(), **hyperparameters)
    run = training(inner=kind, hyperparameters=hyperparameters)
    ours, theirs = SCHEDULERS[name](run.optimizer), SCHEDULERS[name](plain)
    metric = [1.0] if name == "ReduceLROnPlateau" else []
    for _ in range(7):
        run.run(1)
        plain.step()
        ours.step(*metric)
        theirs.step(*metric)
        found, expected = run.optimizer.param_groups[0], plain.param_groups[0]
        assert {key: found[key] for key in found if key != "params"} == {
            key: expected[key] for key in expected if key != "params"
        }


def test_a_scheduler_changes_a_tensor_lr():
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


@pytest.mark.parametrize("lr", [0.02, torch.tensor(0.02)], ids=["float", "tensor"])
def test_raises_if_a_scheduler_steps_at_every_microbatch(lr):
    run = training(hyperparameters={"lr": lr})
    scheduler = lr_scheduler.ExponentialLR(run.optimizer, 0.9)
    steps = run.steps()
    next(steps)
    scheduler.step()
    with pytest.raises(
        RuntimeError, match=r"learning rate must stay constant within a step.*call scheduler\.step\(\) only when"
    ):
        next(steps)


def test_raises_if_a_scheduler_steps_in_a_step_hook():
    run = training()
    scheduler = lr_scheduler.ExponentialLR(run.optimizer, 0.9)
    run.optimizer.register_step_post_hook(lambda *_: scheduler.step())
    with pytest.raises(
        RuntimeError, match=r"stay constant within an update, but lr changed in .*; call scheduler\.step\(\) after"
    ):
        run.run(1)
    assert run.optimizer.param_groups[0]["lr"] == SGD["lr"]


# ---------------------------------------------------------------------------------------------------------------- hooks


def test_step_hooks_run_once_an_update_with_the_reduced_gradient():
    def look(backend):
        run = training(backend=backend)
        seen = []

        def hook(when):
            def note(inner, args, kwargs):
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


def test_state_hooks_of_the_wrapper_run():
    run = training().run(1)
    optimizer, calls = run.optimizer, []
    optimizer.register_state_dict_pre_hook(lambda *_: calls.append("save"))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "note": 1})
    optimizer.register_load_state_dict_pre_hook(lambda _, state: calls.append(state["note"]))
    optimizer.register_load_state_dict_post_hook(lambda *_: calls.append("loaded"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["save", 1, "loaded"]
