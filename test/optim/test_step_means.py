"""`optimizer.log`: means over exactly the samples of each step, in the message of the gradients."""

import pytest

import variable_batch_size as vbs
from helpers.reference import training
from variable_batch_size.backend import LocalBackend
from variable_batch_size.testing import run_ranks


class Counting(LocalBackend):
    """Counts the tensors of each message."""

    def __init__(self):
        super().__init__()
        self.messages = []

    def all_reduce_sum(self, tensors):
        self.messages.append([tensor.numel() for tensor in tensors])
        super().all_reduce_sum(tensors)


def test_it_travels_in_the_message_of_the_gradients_and_costs_nothing_unless_asked_for():
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


def test_values_of_a_discarded_step_do_not_count():
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


# ------------------------------------------------------------------------------------------------------------- mistakes


def test_a_name_twice_for_a_microbatch_raises():
    run = training()
    run.optimizer.log(loss=1.0)
    with pytest.raises(RuntimeError, match="'loss' was logged twice; call log"):
        run.optimizer.log(loss=1.0)


def test_a_new_name_after_the_first_update_raises():
    run = training(sizes=[4]).run(1)
    with pytest.raises(
        RuntimeError, match=r"those of the first update, none, but 'loss' is new; log it from the first"
    ):
        run.optimizer.log(loss=1.0)


def test_a_value_for_some_microbatches_of_a_step_only_raises():
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


def test_one_rank_that_does_not_log_raises_on_all():
    def train(backend):
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
def test_one_rank_that_stops_logging_raises_on_all(counted):
    def train(backend):
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
