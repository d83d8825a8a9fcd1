"""Ranks, and runs that resume, read the same rows: what is compared is the content of a dataset, not its length."""

from __future__ import annotations

import copy
import pickle
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, random_split

import variable_batch_size as vbs
from helpers.properties import examples
from variable_batch_size.data.dataset.content import ROWS, Content
from variable_batch_size.testing import run_ranks

NUMBER = 40
X = torch.randn(NUMBER, 3, generator=torch.Generator().manual_seed(0))


class Rows(Dataset):
    """A dataset of any kind of rows, with the indices that a rank has of a larger one."""

    def __init__(self, kind, chosen=range(NUMBER)):
        self.kind, self.chosen, self.handle = kind, [*chosen], None

    def __len__(self):
        return len(self.chosen)

    def __getitem__(self, index):
        if index >= len(self):
            raise IndexError(index)
        self.handle = object()  # as a file that is opened by the first read
        return KINDS[self.kind](self.chosen[index])


class Image:
    """As PIL's."""

    def __init__(self, index):
        self.size, self._index = (2, 2), index

    def tobytes(self):
        return bytes([self._index] * 4)


KINDS = {
    "tensor": lambda i: X[i],
    "bfloat16 and a label": lambda i: (X[i].bfloat16(), i % 3),
    "array": lambda i: X[i].numpy(),
    "dictionary": lambda i: {"x": [i, {"text": f"sample {i}"}], "missing": None},
    "image": lambda i: (Image(i), "label"),
    "objects": lambda i: np.array([i, str(i)], dtype=object),
}
RANDOM = {
    "torch": lambda i: X[i] + torch.rand(3),
    "numpy": lambda i: X[i].numpy() * np.random.rand(),
    "python": lambda i: (X[i], random.random()),
}
KINDS |= RANDOM


def train(backend, dataset, state=None, **sampling):
    """Make an update, and return the state."""
    world = backend.world
    sampler = vbs.CustomSampler(dataset, 8, world.size, world.rank, minibatch_size=2, shuffle=False, **sampling)
    model = nn.Linear(3, 1)
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    optimizer = vbs.ConstantOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), sampler, backend=backend)
    if state is not None:
        optimizer.load_state_dict(state)
    for indices in sampler:
        model(X[indices]).mean().backward()
        if optimizer.step():
            return optimizer.state_dict()
    raise AssertionError


def cut(rank, ranks):
    return range(rank, NUMBER, ranks)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("kind", sorted(KINDS.keys() - RANDOM))
def test_ranks_with_other_rows_raise_before_the_first_update(kind, ranks):
    run_ranks(lambda backend: train(backend, Rows(kind)), ranks)
    remedies = r"pass the whole dataset on every rank.*vbs.ArrivingBatches.*fingerprint="
    with pytest.raises(RuntimeError, match=rf"the same rows of the dataset, but it is .* {remedies}"):
        run_ranks(lambda backend: train(backend, Rows(kind, [*cut(backend.world.rank, ranks)][:13])), ranks)


@pytest.mark.parametrize("kind", ["tensor", *RANDOM])
def test_ranks_that_split_a_dataset_by_other_seeds_raise(kind):
    def split(backend, seed):
        generator = torch.Generator().manual_seed(seed)
        inner = Subset(Rows(kind), range(1, NUMBER))
        return train(backend, random_split(inner, [30, 9], generator=generator)[0])

    run_ranks(lambda backend: split(backend, 1), 2)
    with pytest.raises(RuntimeError, match="the same rows of the dataset"):
        run_ranks(lambda backend: split(backend, backend.world.rank), 2)


@pytest.mark.parametrize("kind", RANDOM)
def test_random_rows_are_not_compared_which_is_said_once(kind, caplog):
    content = Content(Rows(kind), 0)
    assert content.digest() == content.digest() == ""
    assert [record.message[:40] for record in caplog.records] == ["The rows of ranks are not compared: they"]
    assert Content(vbs.Seeded(Rows(kind)), 0).digest() == Content(vbs.Seeded(Rows(kind)), 0).digest() != ""
    run_ranks(lambda backend: train(backend, Rows(kind, [*cut(backend.world.rank, 2)])), 2)


def test_a_dataset_that_only_workers_can_read_is_not_compared(caplog):
    class Opened(Rows):
        def __getitem__(self, index):
            raise RuntimeError("not opened")

    assert Content(Opened("tensor"), 0).digest() == ""
    assert "RuntimeError('not opened')" in caplog.text


def test_a_run_resumes_with_the_same_rows_only():
    data = TensorDataset(X)
    state = train(vbs.backend.LocalBackend(), data)
    train(vbs.backend.LocalBackend(), TensorDataset(X.clone()), state)
    with pytest.raises(ValueError, match="but rows of the dataset are others; pass the same dataset"):
        train(vbs.backend.LocalBackend(), TensorDataset(X + 1), state)
    unknown = train(vbs.backend.LocalBackend(), NUMBER)
    train(vbs.backend.LocalBackend(), data, unknown)
    train(vbs.backend.LocalBackend(), NUMBER, state)


def test_a_fingerprint_is_compared_in_the_place_of_rows():
    class Slow(Rows):
        def __getitem__(self, index):
            raise AssertionError

    state = train(vbs.backend.LocalBackend(), Slow("tensor"), fingerprint="v1")
    with pytest.raises(ValueError, match="rows of the dataset are others"):
        train(vbs.backend.LocalBackend(), Slow("tensor"), state, fingerprint="v2")


@given(kind=st.sampled_from(sorted(KINDS)), size=st.integers(1, NUMBER), seed=st.integers(0, 2**64 - 1))
@examples(100)
def test_a_digest_moves_nothing_and_depends_on_rows_alone(kind, size, seed):
    dataset = Rows(kind, range(size))
    before = torch.get_rng_state(), np.random.get_state(legacy=False), random.getstate()
    content = Content(Subset(dataset, range(size)), seed)
    found = content.digest()
    after = torch.get_rng_state(), np.random.get_state(legacy=False), random.getstate()
    assert before[0].equal(after[0])
    assert str(before[1:]) == str(after[1:])
    assert dataset.handle is None  # what a read opens stays with the copy that is read
    assert found == Content(Subset(Rows(kind, range(size)), [*range(size)]), seed).digest()
    assert found != Content(Subset(dataset, [*range(size), 0]), seed).digest()
    assert pickle.loads(pickle.dumps(content)).digest() == copy.deepcopy(content).digest() == found


def test_few_rows_are_read():
    read = []

    class Counting(Rows):
        def __getitem__(self, index):
            read.append(index)
            return super().__getitem__(index)

    Content(Counting("tensor"), 3).digest()
    assert len(read) == 2 * ROWS


class File(Rows):
    """As a file that is opened by the first read, and closed with the object."""

    closed = False

    def __del__(self):
        type(self).closed = True


class Wrapper:
    """As wrappers are that pass everything on."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        return self.dataset[index]

    def __getattr__(self, name):
        return getattr(self.dataset, name)


class WrapperDataset(Wrapper, Dataset):
    pass


def test_what_a_read_opens_stays_with_a_copy_in_concatenated_datasets_too():
    parts = [Rows("tensor", range(10)), Rows("tensor", range(10, 30))]
    whole = ConcatDataset(parts)
    assert Content(whole, 0).digest() == Content(Rows("tensor", range(30)), 0).digest() != ""
    assert [part.handle for part in parts] == [None, None]


def test_a_copy_closes_no_file():
    dataset = File("tensor")
    assert Content(dataset, 0).digest() == Content(Rows("tensor"), 0).digest()
    assert not File.closed
    del dataset


@pytest.mark.parametrize("kind", [Wrapper, WrapperDataset])
def test_wrappers_that_pass_everything_on_are_read(kind):
    assert Content(kind(Rows("tensor")), 0).digest() == Content(Rows("tensor"), 0).digest() != ""


def test_the_order_of_keys_is_none_of_the_rows():
    first, second = (dict.fromkeys(names, i) for i, names in enumerate(("abc", "cba")))
    second = dict.fromkeys(second, 0)
    assert Content([first], 0).digest() == Content([second], 0).digest() != Content([{"a": 1}], 0).digest()


def test_rows_that_are_random_on_some_rank_are_not_compared():
    def row(backend):
        return train(backend, Rows("tensor" if backend.world.rank else "torch"))

    assert len(run_ranks(row, 2)) == 2


def test_rows_that_depend_on_an_epoch_are_those_of_the_first_update():
    """A state that is saved later, and one that is restored before the first read, have the same digest."""

    class Epochs(Rows):
        epoch = 0

        def __getitem__(self, index):
            return super().__getitem__(index) + self.epoch

    def run(state=None):
        dataset, model = Epochs("tensor"), nn.Linear(3, 1)
        sampler = vbs.CustomSampler(dataset, 20, 1, 0, minibatch_size=20, epochs=3)
        optimizer = vbs.ConstantOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), sampler)
        if state is not None:
            optimizer.load_state_dict(state)
        for epoch in vbs.remaining_epochs(sampler, optimizer):
            dataset.epoch = epoch
            for indices in sampler:
                optimizer.backward(model(X[indices]).mean())
                optimizer.step()
                if state is None and optimizer.updates == 3:
                    return optimizer.state_dict()
        return optimizer.updates

    assert run(run()) == 6
