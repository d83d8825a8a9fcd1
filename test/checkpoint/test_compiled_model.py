"""A checkpoint of a compiled model and a model that is not compiled: the error says why it is not restored."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import variable_batch_size as vbs
from helpers.reference import training


@pytest.mark.parametrize(
    ("compiled", "where", "remedy"),
    [(True, "in it", "pass the compiled model, as"), (False, "here", "pass the model itself, not what torch.compile")],
)
def test_the_names_that_torch_compile_adds(compiled: bool, where: str, remedy: str, tmp_path: Path) -> None:
    run, later = training(), training()
    models = [torch.compile(run.model), later.model] if compiled else [run.model, torch.compile(later.model)]
    with vbs.Checkpoint(tmp_path, model=models[0], optimizer=run.optimizer, sampler=run.sampler) as saves:
        saves.save()
    expected = rf"update-00000000 has the tensors of this model under other names, .* to them {where}; {remedy}"
    with (
        vbs.Checkpoint(tmp_path, model=models[1], optimizer=later.optimizer, sampler=later.sampler) as restores,
        pytest.raises(RuntimeError, match=expected),
    ):
        restores.restore()


def test_a_compiled_model_is_restored_into_a_compiled_model(tmp_path: Path) -> None:
    run, later = training(), training()
    run.run(1)
    with vbs.Checkpoint(tmp_path, model=torch.compile(run.model), optimizer=run.optimizer) as saves:
        saves.save()
    with vbs.Checkpoint(tmp_path, model=torch.compile(later.model), optimizer=later.optimizer) as restores:
        assert restores.restore()
    for saved, restored in zip(run.weights(), later.weights(), strict=True):
        assert (saved == restored).all()
