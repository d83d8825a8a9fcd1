"""On a GPU: autocast, and a GradScaler whose scale changes within an update or finds a non-finite gradient."""

from __future__ import annotations

import pytest
import torch

import variable_batch_size as vbs
from helpers.gpu import DEVICE, MARKS, difference, on_device
from helpers.reference import HYPERPARAMETERS, SIZES, twin

pytestmark = MARKS

EPOCH = {"sizes": SIZES[:4], "dataset_size": 61}  # of four updates, of 5, 2, 1 and 9 microbatches
every_kind = pytest.mark.parametrize(
    "kind",
    [vbs.RootRuleOptimizer, vbs.LinearRuleMomentumOptimizer, vbs.AdaScaleOptimizer, vbs.SqrtSDERuleOptimizer],
    ids=lambda kind: kind.__name__,
)


def grad_scaler(growth_interval=2):
    """Return one whose scale grows at every second microbatch."""
    return torch.amp.GradScaler(DEVICE, init_scale=2.0**8, growth_interval=growth_interval)


def scaled_steps(run, scaler, spoil=-1):
    """Train for an epoch; yield what each step returns. The loss of microbatch number `spoil` is infinite."""
    for number, indices in enumerate(run.sampler):
        run.optimizer.backward(run.loss(indices) * (torch.inf if number == spoil else 1), scaler=scaler)
        yield scaler.step(run.optimizer)
        scaler.update()


@every_kind
@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
def test_an_update_under_a_grad_scaler_on_a_gpu_is_exact(kind, fused):
    inner = type(on_device(kind, **EPOCH).optimizer.inner)
    values = HYPERPARAMETERS[inner] | ({"fused": True} if fused else {})
    run, scaler = on_device(kind, **EPOCH, max_grad_norm=0.5, hyperparameters=values), grad_scaler()
    assert sum(scaled_steps(run, scaler)) == 4
    assert scaler.get_scale() > 2.0**8
    assert difference(run, twin(kind, **EPOCH, max_grad_norm=0.5)) <= 1e-12


@every_kind
def test_an_overflow_on_a_gpu_skips_the_update(kind):
    run, scaler = on_device(kind, **EPOCH), grad_scaler()
    assert sum(scaled_steps(run, scaler, spoil=2)) == 3
    assert difference(run, twin(kind, **EPOCH, skipped={0})) <= 1e-12
    assert (run.optimizer.updates, run.optimizer.samples) == (4, 61)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [vbs.LinearRuleOptimizer, vbs.AdaScaleOptimizer], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("scales", [False, True], ids=["", "GradScaler"])
def test_trains_with_autocast_on_a_gpu(kind, dtype, scales):
    run = on_device(kind, **EPOCH, dtype=torch.float32)
    whole_loss = run.loss

    def loss(indices):
        with torch.autocast(DEVICE, dtype=dtype):
            return whole_loss(indices)

    run.loss = loss
    assert sum(scaled_steps(run, grad_scaler(growth_interval=8)) if scales else run.steps()) == 4
    assert difference(run, twin(kind, **EPOCH)) <= 1e-2
