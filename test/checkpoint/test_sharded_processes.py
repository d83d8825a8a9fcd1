"""Real processes that write a checkpoint together, and that are killed while they do."""

from __future__ import annotations

import pytest

from helpers.checkpoints import messages, path_of, restore_checkpoint, start, updates
from helpers.reference import assert_equal
from helpers.sharded import always_sharded, wide

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
def test_processes_write_equally_much_and_another_world_restores(size, end, tmp_path):
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
    restore_checkpoint(tmp_path / "saved", run)
    assert_equal(run.weights(), wide().run(2).weights())
