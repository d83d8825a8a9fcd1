"""A state that no checkpoint can hold is found before there is anything to lose."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from helpers.checkpoints import Held, checkpoint, updates
from helpers.reference import training
from variable_batch_size.testing import run_ranks


def test_a_part_whose_state_holds_a_function_is_refused_at_once(tmp_path):
    run = training()
    with pytest.raises(RuntimeError, match=r"got a builtins\.function at scheduler/value; return numbers"):
        checkpoint(tmp_path, run, scheduler=Held({"value": lambda t: t}))
    with checkpoint(tmp_path, training()) as saves:  # the folder is not locked
        saves.save()


def test_a_scheduler_of_torch_whose_state_holds_a_function_keeps_its_own(tmp_path):
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


def test_a_name_that_could_be_that_of_other_tensors_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"^the name of a part must have no \"/\", got 'a/b'; pass the part"):
        checkpoint(tmp_path, training(), **{"a/b": Held({})})


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("bad_rank", [0, 1])
def test_every_rank_raises(world, bad_rank, tmp_path):
    def train(backend):
        run = training(backend=backend)
        part = Held({"value": np.float64(1) if backend.world.rank == bad_rank % world else 1.0})
        with pytest.raises(RuntimeError, match=r"got a numpy\.float64 at part/value; return"):
            checkpoint(tmp_path, run, part=part)
        return 1

    assert run_ranks(train, world) == [1] * world


@pytest.mark.parametrize("world", [1, 2])
def test_what_the_first_update_adds_is_found_after_it(world, tmp_path):
    def train(backend):
        run, part = training(backend=backend), Held({"value": None})
        with checkpoint(tmp_path, run, part=part) as saves:
            for updated in run.steps():
                part.held = {"value": np.zeros(2)}
                if updated:
                    with pytest.raises(RuntimeError, match=r"got a numpy\.ndarray at part/value; return"):
                        saves.step()
                    return run.optimizer.updates
                saves.step()
        return 0

    assert run_ranks(train, world) == [1] * world
    assert updates(tmp_path) == []


def test_a_checkpoint_that_is_made_inside_a_step_looks_after_it(tmp_path):
    run = training()
    for _ in run.steps():
        break
    assert run.optimizer.inside_step
    with checkpoint(tmp_path, run, part=Held({"value": np.zeros(2)})) as saves:
        run.optimizer.discard_step()
        run.run(1)
        with pytest.raises(RuntimeError, match="numpy"):
            saves.step()
