"""transformers' Trainer with a variable batch size, as docs/trainers/transformers.md writes it."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset
from transformers import EarlyStoppingCallback, TrainerCallback, TrainingArguments

from helpers import fsdp2_on_cpu
from helpers.trainings import EVALUATED, WARM_UP, Trained, TrainerCase, note_rates
from helpers.yardstick import EPOCHS, MICROBATCH, REF, SAMPLES
from variable_batch_size.integrations.transformers import VariableBatchTrainer

QUIET: dict[str, Any] = {
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
    "log_level": "error",
}
SHARDS = {"fsdp_version": 2, "auto_wrap_policy": "NO_WRAP", "state_dict_type": "SHARDED_STATE_DICT"}


class Rows(Dataset[dict[str, Tensor]]):
    """Samples of a case, by name."""

    def __init__(self, case: TrainerCase, names: tuple[str, str] = ("inputs", "labels")) -> None:
        self.samples, self.names = case.dataset(), names

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return dict(zip(self.names, self.samples[index], strict=True))


class Model(nn.Module):
    """The model of a case, which returns its loss, a mean over rows or labels."""

    def __init__(self, case: TrainerCase) -> None:
        super().__init__()
        self.net, self.case, self.accepts_loss_kwargs = case.model(), case, case.counting

    def forward(self, inputs: Tensor, labels: Tensor, num_items_in_batch: Any = None) -> dict[str, Tensor]:
        return {"loss": self.case.loss(self.net(inputs), labels)}


class CaseTrainer(VariableBatchTrainer):
    """A trainer with the optimizer and the schedule of a case, which notes losses before Trainer rounds them."""

    case = TrainerCase()

    def create_optimizer(self, *_: Any) -> Any:
        self.losses: list[float] = []
        self.optimizer = self.optimizer or self.case.optimizer(self.model)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self.case.schedule == "step":
            self.lr_scheduler = self.case.scheduler(self.optimizer)
        return super().create_scheduler(num_training_steps, optimizer)

    def training_step(self, *args: Any) -> Tensor:
        loss = super().training_step(*args)
        self.losses.append(float(self.accelerator.reduce(loss, "mean")))
        return loss


class Asks(TrainerCallback):
    """Asks for checkpoints after updates, and notes rates, but not of torch's steps that create a state."""

    def __init__(self, save_at: Collection[int]) -> None:
        self.save_at, self.rates = save_at, list[float]()

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.rates = note_rates(others["optimizer"].optimizer)
        if args.fsdp:
            fsdp2_on_cpu.check_sharded(others["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_save |= state.global_step in self.save_at


class Transformers:
    """The trainer, for the laws that all trainers keep."""

    def fit(
        self, case: TrainerCase, folder: Path, *, save_at: Collection[int] = (), resume: Path | None = None
    ) -> Trained:
        asks = Asks(save_at)
        trainer = trainer_of(folder, case, callbacks=[asks])
        trainer.train(None if resume is None else str(resume))
        if dist.is_initialized():
            dist.barrier()  # all have saved
        if trainer.args.should_save:
            for update in save_at:
                (folder / f"checkpoint-{update}").rename(folder / f"at-{update}")
        evaluations = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
        optimizer = trainer.variable_optimizer
        return Trained.of(trainer.model, optimizer, trainer.losses, asks.rates, evaluations=evaluations)


def trainer_of(
    folder: Path,
    case: TrainerCase = TrainerCase(),  # noqa: B008 (it is frozen)
    *,
    kind: Any = CaseTrainer,
    model: Any = None,
    data: Any = None,
    callbacks: Any = (),
    options: dict[str, Any] | None = None,
    **others: Any,
) -> Any:
    """The trainer of a case; `options`: further arguments of the class, `others`: training arguments."""
    args: dict[str, Any] = {"seed": torch.initial_seed() % 2**32, "data_seed": 0, "max_grad_norm": case.clip or 0.0}
    args |= {"per_device_train_batch_size": MICROBATCH, "dataloader_num_workers": case.workers}
    args |= {"num_train_epochs": case.epochs, "lr_scheduler_type": "constant", "learning_rate": 0.01}
    own: dict[str, Any] = {"trace": case.trace, "rule": case.rule, "callbacks": list(callbacks)}
    if case.schedule == "cosine":
        args |= {"lr_scheduler_type": "cosine", "warmup_steps": WARM_UP}
    if case.adaptive:
        args |= {"max_steps": EPOCHS * SAMPLES}
        own["sampler_options"] = {"max_samples": EPOCHS * SAMPLES}
    if case.patience:
        args |= {"eval_strategy": "epoch", "per_device_eval_batch_size": 50}
        args |= {"metric_for_best_model": "eval_loss", "greater_is_better": True}
        own["callbacks"].append(EarlyStoppingCallback(case.patience))
    if case.wrapper == "fsdp2":
        fsdp2_on_cpu.enable()
        args |= {"fsdp": True, "fsdp_config": dict(SHARDS)}
    return type(kind.__name__, (kind,), {"case": case})(
        Model(case) if model is None else model,
        TrainingArguments(str(folder), **{**QUIET, **args, **others}),
        train_dataset=Rows(case) if data is None else data,
        eval_dataset=Subset(Rows(case), range(EVALUATED)),
        ref_batchsize=REF,
        **{**own, **(options or {})},
    )


def trained(*args: Any, resume: Any = None, **options: Any) -> Any:
    """The trainer after its training."""
    trainer = trainer_of(*args, **options)
    trainer.train(resume)
    return trainer
