"""Forwards that leave no traces: attributes of modules, their metrics, hooks, gradients and random generators."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import ConcatDataset, Subset

from variable_batch_size.testing import check_loss
from variable_batch_size.testing.undisturbed import KeptAttributes, kept_attributes, undisturbed_evaluation


class Metric(nn.Module):
    """Has states as those of torchmetrics: a tensor that is written in place, one that is replaced, and a list."""

    def __init__(self):
        super().__init__()
        self.total, self.latest, self.values = torch.zeros(()), torch.zeros(()), []

    def update(self, value):
        self.total += value.detach()
        self.latest = value
        self.values.append(value)


class Busy(nn.Module):
    """Counts, keeps and draws in each forward."""

    def __init__(self):
        super().__init__()
        self.linear, self.metric = nn.Linear(4, 3), Metric()
        self.lock = iter(())  # which cannot be copied
        self.calls, self.recent, self.by_name, self.names = 0, deque([1], 3), {"a": defaultdict(list)}, {"b"}
        self.generator, self.numpy, self.python = torch.Generator(), np.random.default_rng(0), random.Random(0)
        self.linear.register_forward_hook(lambda *_: self.recent.append(2))

    def forward(self, x):
        self.calls += 1
        self.latest = self.linear(x)
        self.by_name["a"]["x"].append(self.latest)
        self.by_name["new"] = {}
        self.names.add(f"{self.calls}")
        self.metric.update(self.latest.mean())
        self.drawn = torch.rand((), generator=self.generator) + self.numpy.random() + self.python.random()
        return self.latest


def test_attributes_are_as_before():
    model = Busy()
    names, hooked = {*vars(model)}, []
    model.linear.weight.register_post_accumulate_grad_hook(hooked.append)
    states = model.generator.get_state(), model.numpy.bit_generator.state, model.python.getstate()
    model.metric.update(torch.ones(()))
    x, labels = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 3
    check_loss(model, lambda model, batch: cross_entropy(model(batch[0]), batch[1]), (x, labels))
    assert {*vars(model)} == names
    assert (model.calls, model.recent, model.by_name, model.names) == (0, deque([1], 3), {"a": {}}, {"b"})
    assert (float(model.metric.total), float(model.metric.latest), model.metric.values) == (1, 1, [torch.ones(())])
    assert torch.equal(model.generator.get_state(), states[0])
    assert model.numpy.bit_generator.state == states[1]
    assert model.python.getstate() == states[2]
    assert hooked == []
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.training


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_modes_are_as_before():
    model = nn.Sequential(nn.Dropout(), torch.jit.script(nn.Dropout()), nn.Dropout().eval())
    with undisturbed_evaluation(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model] == [True, True, False]


def test_what_has_not_changed_is_not_written():
    class Refusing(list):
        def clear(self):
            raise AssertionError("nothing has changed")

    owner = Busy()
    owner.values = Refusing([torch.ones(2)])
    with torch.inference_mode():
        owner.without_version = torch.ones(2)
    kept = KeptAttributes(owner, 3, None)
    owner.calls = 5
    kept.restore()
    assert owner.calls == 0


class Drawing(torch.utils.data.Dataset):
    """Draws by a generator that its transforms refer to."""

    def __init__(self, transforms):
        self.transforms = transforms

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return [float(transform(index)) for transform in self.transforms]


class Transform:
    def __init__(self, numpy):
        self.numpy = numpy

    def __call__(self, _):
        return self.numpy.random()


REFERENCES = {
    "attribute of an item": lambda numpy: Transform(numpy),
    "bound method": lambda numpy: Transform(numpy).__call__,
    "partial": lambda numpy: partial(lambda _, numpy: numpy.random(), numpy=numpy),
    "closure": lambda numpy: lambda _: numpy.random(),
    "a dict in a closure": lambda numpy: (lambda by_name: lambda _: by_name["numpy"].random())({"numpy": numpy}),
}


@pytest.mark.parametrize("reference", REFERENCES)
@pytest.mark.parametrize(
    "wrap", [lambda data: data, lambda data: Subset(data, [0, 1]), lambda data: ConcatDataset([Subset(data, [0])])]
)
def test_generators_are_as_before_wherever_a_dataset_has_them(reference, wrap):
    numpy = np.random.default_rng(0)
    data, before = wrap(Drawing([REFERENCES[reference](numpy)])), numpy.bit_generator.state
    with kept_attributes(data):
        assert data[0]
        assert numpy.bit_generator.state != before
    assert numpy.bit_generator.state == before
    with kept_attributes(REFERENCES[reference](numpy)):  # as a collator
        numpy.random()
    assert numpy.bit_generator.state == before


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, x):
        return x + torch.rand(x.shape, generator=self.generator)


@pytest.mark.parametrize("depth", [1, 20])
def test_generators_of_modules_are_as_before_however_deep_and_many_they_are(depth):
    noisy = Noisy()
    model = nn.Sequential(*(nn.Tanh() for _ in range(3000)), noisy)
    for _ in range(depth):
        model = nn.Sequential(model)
    before = noisy.generator.get_state()
    with undisturbed_evaluation(model):
        noisy(torch.zeros(2))
    assert torch.equal(noisy.generator.get_state(), before)


def test_a_cycle_of_references_ends():
    one, other = Transform(None), Transform(None)
    one.numpy, other.numpy = other, one
    with kept_attributes(one):
        pass


def test_what_forwards_write_in_modules_of_a_loss_is_as_before():
    centers, table = nn.BatchNorm1d(3), nn.Embedding(5, 3, max_norm=0.5)
    before = [centers.running_mean.clone(), table.weight.detach().clone()]
    with kept_attributes(nn.Sequential(centers)), undisturbed_evaluation(table):
        centers(torch.randn(4, 3, generator=torch.Generator().manual_seed(0)))
        table(torch.arange(5))
        assert not torch.equal(table.weight, before[1])
    assert torch.equal(centers.running_mean, before[0])
    assert torch.equal(table.weight, before[1])
