"""Checkpoints have the names of the model itself, whether it or its parts are compiled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import variable_batch_size as vbs
from helpers.reference import assert_equal, training


@pytest.mark.parametrize("compiled", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize(
    "how", [torch.compile, nn.DataParallel, lambda model: nn.Sequential(torch.compile(model[0]), *model[1:])]
)
def test_a_model_is_restored_whether_it_was_compiled_or_not(
    compiled: tuple[bool, bool], how: Callable[[nn.Module], nn.Module], tmp_path: Path
) -> None:
    run, later = training(), training()
    run.run(1)
    models = [
        how(one.model) if is_compiled else one.model for one, is_compiled in zip((run, later), compiled, strict=True)
    ]
    with vbs.Checkpoint(tmp_path, model=models[0], optimizer=run.optimizer) as saves:
        saves.save()
    with vbs.Checkpoint(tmp_path, model=models[1], optimizer=later.optimizer) as restores:
        assert restores.restore()
    assert_equal(run.weights(), later.weights())
    assert vbs.read_checkpoint(tmp_path)["parts"]["model"].keys() == run.model.state_dict().keys()
