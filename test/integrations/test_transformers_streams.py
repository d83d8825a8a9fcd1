"""Trainer with datasets without an index, and with samples grouped by length: the updates of the same rows in order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from helpers.transformers_jobs import Classifier, Rows, Texts, arguments, gpt2, sum_in_float64, trainer_of
from helpers.yardstick import REF, SAMPLES

TRACE = [12, 5, 20, 7, 30, 16, 9, 24, 11, 3]  # 137 samples


class Stream(IterableDataset[dict[str, Any]]):
    """The rows of the yardstick, in order."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        rows = Rows()
        return (rows[index] for index in range(len(rows)))


def weights_of(trainer: Any) -> list[Any]:
    return [parameter.detach().numpy() for parameter in trainer.model.parameters()]


def trained(folder: Path, dataset: Any, **others: Any) -> Any:
    trainer = trainer_of(folder, Classifier(), trace=TRACE, train_dataset=dataset, max_steps=len(TRACE), **others)
    trainer.train()
    return trainer


def test_an_update_has_the_rows_of_the_stream(tmp_path: Path) -> None:
    own = trained(tmp_path, Stream())
    model = Classifier()
    rows, taken = itertools.cycle(Rows()[index] for index in range(SAMPLES)), []
    for size in TRACE:
        taken.append([next(rows) for _ in range(size)])
    args = arguments(tmp_path)
    inner = torch.optim.AdamW(
        [
            {"params": [p for n, p in model.named_parameters() if not n.endswith("bias")], "weight_decay": 0.0},
            {"params": [p for n, p in model.named_parameters() if n.endswith("bias")], "weight_decay": 0.0},
        ],
        lr=args.learning_rate,
        eps=args.adam_epsilon,
    )
    for batch in taken:
        inner.zero_grad()
        x, labels = torch.stack([row["x"] for row in batch]), torch.stack([row["labels"] for row in batch])
        model(x, labels)["loss"].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        for group in inner.param_groups:
            group["lr"] = args.learning_rate * (len(batch) / REF) ** 0.5
        inner.step()
    for found, parameter in zip(weights_of(own), model.parameters(), strict=True):
        np.testing.assert_allclose(found, parameter.detach().numpy(), rtol=0, atol=1e-9)
    assert own.variable_optimizer.samples == sum(TRACE)
    assert own.state.global_step == len(TRACE)


def test_a_hugging_face_stream_resumes_where_it_was(tmp_path: Path) -> None:
    import datasets

    rows = [{"x": Rows()[i]["x"].tolist(), "labels": int(Rows()[i]["labels"])} for i in range(SAMPLES)]

    def stream() -> Any:
        found = datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=2)
        return found.shuffle(seed=3, buffer_size=16)

    def collate(batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        x = torch.tensor([row["x"] for row in batch], dtype=torch.float64)
        return {"x": x, "labels": torch.tensor([row["labels"] for row in batch])}

    whole = trained(tmp_path / "a", stream(), options={"data_collator": collate})
    saving = {"save_strategy": "steps", "save_steps": 4, "options": {"data_collator": collate}}
    trained(tmp_path / "b", stream(), **saving)
    again = trainer_of(
        tmp_path / "b", Classifier(), trace=TRACE, train_dataset=stream(), max_steps=len(TRACE), **saving
    )
    again.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-4"))
    assert again.variable_optimizer.samples == sum(TRACE)
    for found, expected in zip(weights_of(again), weights_of(whole), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_samples_grouped_by_length_are_used_once_a_pass(tmp_path: Path) -> None:
    class Lengths(Texts):
        def __getitem__(self, index: int) -> dict[str, Any]:
            length = int(self.lengths[index])
            row = super().__getitem__(index)
            return {name: values[:length] for name, values in row.items()} | {"number": index}

    seen: list[list[int]] = []

    def collate(batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        seen.append([len(row["input_ids"]) for row in batch])
        numbers.extend(row["number"] for row in batch)
        pad = {"input_ids": 0, "labels": -100, "attention_mask": 0}
        return {
            name: torch.nn.utils.rnn.pad_sequence([row[name] for row in batch], batch_first=True, padding_value=value)
            for name, value in pad.items()
        }

    numbers: list[int] = []
    sizes = [SAMPLES // 4] * 3 + [SAMPLES - 3 * (SAMPLES // 4)]
    trainer = trainer_of(
        tmp_path,
        gpt2(),
        trace=sizes,
        train_dataset=Lengths(),
        max_steps=4,
        train_sampling_strategy="group_by_length",
        remove_unused_columns=False,
        options={"data_collator": collate, "compute_loss_func": sum_in_float64, "check_loss": False},
    )
    trainer.train()
    assert sorted(numbers) == [*range(SAMPLES)]
    spread = np.mean([max(lengths) - min(lengths) for lengths in seen])
    whole = [int(length) for length in Texts().lengths]
    in_order = np.mean([np.ptp(part) for part in np.array_split(whole, len(seen))])
    assert spread < in_order / 2


def test_what_streams_lack_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r'"group_by_length" with max_steps'):
        trainer_of(tmp_path, train_sampling_strategy="group_by_length")
    with pytest.raises(ValueError, match=r"max_steps has to be specified|max_steps"):
        trainer_of(tmp_path, train_dataset=Stream())
    with pytest.raises(ValueError, match=r"may have fixed_shape only"):
        trainer_of(tmp_path, train_dataset=Stream(), max_steps=3, trace=[3] * 3, sampler_options={"shuffle": True})
