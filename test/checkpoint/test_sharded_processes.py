"""Real processes that write a checkpoint together, and that are killed while they do."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

import variable_batch_size as vbs
from helpers.checkpoints import checkpoint, messages, path_of, start, updates
from helpers.reference import assert_equal
from helpers.sharded import always_sharded, wide
from variable_batch_size.backend import Backend
from variable_batch_size.checkpoint.folder import Folder, update_of
from variable_batch_size.testing import run_ranks

pytestmark = [pytest.mark.slow("starts processes in several worlds"), pytest.mark.torch]

__all__ = ["always_sharded"]

SCRIPT = """
import torch.distributed as dist
from helpers.sharded import wide
from variable_batch_size.checkpoint import shards
shards.SMALLEST = 1
rank, size = map(int, sys.argv[2:4])
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size)
run = wide(vbs.backend.DistributedBackend())
saves = checkpoint(folder / "saved", run, every=1, keep=1)
assert not saves.restore()
run.run(1)
saves.save()
assert updates(folder / "saved") == [1]
run.run(1)
assert saves.step()
"""


@pytest.mark.parametrize(("size", "end"), [(2, "saves.close()\n"), (3, "")])
def test_processes_write_equally_much_and_another_world_restores(size: int, end: str, tmp_path: Path) -> None:
    """Also if they end without close(): every process then ends after its thread."""
    ranks = [start(SCRIPT + end + "dist.destroy_process_group()", tmp_path, rank, size) for rank in range(size)]
    ends = [(messages(process.communicate(timeout=100)[1]), process.returncode) for process in ranks]
    absent = f"No checkpoint in {tmp_path}/saved: nothing is restored."  # of rank 0
    assert ends == [([absent], 0), *[([], 0)] * (size - 1)]
    assert updates(tmp_path / "saved") == ([2] if end else [1, 2])  # the earlier one is deleted by a close()
    sizes = {file.name: file.stat().st_size for file in path_of(tmp_path / "saved", 2).glob("tensors-*")}
    assert sizes.keys() == {f"tensors-{rank}.safetensors" for rank in range(size)}
    assert max(sizes.values()) < 1.3 * min(sizes.values())
    run = wide()
    with checkpoint(tmp_path / "saved", run) as saves:
        assert saves.restore()
    assert_equal(run.weights(), wide().run(2).weights())


def test_ranks_that_are_killed_at_any_moment_leave_a_checkpoint_of_one_update(
    tmp_path: Path, always_sharded: None
) -> None:
    """One rank is killed while all save after every update; what is left is intact and restores exactly."""
    seed = 3
    print("seed", seed)
    rng, saved = random.Random(seed), tmp_path / "saved"
    path = os.pathsep.join([str(Path(__file__).parents[1]), str(Path(vbs.__file__).parent.parent)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    for size, victim in ((2, 1), (3, 0)):
        (tmp_path / "meet").unlink(missing_ok=True)
        logs = [tmp_path / f"updates{rank}" for rank in range(size)]
        for log in logs:
            log.write_text("")
        command = [sys.executable, "-m", "helpers.sharded", str(tmp_path)]
        ranks = [
            subprocess.Popen(
                [*command, str(rank), str(size)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
            )
            for rank in range(size)
        ]
        try:
            while any(log.read_text().count("\n") < 3 for log in logs):
                assert all(process.poll() is None for process in ranks)
                time.sleep(0.01)
            time.sleep(rng.uniform(0, 0.1))
            ranks[victim].kill()
            for process in ranks:  # the others end when a collective fails
                assert process.wait(timeout=100) != 0
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        reached = [int(log.read_text().split("\n")[-2]) for log in logs]
        folder = Folder(saved)
        assert all(map(folder.is_intact, folder.names()))
        newest = update_of(folder.names()[0])
        assert max(reached) - 2 <= newest <= max(reached) + 1

        def restore(backend: Backend) -> None:
            run = wide(backend)
            with checkpoint(saved, run) as saves:
                assert saves.restore()
            update = run.optimizer.updates
            assert update == newest  # noqa: B023
            states = [value for state in run.optimizer.state.values() for value in state.values()]
            tensors = [*run.model.parameters(), *states]
            assert len(tensors) == 4 * 8
            assert all(tensor.eq(update).all() for tensor in tensors)

        run_ranks(restore, rng.choice((1, 2)))
