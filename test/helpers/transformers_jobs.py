"""Trainings by transformers' Trainer for the tests of its integration, some of them in several processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, TrainerCallback, TrainingArguments

import variable_batch_size as vbs
from helpers.yardstick import EPOCHS, MAX_GRAD_NORM, MICROBATCH, REF, SAMPLES, STOPS, TRACE, network, samples, weights
from variable_batch_size.integrations.transformers import VariableBatchMixin, VariableBatchTrainer

LR = 0.02
EPS = 0.01  # of AdamW: a large one does not amplify rounding errors of gradients that are 0
TOKENS, VOCABULARY = 12, 40


class Classifier(nn.Module):
    """`network()` as Trainer wants a model: it returns its loss, the mean over the rows."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.net = network(dropout)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.net(x)
        return {"logits": logits} if labels is None else {"loss": nn.functional.cross_entropy(logits, labels)}


class Partly(Classifier):
    """A classifier with a layer that only some samples use."""

    def __init__(self) -> None:
        super().__init__()
        self.rare = nn.Linear(6, 5).double()
        nn.init.constant_(self.rare.weight, 0.1)
        nn.init.constant_(self.rare.bias, 0.1)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits, rare = self.net(x), labels == 2
        if rare.any():
            logits = logits + self.rare(x) * rare[:, None]
        return {"loss": nn.functional.cross_entropy(logits, labels)}


class Rows(Dataset[dict[str, Any]]):
    """The data of the yardstick, by name."""

    def __init__(self, number: int = SAMPLES) -> None:
        self.x, self.target = samples()
        self.number = number

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.x[index], "labels": self.target[index]}


class SavesAt(TrainerCallback):
    """Saves after the updates after which the tests resume."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        control.should_save = state.global_step in STOPS
        return control


QUIET: dict[str, Any] = {  # training arguments of a test: on the CPU, with a log for each update and no other output
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
    "log_level": "error",
}


def arguments(folder: Path, **others: Any) -> TrainingArguments:
    """The training arguments of the yardstick; it writes no checkpoints."""
    own: dict[str, Any] = {
        "per_device_train_batch_size": MICROBATCH,
        "num_train_epochs": EPOCHS,
        "learning_rate": LR,
        "adam_epsilon": EPS,
        "lr_scheduler_type": "constant",
        "max_grad_norm": MAX_GRAD_NORM,
        "seed": 0,
        **QUIET,
    }
    return TrainingArguments(str(folder), **{**own, **others})


def trainer_of(
    folder: Path,
    model: Any = None,
    *,
    kind: Any = VariableBatchTrainer,
    trace: Any = TRACE,
    rule: str = "root",
    train_dataset: Any = None,
    sampler_options: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    **others: Any,
) -> Any:
    """A trainer of the yardstick; `options`: further arguments of the class, `others`: training arguments."""
    return kind(
        Classifier() if model is None else model,
        arguments(folder, **others),
        train_dataset=Rows() if train_dataset is None else train_dataset,
        trace=trace,
        rule=rule,
        ref_batchsize=REF,
        sampler_options={"fixed_shape": False, **(sampler_options or {})},
        **(options or {}),
    )


# A language model with texts of unequal length. -----------------------------------------------------------------------


def gpt2(dropout: float = 0.0) -> GPT2LMHeadModel:
    """A GPT-2 of two layers in float64."""
    torch.manual_seed(4)
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": TOKENS, "vocab_size": VOCABULARY}
    drop = {"attn_pdrop": dropout, "embd_pdrop": dropout, "resid_pdrop": dropout}
    config = GPT2Config(**shape, **drop, bos_token_id=0, eos_token_id=0, pad_token_id=0, initializer_range=0.2)
    return GPT2LMHeadModel(config).double()


class Texts(Dataset[dict[str, Any]]):
    """Texts of 2 to 12 tokens, padded; the labels of the padding are -100."""

    def __init__(self) -> None:
        rng = np.random.default_rng(7)
        self.ids = torch.from_numpy(rng.integers(1, VOCABULARY, size=(SAMPLES, TOKENS)))
        self.lengths = torch.from_numpy(rng.integers(2, TOKENS + 1, size=SAMPLES))
        beyond = torch.arange(TOKENS) >= self.lengths[:, None]
        self.labels = self.ids.masked_fill(beyond, -100)
        self.mask = (~beyond).long()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.ids[index], "labels": self.labels[index], "attention_mask": self.mask[index]}


def sum_in_float64(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """The causal loss without the rounding to float32 of the one of transformers; of labels, of which it counts."""
    logits, wanted = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    if num_items_in_batch is None:
        return nn.functional.cross_entropy(logits, wanted)
    return nn.functional.cross_entropy(logits, wanted, reduction="sum") / num_items_in_batch


def mean_of_microbatch(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """A loss that ignores the number of labels that it is given."""
    return sum_in_float64(outputs, labels)


def mean_over_tokens(model: Any, indices: NDArray[np.int64]) -> Tensor:
    """The mean loss over all tokens of these texts that have a label."""
    texts = Texts()
    outputs = model(input_ids=texts.ids[indices], attention_mask=texts.mask[indices])
    return sum_in_float64(outputs, texts.labels[indices])


# trl. -----------------------------------------------------------------------------------------------------------------


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of a few words, made here."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, "<eos>": 1, **{f"w{number}": number + 2 for number in range(VOCABULARY - 2)}}
    own = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    own.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=own, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>")


def sentences(number: int = SAMPLES) -> Any:
    """Texts of 2 to 11 words, as a datasets.Dataset."""
    import datasets

    rng = np.random.default_rng(2)
    sizes = rng.integers(2, TOKENS, size=number)
    texts = [" ".join(f"w{word}" for word in rng.integers(0, VOCABULARY - 2, size=size)) for size in sizes]
    return datasets.Dataset.from_dict({"text": texts})


def small_model() -> GPT2LMHeadModel:
    """The model of `gpt2`, with room for the end of a text."""
    model = gpt2()
    model.config.eos_token_id = model.generation_config.eos_token_id = 1
    model.config.bos_token_id = model.generation_config.bos_token_id = None
    return model


REPEATED: dict[str, Any] = {"trace": 5, "rule": "adamscale", "max_steps": 3}  # a second rank only repeats microbatches


def sft_trainer(folder: Path, *, trace: Any = TRACE, rule: str = "root", check_loss: bool = True, **others: Any) -> Any:
    """trl's trainer with the mixin, on `sentences`; `others`: its arguments."""
    from trl import SFTConfig, SFTTrainer

    class VariableSFTTrainer(VariableBatchMixin, SFTTrainer):
        """The changed line."""

    own = arguments(folder).to_dict() | {"num_train_epochs": 1, "max_length": TOKENS, "dataset_num_proc": None}
    names = set(SFTConfig.__dataclass_fields__)
    config = SFTConfig(**{name: value for name, value in (own | others).items() if name in names})
    return VariableSFTTrainer(
        small_model(),
        config,
        train_dataset=sentences(),
        processing_class=tokenizer(),
        trace=trace,
        rule=rule,
        ref_batchsize=REF,
        sampler_options={"fixed_shape": False},
        check_loss=check_loss,
    )


# Controllers. ---------------------------------------------------------------------------------------------------------


def grows(input: Any) -> int:
    """A pure controller: two samples more every three updates."""
    return 10 + 2 * (input.updates // 3)


def growing() -> vbs.AdaptiveTrace:
    """The trace that it writes."""
    return vbs.AdaptiveTrace(grows, start=8, bounds=(4, 64), every=2, delay=4)


# In several processes. ------------------------------------------------------------------------------------------------


def save(folder: Path, name: str, value: Any) -> None:
    """Save the value of each rank."""
    torch.save(value, folder / f"{name}-{torch.distributed.get_rank()}")


def summary(trainer: Any) -> dict[str, Any]:
    """What a training has come to."""
    state = trainer.state
    sums = {"tokens": state.num_input_tokens_seen, "flos": state.total_flos, "logs": state.log_history}
    counts = {"updates": state.global_step, "max_steps": state.max_steps, "epoch": state.epoch}
    own = {"weights": weights(trainer.model), "samples": trainer.variable_optimizer.samples}
    return {**sums, **counts, **own, "loaded": trainer.optimizer.state_dict()["vbs"]["sampler"]["samples"]}


def trained_with_repetitions(folder: Path) -> Any:
    """The trainer of updates of one microbatch, which a second rank can only repeat, because its noise counts."""
    own = {"include_num_input_tokens_seen": "non_padding", "max_steps": 4}
    options = {"compute_loss_func": sum_in_float64}
    trainer = trainer_of(folder, gpt2(), train_dataset=Texts(), trace=5, rule="adamscale", options=options, **own)
    trainer.train()
    return trainer


def updates_of_all_kinds(folder: Path) -> None:
    """Train in every rank with rules, schedules, labels, a controller; and a second time."""
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"world_size of .* all processes .*got 1; pass use_cpu=True"):
            trainer_of(folder, use_cpu=False)
    if torch.distributed.get_rank() == 1:
        torch.manual_seed(1)  # and weights of its own, which are replaced by those of rank 0
    for rule, momentum in ("root", None), ("adascale", 0.9):
        model = Classifier()
        if torch.distributed.get_rank() == 1:
            nn.init.zeros_(model.net[0].weight)
        inner = None if momentum is None else torch.optim.SGD(model.parameters(), lr=LR, momentum=momentum)
        trainer = trainer_of(folder / rule, model, rule=rule, options={"optimizers": (inner, None)})
        trainer.train()
        save(folder, rule, summary(trainer))
        if rule == "adascale":
            trainer.train()
            save(folder, "twice", summary(trainer))
    own = {"include_num_input_tokens_seen": "non_padding", "lr_scheduler_type": "linear"}
    options = {"compute_loss_func": sum_in_float64}
    trainer = trainer_of(folder / "texts", gpt2(), train_dataset=Texts(), options=options, **own)
    trainer.train()
    save(folder, "texts", summary(trainer))
    save(folder, "repeated", summary(trained_with_repetitions(folder / "repeated")))
    options = {"compute_loss_func": mean_of_microbatch}
    trainer = trainer_of(folder / "ignoring", gpt2(), train_dataset=Texts(), options=options)
    trainer.train()
    save(folder, "ignoring", summary(trainer))
    trainer = trainer_of(folder / "partly", Partly(), trace=3)
    trainer.train()
    save(folder, "partly", summary(trainer))
    trainer = trainer_of(folder / "growing", trace=growing(), lr_scheduler_type="linear")
    trainer.train()
    save(folder, "growing", summary(trainer))


class LeavesAlone(TrainerCallback):
    """Leaves the first epoch on one rank only."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        control.should_epoch_stop = state.global_step == 5 and torch.distributed.get_rank() == 1
        return control


def leave_alone(folder: Path) -> None:
    """Train with it: no update is made in two epochs at once."""
    trainer = trainer_of(folder, options={"callbacks": [LeavesAlone()]})
    with pytest.raises(RuntimeError, match="every rank must come to the end of an epoch that a callback has left"):
        trainer.train()
    assert trainer.variable_optimizer.updates == 5


def resume_in_any_world(folder: Path, saved_by_one: Path) -> None:
    """Train with checkpoints, and resume from them; and from those that one process has saved."""
    whole = {"options": {"callbacks": [SavesAt()]}, "lr_scheduler_type": "cosine"}
    trainer = trainer_of(folder / "whole", Classifier(dropout=0.5), **whole)
    trainer.train()
    save(folder, "dropout", summary(trainer))
    for stop in STOPS:
        torch.manual_seed(99)
        trainer = trainer_of(folder / "again", Classifier(dropout=0.5), lr_scheduler_type="cosine")
        trainer.train(resume_from_checkpoint=str(folder / "whole" / f"checkpoint-{stop}"))
        save(folder, f"dropout-{stop}", summary(trainer))
        trainer = trainer_of(folder / "again", lr_scheduler_type="cosine")
        trainer.train(resume_from_checkpoint=str(saved_by_one / f"checkpoint-{stop}"))
        save(folder, f"one-{stop}", summary(trainer))
    trainer = trainer_of(folder / "by-two", **whole)
    trainer.train()


def sft(folder: Path) -> None:
    """Train with trl, whose loss gathers in each microbatch; ranks have unequal numbers of these."""
    trainer = sft_trainer(folder / "sft")
    trainer.train()
    save(folder, "sft", summary(trainer))
    trainer = sft_trainer(folder / "repeated", **REPEATED)
    trainer.train()
    save(folder, "repeated", summary(trainer))
