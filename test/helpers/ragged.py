"""Texts of unequal lengths for tests of trainers, and a training with whole batches by hand."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

import variable_batch_size as vbs
from helpers.trainings import IGNORED, VOCABULARY, Trained, language_model
from helpers.yardstick import weights

REF, EPOCHS = 60, 2
TRACE = "0:60 3:150 8:90 20:200"
LENGTHS = np.random.default_rng(5).integers(2, 21, 90)
COUNTS = (LENGTHS - 1).tolist()  # the first token is predicted by none
OPTIONS: dict[str, Any] = {"lengths": LENGTHS, "counts": COUNTS, "max_tokens": 64, "pad": True, "on_end": "hold"}
OPTIONS |= {"seed": 0}


class Ragged(Dataset[dict[str, Any]]):
    """Texts as lists of tokens."""

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = np.random.default_rng(index).integers(VOCABULARY, size=LENGTHS[index]).tolist()
        return {"input_ids": tokens, "labels": tokens}


def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Return rows that are padded to the longest one, whose padding does not count."""
    tokens = [torch.tensor(row["input_ids"]) for row in rows]
    padded = nn.utils.rnn.pad_sequence(tokens, batch_first=True, padding_value=IGNORED)
    assert padded.numel() <= OPTIONS["max_tokens"]
    return {"input_ids": padded.clamp(min=0), "labels": padded}


def model_of() -> nn.Module:
    return language_model()


def token_loss(logits: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    """The loss of the next tokens that count."""
    reduction = reduction.partition(" ")[0]
    return cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED, reduction=reduction
    )


@cache
def expected() -> Trained:
    """Train on whole batches, whose samples are those of the sampler in one process, with the linear rule."""
    sampler = vbs.CustomSampler(len(LENGTHS), TRACE, 1, 0, **OPTIONS)
    model, sizes, losses = model_of(), list[int](), list[float]()
    inner = torch.optim.SGD(model.parameters(), 0.1, 0.9)
    for number in range(EPOCHS):
        epoch = sampler.batches.plan.epoch(number)
        for step in range(epoch.first_step, epoch.end_step):
            rows = np.concatenate(sampler.batches.parts(number, step))  # type: ignore[attr-defined]
            sizes.append(sum(COUNTS[row] for row in rows))
            inner.param_groups[0]["lr"] = 0.1 * sizes[-1] / REF
            inner.zero_grad()
            total = torch.zeros((), dtype=torch.float64)
            for row in rows:
                batch = collate([Ragged()[int(row)]])
                total = total + token_loss(model(batch["input_ids"]), batch["labels"], "sum")
            (total / sizes[-1]).backward()
            inner.step()
            losses.append(total.item() / sizes[-1])
    return Trained(weights(model), losses, [], sizes, len(sizes), sum(sizes))
