"""transformers' Trainer with a variable batch size on two processes, and from one to two and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR

from helpers.transformers_jobs import (
    EPS,
    LR,
    Classifier,
    Partly,
    SavesAt,
    Texts,
    gpt2,
    leave_alone,
    mean_over_tokens,
    resume_in_any_world,
    trained_with_repetitions,
    trainer_of,
    updates_of_all_kinds,
)
from helpers.yardstick import (
    MAX_GRAD_NORM,
    SAMPLES,
    STOPS,
    UPDATES,
    by_hand,
    difference,
    in_processes,
    network,
    weights,
)

EXACT = 1e-12


def adamw(model: Any) -> AdamW:
    """The optimizer that Trainer makes."""
    return AdamW(model.parameters(), lr=LR, weight_decay=0.0, eps=EPS)


def load(folder: Path, name: str) -> dict[str, Any]:
    """What rank 0 has saved, after a look at rank 1."""
    first, second = (torch.load(folder / f"{name}-{rank}", weights_only=False) for rank in range(2))
    assert torch.equal(first["weights"], second["weights"])
    assert (first["updates"], first["tokens"], first["flos"]) == (second["updates"], second["tokens"], second["flos"])
    return first


@pytest.mark.filterwarnings("ignore:.*use_cpu.*")
def test_two_processes_make_the_updates_of_whole_batches(tmp_path: Path) -> None:
    in_processes(updates_of_all_kinds, 2, tmp_path)
    for rule in "root", "adascale":
        twin = network()
        inner = adamw(twin) if rule == "root" else SGD(twin.parameters(), LR, momentum=0.9)
        losses = by_hand(twin, inner, rule=rule, max_grad_norm=MAX_GRAD_NORM)
        found = load(tmp_path, rule)
        assert difference(twin, found["weights"]) < EXACT
        assert (found["updates"], found["samples"], found["epoch"]) == (UPDATES, 3 * SAMPLES, 3)
        assert [entry["loss"] for entry in found["logs"][:-1]] == pytest.approx(losses, rel=1e-6)
    by_hand(twin, inner, rule="adascale", max_grad_norm=MAX_GRAD_NORM)
    assert difference(twin, load(tmp_path, "twice")["weights"]) < 0.1
    assert load(tmp_path, "twice")["updates"] == UPDATES
    texts, found = gpt2(), load(tmp_path, "texts")
    inner = adamw(texts)
    schedule = LambdaLR(inner, lambda step: 1 - step / UPDATES)
    losses = by_hand(texts, inner, loss=mean_over_tokens, max_grad_norm=MAX_GRAD_NORM, scheduler=schedule)
    assert difference(texts, found["weights"]) < EXACT
    assert [entry["loss"] for entry in found["logs"][:-1]] == pytest.approx(losses, rel=1e-6)
    assert found["tokens"] == 3 * int(Texts().lengths.sum())
    assert found["flos"] >= 6 * texts.num_parameters(exclude_embeddings=True) * 3 * Texts().ids.numel()
    alone, found = trained_with_repetitions(tmp_path / "alone"), load(tmp_path, "repeated")
    assert difference(alone.model, found["weights"]) < EXACT
    assert found["tokens"] == alone.state.num_input_tokens_seen
    texts, found = gpt2(), load(tmp_path, "ignoring")
    losses = by_hand(texts, adamw(texts), loss=mean_over_tokens, max_grad_norm=MAX_GRAD_NORM)
    assert difference(texts, found["weights"]) < EXACT
    assert [entry["loss"] for entry in found["logs"][:-1]] == pytest.approx(losses, rel=1e-6)
    alone = trainer_of(tmp_path / "alone", Partly(), trace=3)
    alone.train()
    assert difference(alone.model, load(tmp_path, "partly")["weights"]) < EXACT
    found = load(tmp_path, "growing")
    assert found["samples"] == 3 * SAMPLES
    sizes = [entry["batch_size"] for entry in found["logs"][:-1]]
    assert len(sizes) == found["updates"] == found["max_steps"]
    assert sum(sizes) == 3 * SAMPLES


@pytest.mark.filterwarnings("ignore:.*skips")
def test_an_epoch_that_one_rank_leaves_raises_at_once(tmp_path: Path) -> None:
    in_processes(leave_alone, 2, tmp_path)


def test_a_training_resumes_in_any_world(tmp_path: Path) -> None:
    options = {"lr_scheduler_type": "cosine"}
    model = Classifier()
    trainer_of(tmp_path / "one", model, options={"callbacks": [SavesAt()]}, **options).train()
    in_processes(resume_in_any_world, 2, tmp_path, tmp_path / "one")
    expected = load(tmp_path, "dropout")["weights"]
    for stop in STOPS:
        assert torch.equal(load(tmp_path, f"dropout-{stop}")["weights"], expected)
        assert difference(model, load(tmp_path, f"one-{stop}")["weights"]) < EXACT
        resumed = Classifier()
        trainer_of(tmp_path / "again", resumed, **options).train(str(tmp_path / "by-two" / f"checkpoint-{stop}"))
        assert difference(resumed, weights(model)) < EXACT
