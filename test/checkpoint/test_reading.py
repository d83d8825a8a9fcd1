"""`read_checkpoint` finds the newest intact checkpoint of a folder, or the best one."""

from __future__ import annotations

import pytest
import torch

import variable_batch_size as vbs
from helpers.checkpoints import checkpoint, path_of, truncate_state, two_saved
from helpers.reference import training
from variable_batch_size.checkpoint.folder import update_of
from variable_batch_size.checkpoint.storage import Storage


def updates(contents):
    weights = training()
    for update in range(1, 5):
        weights.run(1)
        if all(map(torch.equal, weights.model.state_dict().values(), contents["parts"]["model"].values())):
            return update
    raise AssertionError("the weights are those of no update")


def test_the_folder_of_a_training_stands_for_its_newest_checkpoint(tmp_path):
    folder = two_saved(tmp_path)
    assert updates(vbs.read_checkpoint(folder)) == updates(vbs.read_checkpoint(path_of(folder, 2))) == 2
    assert updates(vbs.read_checkpoint(str(path_of(folder, 1)))) == 1


def test_a_damaged_checkpoint_is_skipped_with_a_warning(tmp_path):
    folder = two_saved(tmp_path)
    newest, older = path_of(folder, 2), path_of(folder, 1)
    truncate_state(newest)
    with pytest.warns(RuntimeWarning, match=rf"^Skipped damaged checkpoints: {newest} \(checksum .*; reading {older}$"):
        assert updates(vbs.read_checkpoint(tmp_path)) == 1
    truncate_state(older)
    with pytest.raises(ValueError, match=r"^path must be .*update-00000002\S+ \(.*update-00000001\S+ \(.*; pass an"):
        vbs.read_checkpoint(tmp_path)


@pytest.mark.parametrize(("mode", "best"), [("min", 2), ("max", 3)])
def test_reads_the_best_checkpoint(mode, best, tmp_path):
    run = training()
    with checkpoint(tmp_path, run, best=f"{mode}:loss", keep=4) as saves:
        for loss in (2.0, 1.0, 3.0, 1.5):
            run.run(1)
            saves.report(loss=loss)
            saves.save()
    assert updates(vbs.read_checkpoint(tmp_path, best=True)) == best
    assert updates(vbs.read_checkpoint(tmp_path)) == 4


def test_best_needs_a_reported_value(tmp_path):
    folder = two_saved(tmp_path)
    for path in (folder, path_of(folder, 2)):
        with pytest.raises(ValueError, match=r"^best=True needs the folder of a run .*, got .*; pass best=\"min:"):
            vbs.read_checkpoint(path, best=True)


@pytest.mark.parametrize("best", [False, True])
def test_a_missing_folder_is_named(best, tmp_path):
    with pytest.raises(ValueError, match=rf"got {tmp_path}/missing; nothing is there$"):
        vbs.read_checkpoint(tmp_path / "missing", best=best)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("call", ["read_checkpoint", "latest"])
@pytest.mark.parametrize("saves_after", [{1}, {2}, {1, 2}, {1, 2, 3}])
def test_a_reader_gets_no_older_checkpoint_while_the_training_saves_and_deletes(call, saves_after, tmp_path):
    """The training saves after listings of the reader; the best checkpoint, which is older, stays."""
    run = training()
    with checkpoint(tmp_path, run, keep=1, best="min:loss") as saves, pytest.MonkeyPatch.context() as patch:
        for _ in range(3):
            run.run(1)
            saves.report(loss=run.optimizer.updates)
            saves.save()
        newest, listings, listed, busy = run.optimizer.updates, 0, Storage.listed, False

        def list_and_save(storage, *prefix):
            nonlocal listings, busy
            found = listed(storage, *prefix)
            if not busy:
                listings += 1
                busy = True
                if listings in saves_after:
                    run.run(1)
                    saves.save()
                busy = False
            return found

        patch.setattr(Storage, "listed", list_and_save)
        path = saves.latest if call == "latest" else vbs.read_checkpoint(tmp_path)["facts"]["updates"]
        assert (update_of((path or "").rpartition("/")[2]) if call == "latest" else path) >= newest
        assert listings >= 1
