"""The function of a TorchTrainer, which trains the yardstick and writes down the samples of each update."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import ray
import ray.train.torch
from torch import Tensor
from torch.utils.data import DataLoader

import variable_batch_size as vbs
from helpers.trainings import TrainerCase
from helpers.yardstick import EPOCHS, MICROBATCH, REF, TRACE, Samples
from variable_batch_size.adaptive import PerDevice
from variable_batch_size.integrations.ray import RunCheckpoint

PER_WORKER, EVERY = 12, 5  # samples of an update for each worker; updates from one save to the next


class Numbered(Samples):
    """The samples with their numbers."""

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        return (index, *super().__getitem__(index))


def train(config: dict[str, Any]) -> None:
    """Train, and at the update that `events` names for the restored one, raise, or wait on the last rank for its end.

    Each worker writes a line of JSON for each update: the restored update, this one, the number of workers, and the
    numbers of its samples.
    """
    case, context = TrainerCase(), ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    model = ray.train.torch.prepare_model(case.model())  # DistributedDataParallel, if there are several workers
    trace = vbs.AdaptiveTrace(PerDevice(PER_WORKER), every=None) if config["adaptive"] else TRACE
    sampler = vbs.CustomSampler(Numbered(), trace, minibatch_size=MICROBATCH)
    loader = DataLoader(Numbered(), batch_sampler=sampler)
    optimizer = vbs.CustomOptimizer(case.optimizer(model), sampler, REF, rule=case.rule, model=model)
    checkpoint = RunCheckpoint(model=model, optimizer=optimizer, every=EVERY)
    checkpoint.restore()
    restored = optimizer.updates
    end = config["events"].get(restored)
    folder = Path(config["folder"])
    with (folder / f"{time.time_ns()}-{rank}.jsonl").open("w", buffering=1) as records:
        for _ in vbs.remaining_epochs(sampler, optimizer, until=EPOCHS):
            for update in vbs.updates(loader, optimizer):
                number, samples = optimizer.updates, []
                for index, x, target in update:
                    loss = case.loss(model(x), target)
                    optimizer.backward(loss)
                    optimizer.log(loss=loss)
                    optimizer.step()
                    samples += index.tolist()
                print(json.dumps([restored, number, world, samples]), file=records)
                checkpoint.step(**optimizer.logged)
                if end is None or end[1] != optimizer.updates:
                    continue
                ray.train.get_all_reported_checkpoints()  # returns when Ray knows the last one
                if end[0] == "raise":
                    raise ArithmeticError("an error of the loop")
                if rank == world - 1:
                    file = folder / f"waits-{optimizer.updates}"
                    file.with_suffix(".new").write_text(f"{ray.get_runtime_context().get_node_id()} {os.getpid()}")
                    file.with_suffix(".new").rename(file)
                    time.sleep(600)
        checkpoint.save(**optimizer.logged)
