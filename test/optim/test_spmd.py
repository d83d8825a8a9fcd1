"""PyTorch/XLA's SPMD mode: the weights of plain torch, no graph after two updates, and checkpoints for any mesh."""

from itertools import count
from typing import Any

import pytest
import torch

pytest.importorskip("torch_xla")
pytestmark = [pytest.mark.xla, pytest.mark.slow("launches XLA")]

import variable_batch_size as vbs  # noqa: E402
from helpers.spmd import RESTORED, SAVED, SpmdCase, SpmdTraining, by_hand, farthest, run_cases  # noqa: E402

TOLERANCE = 2e-6  # of the largest weight; measured 1e-7 with SGD, 5e-7 with AdamW
SKIP = 10.0  # no norm is nearer than 0.3 %
ADASCALE: dict[str, Any] = {"kind": vbs.AdaScaleOptimizer}
ROOT: dict[str, Any] = {"kind": vbs.RootRuleOptimizer, "inner": torch.optim.AdamW}
WIDTHS = count(8, 4)
CASES = {
    "linear, data": SpmdCase("data", next(WIDTHS)),
    "linear, fsdp, clipped": SpmdCase("fsdp", next(WIDTHS), options={"max_grad_norm": 5.0}),
    "linear, tensor, counted": SpmdCase("tensor", next(WIDTHS), counted=True),
    "linear, fsdp, skipping": SpmdCase("fsdp", next(WIDTHS), options={"skip_grad_norm": SKIP}),
    "linear, data, step": SpmdCase("data", next(WIDTHS), around="step"),
    "linear, data, compile": SpmdCase("data", next(WIDTHS), around="compile"),
    "linear, data, full graph of the backward": SpmdCase("data", next(WIDTHS), around="backward"),
    "AdaScale, data, six rows": SpmdCase("data", next(WIDTHS), minibatch_size=6, **ADASCALE),  # on four devices
    "AdaScale, fsdp": SpmdCase("fsdp", next(WIDTHS), **ADASCALE),
    "AdaScale, tensor, clipped": SpmdCase("tensor", next(WIDTHS), options={"max_grad_norm": 5.0}, **ADASCALE),
    "root, data": SpmdCase("data", next(WIDTHS), **ROOT),
    "root, fsdp": SpmdCase("fsdp", next(WIDTHS), **ROOT),
    "root, tensor": SpmdCase("tensor", next(WIDTHS), **ROOT),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("spmd")


@pytest.fixture(scope="module")
def found(folder):
    return run_cases(folder, CASES)


@pytest.mark.parametrize("name", CASES)
def test_a_training_on_four_devices_ends_as_plain_torch_and_compiles_nothing_after_two_updates(name, found):
    weights, norms = by_hand(CASES[name])
    assert farthest(found[name].weights, weights) < TOLERANCE
    assert not any(update.compiled for update in found[name].updates[2:])
    skipped = sum(norm > SKIP for norm in norms[1:])
    assert found[name].skipped == (skipped if "skipping" in name else 0)
    assert "skipping" not in name or skipped == 7


@pytest.mark.parametrize("mesh", RESTORED)
def test_a_checkpoint_goes_on_on_another_mesh_whose_moments_lie_there_after_an_update(mesh, found):
    (case,) = (case for name, case in CASES.items() if name == f"root, {RESTORED[mesh]}")
    restored = found[f"{mesh} from {RESTORED[mesh]}"]
    assert farthest(restored.weights, by_hand(case)[0]) < TOLERANCE
    assert not any(update.compiled for update in restored.updates[2:])
    assert restored.shardings == found[f"root, {mesh}"].shardings


@pytest.mark.parametrize("mesh", RESTORED)
@pytest.mark.usefixtures("found")
def test_a_checkpoint_goes_on_in_plain_torch_on_the_cpu(mesh, folder):
    (case,) = (case for name, case in CASES.items() if name == f"root, {mesh}")
    training = SpmdTraining(case, spmd=False)
    with training.checkpoint(folder / mesh) as checkpoint:
        assert checkpoint.restore()
    assert training.optimizer.updates == SAVED
    assert farthest(training.run().weights(), by_hand(case)[0]) < TOLERANCE


def test_parameters_and_moments_lie_as_the_mesh_says(found):
    assert all("devices=" in sharding for sharding in found["root, fsdp"].shardings)
    assert set(found["root, data"].shardings) == {"{replicated}"}
    assert {"devices=" in sharding for sharding in found["root, tensor"].shardings} == {True, False}


def test_step_and_compile_of_torch_xla_change_no_graph_and_a_full_graph_is_refused(found):
    for around in ("step", "compile"):
        assert found[f"linear, data, {around}"].updates == found["linear, data"].updates
    assert "Unexpected execution happens inside the compiled function" in found["full graph"]
