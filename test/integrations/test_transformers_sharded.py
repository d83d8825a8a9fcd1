"""transformers' Trainer with FSDP2, against one whole batch an update by hand, on one to three processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR

from helpers.transformers_jobs import EPS, LR, gpt2, mean_over_tokens
from helpers.transformers_sharded_jobs import resume_sharded, save_sharded, sharded_yardstick, untied
from helpers.yardstick import MAX_GRAD_NORM, STOPS, UPDATES, by_hand, difference, in_processes, network

EXACT = 1e-12


def adamw(model: Any) -> AdamW:
    """The optimizer that Trainer makes."""
    return AdamW(model.parameters(), lr=LR, weight_decay=0.0, eps=EPS)


def load(folder: Path, name: str) -> dict[str, Any]:
    """What rank 0 has saved."""
    return torch.load(folder / f"{name}-0", weights_only=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "world", [3, *(pytest.param(world, marks=pytest.mark.nightly("starts processes")) for world in (1, 2))]
)
def test_sharded_models_make_the_updates_of_whole_batches(tmp_path: Path, world: int) -> None:
    in_processes(sharded_yardstick, world, tmp_path)
    for rule in "root", "adascale":
        twin = network()
        inner = adamw(twin) if rule == "root" else SGD(twin.parameters(), LR)
        losses = by_hand(twin, inner, rule=rule, max_grad_norm=MAX_GRAD_NORM)
        found = load(tmp_path, rule)
        assert difference(twin, found["weights"]) < EXACT
        assert [entry["loss"] for entry in found["logs"][:-1]] == pytest.approx(losses, rel=1e-6)
    for name, create in ("tied", gpt2), ("untied", untied):
        texts, found = create(), load(tmp_path, name)
        schedule = LambdaLR(inner := adamw(texts), lambda step: 1 - step / UPDATES)
        losses = by_hand(texts, inner, loss=mean_over_tokens, max_grad_norm=MAX_GRAD_NORM, scheduler=schedule)
        assert difference(texts, found["weights"]) < EXACT
        assert [entry["loss"] for entry in found["logs"][:-1]] == pytest.approx(losses, rel=1e-6)


@pytest.mark.parametrize("world", [1, 3])
def test_a_sharded_training_resumes_in_another_world(tmp_path: Path, world: int) -> None:
    stops = STOPS[1:4]
    in_processes(save_sharded, 2, tmp_path, stops)
    in_processes(resume_sharded, world, tmp_path / "again", tmp_path, stops)
    for name in "whole", "shards":
        expected = load(tmp_path, name)
        for stop in stops:
            found = load(tmp_path / "again", f"{name}-{stop}")
            assert (found["updates"], found["samples"], found["epoch"]) == (UPDATES, expected["samples"], 3)
            assert float((found["weights"] - expected["weights"]).abs().max()) < EXACT
