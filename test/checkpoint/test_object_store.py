"""Checkpoints in an object store: a server of S3 on this machine."""

from __future__ import annotations

import fsspec
import pytest
import s3fs
from fsspec.implementations.memory import MemoryFileSystem

import variable_batch_size as vbs
from helpers.checkpoints import as_another_process, checkpoint, intact, save_checkpoint, told, updates
from helpers.commands import run as execute
from helpers.object_stores import s3
from helpers.reference import SIZES, assert_equal, training
from helpers.sharded import always_sharded, wide
from variable_batch_size.checkpoint import writer
from variable_batch_size.checkpoint.events import read_events
from variable_batch_size.checkpoint.folder import Folder
from variable_batch_size.checkpoint.storage import Storage
from variable_batch_size.testing import run_ranks

__all__ = ["always_sharded"]


@pytest.fixture(scope="module")
def bucket():
    with pytest.MonkeyPatch.context() as patch, s3(patch) as url:
        yield url


@pytest.fixture
def folder(bucket, request):
    return f"{bucket}/{request.node.name}"


@pytest.mark.slow("saves to S3")
@pytest.mark.parametrize("wait", [False, True])
def test_a_training_is_saved_and_goes_on(wait, folder, caplog):
    run = training()
    with checkpoint(folder, run, best="min:loss") as saves:
        assert not saves.restore()
        for loss in (0.1, 0.3, 0.2, 0.4):
            run.run(1)
            saves.report(loss=loss)
            saves.save(wait=wait)
    assert updates(folder) == [1, 3, 4]  # two, and the best one
    later = training()
    with checkpoint(folder, later, keep=1) as saves:
        assert saves.restore()
        assert saves.latest == f"{folder}/update-00000004-0001-5-1"
        assert later.run(len(SIZES) - 4).optimizer.updates == len(SIZES)
        saves.save()
    assert updates(folder) == [1, 7]
    assert_equal(later.weights(), training().run(len(SIZES)).weights())
    assert vbs.read_checkpoint(folder, best=True)["facts"]["metrics"] == {"loss": 0.1}
    assert "restored: update 4" in told(caplog)[1]
    assert [event["event"] for event in read_events(Storage(folder))].count("start") == 2


@pytest.mark.nightly("starts commands that import torch")
def test_commands_take_urls(folder):
    save_checkpoint(folder, training().run(1))
    assert "update-00000001-0001-1-1" in execute("vbs", "checkpoint", "show", folder).stdout
    assert execute("vbs", "checkpoint", "verify", f"{folder}/update-00000001-0001-1-1").stdout.endswith(
        "-1-1: intact\n"
    )
    assert "1 runs, 1 saves" in execute("vbs", "goodput", folder).stdout


def test_ranks_write_together(folder, always_sharded):
    def train(backend):
        run = wide(backend)
        with checkpoint(folder, run) as saves:
            saves.restore()
            run.run(2)
            saves.save(wait=False)
        return run

    for ranks in (3, 2):
        found = run_ranks(train, ranks)
    name, _ = Folder(folder).names()
    assert {f"tensors-{rank}.safetensors" for rank in range(2)} < {*Storage(f"{folder}/{name}").names()}
    assert_equal(found[0].weights(), wide().run(4).weights())


def test_the_folder_has_one_writer(folder, monkeypatch):
    first = checkpoint(folder, training(), run="a")
    for job in (None, "b"):
        as_another_process()
        with pytest.raises(RuntimeError, match=r"in use by process \d+ on .*; end that .* wait for \d+ s if it"):
            checkpoint(folder, training(), run=job)
    first.close()
    checkpoint(folder, training(), run="b")
    as_another_process()
    monkeypatch.setattr(writer, "SECONDS", 0.0)  # as ten minutes later
    checkpoint(folder, training()).close()


def test_a_restart_of_the_job_takes_over_and_what_the_earlier_writer_adds_is_never_the_newest(folder, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    stale, run, later = training(), training(), training()
    old = checkpoint(folder, stale)
    stale.run(1)
    old.save()
    stale.run(1)
    as_another_process()  # the first one is believed to be dead
    new = checkpoint(folder, run)
    assert new.restore()
    with pytest.raises(RuntimeError, match=r"was taken over by process .* writes no checkpoint; end it"):
        old.save()
    place = Storage(folder)
    for file in ("tensors-0.safetensors", "rank-0.json"):  # as if it had been on its way
        text = place.read("update-00000001-0001-1-1", file).decode(errors="replace")
        place.put(text, "update-00000009-0001-7-1", file)
    run.run(1)
    new.save()
    as_another_process()
    with checkpoint(folder, later, keep=1) as third:
        assert third.restore()
        assert later.optimizer.updates == 2
        third.save()
    new.close()
    assert updates(folder) == [2]
    assert "update-00000009-0001-7-1" not in place.listed()


def test_files_without_the_json_of_each_rank_are_no_checkpoint_and_are_deleted(folder):
    run, place = training().run(1), Storage(folder)
    place.put("half", "update-00000009-0001-1-1", "tensors-0.safetensors")
    place.put("of the user", "update-notes.txt")
    with checkpoint(folder, run) as saves:
        assert not saves.restore()
        saves.save()
    assert {"update-notes.txt", "update-00000001-0002-1-1"} <= place.listed().keys()
    assert "update-00000009-0001-1-1" not in place.listed()
    assert updates(folder) == [1]


class BrokenError(OSError):
    """What a store raises."""


@pytest.mark.parametrize("what", ["create", "put"])
def test_a_write_that_fails_leaves_the_earlier_checkpoints(what, folder, monkeypatch):
    run = training()

    def fail(*args):
        raise BrokenError(5, "connection reset")

    with checkpoint(folder, run) as saves:
        run.run(1)
        saves.save()
        run.run(1)
        with monkeypatch.context() as patch:
            patch.setattr(Storage, what, fail)
            with pytest.raises(RuntimeError, match="connection reset"):
                saves.save()
        assert updates(folder) == [1]
        saves.save()
        assert updates(folder) == [1, 2]


def test_a_store_that_cannot_be_reached_loses_nothing(folder, monkeypatch):
    """Updates go on, a save raises and a later one succeeds, and a restore raises: the newest is not damaged."""
    run, reached = training(), s3fs.S3FileSystem._call_s3

    async def fail(*args, **options):
        raise PermissionError(13, "the network is away")

    with checkpoint(folder, run) as saves:
        for _ in range(2):
            run.run(1)
            saves.save()
        with monkeypatch.context() as patch:
            patch.setattr(s3fs.S3FileSystem, "_call_s3", fail)
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
    assert updates(folder) == [2, 3]


def test_the_error_of_a_training_propagates_if_the_store_cannot_be_reached(folder, monkeypatch):
    async def fail(*args, **options):
        raise ConnectionError("the network is away")

    def train():
        run = training()
        with checkpoint(folder, run):
            run.run(1)
            monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", fail)
            raise KeyError("of the training")

    with pytest.raises(KeyError, match="of the training"):
        train()


def test_damage_is_found(folder):
    run = training()
    with checkpoint(folder, run) as saves:
        for _ in range(2):
            run.run(1)
            saves.save()
        path = saves.latest or ""
        file = s3fs.S3FileSystem().open(f"{path}/tensors-0.safetensors", "rb").read()
        s3fs.S3FileSystem().pipe_file(f"{path}/tensors-0.safetensors", file[:-1] + bytes([file[-1] ^ 1]))
        assert not intact(path)
        with pytest.warns(RuntimeWarning, match="checksum mismatch"):
            assert saves.restore()
    assert run.optimizer.updates == 1


def test_a_missing_library_is_named(monkeypatch, tmp_path):
    import sys

    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ModuleNotFoundError, match=r"gs://bucket/a needs .* pip install 'variable_batch_size\[cloud\]'"):
        checkpoint("gs://bucket/a", training())
    checkpoint(str(tmp_path), training()).close()


class Account(MemoryFileSystem):
    """A store whose URLs name a host, which its paths lack, as those of Azure do."""

    protocol = "account"
    root_marker = ""

    @classmethod
    def _strip_protocol(cls, path):
        if not path.startswith("account://"):
            return super()._strip_protocol(path)
        box, _, rest = path.removeprefix("account://").partition("/")
        return f"/{box.partition('@')[0].partition(':')[0]}/{rest}".rstrip("/")


def test_a_password_is_in_no_message():
    fsspec.register_implementation("account", Account, clobber=True)
    assert "secret" not in Storage("account://me:secret@host/runs/a").location


def test_a_url_keeps_the_host_that_the_paths_of_its_store_lack():
    fsspec.register_implementation("account", Account, clobber=True)
    url = "account://box@host/runs/a/"
    run = training().run(1)
    with checkpoint(url, run) as saves:
        assert saves.save().startswith("account://box@host/runs/a/update-")
        assert saves.latest is not None
        assert saves.latest.startswith("account://box@host/runs/a/update-")
    assert vbs.read_checkpoint(saves.latest)
    with checkpoint(url.rstrip("/"), training()) as later:
        assert later.restore()
