"""What a loop does at the end of an epoch is done once, wherever the training is stopped and restored."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import variable_batch_size as vbs
from helpers.checkpoints import checkpoint
from helpers.properties import examples
from helpers.reference import assert_equal, training
from variable_batch_size.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

SIZES, SAMPLES, EPOCHS = (7, 3, 10), 20, 3  # three updates an epoch


def train(
    folder,
    backend,
    *,
    stop=-1,
    every=1,
    loop="range",
    once=False,
    in_loop=False,
    kind=DataLoader,
    **loading,
):
    """A user's script: it steps a scheduler, evaluates at random and reads metrics at the end of each epoch."""
    random.seed(1)
    run = training(sizes=SIZES, dataset_size=SAMPLES, backend=backend, sampling={"on_end": "cycle"})
    optimizer, lines = run.optimizer, []
    scheduler, metrics = StepLR(optimizer, step_size=1, gamma=0.5), vbs.Accumulator(optimizer)
    numbers = range(SAMPLES)
    loader = kind(numbers, batch_sampler=run.sampler, collate_fn=list, **loading)
    parts = {"scheduler": scheduler, "metrics": metrics}
    with checkpoint(folder, run, every=every, **parts) as saves:
        saves.restore()

        def train_epoch(epoch):
            """Return whether the training is stopped in it."""
            for one in (run.sampler, optimizer, metrics):
                one.set_epoch(epoch)
            for indices in loader:
                factor = 1 + random.random()
                metrics.add(factor=factor)
                (factor * run.loss(indices)).backward()
                optimizer.step()
                if in_loop and not optimizer.inside_step:
                    saves.save(in_loop=True)
                elif not once:
                    saves.step()
                if optimizer.updates == stop and not optimizer.inside_step:
                    return True
            scheduler.step()
            lines.append((epoch, random.random() + metrics.read()["factor"], optimizer.param_groups[0]["lr"]))
            if once:
                saves.step()
            return optimizer.updates == stop

        if loop == "range":
            any(train_epoch(epoch) for epoch in range(optimizer.epoch, EPOCHS))
        else:
            while optimizer.epoch < EPOCHS and not train_epoch(optimizer.epoch):
                pass
    return run, lines


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
@examples(25)
@given(stop=st.integers(1, 9), every=st.sampled_from([1, 1, 2, 3]), loop=st.sampled_from(["range", "while"]))
def test_a_restored_loop_ends_its_epochs_as_an_uninterrupted_one(kind, stop, every, loop):
    with tempfile.TemporaryDirectory() as folder:
        whole, lines = train(Path(folder, "a"), vbs.backend.LocalBackend(), loop=loop, kind=kind)
        _, before = train(Path(folder, "b"), vbs.backend.LocalBackend(), stop=stop, every=every, loop=loop, kind=kind)
        restored, after = train(Path(folder, "b"), vbs.backend.LocalBackend(), every=every, loop=loop, kind=kind)
    assert [line[0] for line in lines] == [0, 1, 2]
    found = {line[0]: line for line in before + after}
    assert [found[epoch] for epoch in range(3)] == lines
    assert len(before + after) == 3 or every > 1  # no end twice, if nothing was lost
    assert_equal(restored.weights(), whole.weights(), 0)


def test_it_does_so_after_a_save_in_the_loop(tmp_path):
    whole, lines = train(tmp_path / "a", vbs.backend.LocalBackend())
    for stop in range(1, 9):
        _, before = train(tmp_path / str(stop), vbs.backend.LocalBackend(), stop=stop, in_loop=True)
        restored, after = train(tmp_path / str(stop), vbs.backend.LocalBackend())
        assert before + after == lines
        assert_equal(restored.weights(), whole.weights(), 0)


@pytest.mark.parametrize("loading", [{"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
def test_it_does_so_with_workers(loading, tmp_path):
    whole, lines = train(tmp_path / "a", vbs.backend.LocalBackend(), **loading)
    _, before = train(tmp_path / "b", vbs.backend.LocalBackend(), stop=3, **loading)
    restored, after = train(tmp_path / "b", vbs.backend.LocalBackend(), **loading)
    assert before + after == lines
    assert_equal(restored.weights(), whole.weights(), 0)


def test_it_does_so_on_several_ranks(tmp_path):
    run_ranks(lambda backend: train(tmp_path, backend, stop=6), 2)
    for run, after in run_ranks(lambda backend: train(tmp_path, backend), 2):
        assert [line[0] for line in after] == [1, 2]
        assert run.optimizer.updates == 9


@pytest.mark.parametrize("loading", [{}, {"num_workers": 2}])
def test_a_step_after_each_epoch_saves_its_end_as_done(loading, tmp_path):
    whole, lines = train(tmp_path / "a", vbs.backend.LocalBackend(), once=True, **loading)
    _, before = train(tmp_path / "b", vbs.backend.LocalBackend(), stop=7, once=True, **loading)
    restored, after = train(tmp_path / "b", vbs.backend.LocalBackend(), once=True, **loading)
    assert [line[0] for line in after] == [2]
    assert before + after == lines
    assert_equal(restored.weights(), whole.weights(), 0)


def test_an_end_that_was_read_is_not_pending_in_later_saves(tmp_path):
    train(tmp_path, vbs.backend.LocalBackend(), stop=3)
    run = training(sizes=SIZES, dataset_size=SAMPLES, sampling={"on_end": "cycle"})
    scheduler, metrics = StepLR(run.optimizer, step_size=1, gamma=0.5), vbs.Accumulator(run.optimizer)
    with checkpoint(tmp_path, run, scheduler=scheduler, metrics=metrics) as saves:
        for saved_at in (0, 1, 1):  # as it was, after the end, and again
            assert saves.restore()
            assert run.optimizer.epoch == run.sampler.epoch == saved_at
            if saved_at == 0:
                saves.save()  # before the end changes nothing
                assert saves.restore()
                assert run.optimizer.epoch == 0
                assert list(run.sampler) == []
            assert run.optimizer.epoch == run.sampler.epoch == 1
            saves.save()
