"""How long does it take to resume from a checkpoint, and how long does a save block the training?

The first question is measured in new processes, from their start to the first update after a restore. The second one
is measured in others: the call of `save(wait=False)` against a plain copy of the same tensors, and a save that waits
against `torch.save` to another name and `os.replace`, which has no checksum and no guarantee after a power loss.
`torch.distributed.checkpoint.async_save` is the alternative of a user who does not want to wait. All measurements
that are compared are interleaved. Each process trains on one CPU thread; the writer is a second thread.
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

# Everything else is imported later, because the new processes measure their imports.

HIDDEN = {"10M": (2048, 2), "100M": (4096, 6)}  # width and number of the square layers
ROWS = 32


class Training(NamedTuple):
    """The objects of a training script."""

    model: Any
    optimizer: Any
    sampler: Any
    update: Callable[[], object]

    def tensors(self) -> list[Any]:
        """Return all tensors that a checkpoint holds."""
        momenta = [state["momentum_buffer"] for state in self.optimizer.state.values()]
        return [*(value.detach() for value in self.model.state_dict().values()), *momenta]

    def state(self) -> dict[str, Any]:
        """Return the state that a user saves without a `Checkpoint`."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def build(size: str) -> Training:
    """Return a training of a multilayer perceptron before its first update."""
    import torch
    from torch import nn

    import variable_batch_size as vbs

    width, squares = HIDDEN[size]
    widths = [784, *[width] * (squares + 1), 10]
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    model = nn.Sequential(*layers[:-1])
    world = vbs.backend.current_world()
    sampler = vbs.CustomSampler(10**9, ROWS * world.size, world.size, world.rank, ROWS)
    inner = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.5)
    optimizer = vbs.LinearRuleOptimizer(inner, sampler, ref_batchsize=ROWS)
    images, labels = torch.randn(ROWS, 784), torch.randint(10, (ROWS,))
    indices = chain(sampler)  # lazy: it starts at the first update, which is after a restore

    def update() -> None:
        next(indices)
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return Training(model, optimizer, sampler, update)


def save_first(size: str, folder: Path) -> None:
    """Make one update and save a checkpoint."""
    import variable_batch_size as vbs

    training = build(size)
    with vbs.Checkpoint(folder, model=training.model, optimizer=training.optimizer) as checkpoint:
        training.update()
        checkpoint.save()


def resume(size: str, folder: Path, started: float) -> dict[str, float]:
    """Return the seconds of each part of resuming, in a process that was started at time `started`."""
    times = {"start": time.time()}
    import torch

    times["import torch"] = time.time()
    import variable_batch_size as vbs

    times["import variable_batch_size"] = time.time()
    torch.optim.SGD([torch.zeros(1)])  # the first optimizer of a process imports 800 further modules of torch
    times["imports of torch.optim"] = time.time()
    training = build(size)
    times["model"] = time.time()
    with vbs.Checkpoint(folder, model=training.model, optimizer=training.optimizer) as checkpoint:
        assert checkpoint.restore()
        times["restore"] = time.time()
        training.update()
        times["first update"] = time.time()
    return {name: now - before for (name, now), before in zip(times.items(), [started, *times.values()], strict=False)}


def saves(size: str, folder: Path, repetitions: int) -> dict[str, list[float]]:
    """Return the seconds of each kind of save and copy, by repetition."""
    import torch
    import torch.distributed.checkpoint as dcp

    import variable_batch_size as vbs

    warnings.simplefilter("ignore")  # dcp warns that there is one process
    training = build(size)
    training.update()
    tensors, took = training.tensors(), defaultdict(list)
    buffers = [torch.empty_like(tensor) for tensor in tensors]
    checkpoint = vbs.Checkpoint(folder / "ours", model=training.model, optimizer=training.optimizer, keep=1)

    def timed(what: str, call: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = call()
        took[what].append(time.perf_counter() - began)
        return result

    def save_and_replace() -> None:
        torch.save(training.state(), folder / "part")
        os.replace(folder / "part", folder / "published")  # noqa: PTH105

    def save_and_continue() -> None:
        for _ in range(3):
            alone.append(update_seconds())
        path = timed("blocked", lambda: checkpoint.save(wait=False))
        beside.append(update_seconds())
        while not is_there(path):
            beside.append(update_seconds())
        time.sleep(0.1)  # until the thread has ended
        took["alone"].append(median(alone[-3:]))
        took["beside"].append(sum(beside) / len(beside))
        beside.clear()

    def update_seconds() -> float:
        began = time.perf_counter()
        training.update()
        return time.perf_counter() - began

    def save_by_dcp() -> None:
        pending = timed("dcp blocked", lambda: dcp.async_save(training.state(), checkpoint_id=folder / "dcp"))
        pending.result()

    alone: list[float] = []
    beside: list[float] = []
    order: list[Callable[[], object]] = [
        lambda: timed("copy", lambda: [tensor.clone() for tensor in tensors]),
        lambda: timed("copy into reused memory", lambda: torch._foreach_copy_(buffers, tensors)),
        lambda: timed("save", checkpoint.save),
        lambda: timed("torch.save", save_and_replace),
        save_and_continue,
        save_by_dcp,
    ]
    timed("first copy", lambda: [tensor.clone() for tensor in tensors])
    timed("first blocked", lambda: checkpoint.save(wait=False))
    checkpoint.save()
    for repetition in range(-1, repetitions):  # -1 is a warm-up
        random.Random(repetition).shuffle(order)
        for call in order:
            training.update()
            call()
        if repetition < 0:
            took = defaultdict(list, {name: times for name, times in took.items() if name.startswith("first")})
    checkpoint.close()
    return dict(took)


def is_there(checkpoint: str) -> bool:
    """Return whether all ranks have written it."""
    ranks = int(checkpoint.rpartition("-")[2])
    return all(Path(checkpoint, f"rank-{rank}.json").exists() for rank in range(ranks))


def run_process(*arguments: object) -> Any:
    """Run this script in a new process, and return what it prints."""
    command = [sys.executable, __file__, "--started", repr(time.time()), *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return json.loads(done.stdout.splitlines()[-1])


def measure(size: str, processes: int, repetitions: int, root: Path) -> None:
    from records import spread
    from results import record

    root.mkdir()
    run_process("--child", "save first", "--models", size, "--folder", root / "saved")
    runs = [run_process("--child", "resume", "--models", size, "--folder", root / "saved") for _ in range(processes)]
    own = {"question": "time to the first update after a restore", "what": "", "on": f"{size} parameters"}
    for part in runs[0]:
        record(**own, case=part, measured=spread([run[part] for run in runs]), unit="s")
    imports = [sum(seconds for name, seconds in run.items() if name.startswith("import")) for run in runs]
    shares = [100 * seconds / sum(run.values()) for seconds, run in zip(imports, runs, strict=True)]
    record(**own, case="imports / all", measured=spread(shares), unit="%")
    after = [run["model"] + run["restore"] + run["first update"] for run in runs]
    record(**own, case="after the imports", measured=spread(after), unit="s")
    took: dict[str, list[float]] = defaultdict(list)
    for number in range(processes):
        folder = root / f"saves{number}"
        folder.mkdir()
        arguments = ("--child", "saves", "--models", size, "--folder", folder, "--repetitions", repetitions)
        for name, times in run_process(*arguments).items():
            took[name] += times
    blocks = "time that a save blocks"
    for question, what, numerator, denominator in (
        (blocks, "save(wait=False) / a copy of the state", "blocked", "copy"),
        (blocks, "first save(wait=False) / first copy of the state", "first blocked", "first copy"),
        (blocks, "save(wait=False) / a copy into reused memory", "blocked", "copy into reused memory"),
        (blocks, "torch.distributed.checkpoint.async_save / a copy of the state", "dcp blocked", "copy"),
        ("time of an update beside a save", "while the thread writes / alone", "beside", "alone"),
        ("time of a save", "save() / torch.save and os.replace", "save", "torch.save"),
    ):
        ratios = [one / other for one, other in zip(took[numerator], took[denominator], strict=True)]
        own = {"question": question, "what": what, "on": f"{size} parameters"}
        record(**own, measured=spread(ratios))
        record(**own, measured=spread([1e3 * seconds for seconds in took[numerator]]), unit="ms", case="numerator")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", choices=HIDDEN, default=list(HIDDEN))
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--repetitions", type=int, default=5, help="in each process that saves")
    for hidden in ("child", "started", "folder"):
        parser.add_argument(f"--{hidden}", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.child:
        size, folder = flags.models[0], Path(flags.folder)
        children: dict[str, Callable[[], Any]] = {
            "save first": lambda: save_first(size, folder),
            "resume": lambda: resume(size, folder, float(flags.started)),
            "saves": lambda: saves(size, folder, flags.repetitions),
        }
        print(json.dumps(children[flags.child]()))
        raise SystemExit
    with tempfile.TemporaryDirectory() as root:
        for size in flags.models:
            measure(size, flags.processes, flags.repetitions, Path(root) / size)
