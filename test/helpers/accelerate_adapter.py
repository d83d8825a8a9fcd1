"""An ordinary loop of Accelerate with the objects of the library, as docs/trainers/accelerate.md writes it."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn
from torch.utils.data import DataLoader

import variable_batch_size as vbs
from helpers import fsdp2_on_cpu
from helpers.trainings import EVALUATED, Trained, TrainerCase, note_rates
from helpers.yardstick import MICROBATCH, REF
from variable_batch_size.integrations.accelerate import PositionState


class Accelerate:
    """The trainer, for the laws that all trainers keep."""

    def fit(
        self, case: TrainerCase, folder: Path, *, save_at: Collection[int] = (), resume: Path | None = None
    ) -> Trained:
        reset()
        accelerator = accelerator_for(case)
        data, model = case.dataset(), case.model()
        inner = case.optimizer(model)
        if case.wrapper == "fsdp2":
            model, prepared = accelerator.prepare(model, inner)
            inner = prepared.optimizer
            fsdp2_on_cpu.check_sharded(model)
        else:
            model = accelerator.prepare_model(model)
        sampler = vbs.CustomSampler(data, case.trace, minibatch_size=MICROBATCH)
        loader = DataLoader(data, batch_sampler=sampler, num_workers=case.workers, generator=torch.Generator())
        options: dict[str, Any] = {"reduction": "sum" if case.tokens else "mean", "max_grad_norm": case.clip}
        optimizer = vbs.CustomOptimizer(inner, sampler, REF, rule=case.rule, model=model, **options)
        scheduler = case.scheduler(inner)
        position = PositionState(optimizer) if case.wrapper == "fsdp2" else optimizer
        accelerator.register_for_checkpointing(position, *filter(None, [scheduler]))
        losses, evaluations = list[float](), list[float]()
        if resume is not None:
            accelerator.load_state(str(resume))
        rates = note_rates(inner)  # after the step that torch makes to restore sharded states
        while optimizer.epoch < case.epochs:
            for x, target in loader:
                x, target = x.to(accelerator.device), target.to(accelerator.device)
                loss, count = case.loss(model(x), target, options["reduction"]), case.count(target)
                optimizer.backward(loss)
                optimizer.log(loss=loss)
                if not optimizer.step(count=count if case.tokens else None):
                    continue
                losses.append(float(optimizer.logged["loss"]))
                if scheduler is not None:
                    scheduler.step()
                if optimizer.updates in save_at:
                    accelerator.save_state(str(folder / f"at-{optimizer.updates}"))
            if case.patience:
                evaluations.append(mean_loss(accelerator, case, model))
                if len(evaluations) - evaluations.index(max(evaluations)) > case.patience:
                    break
        return Trained.of(model, optimizer, losses, rates, evaluations=evaluations)


def accelerator_for(case: TrainerCase) -> Accelerator:
    if case.wrapper != "fsdp2":
        return Accelerator(cpu=True)
    fsdp2_on_cpu.enable()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="no_wrap", state_dict_type="SHARDED_STATE_DICT"
    )
    return Accelerator(cpu=True, fsdp_plugin=plugin)


def mean_loss(accelerator: Accelerator, case: TrainerCase, model: nn.Module) -> float:
    """Evaluate with a loader that Accelerate has prepared."""
    data = torch.utils.data.Subset(case.dataset(), range(EVALUATED))
    losses = []
    model.eval()
    with torch.no_grad():
        for x, target in accelerator.prepare(DataLoader(data, 50)):
            losses.append(accelerator.gather_for_metrics(case.loss(model(x), target).repeat(len(x))))
    model.train()
    return float(torch.cat(losses).mean())


def reset() -> None:
    """Forget the settings of earlier accelerators, as Accelerate's own tests do."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
