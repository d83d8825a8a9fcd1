"""How long is the way back from a checkpoint to training, and how long does a save hold the training up?

The first question is asked in fresh processes, from their start to the first update after a restore. The second one in
others, where the call of `save(wait=False)` is compared with a plain copy of the same tensors, and a save for which
the training waits with `torch.save` to another name and `os.replace`, which promises less: no checksum, and nothing
about a machine that loses power. `torch.distributed.checkpoint.async_save` is what a user would take to go on at once.
All that is compared is interleaved. Everything runs in one process and on one CPU thread; the writer is another one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from itertools import chain, pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

# Nothing else is imported here: that is a part of what the fresh processes measure.

HIDDEN = {"10M": (2048, 2), "100M": (4096, 6)}  # width and number of the square layers
ROWS = 32


class Training(NamedTuple):
    """What a script holds."""

    model: Any
    optimizer: Any
    sampler: Any
    update: Callable[[], object]

    def tensors(self) -> list[Any]:
        """All that a checkpoint of it holds."""
        momenta = [state["momentum_buffer"] for state in self.optimizer.state.values()]
        return [*(value.detach() for value in self.model.state_dict().values()), *momenta]

    def state(self) -> dict[str, Any]:
        """The same, as it is saved without a `Checkpoint`."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def build(size: str) -> Training:
    """A perceptron, made as one is for a training from the beginning too."""
    import torch
    from torch import nn

    import variable_batch_size as vbs

    width, squares = HIDDEN[size]
    widths = [784, *[width] * (squares + 1), 10]
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    model = nn.Sequential(*layers[:-1])
    sampler = vbs.CustomSampler(10**9, ROWS, 1, 0, ROWS)
    inner = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.5)
    optimizer = vbs.LinearRuleOptimizer(inner, sampler, ref_batchsize=ROWS)
    images, labels = torch.randn(ROWS, 784), torch.randint(10, (ROWS,))
    indices = chain(sampler)  # which begins when it is first asked: after a restore

    def update() -> None:
        next(indices)
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return Training(model, optimizer, sampler, update)


def begun(size: str, folder: Path) -> None:
    """Leave a checkpoint of a training that has begun."""
    import variable_batch_size as vbs

    training = build(size)
    with vbs.Checkpoint(folder, model=training.model, optimizer=training.optimizer) as checkpoint:
        training.update()
        checkpoint.save()


def way_back(size: str, folder: Path, started: float) -> dict[str, float]:
    """The seconds of each part, in a process that was started then."""
    times = {"start": time.time()}
    import torch

    times["import torch"] = time.time()
    import variable_batch_size as vbs

    times["import variable_batch_size"] = time.time()
    torch.optim.SGD([torch.zeros(1)])  # the first optimizer of a process imports 800 modules of torch more
    times["imports of torch.optim"] = time.time()
    training = build(size)
    times["model"] = time.time()
    with vbs.Checkpoint(folder, model=training.model, optimizer=training.optimizer) as checkpoint:
        assert checkpoint.restore()
        times["restore"] = time.time()
        training.update()
        times["first update"] = time.time()
    return {name: now - before for (name, now), before in zip(times.items(), [started, *times.values()], strict=False)}


def saves(size: str, folder: Path, rounds: int) -> dict[str, list[float]]:
    """The seconds of each kind of save and copy, round by round."""
    import torch
    import torch.distributed.checkpoint as dcp

    import variable_batch_size as vbs

    warnings.simplefilter("ignore")  # dcp's, that there is one process
    training = build(size)
    training.update()
    tensors, took = training.tensors(), defaultdict(list)
    kept = [torch.empty_like(tensor) for tensor in tensors]
    checkpoint = vbs.Checkpoint(folder / "ours", model=training.model, optimizer=training.optimizer, keep=1)

    def timed(what: str, call: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = call()
        took[what].append(time.perf_counter() - began)
        return result

    def save_and_replace() -> None:
        torch.save(training.state(), folder / "part")
        os.replace(folder / "part", folder / "whole")  # noqa: PTH105

    def go_on() -> None:
        for _ in range(3):
            alone.append(updated())
        path = timed("stall", lambda: checkpoint.save(wait=False))
        beside.append(updated())
        while not path.exists():
            beside.append(updated())
        time.sleep(0.1)  # until the one before is deleted
        took["alone"].append(median(alone[-3:]))
        took["beside"].append(sum(beside) / len(beside))
        beside.clear()

    def updated() -> float:
        began = time.perf_counter()
        training.update()
        return time.perf_counter() - began

    def distributed() -> None:
        pending = timed("dcp stall", lambda: dcp.async_save(training.state(), checkpoint_id=folder / "dcp"))
        pending.result()

    alone: list[float] = []
    beside: list[float] = []
    order: list[Callable[[], object]] = [
        lambda: timed("copy", lambda: [tensor.clone() for tensor in tensors]),
        lambda: timed("copy into kept memory", lambda: torch._foreach_copy_(kept, tensors)),
        lambda: timed("save", checkpoint.save),
        lambda: timed("torch.save", save_and_replace),
        go_on,
        distributed,
    ]
    timed("first copy", lambda: [tensor.clone() for tensor in tensors])
    timed("first stall", lambda: checkpoint.save(wait=False))
    checkpoint.save()
    for turn in range(-1, rounds):
        random.Random(turn).shuffle(order)
        for call in order:
            training.update()
            call()
        if turn < 0:
            took = defaultdict(list, {name: times for name, times in took.items() if name.startswith("first")})
    checkpoint.close()
    return dict(took)


def fresh(*arguments: object) -> Any:
    """What a fresh process prints."""
    command = [sys.executable, __file__, "--started", repr(time.time()), *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return json.loads(done.stdout.splitlines()[-1])


def measure(size: str, processes: int, rounds: int, root: Path) -> None:
    from results import record, spread

    root.mkdir()
    fresh("--child", "begun", "--models", size, "--folder", root / "begun")
    ways = [fresh("--child", "way back", "--models", size, "--folder", root / "begun") for _ in range(processes)]
    parts = {name: median(way[name] for way in ways) for name in ways[0]}
    imports = [sum(seconds for name, seconds in way.items() if name.startswith("import")) for way in ways]
    after = [way["model"] + way["restore"] + way["first update"] for way in ways]
    share = median(mine / sum(way.values()) for mine, way in zip(imports, ways, strict=True))
    record(
        f"seconds from a process's start to its first update after a restore, {size} parameters",
        ", ".join(f"{name} {seconds:.2f}" for name, seconds in parts.items())
        + f"; imports are {share:.0%} (medians of {processes} processes)",
    )
    record(
        f"seconds from having imported to the first update after a restore, {size} parameters",
        f"{median(after):.2f} ({min(after):.2f} to {max(after):.2f}, {processes} processes)",
    )
    took: dict[str, list[float]] = defaultdict(list)
    for number in range(processes):
        folder = root / f"saves{number}"
        folder.mkdir()
        for name, times in fresh("--child", "saves", "--models", size, "--folder", folder, "--rounds", rounds).items():
            took[name] += times
    for what, mine, other in (
        ("the stall of save(wait=False) / copying the state", "stall", "copy"),
        ("the stall of the first save(wait=False) of a process / copying the state", "first stall", "first copy"),
        ("the stall of save(wait=False) / copying the state into kept memory", "stall", "copy into kept memory"),
        ("the stall of torch.distributed.checkpoint.async_save / copying the state", "dcp stall", "copy"),
        ("an update while the thread writes / one alone", "beside", "alone"),
        ("save() / torch.save and os.replace", "save", "torch.save"),
    ):
        ratios = [one / another for one, another in zip(took[mine], took[other], strict=True)]
        record(f"{what}, {size} parameters", f"{spread(ratios)}; {1e3 * median(took[mine]):.0f} ms")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", choices=HIDDEN, default=list(HIDDEN))
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5, help="in each process that saves")
    for hidden in ("child", "started", "folder"):
        parser.add_argument(f"--{hidden}", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.child:
        size, folder = flags.models[0], Path(flags.folder)
        children: dict[str, Callable[[], Any]] = {
            "begun": lambda: begun(size, folder),
            "way back": lambda: way_back(size, folder, float(flags.started)),
            "saves": lambda: saves(size, folder, flags.rounds),
        }
        print(json.dumps(children[flags.child]()))
        raise SystemExit
    with tempfile.TemporaryDirectory() as root:
        for size in flags.models:
            measure(size, flags.processes, flags.rounds, Path(root) / size)
