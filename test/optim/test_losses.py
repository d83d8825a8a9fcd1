"""The lines of docs/losses.md for losses with another denominator: each is that of the whole batch, on any ranks."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import variable_batch_size as vbs
from helpers.reference import assert_equal
from variable_batch_size.backend import LocalBackend

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


def texts():
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


def train(backend, loss_of):
    (x, y), model = texts(), layer()
    sampler = vbs.CustomSampler(ROWS, SIZES, backend.world.size, backend.world.rank, 3, shuffle=False)
    inner = torch.optim.SGD(model.parameters(), lr=0.3)
    optimizer = vbs.ConstantOptimizer(inner, sampler, reduction="sum", backend=backend)
    for update in vbs.updates(sampler, optimizer):
        for rows in update:
            loss, count = loss_of(model(x[rows]).flatten(0, 1), y[rows].flatten())
            optimizer.backward(loss)
            optimizer.step(count=count)
    return [parameter.detach().numpy() for parameter in model.parameters()]


CASES = [(class_weights, whole_class_weights), (ignored, cross_entropy), (with_z_loss, whole_with_z_loss)]


@pytest.mark.parametrize(("loss_of", "whole"), CASES)
def test_the_loss_is_that_of_the_whole_batch(loss_of, whole):
    (x, y), model, begin = texts(), layer(), 0
    inner = torch.optim.SGD(model.parameters(), lr=0.3)
    for size in SIZES:
        inner.zero_grad()
        rows = slice(begin, begin + size)
        whole(model(x[rows]).flatten(0, 1), y[rows].flatten()).backward()
        inner.step()
        begin += size
    expected = [parameter.detach().numpy() for parameter in model.parameters()]
    assert_equal(train(LocalBackend(), loss_of), expected)
    for weights in vbs.testing.run_ranks(lambda backend: train(backend, loss_of), 3):
        assert_equal(weights, expected)
