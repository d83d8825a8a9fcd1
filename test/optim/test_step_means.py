"""`optimizer.log`: means over exactly the samples of each step, in the message of the gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import variable_batch_size as vbs
from helpers.reference import training
from variable_batch_size.backend import LocalBackend
from variable_batch_size.testing import run_ranks


class Counting(LocalBackend):
    """Counts the tensors of each message."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[list[int]] = []

    def all_reduce_sum(self, tensors: Any) -> None:
        self.messages.append([tensor.numel() for tensor in tensors])
        super().all_reduce_sum(tensors)


def test_it_travels_in_the_message_of_the_gradients_and_costs_nothing_unless_asked_for() -> None:
    for log in (True, False):
        backend = Counting()
        run = training(sizes=[9], backend=backend)
        for indices in run.sampler:
            run.loss(indices).backward()
            if log:
                run.optimizer.log(loss=1.0, hits=2)
            if run.optimizer.step():
                break
        (message,) = backend.messages
        assert message[len(list(run.model.parameters())) :] == ([4] if log else [])


def test_values_of_a_discarded_step_do_not_count() -> None:
    run = training(sizes=[9])
    run.loss(next(iter(run.sampler))).backward()
    run.optimizer.log(loss=1e9)
    run.optimizer.step()
    run.optimizer.log(loss=1e9)
    run.optimizer.discard_step()
    for indices in run.sampler:
        run.loss(indices).backward()
        run.optimizer.log(loss=2.0)
        if run.optimizer.step():
            break
    assert run.optimizer.logged["loss"].item() == 2.0


def test_an_update_without_values_has_no_mean() -> None:
    run = training(sizes=[4])
    for number, indices in enumerate(run.sampler):
        run.loss(indices).backward()
        if number % 2 == 0:
            run.optimizer.log(loss=number)
        assert run.optimizer.step()
        assert run.optimizer.logged["loss"].item() == pytest.approx(
            number if number % 2 == 0 else math.nan, nan_ok=True
        )
        if number == 3:
            break


# ------------------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"loss": torch.ones(3)}, ValueError, r"loss must be a mean over the rows .* shape \(3,\); pass its .mean"),
        ({"loss": "1"}, TypeError, "loss must be a number or a tensor with one element, got '1'"),
        ({"loss": None}, TypeError, "loss must be a number"),
        ({"update": 1.0}, ValueError, 'a name must not be empty, "update"'),
        ({"": 1.0}, ValueError, "a name must not be empty"),
        ({"vbs/lr": 1.0}, ValueError, 'or begin with "vbs/"'),
    ],
)
def test_rejects_wrong_values(values: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        training().optimizer.log(**values)


def test_a_name_twice_for_a_microbatch_raises() -> None:
    run = training()
    run.optimizer.log(loss=1.0)
    with pytest.raises(RuntimeError, match="'loss' was logged twice; call log"):
        run.optimizer.log(loss=1.0)


def test_a_new_name_after_the_first_update_raises() -> None:
    run = training(sizes=[4]).run(1)
    with pytest.raises(
        RuntimeError, match=r"those of the first update, none, but 'loss' is new; log it from the first"
    ):
        run.optimizer.log(loss=1.0)


def test_a_value_for_some_microbatches_of_a_step_only_raises() -> None:
    run = training(sizes=[9])
    batches = iter(run.sampler)
    run.loss(next(batches)).backward()
    run.optimizer.log(loss=1.0)
    run.optimizer.step()
    for _ in range(1):
        run.loss(next(batches)).backward()
        run.optimizer.step()
    run.loss(next(batches)).backward()
    with pytest.raises(RuntimeError, match="'loss' has 1 values for 3 microbatches; call it before each step"):
        run.optimizer.step()


def test_one_rank_that_does_not_log_raises_on_all() -> None:
    def train(backend: vbs.backend.Backend) -> str:
        run = training(sizes=[8], backend=backend)
        run.loss(next(iter(run.sampler))).backward()
        if backend.world.rank == 0:
            run.optimizer.log(loss=1.0)
        try:
            run.optimizer.step()
        except RuntimeError as error:
            return str(error)
        return ""

    for message in run_ranks(train, 2):
        assert "rank 0 has loss and rank 1 has none; call log() for every microbatch on every rank" in message


@pytest.mark.parametrize("counted", [False, True])
def test_one_rank_that_stops_logging_raises_on_all(counted: bool) -> None:
    def train(backend: vbs.backend.Backend) -> str:
        kind, reduction = vbs.ConstantOptimizer, "sum" if counted else "mean"
        run = training(kind, sizes=[8], backend=backend, reduction=reduction)
        try:
            for indices in run.sampler:
                run.loss(indices).backward()
                if backend.world.rank == 0 or run.optimizer.updates == 0:
                    run.optimizer.log(loss=1.0)
                run.optimizer.step(**({"count": 3} if counted else {}))
        except RuntimeError as error:
            return str(error)
        return ""

    for message in run_ranks(train, 2):
        assert "'loss' has values for 50% of the samples of all ranks; call it before each step" in message
