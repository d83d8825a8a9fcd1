"""A stopped and resumed training draws the random numbers of an unbroken one, through loaders that draw seeds."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import variable_batch_size as vbs
from helpers.checkpoints import restore_checkpoint, save_checkpoint
from helpers.properties import examples
from helpers.reference import assert_equal, data, filled, training

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@dataclass(frozen=True)
class Case:
    """A training, its loader, and the random numbers that it draws besides dropout's."""

    kind: type[DataLoader[Any]] = DataLoader
    workers: int = 0
    persistent: bool = False
    loader_is_saved: bool = False  # a StatefulDataLoader as a part of the checkpoint
    sizes: tuple[int, ...] = (7, 3, 10)  # nine updates in three epochs
    dataset_size: int = 20
    minibatch_size: int = 4
    fixed_shape: bool = True
    epochs: int = 3
    stop: float = 0.5  # share of the updates after which the training stops
    evaluates: bool = True  # with a shuffled loader, after every epoch and around the restoration
    augments: bool = False  # at random, in the process that reads the dataset
    seeded: bool = False  # the augmentation: by epoch and sample, as the docstring of Checkpoint says


@dataclass
class Dataset:
    """Float64 samples with noise, if wanted."""

    x: Tensor
    target: Tensor
    augments: bool
    seeded: bool
    epoch: int = 0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(self.epoch * len(self) + index) if self.seeded else None
        noise = torch.randn(3, generator=generator).double() if self.augments else 0
        return self.x[index] + noise, self.target[index]


class Script:
    """A user's script."""

    def __init__(self, case):
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.4), nn.Linear(4, 2)).double()
        sampling = {"on_end": "cycle", "fixed_shape": case.fixed_shape}
        self.case = case
        self.run = training(
            sizes=case.sizes,
            dataset_size=case.dataset_size,
            minibatch_size=case.minibatch_size,
            model=filled(model),
            sampling=sampling,
        )
        self.dataset = Dataset(*data(case.dataset_size), augments=case.augments, seeded=case.seeded)
        self.loader = case.kind(
            self.dataset, batch_sampler=self.run.sampler, num_workers=case.workers, persistent_workers=case.persistent
        )
        self.parts = {"loader": self.loader} if case.loader_is_saved else {}

    def evaluate(self):
        if self.case.evaluates:
            some = range(5)
            list(DataLoader(some, batch_size=2, shuffle=True))

    def microbatches(self):
        """Those of an epoch; only `vbs.updates` sees that a loader starts workers for all epochs to come."""
        if self.case.persistent:
            for update in vbs.updates(self.loader, self.run.optimizer):
                yield from update
        else:
            yield from self.loader

    def updates(self, first_epoch=0):
        """Train; yield after every update."""
        run = self.run
        for epoch in range(first_epoch, self.case.epochs):
            run.sampler.set_epoch(epoch)
            run.optimizer.set_epoch(epoch)
            self.dataset.epoch = epoch
            for x, target in self.microbatches():
                factor = 1 + random.random() + np.random.random()
                (factor * (run.model(x) - target).square().sum(dim=1).mean()).backward()
                if run.optimizer.step():
                    yield
            self.evaluate()


def seed(number):
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


def check(case, folder):
    seed(1)
    unbroken = Script(case)
    number = sum(1 for _ in unbroken.updates())
    stop = min(number, max(1, round(case.stop * number)))

    seed(1)
    begun = Script(case)
    for _ in itertools.islice(begun.updates(), stop):
        pass
    save_checkpoint(folder, begun.run, **begun.parts)
    seed(2)
    resumed = Script(case)
    resumed.evaluate()
    restore_checkpoint(folder, resumed.run, **resumed.parts)
    resumed.evaluate()  # at the end of an epoch, the one that follows it
    assert sum(1 for _ in resumed.updates(resumed.run.optimizer.epoch)) == number - stop
    assert_equal(resumed.run.weights(), unbroken.run.weights())


@st.composite
def cases(draw):
    dataset_size = draw(st.integers(1, 40))
    sizes = draw(st.lists(st.integers(1, min(dataset_size, 20)), min_size=1, max_size=6))
    kind = draw(st.sampled_from([DataLoader, StatefulDataLoader]))
    loader_is_saved = kind is StatefulDataLoader and draw(st.booleans())
    return Case(
        kind=kind,
        loader_is_saved=loader_is_saved,
        sizes=tuple(sizes),
        dataset_size=dataset_size,
        minibatch_size=draw(st.integers(1, 8)),
        fixed_shape=draw(st.booleans()),
        stop=draw(st.one_of(st.floats(0, 1), st.sampled_from([1 / 3, 2 / 3, 1]))),
        evaluates=draw(st.booleans()),
        augments=draw(st.booleans()),
    )


@pytest.mark.slow("resumes with many loaders")
@pytest.mark.torch
@examples(100)
@given(cases())
def test_dropout_and_augmentation_resume_with_any_loader_without_workers(case):
    with TemporaryDirectory() as folder:
        check(case, Path(folder))


STOPS = [1 / 9, 3 / 9, 5 / 9]  # in an epoch, at the end of one, in the next
WORKERS = [
    Case(),
    Case(workers=2),
    Case(workers=2, persistent=True),
    Case(StatefulDataLoader, workers=2),
    Case(StatefulDataLoader, workers=2, persistent=True),
    Case(StatefulDataLoader, workers=2, loader_is_saved=True),
    Case(workers=2, augments=True, seeded=True),
]


SLOW = {6: pytest.mark.slow("starts workers")}
STOPPED = [
    pytest.param(case, stop, marks=SLOW.get(index, ()), id=str(index))
    for index, (case, stop) in enumerate(zip(WORKERS, itertools.cycle(STOPS)))
]


@pytest.mark.parametrize(("case", "stop"), STOPPED)
def test_dropout_resumes_with_workers(case, stop, tmp_path):
    check(replace(case, stop=stop), tmp_path)


UNSAVED = [case for case in WORKERS if not case.loader_is_saved]


@pytest.mark.parametrize(("case", "epoch"), [*zip(UNSAVED, itertools.cycle(range(3)))], ids=range(len(UNSAVED)))
def test_a_save_before_an_epoch_is_read_resumes_before_the_loader_draws(case, epoch, tmp_path):
    """As the first checkpoint, or one at the begin of each epoch; a loader that is saved begins to iterate for that."""
    seed(1)
    unbroken = Script(case)
    number = sum(1 for _ in unbroken.updates())
    seed(1)
    begun = Script(replace(case, epochs=epoch))
    made = sum(1 for _ in begun.updates())
    begun.run.sampler.set_epoch(epoch)
    begun.run.optimizer.set_epoch(epoch)
    save_checkpoint(tmp_path, begun.run, **begun.parts)
    seed(2)
    resumed = Script(case)
    restore_checkpoint(tmp_path, resumed.run, **resumed.parts)
    assert sum(1 for _ in resumed.updates(epoch)) == number - made
    assert_equal(resumed.run.weights(), unbroken.run.weights())


def test_a_batch_that_is_looked_at_before_the_loop_draws_nothing(tmp_path):
    case = Case()
    seed(1)
    unbroken = Script(case)
    list(unbroken.updates())
    seed(1)
    begun = Script(case)
    next(begun.updates())
    save_checkpoint(tmp_path, begun.run)
    resumed = Script(case)
    restore_checkpoint(tmp_path, resumed.run)
    next(iter(resumed.loader))
    list(resumed.updates())
    assert_equal(resumed.run.weights(), unbroken.run.weights())
