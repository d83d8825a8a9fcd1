"""What the processes of test_speeds.py run: shares by speed; torch, DistributedDataParallel or FSDP2 sums."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import variable_batch_size as vbs
from helpers.reference import Array, Training, network, training

WAYS = ("plain", "ddp", "fsdp2")
SPEEDS = (3, 1)
ODD = (9, 4, 17, 1, 12, 3, 2, 30)  # the slow rank gets no sample of some


def model_for(way: str) -> nn.Module:
    model = network()
    if way == "ddp":
        return DistributedDataParallel(model)
    if way == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return model


def run_for(way: str, kind: Any, speeds: Sequence[float], sizes: Sequence[int] = ODD, **sampling: Any) -> Training:
    sampling, backend = {"speeds": speeds, **sampling}, vbs.backend.DistributedBackend()
    return training(kind, sizes, model=model_for(way), backend=backend, sampling=sampling)


def counted(way: str) -> list[list[int]]:
    """The samples of the microbatches of this rank in each update."""
    run, found = run_for(way, vbs.LinearRuleOptimizer, SPEEDS), [list[int]()]
    while len(found) <= len(ODD):
        run.sampler.set_epoch(run.optimizer.epoch)
        run.optimizer.set_epoch(run.optimizer.epoch)
        for indices in run.sampler:
            found[-1].append(run.optimizer.microbatch.samples)
            run.optimizer.backward(run.loss(indices))
            if run.optimizer.step():
                found.append([])
                if len(found) > len(ODD):
                    break
    return found[:-1]


def weights(way: str) -> dict[str, list[Array]]:
    """The weights after the updates of `ODD`, of a rule that measures the noise, too; and with equal rounds."""
    found = {}
    for kind in (vbs.LinearRuleOptimizer, vbs.AdaScaleOptimizer):
        found[kind.__name__] = run_for(way, kind, SPEEDS).run(len(ODD)).weights()
    run = run_for(way, vbs.LinearRuleOptimizer, SPEEDS, (30, 23), equal_rounds=True).run(2)
    return {**found, "equal rounds": run.weights()}


def resumed(way: str) -> list[Array]:
    """The weights of a run that resumes with other speeds every two updates."""
    run = run_for(way, vbs.LinearRuleOptimizer, SPEEDS).run(2)
    if way == "fsdp2":  # whose states are those of shards
        return run.run(6).weights()
    for speeds in ((1, 5), (1, 1), (2, 3)):
        state = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict()))
        run = run_for(way, vbs.LinearRuleOptimizer, speeds)
        run.model.load_state_dict(state[0])
        run.optimizer.load_state_dict(state[1])
        run.run(2)
    return run.weights()


def unequal() -> str:
    """The error of ranks that were told other speeds."""
    try:
        run_for("plain", vbs.LinearRuleOptimizer, (3, 1) if dist.get_rank() else (1, 3)).run(1)
    except RuntimeError as error:
        return str(error)
    return "no error"


def run_scenarios(backend: vbs.backend.Backend) -> dict[str, Any]:
    """The results of this rank."""
    found: dict[str, Any] = {
        way: {"counted": counted(way), "weights": weights(way), "resumed": resumed(way)} for way in WAYS
    }
    return {**found, "unequal": unequal()}
