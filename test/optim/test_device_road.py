"""The road of a GPU, on a CPU: numbers stay in tensors that the host does not read, and operations are not compiled.

Machines without a GPU try the values here; that nothing is read is what `test_host_reads.py` tries.
"""

from itertools import pairwise

import numpy as np
import pytest
import torch

import variable_batch_size as vbs
from helpers.reference import OPTIMIZERS, SIZES, training
from variable_batch_size.backend import Backend
from variable_batch_size.optim.tensors.arithmetic import zero_unless


@pytest.fixture(autouse=True)
def nothing_is_read(monkeypatch):
    monkeypatch.setattr(Backend, "reads", lambda self, tensor: False)


@pytest.mark.parametrize("kind", OPTIMIZERS.values(), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 1.0}], ids=lambda one: "".join(one))
def test_weights_and_progress_are_those_of_the_host(monkeypatch, kind, options):
    on_device = training(kind, SIZES, **options).run(len(SIZES))
    monkeypatch.undo()
    on_host = training(kind, SIZES, **options).run(len(SIZES))
    for found, expected in zip(on_device.weights(), on_host.weights(), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)
    assert on_device.optimizer.progress == pytest.approx(on_host.optimizer.progress, rel=1e-6)


def logged(**options):
    """The means of a log and the norm of the gradient, of each update; the last update logs nothing."""
    run = training(sizes=SIZES, grad_norm=True, **options)
    rows = []
    for indices in run.microbatches(len(SIZES)):
        loss = run.loss(indices)
        run.optimizer.backward(loss)
        if len(rows) < len(SIZES) - 1:
            run.optimizer.log(loss=loss, rows=torch.tensor(len(indices)), number=3)
        if run.optimizer.step():
            rows.append([*map(float, run.optimizer.logged.values()), float(run.optimizer.grad_norm)])
    return rows


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("kind", [vbs.LinearRuleOptimizer, vbs.LinearRuleMomentumOptimizer, vbs.AdaScaleOptimizer])
def test_means_of_a_log_are_those_of_the_host(monkeypatch, kind, reduction):
    on_device = logged(kind=kind, reduction=reduction)
    monkeypatch.undo()
    np.testing.assert_allclose(on_device, logged(kind=kind, reduction=reduction), rtol=1e-5)


@pytest.mark.parametrize("factor", [0.0, 1e-30, 1e30, -2.0])
@pytest.mark.parametrize("reads", [True, False])
def test_the_norm_of_a_log_is_that_of_the_gradient_whatever_the_rule_makes_of_it(monkeypatch, factor, reads):
    if reads:
        monkeypatch.undo()
    norms = []
    for rule in (vbs.rules.ConstantRule(), lambda update: vbs.rules.Scaling(gradient=factor)):
        run = training(vbs.CustomOptimizer, [12], rule=rule, grad_norm=True, dtype=torch.float32)
        run.run(1)
        norms.append(float(run.optimizer.grad_norm))
    assert norms[0] == norms[1] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64, torch.complex128], ids=str)
def test_gradients_that_are_not_finite_become_zero_and_others_stay(dtype):
    bad = torch.tensor([1.5, torch.nan, torch.inf, -torch.inf, -0.0]).to(dtype)
    tensors = [bad.clone(), torch.randn(3, 4, dtype=torch.float32).T, torch.randn(7, dtype=dtype)]
    before = [tensor.clone() for tensor in tensors]
    zero_unless(torch.tensor(True), tensors)
    for tensor, old in zip(tensors, before, strict=True):
        torch.testing.assert_close(tensor, old, rtol=0, atol=0, equal_nan=True)
    zero_unless(torch.tensor(False), tensors)
    assert all(not tensor.any() and torch.isfinite(tensor).all() for tensor in tensors)


def test_gradients_without_a_view_of_their_bits_become_zero_too():
    bad = torch.tensor([1 + 2j, complex(torch.nan, 1)])
    tensors = [bad.conj(), bad.conj().imag, bad.to(torch.complex128).conj()]
    assert tensors[0].is_conj()
    assert tensors[1].is_neg()
    before = [tensor.clone() for tensor in tensors]
    zero_unless(torch.tensor(True), tensors)
    for tensor, old in zip(tensors, before, strict=True):
        torch.testing.assert_close(tensor, old, rtol=0, atol=0, equal_nan=True)
    zero_unless(torch.tensor(False), tensors)
    assert not any(tensor.any() for tensor in tensors)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_an_update_with_a_gradient_that_is_not_finite_changes_nothing(momentum):
    hyperparameters = {"lr": 0.02, "momentum": momentum}
    run = training(vbs.AdaScaleOptimizer, [12] * 4, dataset_size=48, hyperparameters=hyperparameters)
    weights, progress = [], []
    for number, indices in enumerate(run.sampler):
        (run.loss(indices) * (torch.inf if number == 4 else 1)).backward()  # in the second update
        if run.optimizer.step():
            weights.append(run.weights())
            progress.append(run.optimizer.progress)
    moved = [not all(map(np.array_equal, *pair)) for pair in pairwise(weights)]
    assert moved[1:] == [True, True]
    assert np.isfinite(np.concatenate([one.ravel() for one in weights[-1]])).all()
    if not momentum:  # else the momentum of the first update goes on, times a learning rate of 0
        assert not moved[0]
    assert progress[0] == progress[1] < progress[2]
