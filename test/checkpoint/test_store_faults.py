"""Connections to an object store that break, refuse, lose answers or are slow: what was saved is there and is right."""

from __future__ import annotations

import random
from collections import defaultdict
from uuid import uuid4

import pytest
import s3fs
from hypothesis import given
from hypothesis import strategies as st

import variable_batch_size as vbs
from helpers.checkpoints import checkpoint
from helpers.object_stores import FAULTS, Server, s3
from helpers.properties import examples
from helpers.reference import SIZES, assert_equal, training
from variable_batch_size.checkpoint import writer


@pytest.fixture(scope="module")
def store():
    server = Server()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_MAX_ATTEMPTS", "1")  # botocore waits for seconds between attempts; s3fs has its own
        with s3(patch, server) as url:
            yield server, url


WEIGHTS = [training().run(updates).weights() for updates in range(len(SIZES) + 1)]
PROCESSES = 6  # of the job, until the store is well again


@pytest.mark.slow("restarts a job many times")
@examples(16)
@given(
    seed=st.integers(0, 2**32),
    share=st.sampled_from([0.02, 0.05, 0.15]),
    attempts=st.sampled_from([1, 3]),
    kinds=st.lists(st.sampled_from(FAULTS), min_size=1, max_size=4, unique=True),
)
def test_what_was_saved_is_restored(store, seed, share, attempts, kinds):
    """A save that returned is there, one that raised may be, and the next process of the job loses nothing else."""
    server, bucket = store
    folder, rng, requests = f"{bucket}/{uuid4().hex}", random.Random(seed), random.Random(seed + 1)
    saved, losses = 0, defaultdict[int, set[float]](set)  # the newest update of which a save returned; those reported

    def fault():
        return requests.choice(kinds) if requests.random() < share else ""

    def train(run):
        nonlocal saved
        writer._open.clear()  # it is another process
        saves = checkpoint(folder, run, run="job", best="min:loss")
        restored = saves.restore()
        assert restored or not saved
        assert run.optimizer.updates >= saved
        assert_equal(run.weights(), WEIGHTS[run.optimizer.updates], 0)
        saved = run.optimizer.updates
        while run.optimizer.updates < len(SIZES):
            run.run(1)
            saves.step()
            if rng.random() < 0.5:
                losses[run.optimizer.updates].add(loss := rng.random())
                saves.report(loss=loss)
            wait = rng.random() < 0.5
            saves.save(wait=wait)
            if rng.random() < 0.2:
                return  # killed, and what its thread still writes is late
            saves.close() if run.optimizer.updates == len(SIZES) else saves._saver.finish_pending("test")
            saved = run.optimizer.updates

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(s3fs.S3FileSystem, "retries", attempts)
        for process in range(PROCESSES + 20):
            server.fault = fault if process < PROCESSES else str
            try:
                train(training())
            except RuntimeError:
                assert process < PROCESSES
            if saved == len(SIZES):
                break
        assert saved == len(SIZES)
        server.fault = str
        with checkpoint(folder, training(), run="job") as saves:
            assert saves.restore()
            saves.save()  # deletes what is left
            assert len(saves._folder.names()) <= 3
            assert not [
                name for name in saves._folder.storage.listed().keys() - saves._folder.names() if "update-" in name
            ]
            if saves.best:
                facts = vbs.read_checkpoint(saves.best)["facts"]
                assert facts["metrics"]["loss"] in losses[facts["updates"]]
