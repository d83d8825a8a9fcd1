"""On a GPU: a compiled model, and a compiled inner step."""

from __future__ import annotations

import logging
import os
import shutil
import warnings

import pytest
import torch

import variable_batch_size as vbs
from helpers.gpu import MARKS, ON_GPU, difference, on_device

COMPILER = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")  # where Triton looks for it
pytestmark = [*MARKS, pytest.mark.skipif(ON_GPU and not COMPILER, reason="Triton needs a C compiler")]

BACKEND = "inductor" if ON_GPU else "eager"
SIZES = [8, 12] * 5  # of one epoch: few learning rates, for each of which an inner step may be compiled
every_kind = pytest.mark.parametrize(
    "kind", [vbs.LinearRuleOptimizer, vbs.SqrtSDERuleOptimizer, vbs.AdaScaleOptimizer], ids=lambda kind: kind.__name__
)


@pytest.fixture(autouse=True)
def new_compiler():
    torch._dynamo.reset()
    logging.getLogger("torch.__trace").propagate = False  # pytest would format each of its many records
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of the compiler
        yield
    torch._dynamo.reset()


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_compiled_model_on_a_gpu_equals_the_eager_one(kind, dtype):
    eager, run = (on_device(kind, SIZES, dataset_size=100, dtype=dtype) for _ in range(2))
    run.model = torch.compile(run.model, backend=BACKEND, dynamic=True)
    assert difference(run.run(10), eager.run(10).weights()) <= (1e-5 if dtype is torch.float32 else 1e-12)


@every_kind
def test_a_compiled_inner_step_on_a_gpu_equals_the_eager_one(kind):
    eager, run = (on_device(kind, SIZES, dataset_size=100) for _ in range(2))
    inner = run.optimizer.inner
    inner.step = torch.compile(inner.step, backend=BACKEND)
    assert difference(run.run(10), eager.run(10).weights()) <= 1e-5  # a compiled Adam corrects its bias in float32
