"""Losses that are no mean over rows or labels are found in the first update, and others are not."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import (
    BertConfig,
    BertForMaskedLM,
    CLIPConfig,
    CLIPModel,
    DataCollatorForLanguageModeling,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
)

from helpers.transformers_jobs import (
    TOKENS,
    VOCABULARY,
    Classifier,
    Rows,
    Texts,
    arguments,
    gpt2,
    sft_trainer,
    small_model,
    tokenizer,
    trainer_of,
)
from helpers.yardstick import difference, in_processes, weights
from variable_batch_size.integrations.transformers import VariableBatchMixin, VariableBatchTrainer

MESSAGE = "an update is the mean over all its samples only if the loss is a mean over rows or labels"


class Weighted(VariableBatchTrainer):
    """The class weights of transformers' own documentation."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        logits = model(inputs["x"])["logits"]
        loss = cross_entropy(logits, inputs["labels"], weight=torch.arange(1.0, 6.0, dtype=torch.float64))
        return (loss, logits) if return_outputs else loss


class Summed(Classifier):
    """A model whose loss is a sum over rows."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        return {"loss": super().forward(x, labels)["loss"] * len(x)}


class Pairs(torch.utils.data.Dataset[Any]):
    """Images and texts."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        rng = torch.Generator().manual_seed(index)
        image = torch.randn(3, 8, 8, generator=rng)
        return {"pixel_values": image, "input_ids": torch.randint(VOCABULARY, (5,), generator=rng), "return_loss": True}


def pairs_together(rows: list[Any]) -> Any:
    """A microbatch for CLIP."""
    return {name: torch.stack([row[name] for row in rows]) for name in ("pixel_values", "input_ids")} | {
        "return_loss": True
    }


def clip() -> Any:
    """A small CLIP."""
    text = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    vision = {**text, "image_size": 8, "patch_size": 4}
    shape = {"vocab_size": VOCABULARY, "eos_token_id": 1}
    return CLIPModel(CLIPConfig(text_config={**text, **shape}, vision_config=vision, projection_dim=8))


class Sounds(torch.utils.data.Dataset[Any]):
    """Noise and its letters."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        rng = torch.Generator().manual_seed(index)
        return {"input_values": torch.randn(400, generator=rng), "labels": torch.randint(1, 8, (4,), generator=rng)}


def ctc() -> Any:
    """A small Wav2Vec2, whose loss is the sum over rows unless one asks for another one."""
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 16}
    convolutions = {"conv_dim": (8,), "conv_kernel": (8,), "conv_stride": (8,), "num_conv_pos_embeddings": 4}
    more = {"num_conv_pos_embedding_groups": 1, "vocab_size": 8, "mask_time_prob": 0.0, "num_feat_extract_layers": 1}
    return Wav2Vec2ForCTC(Wav2Vec2Config(**shape, **convolutions, **more))


class Alarming(VariableBatchTrainer):
    """Slightly different class weights."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        weight = torch.tensor([1.0, 5.0, 0.2, 3.0, 1.0])
        logits = model(inputs["x"])["logits"].float()
        return cross_entropy(logits, inputs["labels"], weight=weight)


CAUGHT: dict[str, dict[str, Any]] = {
    "class weights": {"kind": Weighted},
    "a sum": {"model": Summed},
    "CLIP": {"model": clip, "train_dataset": Pairs(), "options": {"data_collator": pairs_together}},
    "CTC": {"model": ctc, "train_dataset": Sounds()},
    "class weights, row by row": {"kind": Weighted, "per_device_train_batch_size": 1},
    "class weights in bfloat16": {
        "kind": Alarming,
        "model": lambda: Classifier().float(),
        "bf16": True,
        "train_dataset": [{"x": row["x"].float(), "labels": row["labels"]} for row in Rows()],
    },
}


def run(folder: Path, *, model: Any = Classifier, **options: Any) -> Any:
    """Make two updates."""
    trainer = trainer_of(folder, model(), trace=16, max_steps=2, **options)
    trainer.train()
    return trainer


@pytest.mark.parametrize("name", CAUGHT)
def test_a_loss_that_is_no_mean_is_found_once(tmp_path: Path, name: str) -> None:
    with pytest.warns(UserWarning, match=MESSAGE) as caught:
        run(tmp_path, **CAUGHT[name])
    assert sum(MESSAGE in str(warning.message) for warning in caught) == 1


def test_it_can_be_silenced(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(tmp_path, kind=Weighted, options={"check_loss": False})


class Denoiser(Classifier):
    """A model whose loss draws random numbers, also in evaluation."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        return {"loss": (self.net(x + torch.randn_like(x)) ** 2).mean()}


class Counting(Classifier):
    """A model that counts its forwards, and whose loss depends on the count."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        self.calls += 1  # type: ignore[operator]
        return {"loss": super().forward(x, labels)["loss"] / (1 + self.calls)}  # type: ignore[operator]


def bert() -> Any:
    """A small BERT."""
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return BertForMaskedLM(BertConfig(**shape, vocab_size=VOCABULARY))


MEANS: dict[str, dict[str, Any]] = {
    "rows": {},
    "rows in bfloat16": {"model": lambda: Classifier().float(), "train_dataset": [
        {"x": row["x"].float(), "labels": row["labels"]} for row in Rows()
    ], "bf16": True},
    "labels": {"model": gpt2, "train_dataset": Texts()},
    "masked at random": {
        "model": bert,
        "train_dataset": [{"input_ids": row["input_ids"]} for row in Texts()],
        "options": {"data_collator": DataCollatorForLanguageModeling(tokenizer(), mlm=False)},
    },
    "dropout": {"model": lambda: Classifier(dropout=0.5)},
    "random numbers": {"model": Denoiser},
    "row by row": {"per_device_train_batch_size": 1},
    "a buffer": {"model": Counting},
}  # fmt: skip


@pytest.mark.parametrize("name", MEANS)
def test_a_mean_is_not_warned_of_and_nothing_changes(tmp_path: Path, name: str) -> None:
    found = []
    for check in True, False:
        torch.manual_seed(3)
        random.seed(4)
        np.random.seed(5)
        options = {**MEANS[name], "options": {**MEANS[name].get("options", {}), "check_loss": check}}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer = run(tmp_path, **options)
        assert not [warning for warning in caught if MESSAGE in str(warning.message)]
        found.append((weights(trainer.model), torch.rand(1), random.random(), np.random.rand()))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1:] == found[1][1:]


def test_the_logs_of_trl_are_those_of_the_training(tmp_path: Path) -> None:
    logs = []
    for check in True, False:
        trainer = sft_trainer(tmp_path, max_steps=2, check_loss=check)
        trainer.train()
        logs.append([{key: value for key, value in row.items() if "per_second" not in key and "runtime" not in key}
                     for row in trainer.state.log_history])  # fmt: skip
        assert trainer._metrics["eval"] == {}
    assert logs[0] == logs[1]


def test_a_dpo_loss_of_several_terms(tmp_path: Path) -> None:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    class Variable(VariableBatchMixin, DPOTrainer):
        """The changed line."""

    rng = np.random.default_rng(2)
    words = [[" ".join(f"w{n}" for n in rng.integers(0, 38, size=size)) for size in (2, k, 9 - k)] for k in range(1, 9)]
    rows = Dataset.from_list([dict(zip(("prompt", "chosen", "rejected"), row, strict=True)) for row in words * 3])
    for loss_type, warned in ("sigmoid", False), (["sigmoid", "sft"], True):
        own = arguments(tmp_path, max_steps=1).to_dict() | {"loss_type": loss_type, "max_length": TOKENS + 2}
        known = {name: value for name, value in own.items() if name in DPOConfig.__dataclass_fields__}
        model = small_model()
        reference = small_model()
        nn.init.normal_(model.lm_head.weight, std=0.5)
        options = {"args": DPOConfig(**known), "train_dataset": rows, "processing_class": tokenizer(), "trace": 16}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            Variable(model.float(), reference.float(), **options).train()
        assert any(MESSAGE in str(warning.message) for warning in caught) is warned, loss_type


def in_two(folder: Path) -> None:
    """Of a batch of one sample, one rank repeats the row of the other one: both must make equally many forwards."""
    trainer = trainer_of(folder, Summed(), trace=[1, 16], max_steps=2)
    trainer.train()


def test_ranks_check_alike(tmp_path: Path) -> None:
    in_processes(in_two, 2, tmp_path)


def test_it_leaves_the_yardstick(tmp_path: Path) -> None:
    model, twin = Classifier(), Classifier()
    trainer_of(tmp_path, model, max_steps=5).train()
    trainer_of(tmp_path, twin, max_steps=5, options={"check_loss": False}).train()
    assert difference(model, weights(twin)) == 0
