"""torchft: real groups under a real lighthouse are killed, frozen and started again, and the updates stay the same."""

from __future__ import annotations

import random
import time
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
import yaml
from torch.nn.parallel import DistributedDataParallel

import variable_batch_size as vbs
from helpers.jobs import STOPPED, logs, place, signal_step, slurm, start
from helpers.torchft_groups import Groups, check, run_script, train_alone
from helpers.torchft_training import TRACE, loader_of, loss_of, make, manager_of
from variable_batch_size.integrations.torchft import TorchftBackend

__all__ = ["place"]

ROOT = Path(__file__).parents[2]
LINEAR = {"trace": "fixed", "rule": "linear"}
SEEDS = {2: ("noise", "adascale"), 3: ("per-device", "linear")}  # by number of groups


@pytest.mark.parametrize("number", [3, pytest.param(2, marks=pytest.mark.nightly("starts processes"))])
def test_groups_that_fail_and_come_back_make_the_planned_updates(number, tmp_path):
    seed = 5
    print("seed", seed)
    trace, rule = SEEDS[number]
    settings = {"trace": trace, "rule": rule, "retries": 60}
    with Groups(tmp_path, settings, number // 2 + 1) as groups:
        run_script(groups, number, 6, random.Random(seed))
        found = check(groups.finish(), settings)
    assert found["worlds"] > 1, found


def test_a_group_with_another_model_takes_over_that_of_the_others(tmp_path):
    with Groups(tmp_path, LINEAR, join_ms=10_000) as groups:
        holds = [tmp_path / f"hold-{number}" for number in (0, 1)]
        for number, hold in enumerate(holds):  # each trains alone up to update 5
            hold.write_text("5")
            groups.start(number)
            groups.wait(lambda number=number: groups.reached(number, "held") == 5, "its quorum")
            if number == 0:
                groups.freeze(0)
        groups.thaw(0)
        for number, hold in enumerate(holds):  # and makes that one alone: then both are at the same update
            hold.unlink()
            groups.wait(lambda number=number: groups.reached(number) >= 5, "update 5")
        ends = [event for event in groups.finish() if event["event"] == "end"]
    assert [("update alone" in (tmp_path / f"log-{number}").read_text()) for number in (0, 1)] == [False, True]
    expected = train_alone(LINEAR, vbs.BatchTrace.of(TRACE), ends[0]["updates"], 0)
    for event in ends:
        for own, other in zip(event["weights"], expected, strict=True):
            np.testing.assert_allclose(own, other, rtol=1e-12, atol=1e-12)


@pytest.mark.nightly("starts processes")
def test_all_groups_are_lost_and_fewer_resume_from_the_checkpoint_of_one(tmp_path):
    with Groups(tmp_path, settings := LINEAR | {"checkpoint": True}, 2) as groups:
        groups.start(*range(3))
        groups.wait_for(25)
        for number in range(3):
            groups.kill(number)
        killed = time.time()
        saved = vbs.read_checkpoint(tmp_path / "checkpoints")["facts"]["updates"]
        groups.start(0, 2)
        events = groups.finish()
    check(events, settings)
    made = [event["step"] for event in events if event["event"] == "commit" and event["time"] > killed]
    assert min(made) == saved >= 10


def test_a_lighthouse_that_comes_back_connects_no_group_at_an_earlier_place(tmp_path):
    """It counts quorums from 1 again, and group 2 has had the second one."""
    with Groups(tmp_path, settings := LINEAR | {"retries": 30, "quorum_timeout": 30}, 2) as groups:
        for number in range(3):
            groups.start(number)
            if number:
                groups.wait(lambda number=number: len(groups.holders) == number + 1, "it")
        assert groups.events()[-1]["quorum"] == 2
        groups.freeze(2)
        groups.restart_lighthouse()
        groups.wait_for(5)
        groups.thaw(2)
        thawed = groups.reached()
        groups.wait(lambda: groups.reached(2) > thawed, "its return")
        events = groups.finish()
    check(events, settings)
    assert next(e["quorum"] for e in events if e["event"] == "commit" and e["group"] == 2 and e["step"] > thawed) == 2
    assert not any("exception in pg configure" in path.read_text() for path in tmp_path.glob("log-*"))
    log = (tmp_path / "log-2").read_text()
    assert "Trains with 3 replica groups: group0, group1, group2" in log
    assert log.count("Takes over the state of another group, of update ") >= 2


@pytest.mark.parametrize("retries", [0, 30])
def test_without_a_lighthouse_every_group_ends_with_one_sentence(retries, tmp_path):
    with Groups(tmp_path, LINEAR | {"quorum_timeout": 3, "retries": retries}, 2) as groups:
        groups.start(*range(2))
        groups.wait_for(5)
        groups.kill_lighthouse()
        for number in range(2):
            assert groups.ended(number) == 1
            log = (tmp_path / f"log-{number}").read_text()
            assert "an update needs a quorum of replica groups, but" in log
            assert "Waits for a quorum of replica groups" in log


@pytest.mark.parametrize(("there", "comes"), [([0, 1], 2), ([1], 0)])
def test_a_group_that_trains_otherwise_ends_and_says_in_what(there, comes, tmp_path):
    """It is the first one by name in some cases."""
    with Groups(tmp_path, settings := LINEAR | {"only": {str(comes): {"rule": "root"}}}, len(there)) as groups:
        groups.start(*there)
        groups.wait(lambda: groups.holders == there, "those")
        groups.start(comes)
        assert groups.ended(comes) == 1
        assert "this one differs from the others in rule;" in (tmp_path / f"log-{comes}").read_text()
        check(groups.finish(), settings)


def test_a_group_that_dies_within_the_sum_holds_up_nobody(tmp_path):
    """Those that have no connection with it either: the timeout of the process group is longer than the test waits."""
    settings = LINEAR | {"timeout": 1000, "only": {"1": {"dies": 60}}}
    with Groups(tmp_path, settings, 3) as groups:
        start_together(groups, 4)
        assert groups.reached() < 59
        assert groups.ended(1) == -9
        groups.wait_for(5)
        check(groups.finish(), settings)


def test_a_group_that_misses_the_last_update_takes_over_its_result(tmp_path):
    settings = LINEAR | {"max_updates": 12, "only": {"1": {"misses": 12}}}
    with Groups(tmp_path, settings, 2) as groups:
        groups.start(0, 1)
        assert [groups.ended(number) for number in (0, 1)] == [0, 0]
        ends = [event for event in groups.events() if event["event"] == "end"]
        assert [event["group"] for event in groups.events() if event["event"] == "broken"][-1] == 1
    assert ends[0]["weights"] == ends[1]["weights"]
    assert ends[0]["updates"] == ends[1]["updates"] == 12


def start_together(groups, size):
    """Start groups that wait for one another at update 10."""
    for number in range(size):
        (groups.folder / f"hold-{number}").write_text("10")
        groups.start(number)
    groups.wait(lambda: sum(event["event"] == "up" for event in groups.events()) == size, "all")
    for number in range(size):
        (groups.folder / f"hold-{number}").unlink()
    groups.wait(lambda: len(groups.holders) == size, "all")


def test_a_group_that_misses_an_update_takes_over_its_result(tmp_path):
    with Groups(tmp_path, settings := LINEAR | {"only": {"1": {"misses": 60}}}, 2) as groups:
        start_together(groups, 3)
        assert groups.reached() < 59
        groups.wait(lambda: groups.reached() > 62, "the next updates")
        events = groups.finish()
    check(events, settings)
    assert [(e["step"], e["group"]) for e in events if e["event"] == "broken" and e["step"] > 50] == [(59, 1)]


def test_values_that_are_logged_now_and_then_do_not_keep_a_group_out(tmp_path):
    with Groups(tmp_path, settings := LINEAR | {"period": 10}, 2) as groups:
        groups.start(*range(3))
        groups.wait(lambda: len(groups.holders) == 3, "all")
        groups.kill(2)
        groups.start(2)
        check(groups.finish(), settings)


@pytest.mark.nightly("starts processes")
def test_the_example_trains_with_the_groups_that_are_left(place):
    """A pod of Kubernetes, a machine of SkyPilot, and a job of Slurm, which is preempted."""
    clusters = ROOT / "examples" / "clusters"
    *_, pods = yaml.safe_load_all((clusters / "kubernetes_groups.yaml").read_text())
    *_, task = yaml.safe_load_all((clusters / "skypilot_groups.yaml").read_text())
    *shell, pod = pods["spec"]["template"]["spec"]["containers"][0]["command"]
    with Groups(place, {}, 2) as groups:
        address = f"http://localhost:{groups.port}"
        own = {"TORCHFT_LIGHTHOUSE": address, "POD_IP": "127.0.0.1", "CHECKPOINTS": str(place / "checkpoints")}
        run = task["run"].replace("http://lighthouse-0.$SKYPILOT_JOBGROUP_NAME:29510", address)
        of_task = {name: str(value) for name, value in task["envs"].items()} | own | {"SKYPILOT_NODE_IPS": "127.0.0.1"}

        def job():
            return slurm(place, "examples/replica_groups.py", 7, tasks=1, **own, SLURM_ARRAY_TASK_ID="0")

        groups.running = {
            0: job(),
            1: start([*shell, pod], place, "log-1", **own, JOB_COMPLETION_INDEX="1"),
            2: start(["bash", "-c", run], place, "log-2", **of_task),
        }
        groups.wait(lambda: "update 50: 3 groups" in logs(place), "update 50")
        signal_step(place, 7)
        assert groups.ended(0) == STOPPED, logs(place)
        assert (place / "requests").read_text() == "requeue 7\n"
        assert [groups.ended(number) for number in (1, 2)] == [0, 0], logs(place)
        assert "update 300: 2 groups" in logs(place)
        assert vbs.read_checkpoint(place / "checkpoints")["facts"]["updates"] == 300
        groups.running = {0: job()}  # which finds the result
        assert groups.ended(0) == 0, logs(place)


# What is refused. ----------------------------------------------------------------------------------------------------


@pytest.fixture
def manager(tmp_path, request):
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    with Groups(tmp_path, {}) as groups:
        own = {"use_async_quorum": getattr(request, "param", False)}
        made = manager_of(store.port, lighthouse_addr=f"http://localhost:{groups.port}", **own)
        yield made
        made.shutdown(wait=False)


@pytest.mark.parametrize("manager", [True], indirect=True)
def test_an_asynchronous_quorum_is_refused(manager):
    with pytest.raises(ValueError, match="pass use_async_quorum=False"):
        TorchftBackend(manager)


def test_what_is_no_manager_is_refused():
    with pytest.raises(TypeError, match=r"manager must be a torchft\.Manager, got 3"):
        TorchftBackend(3)


def test_a_loop_needs_the_updates_and_a_state(manager):
    backend = TorchftBackend(manager)
    model, optimizer = make(LINEAR, TRACE, 0, backend=backend)
    loader = loader_of(optimizer)
    with pytest.raises(RuntimeError, match=r"call backend\.register\(model=model, optimizer=optimizer\)"):
        next(iter(vbs.updates(loader, optimizer)))
    with pytest.raises(TypeError, match="epoch must have state_dict"):
        backend.register(model=model, optimizer=optimizer, epoch=3)
    backend.register(model=model, optimizer=optimizer)
    with pytest.raises(RuntimeError, match=r"loop over vbs\.updates"):  # noqa: PT012
        for _, x, y in loader:
            optimizer.backward(loss_of(model, x, y))
            optimizer.step()


def test_a_model_that_sums_by_itself_is_refused(manager):
    backend = TorchftBackend(manager)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model, _ = make(LINEAR, TRACE, 0)
        with pytest.raises(TypeError, match="pass the bare model"):
            make(LINEAR, TRACE, 0, backend=backend, model=DistributedDataParallel(model))
    finally:
        dist.destroy_process_group()
