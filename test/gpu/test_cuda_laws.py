"""On a GPU, an update equals that of one big batch: for each rule, any sizes, any world and each implementation."""

from __future__ import annotations

import warnings
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import variable_batch_size as vbs
from helpers.denominators import DATASET, Divided, batches_of, plain
from helpers.gpu import DEVICE, MARKS, TOLERANCES, deviation, difference, on_device
from helpers.properties import examples
from helpers.reference import EQUATIONS, HYPERPARAMETERS, OPTIMIZERS, SIZES, twin
from variable_batch_size.testing import run_ranks

pytestmark = MARKS

Kind = type[vbs.CustomOptimizer]
every_class = pytest.mark.parametrize("kind", OPTIMIZERS.values(), ids=lambda kind: kind.__name__)
every_dtype = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)


@every_class
@every_dtype
@examples(24)
@given(
    sizes=st.lists(st.integers(1, 96), min_size=2, max_size=4),
    minibatch_size=st.integers(4, 40),
    fixed_shape=st.booleans(),
    max_grad_norm=st.sampled_from([None, 0.5, 1e6]),
    seed=st.integers(0, 2**64 - 1),
    tail=st.integers(0, 40),
)
def test_an_update_on_a_gpu_equals_that_of_one_big_batch(kind, dtype, sizes, tail, **options):
    assert deviation(kind, sizes, dtype, dataset_size=max(sizes) + tail, **options) <= TOLERANCES[dtype]


@every_class
@every_dtype
def test_the_world_does_not_matter_on_a_gpu(kind, dtype):
    def train(backend):
        return on_device(kind, SIZES, dtype=dtype, backend=backend).run(len(SIZES))

    for run in run_ranks(train, 3):
        assert difference(run, twin(kind, SIZES, dtype=dtype)) <= TOLERANCES[dtype]


@pytest.mark.parametrize("counted_on", ["cpu", DEVICE])
def test_denominators_on_a_gpu_are_those_of_all_ranks(counted_on):
    def train(backend):
        run = on_device(vbs.ConstantOptimizer, SIZES, dataset_size=DATASET, ref_batchsize=None, backend=backend)
        Divided(run, {name: number.to(counted_on) for name, number in numbers.items()}).train(len(SIZES))
        return run

    numbers = {"tokens": torch.arange(DATASET).remainder(7).double(), "rows": torch.ones(DATASET).double()}
    for run in run_ranks(train, 3):
        assert difference(run, plain(numbers, batches_of([*SIZES]))) <= 1e-12


IMPLEMENTED = {torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW}
INNERS = [(kind, inner) for kind in OPTIMIZERS.values() for inner in EQUATIONS[kind].inners if inner in IMPLEMENTED]


@pytest.mark.parametrize(
    ("kind", "inner", "implementation"),
    [(kind, inner, name) for (kind, inner), name in product(INNERS, ["foreach", "fused"])],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
@every_dtype
def test_an_implementation_of_the_inner_optimizer_changes_nothing(kind, inner, implementation, dtype):
    values = HYPERPARAMETERS[inner] | {implementation: True}
    run = on_device(kind, SIZES, dtype=dtype, inner=inner, hyperparameters=values).run(len(SIZES))
    assert difference(run, twin(kind, SIZES, dtype=dtype, inner=inner)) <= TOLERANCES[dtype]


def test_a_non_finite_gradient_leaves_the_weights_if_the_noise_is_measured():
    """On a device the host does not read it: the update is made, with a learning rate of 0."""
    run = on_device(vbs.AdaScaleOptimizer, [12] * 4, dataset_size=48)
    weights = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # on a CPU the update is skipped
        for number, indices in enumerate(run.sampler):
            (run.loss(indices) * (torch.inf if number == 4 else 1)).backward()  # in the second update
            run.optimizer.step()
            if number % 3 == 2:
                weights.append(torch.cat([parameter.detach().flatten() for parameter in run.model.parameters()]))
    first, second, *others = weights
    assert torch.equal(first, second)
    assert all(torch.isfinite(one).all() for one in others)
    assert not torch.equal(second, others[0])
