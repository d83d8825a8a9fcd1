"""A replica group of a training under torchft: `python torchft_training.py FOLDER NUMBER SETTINGS`.

It is a process, or as many as the settings say, of which the first one forks the others; these shard the model. Each
appends a line of JSON to `FOLDER/NUMBER-RANK.jsonl` for each attempt of an update, before its sum, and for each update
that is committed. They train until the update that the file `FOLDER/end` names.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

import variable_batch_size as vbs
from helpers.commands import free_port

SAMPLES, WIDTH, ROWS, REFERENCE = 61, 8, 4, 8
TRACE = [13, 7, 1, 29, 11] * 4000
TRACES: dict[str, Any] = {
    "fixed": TRACE,
    "per-device": vbs.AdaptiveTrace(vbs.adaptive.PerDevice(8), every=5, delay=4),
    "noise": vbs.AdaptiveTrace(vbs.adaptive.NoiseScale(), start=8, bounds=(4, 60), every=5, delay=4),
}
Settings = dict[str, Any]  # trace, rule, pause, processes


def samples() -> TensorDataset:
    """Random samples with their indices, in float64."""
    drawn = torch.Generator().manual_seed(3)
    x = torch.randn(SAMPLES, WIDTH, generator=drawn, dtype=torch.float64)
    noise = torch.randn(SAMPLES, generator=drawn, dtype=torch.float64)
    return TensorDataset(torch.arange(SAMPLES), x, x @ torch.arange(WIDTH, dtype=torch.float64) + noise)


def network(seed: int) -> nn.Module:
    """Return a model."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def make(
    settings: Settings, trace: Any, seed: int, *, sharded: bool = False, **options: Any
) -> tuple[nn.Module, vbs.CustomOptimizer]:
    """Return a model and its optimizer, in a world of one."""
    model = network(seed)
    if sharded:
        for layer in model:
            fully_shard(layer)
        options["model"] = fully_shard(model)
    sampler = vbs.CustomSampler(SAMPLES, trace, 1, 0, ROWS, max_updates=settings.get("max_updates"))
    inner = torch.optim.SGD(model.parameters(), lr=5e-4, momentum=0.9, weight_decay=1e-3)
    return model, vbs.CustomOptimizer(inner, sampler, REFERENCE, rule=settings["rule"], **options)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the loss of a microbatch."""
    loss: Tensor = nn.functional.mse_loss(model(x)[:, 0], y)
    return loss


def loader_of(optimizer: vbs.CustomOptimizer) -> DataLoader[Any]:
    """Return the loader of an optimizer's sampler."""
    return DataLoader(samples(), batch_sampler=optimizer.sampler)


def weights_of(model: nn.Module) -> list[Tensor]:
    """Return the whole weights, on every process of a group."""
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach() for p in model.parameters()]


def digest(model: nn.Module) -> str:
    """Return a hash of the weights."""
    return hashlib.sha256(b"".join(weight.numpy().tobytes() for weight in weights_of(model))).hexdigest()[:16]


def end(folder: Path) -> float:
    """Return after which update the training ends."""
    try:
        return float((folder / "end").read_text() or "inf")
    except FileNotFoundError:
        return float("inf")


def is_held(folder: Path, number: int, update: int) -> bool:
    """Return whether a file says that a group waits at an update, `FOLDER/hold-NUMBER`."""
    try:
        return update >= int((folder / f"hold-{number}").read_text())
    except FileNotFoundError:
        return False


def die_in_the_sum(manager: Any) -> None:
    """Let this process kill itself when the other groups have what goes ahead, and wait for the gradients."""
    allreduce = manager.allreduce

    def die(tensor: Tensor, **options: Any) -> Any:
        if tensor.is_floating_point():
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)
        return allreduce(tensor, **options)

    manager.allreduce = die


def receive_later(manager: Any, folder: Path, *, waits: bool) -> None:
    """Let a process of a group wait for the file `FOLDER/go` before it takes over a state, and the others ask late.

    The file `FOLDER/waits` says that it waits. Of the processes of a group, torchft believes the last one that asks.
    """
    receive, start = manager._checkpoint_transport.recv_checkpoint, manager.start_quorum

    def later(**arguments: Any) -> Any:
        manager._checkpoint_transport.recv_checkpoint = receive
        (folder / "waits").touch()
        while not (folder / "go").exists():
            time.sleep(0.02)
        return receive(**arguments)

    def late() -> None:
        time.sleep(0.2)
        start()

    if waits:
        manager._checkpoint_transport.recv_checkpoint = later
    else:
        manager.start_quorum = late


def miss_once(manager: Any) -> None:
    """Let this group alone find that the next sum has failed."""
    commit = manager.should_commit

    def once() -> bool:
        manager.should_commit = commit
        manager.report_error(RuntimeError("planted"))
        return bool(commit())

    manager.should_commit = once


def start_forked(folder: Path, number: int, settings: Settings, lighthouse: str) -> None:
    """Train as a replica group in a process that was forked, as if a program had been started."""
    os.setsid()
    log = os.open(folder / f"log-{number}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ["TORCHFT_LIGHTHOUSE"] = lighthouse
    warnings.simplefilter("ignore")
    start(folder, number, settings)


def start(folder: Path, number: int, settings: Settings) -> None:
    """Train as a replica group; the settings under "only" are those of one group."""
    settings = settings | settings.get("only", {}).get(str(number), {})
    processes, rank = settings.get("processes", 1), 0
    port = free_port() if processes > 1 else 0  # of the store, which chooses one if nobody else has to know it
    for other in range(1, processes):
        if os.fork() == 0:
            rank = other
            break
    torch.set_num_threads(1)  # after a fork its first call may be made by one thread only (caffe2's thread pool)
    train(folder, number, settings, rank, port)
    if rank == 0:
        for _ in range(1, processes):
            os.wait()
    os._exit(0)  # torchft's threads would keep the process


def manager_of(port: int, seconds: float = 5, **options: Any) -> Any:
    """Return a Manager of torchft whose store has this port."""
    from torchft import Manager, ProcessGroupGloo

    usual = {"load_state_dict": None, "state_dict": None, "min_replica_size": 1, "use_async_quorum": False}
    place = {"store_addr": "localhost", "store_port": port, "rank": 0, "world_size": 1}
    return Manager(pg=ProcessGroupGloo(timeout=timedelta(seconds=seconds)), **(usual | place | options))


def train(folder: Path, number: int, settings: Settings, rank: int, port: int) -> None:
    """Train as a process of a replica group."""
    processes = settings.get("processes", 1)
    from variable_batch_size.integrations.torchft import TorchftBackend
    from variable_batch_size.integrations.torchft import backend as torchft_backend

    store = dist.TCPStore("localhost", port, is_master=rank == 0, wait_for_workers=False)
    if processes > 1:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=processes)
    manager = manager_of(
        store.port,
        settings.get("timeout", 5),
        min_replica_size=settings.get("least", 1),
        replica_id=f"group{number}",
        quorum_retries=settings.get("retries", 0),
        timeout=timedelta(seconds=10),
        quorum_timeout=timedelta(seconds=settings.get("quorum_timeout", 60)),
        rank=rank,
        world_size=processes,
        init_sync=processes == 1,
    )
    backend = TorchftBackend(manager)
    seed = settings.get("seed", number if processes == 1 else 0)
    model, optimizer = make(settings, TRACES[settings["trace"]], seed, backend=backend, sharded=processes > 1)
    backend.register(model=model, optimizer=optimizer)
    if "receives_later" in settings:
        receive_later(manager, folder, waits=settings["receives_later"] == rank)
    torchft_backend._SILENCE = 2  # seconds
    checkpoint = None
    if settings.get("checkpoint") and number == 0:
        checkpoint = vbs.Checkpoint(folder / "checkpoints", model=model, optimizer=optimizer, every=10, run="torchft")
        checkpoint.restore()
    with (folder / f"{number}-{rank}.jsonl").open("a", buffering=1) as file:

        def note(event: str, **facts: Any) -> None:
            own = {"group": number, "rank": rank, "time": time.time()}
            file.write(json.dumps({"event": event, **own, **facts}) + "\n")

        note("up", pid=os.getpid())
        while optimizer.updates < end(folder) and not optimizer.done:
            for update in vbs.updates(loader_of(optimizer), optimizer):
                step, used, made = optimizer.updates, [], False
                if is_held(folder, number, step):
                    note("held", step=step)
                while is_held(folder, number, step):
                    time.sleep(0.02)
                world = [backend.world.rank, backend.world.size]
                for index, x, y in update:
                    microbatch = optimizer.microbatch
                    used += index.tolist() if microbatch.samples else []
                    if step + 1 == settings.get("dies"):
                        die_in_the_sum(manager)
                    loss = loss_of(model, x, y)
                    optimizer.backward(loss)
                    optimizer.log(loss=loss)
                    if step % settings.get("period", step + 1) == 0:
                        optimizer.log(often=1.0)
                    if microbatch.ends_step:
                        note("deal", step=step, world=world, used=used, quorum=manager._quorum_id)
                        if step + 1 == settings.get("misses"):
                            miss_once(manager)
                    made = optimizer.step()
                facts = {"quorum": manager._quorum_id, "world": world, "weights": digest(model)}
                note("commit" if made else "broken", step=step, **facts)
                if checkpoint is not None:
                    checkpoint.step()
                if optimizer.updates >= end(folder):
                    break
                time.sleep(settings.get("pause", 0.02))
                while (folder / f"pause-{number}").exists():  # before it asks for the next quorum
                    time.sleep(0.02)
        weights = [weight.tolist() for weight in weights_of(model)]
        first_step, sizes = optimizer.sampler.trace.runs
        note("end", weights=weights, updates=optimizer.updates, runs=[first_step.tolist(), sizes.tolist()])


if __name__ == "__main__":
    start(Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
