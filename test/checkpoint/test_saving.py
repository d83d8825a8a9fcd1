"""When checkpoints are saved, and which of them are kept."""

from __future__ import annotations

import threading
from datetime import timedelta
from itertools import pairwise
from types import SimpleNamespace

import pytest

from helpers.checkpoints import checkpoint, names, path_of, truncate_state, updates
from helpers.reference import training
from variable_batch_size.checkpoint import checkpoint as module
from variable_batch_size.testing import run_ranks


def test_keeps_the_newest_intact_checkpoints(tmp_path):
    run = training()
    with checkpoint(tmp_path, run, keep=3) as saves:
        for _ in range(5):
            run.run(1)
            saves.save()
        assert updates(tmp_path) == [3, 4, 5]
    truncate_state(path_of(tmp_path, 4))
    with checkpoint(tmp_path, run, keep=3) as saves:
        run.run(1)
        saves.save()  # three are intact, and the damaged one is newer than the oldest of them
        assert [int(name.split("-")[1]) for name in names(tmp_path)] == [3, 4, 5, 6]
        run.run(1)
        saves.save()
        assert updates(tmp_path) == [5, 6, 7]


def test_an_update_can_be_saved_twice(tmp_path):
    run = training().run(1)
    with checkpoint(tmp_path, run, keep=1) as saves:
        first = saves.save()
        run.model[0].weight.data.zero_()
        assert saves.save() == saves.latest != first
        assert updates(tmp_path) == [1]
        run.model[0].weight.data.fill_(1)
        saves.restore()
        assert not run.weights()[0].any()


@pytest.mark.parametrize("world", [1, 2])
def test_saves_at_an_interval_of_updates(world, tmp_path):
    def train(backend):
        run, at = training(backend=backend, minibatch_size=2), []
        with checkpoint(tmp_path, run, every=2) as saves:
            while run.optimizer.updates < 6:
                for _ in run.steps():
                    if saves.step():
                        at.append(run.optimizer.updates)
                    assert not saves.step()
                run.sampler.set_epoch(run.sampler.epoch)
                run.optimizer.set_epoch(run.optimizer.epoch)
        return at

    for at in run_ranks(train, world):
        assert at[:3] == [2, 4, 6]


def test_a_save_that_falls_due_within_an_accumulation_waits_for_the_update(tmp_path):
    run = training(minibatch_size=2)
    with checkpoint(tmp_path, run, every=1) as saves:
        steps = run.steps()
        while not next(steps):
            assert not saves.step()
        next(steps)
        assert run.optimizer.inside_step
        assert not saves.step()  # a save was due at the update, but step() was not called then
        while not next(steps):
            pass
        assert saves.step()
    assert updates(tmp_path) == [2]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_saves_at_an_interval_of_time_on_the_clock_of_rank_0(world, tmp_path, monkeypatch):
    """After the same update on all ranks, which no rank waits for; other clocks do not count."""
    now = {}  # by thread
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[threading.current_thread().name]))

    def train(backend):
        name, rank = threading.current_thread().name, backend.world.rank
        now[name] = 0.0
        run, saved, collectives = training(backend=backend), list[int](), list[int]()
        with checkpoint(tmp_path, run, every=timedelta(seconds=60)) as saves:
            while len(saved) < 3:
                now[name] += 20 if rank == 0 else 1000
                run.run(1)
                before = getattr(backend, "collectives", 0)
                if saves.step():
                    saved.append(run.optimizer.updates)
                elif run.optimizer.updates > 1:  # else it looks whether the state can be saved
                    collectives.append(getattr(backend, "collectives", 0) - before)
        assert not any(collectives)
        return saved, collectives

    (updates, _), *others = run_ranks(train, world)
    assert all(saved == updates for saved, _ in others)
    gaps = [after - before for before, after in pairwise([0, *updates])]
    assert gaps == [3, 3, 3] if world == 1 else min(gaps) >= 3


@pytest.mark.parametrize("world", [1, 2])
def test_a_save_of_the_user_restarts_the_interval_of_time(world, tmp_path, monkeypatch):
    """Also if the ranks have already agreed on the update after which they would have saved."""
    now = [0.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def train(backend):
        run, saved = training(backend=backend).run(1), []
        with checkpoint(tmp_path, run, every=timedelta(seconds=60)) as saves:
            backend._gather_bytes(b"")
            now[0] = 100.0
            saves.save()
            for _ in range(20):
                run.run(1)
                saved.append(saves.step())
            backend._gather_bytes(b"")
            now[0] = 0.0
        return saved

    assert run_ranks(train, world) == world * [20 * [False]]
