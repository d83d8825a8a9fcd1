"""Groups under torchft that are killed, frozen and started again: seconds to the next update; the price of an update.

Beside it, the same training under torchrun, which starts all processes again; and DistributedDataParallel and HSDP by
hand.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import variable_batch_size as vbs
from helpers.commands import free_port
from helpers.elastic_cluster import replay
from helpers.torchft_groups import Groups
from records import spread
from results import record
from step import perceptron
from variable_batch_size.lab.cluster import CapacityTrace

RESTARTED = Path(__file__).parents[1] / "test" / "helpers" / "restarted_training.py"
SETTINGS: dict[str, Any] = {"trace": "fixed", "rule": "linear", "timeout": 2, "pause": 0.05, "retries": 60}
SHARDED = SETTINGS | {"processes": 2, "pause": 0.2}
JOINS = (100, 500, 5000)  # milliseconds
RECOVERY = "seconds to the next update"
GROUPS, ROWS, MICROBATCHES, UPDATES, WARM_UP = 2, 32, 4, 20, 5


def recoveries(repeats: int) -> None:
    """Record what the others wait for after a group is killed or frozen, for several join timeouts."""
    for join in JOINS:
        own = {"on": "3 groups", "where": f"join timeout {join} ms"}
        with tempfile.TemporaryDirectory() as folder, three_groups(Path(folder), SETTINGS, join) as groups:
            record_recoveries(groups, repeats, **own)
            pause = groups.folder / "pause-1"
            pause.touch()
            began = groups.reached()
            time.sleep(2)
            made = groups.reached() - began
            pause.unlink()
            what = "updates of the others while one group pauses for 2 s"
            record(what, "torchft", made, "updates", **own)
            if join == JOINS[1]:
                record_lighthouse(groups, repeats, **own)


def sharded_recoveries(repeats: int) -> None:
    """Record the same of groups of two processes, which have no time left on two cores."""
    join = JOINS[1]
    with tempfile.TemporaryDirectory() as folder, three_groups(Path(folder), SHARDED, join) as groups:
        own = {"on": "3 groups of 2 processes", "where": f"join timeout {join} ms"}
        record_recoveries(groups, repeats, **own)
        record_lighthouse(groups, repeats, **own)


@contextmanager
def three_groups(folder: Path, settings: dict[str, Any], join: int) -> Iterator[Groups]:
    """Start three groups and a lighthouse."""
    with Groups(folder, settings, 2, join_ms=join, programs=True) as groups:
        for number in range(3):
            groups.start(number)
        groups.wait(lambda: len(groups.holders) == 3, "all groups")
        yield groups


def record_recoveries(groups: Groups, repeats: int, **own: str) -> None:
    """Record the seconds to the next update after each kind of failure."""
    waits = dict[str, list[float]]()
    for _ in range(repeats):
        groups.wait_for(5)
        waits.setdefault("after kill -9", []).append(until_next(groups, groups.kill, 2))
        groups.start(2)
        groups.wait(lambda: 2 in groups.holders, "the newcomer")
        ups = [event["time"] for event in groups.events() if event["event"] == "up" and event["group"] == 2]
        first = next(e["time"] for e in commits(groups, 2) if e["time"] > ups[-1])
        waits.setdefault("of a newcomer, after its imports", []).append(first - ups[-1])
        groups.wait_for(5)
        waits.setdefault("after a freeze", []).append(until_next(groups, groups.freeze, 2))
        groups.thaw(2)
        groups.wait(lambda: commits(groups, 2)[-1]["step"] > groups.reached() - 3, "its return")
    for what, seconds in waits.items():
        record(RECOVERY, f"torchft, {what}", spread(seconds), "s", **own)


def record_lighthouse(groups: Groups, repeats: int, **own: str) -> None:
    """Record the seconds from the start of a new lighthouse, two seconds after the end of the last one."""
    seconds = []
    for _ in range(repeats):
        groups.wait_for(5)
        groups.kill_lighthouse()
        time.sleep(2)  # until all groups wait
        seconds.append(until_next(groups, groups.start_lighthouse))
    record(RECOVERY, "torchft, after a new lighthouse", spread(seconds), "s", **own)


def commits(groups: Groups, number: int | None = None) -> list[dict[str, Any]]:
    """Return the committed updates, of all groups or of one."""
    return [e for e in groups.events() if e["event"] == "commit" and number in (None, e["group"])]


def until_next(groups: Groups, happens: Callable[..., None], *arguments: int) -> float:
    """Return the seconds from an event to the first update of the groups that are there then."""
    began = time.time()
    happens(*arguments)
    there = len({*groups.running} - groups.frozen) * groups.settings.get("processes", 1)

    def found() -> list[float]:
        return [e["time"] for e in commits(groups) if e["time"] > began and e["world"][1] == there]

    groups.wait(lambda: bool(found()), "the next update")
    return min(found()) - began


def restart(repeats: int) -> None:
    """Record what a killed process costs under torchrun, which starts all of them again."""
    seconds = []
    for _ in range(repeats):
        capacity = CapacityTrace([0, 15], [3, 2], end=40)
        with tempfile.TemporaryDirectory() as folder:
            _, second = replay(capacity, Path(folder), ["--pause=0.05", "--save-every=1"], script=RESTARTED)
        seconds.append(second.ends[1] - second.begun)
    record(RECOVERY, "torchrun, after kill -9", spread(seconds), "s", on="3 processes", where="--standalone")


def price(repeats: int) -> None:
    """Record the time of an update under torchft over that of what torch has for groups that stay."""
    record_price(repeats, 1, "time of an update of two processes", "torchft / DistributedDataParallel by hand")
    record_price(repeats, 2, "time of an update of two groups of two processes", "torchft / HSDP by hand")


def record_price(repeats: int, processes: int, question: str, what: str) -> None:
    """Record it for groups of so many processes."""
    ratios = []
    for _ in range(repeats):
        found = {side: seconds_of(side, processes) for side in ("torchft", "torch")}
        ratios.append(found["torchft"] / found["torch"])
    record(question, what, spread(ratios), on="10M parameters", where="gloo")


def seconds_of(side: str, processes: int) -> float:
    """Return the median of the seconds of an update."""
    with tempfile.TemporaryDirectory() as folder, Groups(Path(folder), {}, 2) as groups:
        ports = " ".join(str(free_port()) for _ in range(3))
        own = {"TORCHFT_LIGHTHOUSE": f"http://localhost:{groups.port}", "PORTS": ports, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-W", "ignore", __file__, "--folder", folder, "--worker", side]
        command += ["--processes", str(processes)]
        all_of = [
            subprocess.Popen([*command, "--rank", str(rank)], env=os.environ | own, stderr=subprocess.DEVNULL)
            for rank in range(GROUPS * processes)
        ]
        assert {process.wait(300) for process in all_of} == {0}
        return float(json.loads((Path(folder) / "seconds").read_text()))


# The processes that are measured. ------------------------------------------------------------------------------------


def timed(folder: Path, side: str, rank: int, processes: int) -> None:
    """Write the median of the seconds of an update."""
    torch.manual_seed(0)
    model, size = perceptron(2800, 1), GROUPS * processes * ROWS * MICROBATCHES
    dataset = TensorDataset(torch.randn(64 * size, 784), torch.randint(10, (64 * size,)))
    seconds = (by_torch if side == "torch" else by_torchft)(model, dataset, size, rank, processes)
    if rank == 0:
        (folder / "seconds").write_text(json.dumps(statistics.median(seconds[WARM_UP:])))
        time.sleep(1)  # this process has the stores of the others
    os._exit(0)


def connect(number: int, rank: int, size: int) -> dist.TCPStore:
    """Connect processes through one of the ports."""
    port = int(os.environ["PORTS"].split()[number])
    store = dist.TCPStore("localhost", port, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    return store


def by_torch(model: nn.Module, dataset: TensorDataset, size: int, rank: int, processes: int) -> list[float]:
    """Return the seconds of the updates by hand."""
    connect(GROUPS, rank, GROUPS * processes)
    wrapped, seconds = model, list[float]()
    if processes == 1:
        wrapped = DistributedDataParallel(model)
    else:
        shard(model, init_device_mesh("cpu", (GROUPS, processes), mesh_dim_names=("replicate", "shard")))
    inner = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.5)
    batches = iter(DataLoader(dataset, ROWS, shuffle=True))
    for _ in range(WARM_UP + UPDATES):
        began = time.perf_counter()
        for number in range(MICROBATCHES):
            if isinstance(wrapped, DistributedDataParallel):
                wrapped.require_backward_grad_sync = number == MICROBATCHES - 1
            elif isinstance(wrapped, FSDPModule):
                wrapped.set_requires_all_reduce(number == MICROBATCHES - 1)
            x, y = next(batches)
            (nn.functional.cross_entropy(wrapped(x), y) / MICROBATCHES).backward()
        inner.step()
        inner.zero_grad()
        seconds.append(time.perf_counter() - began)
    dist.barrier()
    return seconds


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard the layers that have parameters, and the rest."""
    for layer in model.children():
        if [*layer.parameters()]:
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def by_torchft(model: nn.Module, dataset: TensorDataset, size: int, rank: int, processes: int) -> list[float]:
    """Return the seconds of the updates under torchft."""
    from torchft import Manager, ProcessGroupGloo

    from variable_batch_size.integrations.torchft import TorchftBackend

    group, own = divmod(rank, processes)
    if processes > 1:
        store = connect(group, own, processes)
        shard(model, init_device_mesh("cpu", (processes,)))
    else:
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=20)),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=GROUPS,
        use_async_quorum=False,
        replica_id=f"group{group}",
        store_addr="localhost",
        store_port=store.port,
        rank=own,
        world_size=processes,
        init_sync=processes == 1,
    )
    backend, seconds = TorchftBackend(manager), list[float]()
    sampler = vbs.CustomSampler(dataset, size, 1, 0, ROWS)
    inner = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.5)
    options: dict[str, Any] = {"model": model} if processes > 1 else {}
    optimizer = vbs.LinearRuleOptimizer(inner, sampler, size, backend=backend, **options)
    backend.register(model=model, optimizer=optimizer)
    began = time.perf_counter()
    for update in vbs.updates(DataLoader(dataset, batch_sampler=sampler), optimizer):
        for x, y in update:
            optimizer.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
        seconds.append(time.perf_counter() - began)  # with the quorum
        began = time.perf_counter()
        if len(seconds) == WARM_UP + UPDATES:
            break
    return seconds


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="number of failures, and of pairs")
    parser.add_argument("--only-price", action="store_true", help="of an update, without failures")
    parser.add_argument("--only-recoveries", action="store_true", help="without the price of an update, and torchrun")
    parser.add_argument("--worker", choices=["torchft", "torch"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--processes", type=int, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.worker:
        timed(flags.folder, flags.worker, flags.rank, flags.processes)
    else:
        if not flags.only_recoveries:
            price(flags.repeats)
        if not flags.only_price:
            recoveries(flags.repeats)
            sharded_recoveries(flags.repeats)
        if not flags.only_price and not flags.only_recoveries:
            restart(flags.repeats)
