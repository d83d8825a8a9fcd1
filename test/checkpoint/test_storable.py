"""A state that no checkpoint can hold is found before there is anything to lose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.checkpoints import checkpoint, updates
from helpers.reference import training
from variable_batch_size.backend import Backend
from variable_batch_size.testing import run_ranks


class Part:
    """A part whose state changes with the training."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state["value"]


def test_a_part_whose_state_holds_a_function_is_refused_at_once(tmp_path: Path) -> None:
    run = training()
    with pytest.raises(RuntimeError, match=r"got a builtins\.function at scheduler/value; return numbers"):
        checkpoint(tmp_path, run, scheduler=Part(lambda t: t))
    with checkpoint(tmp_path, training()) as saves:  # the folder is not locked
        saves.save()


def test_a_scheduler_of_torch_whose_state_holds_a_function_keeps_its_own(tmp_path: Path) -> None:
    rates = []
    for resumes in (False, True):
        run = training()
        scheduler = torch.optim.swa_utils.SWALR(run.optimizer, swa_lr=0.5, anneal_epochs=4)
        with checkpoint(tmp_path, run, scheduler=scheduler) as saves:
            assert saves.restore() == resumes
            if not resumes:
                run.run(2)
                scheduler.step()
                saves.save()
            scheduler.step()
            rates.append(scheduler.get_last_lr())
    assert rates[0] == rates[1]


def test_a_name_that_could_be_that_of_other_tensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^the name of a part must have no \"/\", got 'a/b'; pass the part"):
        checkpoint(tmp_path, training(), **{"a/b": Part(1)})


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("bad_rank", [0, 1])
def test_every_rank_raises(world: int, bad_rank: int, tmp_path: Path) -> None:
    def train(backend: Backend) -> int:
        run = training(backend=backend)
        part = Part(np.float64(1) if backend.world.rank == bad_rank % world else 1.0)
        with pytest.raises(RuntimeError, match=r"got a numpy\.float64 at part/value; return"):
            checkpoint(tmp_path, run, part=part)
        return 1

    assert run_ranks(train, world) == [1] * world


@pytest.mark.parametrize("world", [1, 2])
def test_what_the_first_update_adds_is_found_after_it(world: int, tmp_path: Path) -> None:
    def train(backend: Backend) -> int:
        run, part = training(backend=backend), Part(None)
        with checkpoint(tmp_path, run, part=part) as saves:
            for updated in run.steps():
                part.state = np.zeros(2)
                if updated:
                    with pytest.raises(RuntimeError, match=r"got a numpy\.ndarray at part/value; return"):
                        saves.step()
                    return run.optimizer.updates
                saves.step()
        return 0

    assert run_ranks(train, world) == [1] * world
    assert updates(tmp_path) == []


def test_the_state_is_collected_twice_without_a_save(tmp_path: Path) -> None:
    collected = []

    class Counting(Part):
        def state_dict(self) -> dict[str, Any]:
            collected.append(run.optimizer.updates)
            return super().state_dict()

    run = training()
    with checkpoint(tmp_path, run, part=Counting(torch.zeros(2))) as saves:
        for _ in run.steps():
            saves.step()
    assert collected == [0, 1]


def test_a_checkpoint_that_is_made_inside_a_step_looks_after_it(tmp_path: Path) -> None:
    run = training()
    for _ in run.steps():
        break
    assert run.optimizer.inside_step
    with checkpoint(tmp_path, run, part=Part(np.zeros(2))) as saves:
        run.optimizer.discard_step()
        run.run(1)
        with pytest.raises(RuntimeError, match="numpy"):
            saves.step()
