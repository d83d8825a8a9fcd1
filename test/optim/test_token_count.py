"""`step(count=)`: the gradient of the sum of the losses over the sum of the counts, for example of tokens."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import variable_batch_size as vbs
from helpers.denominators import DATASET, terms
from helpers.reference import assert_equal, training
from variable_batch_size.backend.sent_numbers import SentNumbers
from variable_batch_size.testing import run_ranks


def texts(sizes, **options):
    """A training on the loss summed over the tokens of each row."""
    return training(vbs.ConstantOptimizer, sizes, reduction="sum", dataset_size=DATASET, **options)


def train(run, lengths, updates):
    """Train until this update; return the results of all `step()` that ended one."""
    results = []
    for indices in run.microbatches(updates):
        own, due = lengths[indices], run.optimizer.microbatch
        run.optimizer.backward(terms(run.model(run.x[indices]), run.target[indices], {"tokens": own})["tokens"])
        results += [run.optimizer.step(count=own.sum())][: due.ends_step]
    return results


def test_an_update_without_tokens_changes_nothing_where_the_host_does_not_read():
    """On a device that compiles, the update is made, with a gradient of 0, and the next one counts again."""
    run, lengths = (
        texts([4], backend=vbs.backend.LocalBackend(sent=SentNumbers("cpu")), hyperparameters={"lr": 0.02}),
        torch.zeros(DATASET),
    )
    before = run.weights()
    assert train(run, lengths, 1) == [True]
    assert_equal(run.weights(), before, 0)
    train(run, lengths + 1, 2)
    assert all(np.isfinite(weight).all() for weight in run.weights())
    assert not np.array_equal(run.weights()[0], before[0])


# ------------------------------------------------------------------------------------------------------------- mistakes


def attempt(run, **arguments):
    run.loss(next(iter(run.sampler))).backward()
    return run.optimizer.step(**arguments)


@pytest.mark.parametrize("first", [True, False])
def test_some_steps_with_a_count_and_others_without_raise(first):
    run = texts([9])
    steps = iter(run.sampler)
    run.loss(next(steps)).backward()
    run.optimizer.step(count=3 if first else None)
    run.loss(next(steps)).backward()
    with pytest.raises(RuntimeError, match=rf"has a count, or none, but this one has {'none' if first else 'one'}"):
        run.optimizer.step(count=None if first else 3)


def test_a_resumed_run_that_forgets_the_counts_raises():
    begun, resumed = texts([4, 4]), texts([4, 4])
    train(begun, torch.ones(DATASET), 1)
    resumed.optimizer.load_state_dict(begun.optimizer.state_dict())
    with pytest.raises(RuntimeError, match="or none, but this one has none"):
        attempt(resumed)


def test_ranks_that_do_not_agree_on_counts_raise():
    def work(backend):
        with pytest.raises(RuntimeError, match=r"all ranks must train with the same count= in step\(\)"):
            attempt(texts([1], backend=backend), count=1 if backend.world.rank else None)
        return True

    assert run_ranks(work, 2) == [True, True]


# The lines of docs/losses.md: each loss is that of the whole batch, on any ranks. -------------------------------------


ROWS, LENGTH, SIZES = 40, 5, [7, 13, 4, 16]
WEIGHTS = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)


def class_weights(logits, y):
    return cross_entropy(logits, y, weight=WEIGHTS, reduction="sum", ignore_index=-100), WEIGHTS[y[y != -100]].sum()


def ignored(logits, y):
    return cross_entropy(logits, y, reduction="sum"), (y != -100).sum()


def with_z_loss(logits, y):
    tokens = (y != -100).sum()
    aux = logits[y != -100].logsumexp(1).square().sum() / tokens
    return cross_entropy(logits, y, reduction="sum") + tokens * aux, tokens


def whole_class_weights(logits, y):
    return cross_entropy(logits, y, weight=WEIGHTS)


def whole_with_z_loss(logits, y):
    return cross_entropy(logits, y) + logits[y != -100].logsumexp(1).square().mean()


def rows_of_texts():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, LENGTH, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (ROWS, LENGTH), generator=generator)
    y[torch.rand(ROWS, LENGTH, generator=generator) < 0.4] = -100
    return x, y


def layer():
    made = nn.Linear(4, 3).double()
    for number, parameter in enumerate(made.parameters()):
        nn.init.constant_(parameter, 0.1 * number)
    return made


def train_on(backend, loss_of):
    (x, y), model = rows_of_texts(), layer()
    sampler = vbs.CustomSampler(ROWS, SIZES, backend.world.size, backend.world.rank, 3, shuffle=False)
    inner = torch.optim.SGD(model.parameters(), lr=0.3)
    optimizer = vbs.ConstantOptimizer(inner, sampler, reduction="sum", backend=backend)
    for update in vbs.updates(sampler, optimizer):
        for rows in update:
            loss, count = loss_of(model(x[rows]).flatten(0, 1), y[rows].flatten())
            optimizer.backward(loss)
            optimizer.step(count=count)
    return [parameter.detach().numpy() for parameter in model.parameters()], optimizer.count.item()


CASES = [(class_weights, whole_class_weights), (ignored, cross_entropy), (with_z_loss, whole_with_z_loss)]


@pytest.mark.parametrize(("loss_of", "whole"), CASES)
def test_the_loss_is_that_of_the_whole_batch(loss_of, whole):
    (x, y), model, begin = rows_of_texts(), layer(), 0
    inner = torch.optim.SGD(model.parameters(), lr=0.3)
    for size in SIZES:
        inner.zero_grad()
        rows = slice(begin, begin + size)
        whole(model(x[rows]).flatten(0, 1), y[rows].flatten()).backward()
        inner.step()
        begin += size
    expected = [parameter.detach().numpy() for parameter in model.parameters()]
    count = loss_of(model(x[rows]).flatten(0, 1), y[rows].flatten())[1].item()
    for ranks in (1, 3):
        for weights, found in run_ranks(lambda backend: train_on(backend, loss_of), ranks):
            assert_equal(weights, expected)
            assert found == pytest.approx(count)
