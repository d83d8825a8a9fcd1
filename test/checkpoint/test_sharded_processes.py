"""Real processes that write a checkpoint together, and that are killed while they do."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import variable_batch_size as vbs
from helpers.checkpoints import checkpoint, names, start
from helpers.reference import assert_equal
from helpers.sharded import always_sharded, wide
from variable_batch_size.backend import Backend
from variable_batch_size.checkpoint.folder import CheckpointFolder
from variable_batch_size.checkpoint.manifest import MANIFEST, verified_manifest
from variable_batch_size.testing import run_ranks

__all__ = ["always_sharded"]

SCRIPT = """
import torch.distributed as dist
from helpers.sharded import wide
from variable_batch_size.checkpoint import shards
shards.SMALLEST = 1
rank, size, end = map(int, sys.argv[2:5])
dist.init_process_group("gloo", init_method=f"file://{folder}/meet{size}", rank=rank, world_size=size)
run = wide(vbs.DistributedBackend())
saves = checkpoint(folder / "saved", run, every=1, keep=1)
print(saves.restore())
writes = []
written = saves._saver._publisher._folder.write
saves._saver._publisher._folder.write = lambda *args: writes.append(written(*args)) or writes[-1]
run.run(1)
saves.save()
run.run(1)
saves.step()
"""


@pytest.mark.parametrize("size", [2, 3])
def test_processes_write_equally_much_and_another_world_restores(size: int, tmp_path: Path) -> None:
    """The processes end with and without close(), which every rank's write has to survive."""
    for number, end in enumerate(("saves.close()", "")):
        script = SCRIPT + end + "\nprint(*(file.bytes for file in writes))\ndist.destroy_process_group()\n"
        folder = tmp_path / str(number)
        folder.mkdir()
        ranks = [start(script, folder, rank, size, 0) for rank in range(size)]
        written = []
        for process in ranks:
            out, err = process.communicate(timeout=100)
            assert (process.returncode, err) == (0, "")
            restored, sizes = out.splitlines()
            assert restored == "False"
            written.append([int(number) for number in sizes.split()])
        (name,) = names(folder / "saved")
        facts = json.loads((folder / "saved" / name / MANIFEST).read_text())
        assert [facts["file"]["bytes"], *(shard["bytes"] for shard in facts["shards"])] == [
            last for *_, last in written
        ]
        assert max(map(max, written)) < 1.3 * min(map(min, written))
        run = wide()
        with checkpoint(folder / "saved", run) as saves:
            assert saves.restore()
        assert_equal(run.weights(), wide().run(2).weights())


@pytest.mark.skipif(sys.platform != "linux", reason="the signal of a parent's death")
def test_ranks_that_are_killed_at_any_moment_leave_a_checkpoint_of_one_update(
    tmp_path: Path, always_sharded: None
) -> None:
    """One rank or all are killed while they save after every update; what is left is intact and restores exactly."""
    seed = 3
    print("seed", seed)
    rng, saved = random.Random(seed), tmp_path / "saved"
    path = os.pathsep.join([str(Path(__file__).parents[1]), str(Path(vbs.__file__).parent.parent)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    for size, victims in ((2, [1]), (3, [0]), (2, [0, 1]), (3, [2])):
        (tmp_path / "meet").unlink(missing_ok=True)
        command = [sys.executable, "-m", "helpers.sharded", str(tmp_path)]
        ranks = [
            subprocess.Popen(
                [*command, str(rank), str(size)],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=environment,
            )
            for rank in range(size)
        ]
        try:
            reached = [0] * size
            for rank, process in enumerate(ranks):
                for _ in range(3):
                    assert process.stdout is not None
                    reached[rank] = int(process.stdout.readline())
            time.sleep(rng.uniform(0, 0.1))
            for rank in victims:
                ranks[rank].send_signal(signal.SIGKILL)
            for rank, process in enumerate(ranks):  # the others end when a collective fails
                assert process.stdout is not None
                reached[rank] = max([reached[rank], *map(int, process.stdout.read().split())])
                assert process.wait(timeout=100) != 0
        finally:
            for process in ranks:
                process.kill()
                process.communicate()
        entries = CheckpointFolder(saved).entries()
        assert all(verified_manifest(entry.path) for entry in entries)
        assert max(reached) - 2 <= entries[0].update <= max(reached) + 1

        def restore(backend: Backend) -> None:
            run = wide(backend)
            with checkpoint(saved, run) as saves:
                assert saves.restore()
            assert run.optimizer.updates == entries[0].update  # noqa: B023
            assert_equal(run.weights(), wide().run(run.optimizer.updates).weights(), 1e-9)

        run_ranks(restore, rng.choice((1, 2)))
