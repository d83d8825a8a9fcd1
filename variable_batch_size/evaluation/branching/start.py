"""Where branches begin: a checkpoint, restored into another rule and batch size."""

from __future__ import annotations

import math
import os
import random
import warnings
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from variable_batch_size._validation import value_error
from variable_batch_size.backend import LocalBackend
from variable_batch_size.checkpoint.names import Names
from variable_batch_size.checkpoint.reading import StoredState, read_checkpoint
from variable_batch_size.checkpoint.rng_states import RNGStates
from variable_batch_size.data.sampler import CustomSampler
from variable_batch_size.evaluation.branching.candidate import Candidate
from variable_batch_size.evaluation.cell import rule_of
from variable_batch_size.evaluation.loop import Parts
from variable_batch_size.evaluation.task import Defaults, Task, dataset_of, load_task
from variable_batch_size.optim.lr_scheduler import ProgressScheduler
from variable_batch_size.optim.optimizer import CustomOptimizer
from variable_batch_size.optim.update import OtherSettingsWarning
from variable_batch_size.rules.base import RuleInput


@final
@dataclass(frozen=True, eq=False)
class Start:
    """What all branches begin with.

    Args:
        task: the task.
        name: its name, for errors.
        parts: state dicts of the checkpoint by name; None: branches begin with the untrained model.
        rng: host RNG states of the rank that saved; None if they are not known.
        path: the checkpoint, for errors.
        seed: seed of the model and of the order of the samples, if there is no checkpoint.
        total: samples of a full training, for the schedule of the task; None if they are not known.
        lr: learning rate at `ref_batchsize`, if there is no checkpoint.
        ref_batchsize: batch size at which it was tuned; None: that of the checkpoint, or of the task.
        minibatch_size: maximum number of rows of a microbatch.
        schedule: whether the schedule of the task continues.
    """

    task: Task
    name: str
    parts: dict[str, Any] | None
    rng: str | None
    path: Path | None
    seed: int
    total: int | None
    lr: float | None
    ref_batchsize: int | None
    minibatch_size: int
    schedule: bool

    @classmethod
    def read(
        cls,
        checkpoint: str | os.PathLike[str] | None,
        task: Task | str,
        *,
        seed: int | None = None,
        samples: int | None = None,
        lr: float | None = None,
        ref_batchsize: int | None = None,
        minibatch_size: int | None = None,
        schedule: bool = True,
        data_dir: str | None = None,
    ) -> Start:
        """Read a checkpoint, without writing to its folder.

        Raises:
            ValueError: if there is no intact checkpoint, or it lacks a model or an optimizer of this package, or
                `seed`, `lr` or another `ref_batchsize` is given beside it.
        """
        name = task if isinstance(task, str) else type(task).__name__
        found = load_task(task, data_dir=data_dir) if isinstance(task, str) else task
        defaults = Defaults.of(found, name)
        rows = minibatch_size or defaults.minibatch_size
        total = samples or defaults.samples
        if checkpoint is None:
            rate, reference = lr or defaults.lr, ref_batchsize or defaults.ref_batchsize
            if rate is None:
                raise value_error(f"the task {name} needs lr", "none", "pass lr=, or give the task this attribute")
            return cls(found, name, None, None, None, seed or 0, total, rate, reference, rows, schedule)
        for given, argument, other in (lr, "lr", 'candidates such as "root*0.5"'), (seed, "seed", "more orders"):
            if given is not None:
                requirement = f"{argument} must be omitted beside a checkpoint, which has its own"
                raise value_error(requirement, given, f"omit it, or pass {other}")
        contents, path = read_checkpoint(checkpoint), Path(checkpoint)
        parts, rng = contents["parts"], contents["rng"]
        if "vbs" not in parts.get("optimizer", {}) or "model" not in parts:
            requirement = "a branch needs a checkpoint of a vbs.Checkpoint, with model and optimizer"
            raise value_error(requirement, f"{', '.join(parts)} in {path}", "pass the folder of such a training")
        own = parts["optimizer"]["vbs"]
        if None not in (ref_batchsize, own["ref_batchsize"]) and ref_batchsize != own["ref_batchsize"]:
            requirement = f"ref_batchsize must be that of the checkpoint, {own['ref_batchsize']}"
            raise value_error(requirement, ref_batchsize, "omit it")
        reference = ref_batchsize or own["ref_batchsize"] or defaults.ref_batchsize
        states = rng[0] if len(rng) == 1 else None
        if schedule and defaults.schedule is not None and "scheduler" not in parts:
            warnings.warn(
                f"the checkpoint {path} has no scheduler, so the learning rate stays as it is, without the schedule of "
                f'the task {name}; save its ProgressScheduler(..., by="samples") as scheduler=, or pass schedule=False '
                f"(--hold-lr)",
                stacklevel=3,
            )
        return cls(found, name, parts, states, path, own["sampler"]["seed"], total, lr, reference, rows, schedule)

    @property
    def updates(self) -> int:
        """Updates before the branches."""
        return int(self._own.get("step", 0))

    @property
    def samples(self) -> int:
        """Samples before the branches."""
        return int(self._own.get("samples", 0))

    @property
    def _own(self) -> dict[str, Any]:
        return {} if self.parts is None else dict(self.parts["optimizer"]["vbs"]["sampler"])

    def check_ends(self, samples: int) -> None:
        """Raise ValueError if a branch of so many samples would end after the schedule of the task."""
        continues = self.schedule and (self.parts is None or "scheduler" in self.parts)
        if not continues or Defaults.of(self.task, self.name).schedule is None or self.total is None:
            return
        if self.samples + samples > self.total:
            requirement = f"a branch must end within the {self.total:,} samples of the schedule of the task {self.name}"
            found = f"{self.samples:,} + {samples:,}"
            remedy = "pass fewer updates, the samples of a longer training (--total), or schedule=False (--hold-lr)"
            raise value_error(requirement, found, remedy)

    def begin(
        self,
        candidate: Candidate,
        batch_size: int,
        order: int,
        *,
        updates: int | None = None,
        samples: int | None = None,
    ) -> Parts:
        """Create the objects of a branch in the state of the checkpoint, and set the random numbers.

        Args:
            candidate: its rule and learning rate.
            batch_size: samples of each update.
            order: 0 for the order of samples of the training; others are others.
            updates: number of updates of the branch; or
            samples: number of its samples.

        Raises:
            TypeError, ValueError: if task, checkpoint, rule and batch size do not fit one another.
        """
        seed, own = (self.seed + order) % 2**64, self._own
        _seed_all(seed)
        sampler = CustomSampler(
            dataset_of(self.task),  # type: ignore[arg-type]
            batch_size,
            1,
            0,
            self.minibatch_size,
            seed,
            shuffle=own.get("shuffle", True),
            drop_last=own.get("drop_last", False),
            fixed_shape=False,
            max_updates=None if updates is None else self.updates + updates,
            max_samples=None if samples is None else self.samples + samples,
        )
        if self.parts is not None and self._own["dataset_size"] != sampler.plan.dataset_size:
            requirement = f"the dataset of the task {self.name} must be that of the checkpoint {self.path}"
            found = f"{sampler.plan.dataset_size:,} samples instead of {self._own['dataset_size']:,}"
            raise value_error(requirement, found, "pass the task that was trained")
        model = self.task.model(self.seed)
        inner = self.task.optimizer(model, self._rate)
        optimizer = CustomOptimizer(
            inner,
            sampler,
            self.ref_batchsize,
            rule=rule_of(candidate.rule),
            max_grad_norm=Defaults.of(self.task, self.name).max_grad_norm,
            backend=LocalBackend(),
        )
        schedule = self._schedule(optimizer)
        scheduler = None if schedule is None else ProgressScheduler(schedule, optimizer, by="samples")
        if self.parts is not None:
            self._restore(model, optimizer, scheduler)
        if self.parts is not None and schedule is not None:
            self._check_schedule(schedule)
        _scale_lr(optimizer, schedule, candidate.lr_factor)
        if self.rng is not None and order == 0:
            states = RNGStates(self.rng)
            states.set()
            sampler._feed.before_reading.wait(sampler.clock.position, states)
        return Parts(self.task, model, sampler, optimizer, scheduler)

    @property
    def _rate(self) -> float:
        """A learning rate to create the optimizer with; a checkpoint brings its own."""
        return self.lr or Defaults.of(self.task, self.name).lr or 0.1

    def _schedule(self, optimizer: CustomOptimizer) -> LambdaLR | None:
        """Return the schedule of the task; None if there is none, or the learning rate stays where it is."""
        function, size = Defaults.of(self.task, self.name).schedule, self.ref_batchsize
        if not self.schedule or (self.parts is not None and "scheduler" not in self.parts):
            return None
        if function is None:
            if self.parts is None:
                return None
            requirement = f"the checkpoint {self.path} has a scheduler, which the task {self.name} must continue"
            raise value_error(
                requirement, "no schedule", "define schedule(samples, total), or pass schedule=False (--hold-lr)"
            )
        if size is None or self.total is None:
            requirement = f"the schedule of the task {self.name} needs a ref_batchsize and the samples of a training"
            raise value_error(requirement, "none", "pass ref_batchsize= and samples=, or schedule=False")
        total = self.total
        return LambdaLR(optimizer, lambda step: function(step * size, total))

    def _restore(self, model: nn.Module, optimizer: CustomOptimizer, scheduler: ProgressScheduler | None) -> None:
        assert self.parts is not None
        assert self.path is not None
        parts = deepcopy(self.parts)  # torch would otherwise update the tensors that later branches begin with
        names = Names(model)
        StoredState(self.path, "", parts, []).check_model(names.of_model())
        with warnings.catch_warnings():  # that the rule is another one is what branches are for
            warnings.simplefilter("ignore", OtherSettingsWarning)
            optimizer.load_state_dict(parts["optimizer"], strict=False)
        names.load_model(parts["model"])
        if scheduler is None:
            return
        try:
            scheduler.load_state_dict(parts["scheduler"])
        except (KeyError, ValueError) as error:
            requirement = f"the scheduler of the checkpoint {self.path} must be a ProgressScheduler(by='samples')"
            remedy = "pass schedule=False (--hold-lr) to keep the learning rate of the checkpoint"
            raise value_error(requirement, f"another one ({error})", remedy) from error

    def _check_schedule(self, schedule: LambdaLR) -> None:
        """Raise ValueError unless the task's schedule has led to the learning rate of the checkpoint."""
        group, base = schedule.optimizer.param_groups[0], schedule.base_lrs[0]
        saved, own = float(group["lr"]), float(base * schedule.lr_lambdas[0](schedule.last_epoch))
        if not math.isclose(saved, own, rel_tol=1e-6):
            requirement = f"the schedule of the task {self.name} must be that of the checkpoint {self.path}"
            found = f"lr {saved:g} in it, and {own:g} by a schedule of {self.total:,} samples"
            raise value_error(
                requirement, found, "pass the samples of that training (--total), or schedule=False (--hold-lr)"
            )


def updates_ahead(parts: Parts) -> Iterator[RuleInput]:
    """Yield what is known of each update of a branch; the last one of an epoch may be smaller."""
    plan, samples = parts.sampler.plan, parts.optimizer.samples
    number, begin = parts.sampler.clock.position
    for epoch in map(plan.epoch, count(number)):
        for step in range(max(begin, epoch.first_step), epoch.end_step):
            size = plan.step(epoch, step).batch_size
            yield RuleInput(size, parts.optimizer.ref_batchsize or size, step, samples)
            samples += size
        if plan.ends_with(epoch):
            return


def _scale_lr(optimizer: CustomOptimizer, schedule: LambdaLR | None, factor: float) -> None:
    """Multiply the learning rates of all groups, now and in the schedule."""
    if factor == 1:
        return
    for group in optimizer.param_groups:
        for name in {"lr", "initial_lr"} & set(group):
            group[name] = group[name].mul_(factor) if isinstance(group[name], Tensor) else group[name] * factor
    if schedule is not None:
        schedule.base_lrs = [rate * factor for rate in schedule.base_lrs]


def _seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
