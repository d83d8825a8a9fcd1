"""The gradients of an update: of parameters that all microbatches use, or some, or none; and of any dtype."""

import copy
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import variable_batch_size as vbs
from helpers.reference import assert_equal, network, training, twin
from variable_batch_size.backend import Backend, LocalBackend
from variable_batch_size.backend.sent_numbers import SentNumbers
from variable_batch_size.optim.sums.participation import Participation
from variable_batch_size.optim.tensors.late import READ_EVERY
from variable_batch_size.optim.tensors.parameters import Parameters
from variable_batch_size.testing import run_ranks

# ----------------------------------------------------------------------------------------------------------- dtypes


@pytest.mark.parametrize("options", [{}, {"noise": "microbatches"}], ids=str)
@pytest.mark.parametrize("world", [1, 2])
def test_half_precision_does_not_overflow_in_a_sum_of_microbatches(options, world):
    """128 gradients of 1000 have a sum of 128,000, above the largest float16, and a mean of 1000."""

    def train(backend):
        weight = nn.Parameter(torch.zeros(3, dtype=torch.float16))
        sampler = vbs.CustomSampler(128, 128, backend.world.size, backend.world.rank, minibatch_size=1)
        inner = torch.optim.SGD([weight], lr=2**-10)
        optimizer = vbs.ConstantOptimizer(inner, sampler, 128, backend=backend, max_grad_norm=1e6, **options)
        for _ in sampler:
            (weight * 1000).sum().backward()
            optimizer.step()
        return weight.detach()

    for weight in run_ranks(train, world):
        torch.testing.assert_close(weight, torch.full((3,), -1000 / 1024, dtype=torch.float16), rtol=1e-3, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_gradients_are_accumulated_without_loss_of_digits(dtype):
    """The update of 1000 microbatches is that of their exact mean, rounded once."""
    values = torch.linspace(0.5, 1.5, 1000).to(dtype)
    weight = nn.Parameter(torch.zeros((), dtype=dtype))
    sampler = vbs.CustomSampler(1000, 1000, 1, 0, minibatch_size=1)
    optimizer = vbs.ConstantOptimizer(torch.optim.SGD([weight], lr=1.0), sampler)
    for (index,) in sampler:
        (weight * values[index]).backward()
        optimizer.step()
    assert weight.item() == -values.double().mean().to(dtype).item()


def test_with_a_static_graph_gradients_are_replaced_before_anything_is_computed(monkeypatch):
    """What backward leaves may be a view of its transpose: if anything held it, both would be results of the graph."""
    monkeypatch.setattr(vbs.backend.LocalBackend, "static_graph", True)
    run = training(vbs.LinearRuleOptimizer, [20], minibatch_size=8)
    left = []
    held = []

    def mark_step(_):
        held.extend(gradient() is not None for gradient in left)
        left.clear()

    monkeypatch.setattr(vbs.backend.LocalBackend, "mark_step", mark_step)
    for indices in run.sampler:
        run.loss(indices).backward()
        left[:] = [weakref.ref(p.grad) for p in run.model.parameters() if p.grad is not None]
        run.optimizer.step()
    assert held
    assert not any(held)


@pytest.mark.parametrize("skips", [False, True])
def test_a_replay_has_no_effect_even_if_it_is_non_finite_and_may_skip_backward(skips):
    def train(backend):
        run = training(sizes=(5, 1, 2), dataset_size=8, backend=backend)
        for indices in run.sampler:
            replay = run.optimizer.microbatch.samples == 0
            if not (replay and skips):
                (run.loss(indices) * (torch.nan if replay else 1.0)).backward()
            run.optimizer.step()
        return run

    for run in run_ranks(train, 3):
        assert_equal(run.weights(), twin(vbs.LinearRuleOptimizer, (5, 1, 2), dataset_size=8))


# ------------------------------------------------------------------------------------------------------ several ranks


@pytest.mark.parametrize("kind", [vbs.LinearRuleOptimizer, vbs.AdaScaleOptimizer])
def test_a_change_raises_on_all_ranks_before_the_weights_change(kind):
    def train(backend):
        model = network()
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


def test_ranks_that_differ_at_the_first_update_raise():
    def train(backend):
        model = network()
        model[2].weight.requires_grad_(backend.world.rank == 0)
        run = training(model=model, backend=backend)
        with pytest.raises(RuntimeError, match=r"it is \[0, 1, 2, 3\] on rank 0 and \[0, 1, 3\] on rank 1") as caught:
            run.run(1)
        return str(caught.value)

    first, second = run_ranks(train, 2)
    assert first == second


class Device(LocalBackend):
    """A rank of several, on a device that the host does not read."""

    alone = False


@pytest.mark.parametrize("late", [False, True])
def test_a_flag_that_is_not_read_at_once_raises_some_updates_later(late):
    """As on a device; saving a state reads it."""
    parameters = [torch.zeros(2, requires_grad=True), torch.zeros(3, requires_grad=True)]
    agreed = Participation(Parameters(parameters), Device(sent=SentNumbers("cpu")), find_unused=False)
    agreed.load_state_dict({"has_gradient": [1, 0]})

    def update(*has_gradient):
        agreed.forget_use()
        agreed.note_used(has_gradient)
        (flag,) = agreed.message()
        agreed.find_used([flag])

    for _ in range(100):
        update(True, False)
    agreed.state_dict()
    update(True, True)
    changed = r"in every update, but parameter 1, of shape \(3,\), on rank 0 has one; pass"
    if not late:
        with pytest.raises(RuntimeError, match=changed):
            agreed.state_dict()
        return
    with pytest.raises(RuntimeError, match=changed):  # noqa: PT012 (in one of these updates)
        for _ in range(2 * READ_EVERY):
            update(True, False)


def test_ranks_that_use_other_parameters_are_named(monkeypatch):
    monkeypatch.setattr(Backend, "reads", lambda self, tensor: False)  # as on a device

    def train(backend):
        run = training(sizes=[9], backend=backend)
        loss = run.loss(next(iter(run.sampler)))
        inputs = [*run.model.parameters()][: 4 if backend.world.rank != 1 else 3]
        loss.backward(inputs=inputs)
        with pytest.raises(RuntimeError) as caught:
            run.optimizer.step()
        return str(caught.value)

    named = "rank 0 uses parameter 3, of shape (2,), and rank 1 does not; pass find_unused_parameters=True"
    assert all(named in message for message in run_ranks(train, 3))


@pytest.mark.parametrize("sizes", [(1, 1), (3, 3), (2, 4)], ids=str)
@pytest.mark.parametrize(
    ("dtype", "options"),
    [(torch.float64, {}), (torch.float64, {"noise": "microbatches"}), (torch.bfloat16, {})],
    ids=["plain", "measured", "half precision"],
)
def test_microbatches_that_train_different_parameters(dtype, options, sizes):
    """As experts do that few samples choose: of as many parameters in each, of equal or of other shapes."""
    experts = [torch.full((size,), 0.5, dtype=dtype, requires_grad=True) for size in sizes]
    twins = [expert.detach().double().requires_grad_() for expert in experts]
    x = torch.linspace(0.5, 1.5, 48, dtype=torch.float64)
    sampler = vbs.CustomSampler(48, 11, 1, 0, 3)
    inner = torch.optim.SGD(experts, lr=0.1)
    optimizer = vbs.ConstantOptimizer(inner, sampler, 11, **options)

    def loss(parameters, number, indices):
        return (x[indices].mean() * parameters[number % 2].double() - number).square().sum()

    gradients = [torch.zeros_like(twin) for twin in twins]
    for number, indices in enumerate(sampler):
        due = optimizer.microbatch
        found = torch.autograd.grad(loss(twins, number, indices), twins[number % 2])[0]
        gradients[number % 2] += due.samples / due.batch_size * found
        optimizer.backward(loss(experts, number, indices))
        if optimizer.step():
            for twin, gradient in zip(twins, gradients, strict=True):
                twin.data -= 0.1 * gradient
                gradient.zero_()
            break
    for expert, twin in zip(experts, twins, strict=True):
        tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-12
        torch.testing.assert_close(expert.double(), twin, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("later", [False, True])
def test_half_precision_that_comes_later_accumulates_in_float32(later):
    rows = torch.randn(512, 4, generator=torch.Generator().manual_seed(0)) + 1
    head, body = torch.nn.Linear(1, 1), torch.nn.Linear(4, 1, bias=False, dtype=torch.bfloat16)
    groups = [{"params": list(model.parameters())} for model in (head, body)]
    inner = torch.optim.SGD(groups[:1] if later else groups, lr=1.0)
    optimizer = vbs.ConstantOptimizer(inner, sampler := vbs.CustomSampler(512, 512, 1, 0, 1, shuffle=False))
    if later:
        optimizer.add_param_group(groups[1])
    found = []
    inner.register_step_pre_hook(lambda *_: found.append(body.weight.grad.float().clone()))
    for indices in sampler:
        loss = 0 * head(torch.ones(1, 1)).sum() + body(rows[indices].bfloat16()).float().mean()
        optimizer.backward(loss)
        optimizer.step()
    torch.testing.assert_close(found[0], rows.bfloat16().float().mean(0, keepdim=True), rtol=5e-3, atol=0)
