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
        run = training(backend=backend, dataset_size=200, minibatch_size=64)
        run.optimizer._updater.gradient.reduction._reads = False
        for indices in run.sampler:
            run.loss(indices).backward()
            if run.optimizer.updates < 1:
                run.optimizer.step()
                continue
            run.optimizer._updater.gradient.check.stop()
            for parameter in run.model.parameters():
                CHANGES[change](parameter)
            with pytest.raises(RuntimeError, match=r"gradients must .* pass overlap=False to the optimizer"):
                step_and_save(run.optimizer)
            found.append(backend.world.rank)
            break

    run_ranks(train, 2)
    assert sorted(found) == [0, 1]


class StopError(Exception):
    """An exception within `backward()`."""


@pytest.mark.parametrize("way_out", ["discard_step", "set_epoch"])
@pytest.mark.parametrize("again", [1, 2])
def test_a_step_that_all_ranks_discard_is_exact_where_the_host_does_not_wait(way_out: str, again: int) -> None:
    """Some ranks have sent buckets by then, and others, which have more microbatches, have not."""
    sizes = (8, 8, 8, 12, *20 * (8,))

    def stop(*_: Any) -> None:
        raise StopError

    def train(backend: Backend, overlap: bool) -> Training:
        run = training(
            sizes=sizes, backend=backend, dataset_size=200, minibatch_size=4, overlap=overlap, bucket_cap_mb=0
        )
        optimizer, failures = run.optimizer, again
        optimizer._updater.gradient.reduction._reads = False
        while optimizer.updates < 20:
            run.sampler.set_epoch(optimizer.epoch)
            optimizer.set_epoch(optimizer.epoch)
            try:
                for indices in run.sampler:
                    loss = run.loss(indices)
                    if optimizer.updates == 3 and failures:
                        failures -= 1
                        handle = next(run.model.parameters()).register_hook(stop)
                        try:
                            loss.backward()
                        finally:
                            handle.remove()
                    else:
                        loss.backward()
                    optimizer.step()
                    if optimizer.updates == 20:
                        break
            except StopError:
                if way_out == "discard_step":
                    optimizer.discard_step()
        optimizer.state_dict()
        return run

    expected = run_ranks(lambda backend: train(backend, False), 2)[0].weights()
    for run in run_ranks(lambda backend: train(backend, True), 2):
        assert_equal(run.weights(), expected)
