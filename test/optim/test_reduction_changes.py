"""Loops that change gradients between `backward()` and `step()`, when some have left: `.data` has no version."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import variable_batch_size as vbs
from helpers.reference import Training, assert_equal, training
from variable_batch_size.backend import Backend
from variable_batch_size.testing import run_ranks


def clamp(gradient: Tensor) -> None:
    gradient.clamp_(-0.05, 0.05)


CHANGES: dict[str, Any] = {
    "in place": lambda parameter: clamp(parameter.grad),
    "data": lambda parameter: clamp(parameter.grad.data),
    "numpy": lambda parameter: clamp(torch.from_numpy(parameter.grad.numpy())),
    "replaced": lambda parameter: setattr(parameter, "grad", parameter.grad.clamp(-0.05, 0.05)),
}


def changing(backend: Backend, change: str, first: int, **options: Any) -> Training:
    """A loop that changes the gradients after backward, from an update on."""
    run = training(backend=backend, dataset_size=200, minibatch_size=64, **options)
    for indices in run.sampler:
        run.loss(indices).backward()
        if run.optimizer.updates >= first:
            run.optimizer._updater.gradient.check.stop()  # as after the first updates
            for parameter in run.model.parameters():
                CHANGES[change](parameter)
        run.optimizer.step()
        if run.optimizer.updates == 6:
            break
    return run


@pytest.mark.parametrize("first", [0, 1, 3])
@pytest.mark.parametrize("change", CHANGES)
def test_gradients_that_the_loop_changes_after_they_have_left_are_sent_again(change: str, first: int) -> None:
    def train(backend: Backend, overlap: bool) -> Training:
        run = changing(backend, change, first, overlap=overlap)
        if overlap:
            assert run.optimizer._updater.gradient.reduction.order == ((3, 2, 1, 0) if first else ())
        return run

    expected = run_ranks(lambda backend: train(backend, False), 2)[0].weights()
    for run in run_ranks(lambda backend: train(backend, True), 2):
        assert_equal(run.weights(), expected, 0)


def step_and_save(optimizer: vbs.CustomOptimizer) -> None:
    optimizer.step()
    optimizer.state_dict()


@pytest.mark.parametrize("change", CHANGES)
def test_gradients_that_change_after_they_have_left_raise_where_the_host_does_not_wait(change: str) -> None:
    """At once, or when the state is saved."""
    found = []

    def train(backend: Backend) -> None:
        run = training(backend=backend, dataset_size=200, minibatch_size=64).run(1)
        run.optimizer._updater.gradient.reduction._reads = False
        run.optimizer.discard_step()
        run.optimizer._updater.gradient.check.stop()
        for indices in run.sampler:
            run.loss(indices).backward()
            for parameter in run.model.parameters():
                CHANGES[change](parameter)
            with pytest.raises(RuntimeError, match=r"gradients must .* pass overlap=False to the optimizer"):
                step_and_save(run.optimizer)
            found.append(backend.world.rank)
            break

    run_ranks(train, 2)
    assert sorted(found) == [0, 1]
