"""Groups under torchft that are killed, frozen and started again: seconds to the next update; the price of an update.

Beside it, the same training under torchrun, which starts all processes again; and a DistributedDataParallel by hand.
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
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import variable_batch_size as vbs
from helpers.commands import free_port
from helpers.elastic_cluster import replay
from helpers.torchft_groups import Groups
from records import spread
from results import record
from step import perceptron
from variable_batch_size.cluster import CapacityTrace

RESTARTED = Path(__file__).parents[1] / "test" / "helpers" / "restarted_training.py"
SETTINGS: dict[str, Any] = {"trace": "fixed", "rule": "linear", "timeout": 2, "pause": 0.05}
JOINS = (100, 500, 5000)  # milliseconds
RECOVERY, PRICE = "seconds to the next update", "time of an update of two processes"
ROWS, MICROBATCHES, UPDATES, WARM_UP = 32, 4, 20, 5


def recoveries(repeats: int) -> None:
    """Record what the others wait for after a group is killed or frozen, for several join timeouts."""
    for join in JOINS:
        where, waits = f"join timeout {join} ms", dict[str, list[float]]()
        with tempfile.TemporaryDirectory() as folder, Groups(Path(folder), SETTINGS, 2, join_ms=join) as groups:
            for number in range(3):
                groups.start(number)
            groups.wait(lambda: len(groups.holders) == 3, "all groups")
            for _ in range(repeats):
                groups.wait_for(5)
                waits.setdefault("after kill -9", []).append(until_next(groups, lambda: groups.kill(2)))
                groups.start(2)
                groups.wait(lambda: 2 in groups.holders, "the newcomer")
                ups = [event["time"] for event in groups.events() if event["event"] == "up" and event["group"] == 2]
                first = next(e["time"] for e in commits(groups, 2) if e["time"] > ups[-1])
                waits.setdefault("of a newcomer, after its imports", []).append(first - ups[-1])
                groups.wait_for(5)
                waits.setdefault("after a freeze", []).append(until_next(groups, lambda: groups.freeze(2)))
                groups.thaw(2)
                groups.wait(lambda: commits(groups, 2)[-1]["step"] > groups.reached() - 3, "its return")
            for what, seconds in waits.items():
                record(RECOVERY, f"torchft, {what}", spread(seconds), "s", on="3 groups", where=where)
            pause = groups.folder / "pause-1"
            pause.touch()
            began = groups.reached()
            time.sleep(2)
            made = groups.reached() - began
            pause.unlink()
            what = "updates of the others while one group pauses for 2 s"
            record(what, "torchft", made, "updates", on="3 groups", where=where)


def commits(groups: Groups, number: int | None = None) -> list[dict[str, Any]]:
    """Return the committed updates, of all groups or of one."""
    return [e for e in groups.events() if e["event"] == "commit" and number in (None, e["group"])]


def until_next(groups: Groups, happens: Any) -> float:
    """Return the seconds from an event to the first update of the groups that are left."""
    began = time.time()
    happens()
    groups.wait(lambda: any(e["time"] > began and e["world"][1] == 2 for e in commits(groups)), "the others")
    return float(min(e["time"] for e in commits(groups) if e["time"] > began and e["world"][1] == 2)) - began


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
    """Record the time of an update under torchft over that of a DistributedDataParallel by hand."""
    ratios = []
    for _ in range(repeats):
        found = {}
        for side in ("torchft", "ddp"):
            with tempfile.TemporaryDirectory() as folder, Groups(Path(folder), {}, 2) as groups:
                own = {"TORCHFT_LIGHTHOUSE": f"http://localhost:{groups.port}", "PORT": str(free_port())}
                own |= {"OMP_NUM_THREADS": "1", "RUST_LOG": "off"}
                command = [sys.executable, "-W", "ignore", __file__, "--folder", folder, "--worker", side]
                both = [
                    subprocess.Popen([*command, "--rank", str(rank)], env=os.environ | own, stderr=subprocess.DEVNULL)
                    for rank in range(2)
                ]
                assert [process.wait(300) for process in both] == [0, 0]
                found[side] = json.loads((Path(folder) / "seconds").read_text())
        ratios.append(found["torchft"] / found["ddp"])
    record(PRICE, "torchft / DistributedDataParallel by hand", spread(ratios), on="10M parameters", where="gloo")


# The processes that are measured. ------------------------------------------------------------------------------------


def timed(folder: Path, side: str, rank: int) -> None:
    """Write the median of the seconds of an update."""
    torch.manual_seed(0)
    model, size = perceptron(2800, 1), 2 * ROWS * MICROBATCHES
    dataset = TensorDataset(torch.randn(64 * size, 784), torch.randint(10, (64 * size,)))
    inner = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.5)
    seconds = by_ddp(model, inner, dataset, rank) if side == "ddp" else by_torchft(model, inner, dataset, size, rank)
    if rank == 0:
        (folder / "seconds").write_text(json.dumps(statistics.median(seconds[WARM_UP:])))
    os._exit(0)


def by_ddp(model: nn.Module, inner: torch.optim.Optimizer, dataset: TensorDataset, rank: int) -> list[float]:
    """Return the seconds of the updates by hand."""
    dist.init_process_group("gloo", init_method=f"tcp://localhost:{os.environ['PORT']}", rank=rank, world_size=2)
    wrapped, seconds = DistributedDataParallel(model), []
    batches = iter(DataLoader(dataset, ROWS, shuffle=True))
    for _ in range(WARM_UP + UPDATES):
        began = time.perf_counter()
        for number in range(MICROBATCHES):
            wrapped.require_backward_grad_sync = number == MICROBATCHES - 1
            x, y = next(batches)
            (nn.functional.cross_entropy(wrapped(x), y) / MICROBATCHES).backward()
        inner.step()
        inner.zero_grad()
        seconds.append(time.perf_counter() - began)
    dist.barrier()
    return seconds


def by_torchft(
    model: nn.Module, inner: torch.optim.Optimizer, dataset: TensorDataset, size: int, rank: int
) -> list[float]:
    """Return the seconds of the updates under torchft."""
    from torchft import Manager, ProcessGroupGloo

    from variable_batch_size.integrations.torchft import TorchftBackend

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=20)),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=2,
        use_async_quorum=False,
        replica_id=f"group{rank}",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
    )
    backend, seconds = TorchftBackend(manager), list[float]()
    sampler = vbs.CustomSampler(dataset, size, 1, 0, ROWS)
    optimizer = vbs.LinearRuleOptimizer(inner, sampler, size, backend=backend)
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
    parser.add_argument("--worker", choices=["torchft", "ddp"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.worker:
        timed(flags.folder, flags.worker, flags.rank)
    else:
        price(flags.repeats)
        if not flags.only_price:
            recoveries(flags.repeats)
            restart(flags.repeats)
