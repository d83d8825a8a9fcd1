"""torchft with groups of two processes, which shard the model: groups and single processes are lost, and come back."""

from __future__ import annotations

import sys

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from helpers.commands import free_job
from helpers.jobs import logs, place, slurm, start
from helpers.torchft_groups import Groups, check
from helpers.torchft_training import TRACE, make, manager_of
from variable_batch_size.integrations.torchft import TorchftBackend

__all__ = ["place"]

SHARDED = {"trace": "fixed", "rule": "linear", "processes": 2, "pause": 0.2}


def test_a_group_that_is_killed_and_one_that_loses_a_process_come_back(tmp_path):
    own = {"1": {"quorum_timeout": 20}}  # so long it waits for the process that ends, if it has just asked
    settings = SHARDED | {"trace": "noise", "rule": "adascale", "only": own}
    with Groups(tmp_path, settings) as groups:
        groups.start(0, 1)
        groups.wait(lambda: len(groups.holders) == 2, "both")
        groups.kill(0)
        groups.wait_for(5)
        groups.start(0)
        groups.wait(lambda: len(groups.holders) == 2, "both again")
        groups.kill(1, rank=1)
        assert groups.ended(1) == 1
        groups.wait_for(5)
        groups.start(1)
        groups.wait(lambda: len(groups.holders) == 2, "both again")
        found = check(groups.finish(3), settings)
    assert found["worlds"] > 3, found


def test_a_group_that_has_got_half_of_the_state_gets_all_of_it_again(tmp_path):
    """Its process 0 takes it over from group 0, and process 1 from group 1, which is lost before."""
    settings = SHARDED | {"timeout": 20, "only": {"2": {"receives_later": 1}}}
    with Groups(tmp_path, settings) as groups:
        groups.start(0, 1)
        groups.wait(lambda: len(groups.holders) == 2, "both")
        groups.start(2)
        groups.wait((tmp_path / "waits").exists, "the newcomer")
        groups.kill(1)
        (tmp_path / "go").touch()
        groups.wait(lambda: 2 in groups.holders, "its first update")
        check(groups.finish(3), settings)


def test_a_group_with_other_weights_or_settings_ends_and_says_so(tmp_path):
    with Groups(tmp_path, SHARDED | {"only": {"1": {"seed": 7, "rule": "root"}}}, 2) as groups:
        groups.start(0, 1)
        assert groups.ended(1) == 1
    assert "this one differs from the others in parameters, rule;" in (tmp_path / "log-1").read_text()


@pytest.mark.nightly("starts processes")
def test_a_group_of_another_size_ends_and_says_so(tmp_path):
    with Groups(tmp_path, settings := SHARDED | {"only": {"1": {"processes": 3}}}) as groups:
        groups.start(0)
        groups.wait_for(5)
        groups.start(1)
        assert groups.ended(1) == 1
        log = (tmp_path / "log-1").read_text()
        assert log.count("a replica group must have as many processes as the others, 2, got 3; start this") == 3, log
        groups.wait_for(5)
        check(groups.finish(3), settings)


@pytest.mark.slow("starts eight processes")
def test_a_checkpoint_of_one_group_starts_all_again(tmp_path):
    with Groups(tmp_path, settings := SHARDED | {"checkpoint": True}, 2) as groups:
        groups.start(0, 1)
        groups.wait_for(11)
        for number in (0, 1):
            groups.kill(number)
        groups.start(0, 1)
        events = groups.finish(3)
    check(events, settings)
    again = [event["time"] for event in events if event["event"] == "up"][4]
    assert min(event["step"] for event in events if event["event"] == "commit" and event["time"] > again) >= 10


@pytest.mark.nightly("starts four processes, and torchrun")
def test_the_example_trains(place):
    """A group of torchrun, and one of a job of Slurm."""
    script = "examples/sharded_groups.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script]
    with Groups(place, {}, 2) as groups:
        own = {"TORCHFT_LIGHTHOUSE": f"http://localhost:{groups.port}"}
        groups.running = {
            0: start(command, place, "log-0", **own, REPLICA_GROUP_ID="0"),
            1: slurm(place, script, free_job(), tasks=2, **own, SLURM_ARRAY_TASK_ID="1"),
        }
        assert [groups.ended(number) for number in (0, 1)] == [0, 0], logs(place)
    assert "update 300: 4 processes" in logs(place)


def test_what_is_not_supported_within_a_group_is_refused(tmp_path):
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    with Groups(tmp_path, {}) as groups:
        manager = manager_of(store.port, world_size=2, lighthouse_addr=f"http://localhost:{groups.port}")
        with pytest.raises(ValueError, match=r"call init_process_group\(\) first, with the rank and world_size"):
            TorchftBackend(manager)
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        try:
            with pytest.raises(ValueError, match="pass init_sync=False"):
                TorchftBackend(manager)
            manager._init_sync = False
            backend = TorchftBackend(manager)
            parts = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
            in_part = fully_shard(nn.Linear(2, 1), mesh=parts["data"])
            for model in (None, nn.Linear(2, 1), DistributedDataParallel(nn.Linear(2, 1)), in_part):
                with pytest.raises(TypeError, match="must shard the model among all of them"):
                    make(SHARDED, TRACE, 0, backend=backend, model=model)
        finally:
            dist.destroy_process_group()
            manager.shutdown(wait=False)
