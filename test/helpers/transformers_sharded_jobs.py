"""Trainings by transformers' Trainer whose models FSDP2 shards."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2LMHeadModel

from helpers import fsdp2_on_cpu
from helpers.transformers_jobs import Classifier, SavesAt, Texts, gpt2, save, sum_in_float64, summary, trainer_of

FSDP2: dict[str, Any] = {"fsdp": True, "fsdp_config": {"fsdp_version": 2, "auto_wrap_policy": "NO_WRAP"}}
SHARDS: dict[str, Any] = {**FSDP2, "fsdp_config": {**FSDP2["fsdp_config"], "state_dict_type": "SHARDED_STATE_DICT"}}
BLOCKS: dict[str, Any] = {**FSDP2, "fsdp_config": {"fsdp_version": 2, "transformer_layer_cls_to_wrap": "GPT2Block"}}


def untied() -> GPT2LMHeadModel:
    """The GPT-2, whose embeddings are not tied."""
    torch.manual_seed(4)
    config = gpt2().config
    config.tie_word_embeddings = False
    return GPT2LMHeadModel(config).double()


def train_sharded(folder: Path, model: Any, **options: Any) -> Any:
    """Train a model that FSDP2 shards, and return its trainer."""
    fsdp2_on_cpu.enable()
    resume = options.pop("resume", None)
    trainer = trainer_of(folder, model, **copy.deepcopy({**FSDP2, **options}))
    trainer.train(resume_from_checkpoint=resume)
    fsdp2_on_cpu.check_sharded(trainer.model)
    return trainer


def sharded_yardstick(folder: Path) -> None:
    """Train the yardstick and texts, sharded by all ranks."""
    for rule, optim in ("root", "adamw_torch"), ("adascale", "sgd"):
        trainer = train_sharded(folder / rule, Classifier(), rule=rule, optim=optim)
        save(folder, rule, summary(trainer))
    options = {"compute_loss_func": sum_in_float64}
    for name, create in ("tied", gpt2), ("untied", untied):
        own = {**BLOCKS, "gradient_checkpointing": name == "tied", "lr_scheduler_type": "linear"}
        trainer = train_sharded(folder / name, create(), train_dataset=Texts(), options=options, **own)
        save(folder, name, summary(trainer))


def save_sharded(folder: Path, stops: Sequence[int]) -> None:
    """Train with checkpoints of whole and of sharded states."""
    for name, kind in ("whole", FSDP2), ("shards", SHARDS):
        saves = {"callbacks": [SavesAt()]}
        trainer = train_sharded(folder / name, Classifier(), **kind, lr_scheduler_type="cosine", options=saves)
        save(folder, name, summary(trainer))


def resume_sharded(folder: Path, saved: Path, stops: Sequence[int]) -> None:
    """Resume from them, with another number of ranks."""
    for name, kind in ("whole", FSDP2), ("shards", SHARDS):
        for stop in stops:
            resume = str(saved / name / f"checkpoint-{stop}")
            trainer = train_sharded(folder / name, Classifier(), **kind, lr_scheduler_type="cosine", resume=resume)
            save(folder, f"{name}-{stop}", summary(trainer))
