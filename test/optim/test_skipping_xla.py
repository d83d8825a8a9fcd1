"""Skipped updates on a device that compiles graphs: each optimizer as on the CPU, and no graph that compiles late."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("torch_xla")
pytestmark = pytest.mark.xla

import variable_batch_size as vbs  # noqa: E402
from helpers.features import largest_norm  # noqa: E402
from helpers.processes import run_job  # noqa: E402
from helpers.reference import Array, assert_equal, training  # noqa: E402
from helpers.xla_graphs import MINIBATCH_SIZE, Training, count, late  # noqa: E402
from variable_batch_size.backend.xla import launch  # noqa: E402

SIZES = (9, 4, 17, 1, 12, 3, 2, 30, 20, 9, 12, 5, 40)
KINDS = {
    "SGD": (torch.optim.SGD, {}),
    "SGD with momentum": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "Adam": (torch.optim.Adam, {"eps": 0.01, "amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {"eps": 0.01, "weight_decay": 0.1}),
    "NAdam": (torch.optim.NAdam, {"eps": 0.01}),
    "RAdam": (torch.optim.RAdam, {"eps": 0.01, "betas": (0.85, 0.9)}),
    "Adamax": (torch.optim.Adamax, {"eps": 0.01}),
    "Adagrad": (torch.optim.Adagrad, {"lr_decay": 0.1}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 0.5}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.5, "centered": True, "eps": 0.01}),
    "Rprop": (torch.optim.Rprop, {}),
    "ASGD": (torch.optim.ASGD, {"t0": 3}),
    "Muon": (torch.optim.Muon, {}),
}


class Outcome(NamedTuple):
    """What a training ends with."""

    weights: list[Array]
    state: list[Array]
    numbers: list[float]  # skipped updates, these in a row, progress
    average: list[Array]  # of the weights


def begin(name, backend, device=None, **options):
    """Begin a training with an optimizer of KINDS."""
    kind, own = KINDS[name]

    def inner(parameters, **hyperparameters):
        every = [one for one in parameters if one.ndim == 2 or kind is not torch.optim.Muon]
        return kind(every, **hyperparameters)

    options = {"sampling": {"fixed_shape": True}, "skip_grad_norm": largest_norm, **options}
    common = {"inner": inner, "hyperparameters": {"lr": 0.02} | own, "backend": backend, "device": device}
    return training(vbs.ConstantOptimizer, SIZES, **common, **options)


def outcome(run):
    """Train to the end, with an average of the weights."""
    average, optimizer = vbs.WeightAverage(run.model.parameters(), 0.9, run.optimizer), run.optimizer
    for indices in run.microbatches(len(SIZES)):
        run.step(indices)
    optimizer.backend.mark_step()
    state = optimizer.state_dict()
    tensors = [one for own in state["state"].values() for one in own.values() if isinstance(one, Tensor)]
    numbers = [*state["vbs"]["skipped"].values(), optimizer.progress]
    return Outcome(run.weights(), _on_host(tensors), numbers, _on_host(average.averages))


def _on_host(tensors):
    return [one.detach().cpu().double().numpy() for one in tensors]


def outcomes(backend):
    """Train with each of KINDS on a core; return an error, too, and what is known of skipped updates along a training.

    That training skips all of them but the first.
    """
    import torch_xla

    found = {name: outcome(begin(name, backend, torch_xla.device())) for name in KINDS}
    message = ""
    try:
        training(vbs.ConstantOptimizer, inner=torch.optim.Adafactor, hyperparameters={}, **_on(backend))
    except TypeError as error:
        message = str(error)
    run, known = training(vbs.ConstantOptimizer, (4,), **_on(backend)), list[int]()
    for indices in run.microbatches(70):
        assert run.step(indices)
        known.append(run.optimizer.skipped)
    return found, message, known


def _on(backend):
    import torch_xla

    sampling = {"fixed_shape": True}
    return {"backend": backend, "device": torch_xla.device(), "skip_grad_norm": 1e-9, "sampling": sampling}


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
