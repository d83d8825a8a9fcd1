"""Checkpoints in an object store: a server of S3 on this machine."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import s3fs

import variable_batch_size as vbs
from helpers.checkpoints import checkpoint, told
from helpers.commands import run as execute
from helpers.object_stores import s3
from helpers.reference import SIZES, Training, assert_equal, training
from helpers.sharded import always_sharded, wide
from variable_batch_size.backend import Backend
from variable_batch_size.checkpoint import lease
from variable_batch_size.checkpoint.events import read
from variable_batch_size.checkpoint.format import MANIFEST
from variable_batch_size.checkpoint.manifest import verified_manifest
from variable_batch_size.checkpoint.object_store import StoreFolder, folder_at, path_of
from variable_batch_size.testing import run_ranks

__all__ = ["always_sharded"]


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch, s3(patch) as url:
        yield url


@pytest.fixture
def folder(bucket: str, request: pytest.FixtureRequest) -> str:
    return f"{bucket}/{request.node.name}"


def updates(folder: str) -> list[int]:
    return [entry.update for entry in folder_at(folder).entries()]


@pytest.mark.slow("saves to S3")
@pytest.mark.parametrize("wait", [False, True])
def test_a_training_is_saved_and_goes_on(wait: bool, folder: str, caplog: pytest.LogCaptureFixture) -> None:
    run = training()
    with checkpoint(folder, run, best="min:loss") as saves:
        assert not saves.restore()
        for loss in (0.1, 0.3, 0.2, 0.4):
            run.run(1)
            saves.report(loss=loss)
            saves.save(wait=wait)
    assert updates(folder) == [4, 3, 1]  # two, and the best one
    later = training()
    with checkpoint(folder, later, keep=1) as saves:
        assert saves.restore()
        assert str(saves.latest) == f"{folder}/update-00000004-1004"
        assert later.run(len(SIZES) - 4).optimizer.updates == len(SIZES)
        saves.save()
    assert updates(folder) == [7, 1]
    assert_equal(later.weights(), training().run(len(SIZES)).weights())
    assert vbs.read_checkpoint(folder, best=True)["facts"]["metrics"] == {"loss": 0.1}
    assert "restored: batch size" in told(caplog)[1]
    assert [event["event"] for event in read(path_of(folder))].count("start") == 2


@pytest.mark.nightly("starts commands that import torch")
def test_commands_take_urls(folder: str) -> None:
    with checkpoint(folder, training().run(1)) as saves:
        saves.save()
    assert "update-00000001-1000" in execute("vbs", "checkpoint", "show", folder).stdout
    assert execute("vbs", "checkpoint", "verify", f"{folder}/update-00000001-1000").stdout.endswith("1000: intact\n")
    assert "1 runs, 1 saves" in execute("vbs", "goodput", folder).stdout


def test_ranks_write_together(folder: str, always_sharded: None) -> None:
    def train(backend: Backend) -> Training:
        run = wide(backend)
        with checkpoint(folder, run) as saves:
            saves.restore()
            run.run(2)
            saves.save(wait=False)
        return run

    for ranks in (3, 2):
        found = run_ranks(train, ranks)
    (path,) = [entry.path for entry in folder_at(folder).entries()][:1]
    assert len(verified_manifest(path)["files"]) == 2  # type: ignore[index]
    assert_equal(found[0].weights(), wide().run(4).weights())


def test_the_folder_has_one_writer(folder: str) -> None:
    first = checkpoint(folder, training(), run="a")
    with pytest.raises(RuntimeError, match=r"in use by process \d+ on .*; close\(\) that .* wait for \d+ s if it has"):
        checkpoint(folder, training())
    with pytest.raises(RuntimeError, match="in use"):
        checkpoint(folder, training(), run="b")
    first.close()
    checkpoint(folder, training()).close()


def test_a_restart_of_the_job_takes_over_and_the_earlier_writer_publishes_nothing(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    stale, run = training(), training()
    old = checkpoint(folder, stale)
    stale.run(1)
    old.save()
    stale.run(1)
    new = checkpoint(folder, run)  # the other process is believed to be dead
    assert new.restore()
    with pytest.raises(RuntimeError, match=r"was taken over by process .* writes no checkpoint; end it"):
        old.save()
    assert updates(folder) == [1]
    # Even if its manifest was on its way:
    manifest = {"generation": 0}
    late = path_of(folder) / "update-00000009-1007"
    (late / MANIFEST).write_text(json.dumps(manifest))
    assert updates(folder) == [1]
    run.run(1)
    new.save()
    new.close()
    assert updates(folder) == [2, 1]


@pytest.mark.parametrize("checks", [1, 2])
def test_a_checkpoint_that_was_published_while_another_writer_took_over_is_deleted(
    checks: int, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, check, left = checkpoint(folder, training().run(1), run="job"), lease.Lease.check, [checks]

    def replace_after(own: lease.Lease) -> int:
        left[0] -= 1
        number = check(own)
        if not left[0]:
            checkpoint(folder, training(), run="job")
        return number

    monkeypatch.setattr(lease.Lease, "check", replace_after)
    with pytest.raises(RuntimeError, match="was taken over by process"):
        old.save()
    assert not list(path_of(folder).glob("update-*"))


def test_a_checkpoint_that_was_copied_from_a_disk_is_read(folder: str, tmp_path: Path) -> None:
    run = training().run(1)
    with checkpoint(folder, run) as saves:
        saves.save()
    with checkpoint(tmp_path, run.run(1)) as saves:
        path = saves.save()
    for file in path.iterdir():
        (path_of(folder) / path.name / file.name).write_bytes(file.read_bytes())
    with checkpoint(folder, later := training()) as saves:
        assert saves.restore()
    assert later.optimizer.updates == 2


def test_a_writer_that_ended_has_the_folder_for_ten_minutes(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint(folder, training())
    clock = time.time()
    monkeypatch.setattr(lease.time, "time", lambda: clock + lease.SECONDS - 30)
    with pytest.raises(RuntimeError, match=r"wait for (2[0-9]|30) s"):
        checkpoint(folder, training())
    monkeypatch.setattr(lease.time, "time", lambda: clock + lease.SECONDS + 1)
    checkpoint(folder, training()).close()


def test_files_without_a_manifest_are_no_checkpoint_and_are_deleted(folder: str) -> None:
    run = training().run(1)
    left = path_of(folder) / "update-00000009-1000"
    (left / "tensors-0.safetensors").write_bytes(b"half")
    (path_of(folder) / "notes.txt").write_text("of the user")
    with checkpoint(folder, run) as saves:
        assert not saves.restore()
        saves.save()
    assert not left.exists()
    assert (path_of(folder) / "notes.txt").exists()
    assert updates(folder) == [1]


class BrokenError(OSError):
    """What a store raises."""


@pytest.mark.parametrize("what", ["write", "publish"])
def test_a_write_that_fails_leaves_the_earlier_checkpoints(
    what: str, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = training()

    def fail(*args: Any) -> None:
        raise BrokenError(5, "connection reset")

    with checkpoint(folder, run) as saves:
        run.run(1)
        saves.save()
        run.run(1)
        with monkeypatch.context() as patch:
            patch.setattr(StoreFolder, what, fail)
            with pytest.raises(RuntimeError, match="connection reset"):
                saves.save()
        assert updates(folder) == [1]
        saves.save()
        assert updates(folder) == [2, 1]


def test_a_store_that_cannot_be_reached_loses_nothing(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates go on, a save raises and a later one succeeds, and a restore raises: the newest is not damaged."""
    run, reached = training(), s3fs.S3FileSystem._call_s3

    async def fail(*args: Any, **options: Any) -> None:
        raise PermissionError(13, "the network is away")

    with checkpoint(folder, run) as saves:
        for _ in range(2):
            run.run(1)
            saves.save()
        clock = time.time()
        with monkeypatch.context() as patch:
            patch.setattr(s3fs.S3FileSystem, "_call_s3", fail)
            patch.setattr(lease.time, "time", lambda: clock + 100)
            run.run(1)
            assert not saves.step()
            with pytest.raises(
                RuntimeError, match=r"update-00000003 could not be .* \(the network is away\); restore the"
            ):
                saves.save()
            with pytest.raises(RuntimeError, match="the network is away"):
                saves.restore()
        assert run.optimizer.updates == 3
        assert s3fs.S3FileSystem._call_s3 is reached
        saves.save()
    assert updates(folder) == [3, 2]


def test_the_error_of_a_training_propagates_if_the_store_cannot_be_reached(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*args: Any, **options: Any) -> None:
        raise ConnectionError("the network is away")

    def train() -> None:
        run = training()
        with checkpoint(folder, run):
            run.run(1)
            monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", fail)
            raise KeyError("of the training")

    with pytest.raises(KeyError, match="of the training"):
        train()


def test_damage_is_found(folder: str) -> None:
    run = training()
    with checkpoint(folder, run) as saves:
        for _ in range(2):
            run.run(1)
            saves.save()
        file = saves.latest / "tensors-0.safetensors"  # type: ignore[operator]
        contents = bytearray(file.read_bytes())
        contents[-1] ^= 1
        file.write_bytes(contents)
        with pytest.warns(RuntimeWarning, match="checksum mismatch"):
            assert saves.restore()
    assert run.optimizer.updates == 1


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "upath", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'variable_batch_size\[cloud\]'"):
        checkpoint("s3://bucket/a", training())
    checkpoint(str(tmp_path), training()).close()
