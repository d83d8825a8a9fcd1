"""trl's SFTTrainer with a variable batch size; nothing is downloaded."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.optim import AdamW

from helpers.transformers_jobs import EPS, LR, REPEATED, sft, sft_trainer, small_model
from helpers.yardstick import ENDS, MAX_GRAD_NORM, SAMPLES, by_hand, difference, in_processes


def by_tokens(trainer: Any) -> Any:
    """The model, trained by hand with the mean over the tokens of each batch."""
    texts, model = trainer.train_dataset["input_ids"], small_model()

    def loss(own: Any, indices: Any) -> Any:
        rows = [torch.tensor(texts[index]) for index in indices]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        logits = own(input_ids=ids, attention_mask=mask).logits[:, :-1]
        return cross_entropy(logits[mask[:, 1:] == 1], ids[:, 1:][mask[:, 1:] == 1])

    inner = AdamW(model.parameters(), lr=LR, weight_decay=0.0, eps=EPS)
    by_hand(model, inner, loss=loss, max_grad_norm=MAX_GRAD_NORM, updates=ENDS[0])
    return model


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The trainer of one process, at its end."""
    trainer = sft_trainer(tmp_path_factory.mktemp("alone"))
    trainer.train()
    return trainer


def test_it_averages_over_the_tokens_of_an_update(alone: Any) -> None:
    assert difference(alone.model, torch.cat([p.detach().flatten() for p in by_tokens(alone).parameters()])) < 1e-5
    assert alone.state.global_step == ENDS[0]
    last = alone.state.log_history[-2]
    assert last["num_tokens"] == sum(map(len, alone.train_dataset["input_ids"]))
    assert {"entropy", "mean_token_accuracy", "batch_size", "learning_rate"} <= last.keys()


def test_its_loss_may_gather_on_ranks_with_unequal_numbers_of_microbatches(alone: Any, tmp_path: Path) -> None:
    in_processes(sft, 2, tmp_path)
    repeated = sft_trainer(tmp_path / "alone", **REPEATED)
    repeated.train()
    for trainer, name in (repeated, "repeated"), (alone, "sft"):
        found = torch.load(tmp_path / f"{name}-0", weights_only=False)
        compare(trainer, found)
    assert any(-(-entry["batch_size"] // 8) % 2 for entry in found["logs"][:-1])  # with unequal shares
    assert found["samples"] == SAMPLES


def compare(alone: Any, found: dict[str, Any]) -> None:
    """Compare the training of one process with that of two."""
    assert difference(alone.model, found["weights"]) < 1e-5
    pairs = list(zip(alone.state.log_history[:-1], found["logs"][:-1], strict=True))
    assert len(pairs) == alone.state.max_steps
    for one, two in pairs:
        assert one["num_tokens"] == two["num_tokens"]
        assert math.isclose(one["loss"], two["loss"], rel_tol=1e-5)
