"""On a GPU: a training that is restored continues bit for bit, and a background save copies to pinned memory."""

from __future__ import annotations

import pytest
import torch

import variable_batch_size as vbs
from helpers.checkpoints import checkpoint
from helpers.gpu import DEVICE, MARKS, ON_GPU, on_device
from helpers.reference import OPTIMIZERS, SIZES, assert_equal
from variable_batch_size.checkpoint.saving import Copies

pytestmark = MARKS


@pytest.mark.parametrize("kind", OPTIMIZERS.values(), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("wait", [True, False], ids=["", "in the background"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_checkpoint_of_a_gpu_continues_bit_for_bit(kind, wait, dtype, tmp_path):
    run, other = (on_device(kind, SIZES, dtype=dtype) for _ in range(2))
    with checkpoint(tmp_path, run) as saves:
        for _ in range(3):
            run.run(1)
            saves.save(wait=wait)  # the following updates do not change what is written
        run.run(len(SIZES) - 3)
    other.run(5)  # a restore replaces what it has
    with checkpoint(tmp_path, other) as saves:
        saves.restore()
    assert other.optimizer.updates == 3
    assert_equal(other.run(len(SIZES) - 3).weights(), run.weights(), 0)
    assert other.optimizer.progress == run.optimizer.progress


def test_a_copy_for_the_background_is_in_pinned_memory():
    weights = torch.arange(1000.0, device=DEVICE)
    copied = Copies(vbs.backend.LocalBackend()).copy_to_host({"weights": weights})["weights"]
    weights.zero_()
    assert copied.device.type == "cpu"
    assert copied.is_pinned() == ON_GPU
    assert torch.equal(copied, torch.arange(1000.0))
