"""A checkpoint without the scheduler of the training warns, and one of the wrong scheduler is refused."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from torch.optim.lr_scheduler import CosineAnnealingLR

import variable_batch_size as vbs
from helpers.checkpoints import checkpoint
from helpers.reference import training


@pytest.mark.parametrize("inner", [False, True])
def test_a_forgotten_scheduler_warns(inner: bool, tmp_path: Path) -> None:
    run = training()
    cosine = CosineAnnealingLR(run.optimizer.inner if inner else run.optimizer, T_max=9)
    with pytest.warns(UserWarning, match=r"^The checkpoint has no scheduler, but .*; pass scheduler=$") as warned:
        vbs.Checkpoint(tmp_path / "a", model=run.model, optimizer=run.optimizer).close()
    assert warned[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint(tmp_path / "b", run, scheduler=cosine).close()
        checkpoint(tmp_path / "c", run, under_another_name=cosine).close()
        checkpoint(tmp_path / "d", training()).close()


def test_the_scheduler_inside_a_progress_scheduler_is_refused(tmp_path: Path) -> None:
    run = training()
    cosine = CosineAnnealingLR(run.optimizer, T_max=9)
    progress = vbs.ProgressScheduler(cosine, run.optimizer)
    with pytest.raises(ValueError, match=r"got a CosineAnnealingLR that a ProgressScheduler steps; pass the Progress"):
        checkpoint(tmp_path, run, scheduler=cosine)
    checkpoint(tmp_path, run, scheduler=progress).close()
    checkpoint(tmp_path, run, scheduler=progress, cosine=cosine).close()
