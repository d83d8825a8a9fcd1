"""Skipped updates on a device that compiles graphs: each optimizer as on the CPU, and no graph that compiles late."""

import numpy as np
import pytest
import torch

pytest.importorskip("torch_xla")
pytestmark = pytest.mark.xla

import variable_batch_size as vbs  # noqa: E402
from helpers.processes import run_job  # noqa: E402
from helpers.reference import assert_equal  # noqa: E402
from helpers.skipping import KINDS, begin, outcome, outcomes  # noqa: E402
from helpers.xla_graphs import MINIBATCH_SIZE, Training, count, late  # noqa: E402
from variable_batch_size.backend.xla import launch  # noqa: E402

# torch keeps numbers of NAdam, RAdam and ASGD in float32, and Muon's iteration runs in bfloat16.
TOLERANCE = {"NAdam": 1e-8, "RAdam": 1e-6, "ASGD": 1e-5, "Muon": 2e-2}


@pytest.mark.slow("launches XLA")
def test_each_optimizer_ends_as_on_the_cpu():
    ((found, message, known),) = run_job("cores", outcomes, ranks=1)
    for name in KINDS:
        right, tolerance = outcome(begin(name, vbs.backend.LocalBackend())), TOLERANCE.get(name, 1e-12)
        assert found[name].numbers == right.numbers, name
        assert 2 < right.numbers[0] < 11
        for own, others in zip(found[name], right, strict=True):
            if others:
                assert_equal(arrays(own), arrays(others), tolerance)
    assert message.startswith("on xla skip_grad_norm needs an optimizer whose state it can select on the device, SGD, ")
    assert known[:31] == [0] * 31  # which is read every 16 updates, of 16 updates ago
    assert (known[31], known[47], known[-1]) == (15, 31, 47)


def arrays(values):
    return [np.asarray(one) for one in values]


@pytest.mark.slow("launches XLA")
@pytest.mark.parametrize("cores", [2, pytest.param(1, marks=pytest.mark.nightly("launches another world"))])
def test_nothing_compiles_late(cores, tmp_path):
    several, one = 4 * MINIBATCH_SIZE * cores, MINIBATCH_SIZE * cores
    sizes = (*4 * (several,), *2 * (one,), several, MINIBATCH_SIZE, several + 1, *28 * (one,), several, one)
    own = {"skip_grad_norm": 1.0}
    variants = [
        {"hyperparameters": {"momentum": 0.9}},
        {"kind": "AdamW", "loop": "log", "options": {"max_grad_norm": 0.5}},
        {"rule": "adascale", "loop": "reads", "options": {"noise": "differenced"}},
        {"kind": "RAdam", "rule": "root"},
        {"kind": "Adagrad", "hyperparameters": {"lr_decay": 0.1}},
        {"kind": "AdamW", "rule": ("invariant-adam", "root"), "lrs": (0.01, 0.02)},
        {"kind": "AdamW", "rule": "sqrt-sde", "lrs": (0.01, 0.01)},
    ]
    trainings = [Training(sizes, **{**one, "options": {**one.get("options", {}), **own}}) for one in variants]
    launch(count, (tmp_path, trainings), cores=cores)
    found = torch.load(tmp_path / "updates.pt", weights_only=False)
    assert list(map(late, found)) == [{}] * len(found)
