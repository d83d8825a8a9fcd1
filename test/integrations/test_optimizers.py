"""Optimizers of other packages: each is exact along a trace and when it resumes, or refused in a sentence.

The extra `test-optimizers` has them. docs/loops.md has the table of what is found here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

import variable_batch_size as vbs
from helpers.checkpoints import checkpoint, restore_checkpoint, save_checkpoint
from helpers.reference import REF, SIZES, assert_equal, batches, network, training

pytestmark = pytest.mark.nightly("needs the extra test-optimizers")
Make = Callable[[Iterable[Tensor]], Optimizer]


def of(package, name, **options):
    def make(parameters, **_):
        module = pytest.importorskip(package)
        return getattr(module, name)(parameters, **options)

    make.__name__ = name
    return make


ADAFACTOR = of("transformers.optimization", "Adafactor", lr=0.01, relative_step=False, scale_parameter=False)
RELATIVE = of("transformers.optimization", "Adafactor", lr=None)
ADAM8BIT = of("torchao.optim", "AdamW8bit", lr=0.01)
SCHEDULE_FREE = of("schedulefree", "AdamWScheduleFree", lr=0.01)
EXACT = [(ADAFACTOR, 0.5), (ADAFACTOR, 0), (RELATIVE, 0), (SCHEDULE_FREE, 0), (ADAM8BIT, 0.5)]
REFUSED = [
    (RELATIVE, "root", r"needs one in each parameter group, got None in group 0; pass a number, or use the co"),
    (SCHEDULE_FREE, "root", r"AdamWScheduleFree weighs all later ones by the largest .*; use the constant rule"),
]


def mode(optimizer, name):
    """Call `train` or `eval`, which schedule-free optimizers have."""
    if hasattr(optimizer, name):
        getattr(optimizer, name)()


def by_hand(make, power):
    run = training(vbs.ConstantOptimizer, hyperparameters={})
    inner = make(run.model.parameters())
    lr = inner.param_groups[0]["lr"]
    mode(inner, "train")
    for batch in batches(SIZES, 50):
        run.loss(batch.tolist()).backward()
        if power:
            inner.param_groups[0]["lr"] = lr * (len(batch) / REF) ** power
        inner.step()
        inner.zero_grad()
    mode(inner, "eval")
    return run.weights()


@pytest.fixture(autouse=True)
def eager():
    """torchao compiles its step, which would take a minute and change nothing."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.parametrize(("make", "power"), EXACT, ids=lambda value: getattr(value, "__name__", value))
def test_it_steps_as_on_whole_batches_and_resumes(make, power, tmp_path):
    def begin():
        run = training(vbs.RootRuleOptimizer if power else vbs.ConstantOptimizer, inner=make, hyperparameters={})
        mode(run.optimizer, "train")
        return run

    whole = begin().run(len(SIZES))
    mode(whole.optimizer, "eval")
    assert_equal(whole.weights(), by_hand(make, power), 1e-6 if make is ADAM8BIT else 1e-9)  # its rate is a float32
    half, rest = begin().run(3), begin()
    save_checkpoint(tmp_path, half)
    restore_checkpoint(tmp_path, rest)
    rest.run(len(SIZES) - 3)
    mode(rest.optimizer, "eval")
    assert_equal(rest.weights(), whole.weights(), 0)


def test_moments_in_8_bits_are_not_saved(tmp_path):
    """Those of parameters with 4096 elements and more."""
    run = training(vbs.ConstantOptimizer, inner=ADAM8BIT, hyperparameters={}, model=network(width=2048)).run(1)
    told = r"only tensors and plain Python values, got a torchao\..*OptimState8bit .* at optimizer/state/0\.weight"
    with pytest.raises(RuntimeError, match=told):
        checkpoint(tmp_path, run)


@pytest.mark.parametrize(("make", "rule", "told"), REFUSED)
def test_it_is_refused_in_a_sentence(make, rule, told):
    with pytest.raises((TypeError, ValueError), match=told):
        training(vbs.CustomOptimizer, inner=make, hyperparameters={}, rule=rule).run(1)
