"""Checkpoints that several ranks write: what they restore, how they can be damaged, and when there are none."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path

import pytest

import variable_batch_size as vbs
from helpers.checkpoints import checkpoint, intact, path_of, restore_checkpoint, save_checkpoint, updates
from helpers.reference import assert_equal
from helpers.sharded import always_sharded, wide
from variable_batch_size.checkpoint import checkpoint as module
from variable_batch_size.preemption import EXIT_CODE
from variable_batch_size.testing import ThreadBackend, run_ranks

__all__ = ["always_sharded"]
pytestmark = pytest.mark.usefixtures("always_sharded")

STOP, END = 3, 5


def written(ranks):
    """Return the names of what so many ranks have written."""
    return [*(f"rank-{rank}.json" for rank in range(ranks)), *(f"tensors-{rank}.safetensors" for rank in range(ranks))]


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def save(folder, world, made=STOP, wait=True, **options):
    """Save a checkpoint in a world of this size, and return its path."""

    def train(backend):
        run = wide(backend)
        with checkpoint(folder, run, **options) as saves:
            saves.restore()
            run.run(made - run.optimizer.updates)
            return Path(saves.save(wait))

    paths = run_ranks(train, world)
    assert len(set(paths)) == 1
    return paths[0]


@pytest.mark.parametrize(
    ("before", "after", "wait"), [(2, 1, True), (3, 2, False), (2, 3, False), (1, 2, True), (3, 3, True)]
)
def test_every_rank_writes_a_file_and_any_world_restores(before, after, wait, tmp_path):
    path = save(tmp_path, before, wait=wait)
    assert files(path) == written(before)

    def resume(backend):
        run = wide(backend)
        restore_checkpoint(tmp_path, run)
        assert run.optimizer.updates == STOP
        return run.run(END - STOP)

    uninterrupted = wide().run(END)
    for rank in run_ranks(resume, after):
        assert_equal(rank.weights(), uninterrupted.weights())


def test_read_checkpoint_returns_what_one_file_would_hold(tmp_path):
    path, one = save(tmp_path / "sharded", 3), save(tmp_path / "one", 1)
    sharded, whole = vbs.read_checkpoint(path), vbs.read_checkpoint(str(one))
    assert files(one) == written(1)
    assert whole.keys() == sharded.keys()
    model = sharded["parts"]["model"]
    assert model.keys() == whole["parts"]["model"].keys()
    assert model._metadata == whole["parts"]["model"]._metadata
    assert_equal([tensor.numpy() for tensor in model.values()], wide().run(STOP).weights())
    wide().model.load_state_dict(model)


@pytest.mark.parametrize(("how", "world"), [("missing", 2), ("changed", 1), ("another", 1), ("both", 1)])
def test_a_damaged_shard_makes_the_checkpoint_damaged(how, world, tmp_path):
    first, path = save(tmp_path, 2, made=1), save(tmp_path, 2, made=2)
    shard = path / "tensors-1.safetensors"
    contents = bytearray(shard.read_bytes())
    reason = "checksum mismatch of tensors-1.safetensors"
    if how == "missing":
        shard.unlink()
        reason = "tensors-1.safetensors is missing"
    elif how == "changed":
        contents[len(contents) // 2] ^= 1
        shard.write_bytes(contents)
    else:
        shard.write_bytes((first / shard.name).read_bytes())
    if how == "both":  # with the JSON that belongs to it
        (path / "rank-1.json").write_bytes((first / "rank-1.json").read_bytes())
        reason = "checksum mismatch of the JSON of a rank"
    with pytest.raises(ValueError, match=rf"^path must be .* intact checkpoint, .*, got {path} \({reason}\); pass"):
        vbs.read_checkpoint(path)
    assert not intact(path)

    def restore(backend):
        run = wide(backend)
        with checkpoint(tmp_path, run) as saves:
            assert saves.restore()
            assert saves.latest == str(first)
        return run.optimizer.updates

    expected = rf"^Damaged checkpoints in .*: {path.name} \({reason}\); restoring {first.name} instead$"
    with pytest.warns(RuntimeWarning, match=expected):
        assert run_ranks(restore, world) == world * [1]


def test_rank_0_writes_alone_if_the_ranks_do_not_see_the_same_folder(tmp_path):
    for stale in (False, True):  # a file of the same name on another machine

        def train(backend):
            run = wide(backend).run(1 + stale)  # noqa: B023
            save_checkpoint(tmp_path / str(stale) / str(backend.world.rank), run)  # noqa: B023

        if stale:
            checkpoint(tmp_path / "True" / "1", wide()).close()
        run_ranks(train, 2)
        assert files(path_of(tmp_path / str(stale) / "0", 1 + stale)) == written(1)
        assert not list((tmp_path / str(stale) / "1").glob("*update*"))


def test_rank_0_writes_alone_if_ranks_may_be_threads(tmp_path, monkeypatch):
    monkeypatch.setattr(ThreadBackend, "threads", True)
    assert files(save(tmp_path, 2)) == written(1)


def test_a_signal_to_one_rank_saves_after_the_same_update_while_another_waits_for_the_time(tmp_path, monkeypatch):
    notices = {}
    monkeypatch.setattr(module, "signal_notice", lambda: notices.get(threading.current_thread().name, ""))

    def train(backend):
        run = wide(backend)
        with checkpoint(tmp_path, run, every=timedelta(hours=1)) as saves:
            while True:
                run.run(1)
                if (backend.world.rank, run.optimizer.updates) == (1, 4):
                    notices[threading.current_thread().name] = "0.10 s after SIGTERM"
                try:
                    saves.step()
                except SystemExit as stop:
                    return stop.code, run.optimizer.updates

    ((code, update),) = set(run_ranks(train, 3))
    assert code == EXIT_CODE
    assert updates(tmp_path) == [update]
