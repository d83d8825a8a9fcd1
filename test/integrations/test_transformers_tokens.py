"""Batches in tokens in transformers' Trainer: updates are those of whole batches, on one process and two."""

from __future__ import annotations

from functools import partial
from typing import Any

import datasets
import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, nn

from helpers.ragged import COUNTS, EPOCHS, LENGTHS, OPTIONS, REF, TRACE, Ragged, collate, expected, model_of, token_loss
from helpers.trainings import VOCABULARY
from helpers.transformers_adapter import QUIET
from helpers.yardstick import difference, in_processes, weights
from variable_batch_size.integrations.transformers import VariableBatchTrainer


class Model(nn.Module):
    """Returns the mean loss over the labels of a microbatch, or over its rows of the means of each."""

    def __init__(self, *, counting: bool = True, by_rows: bool = False) -> None:
        super().__init__()
        self.net, self.accepts_loss_kwargs, self.by_rows = model_of(), counting, by_rows
        self.loss_type = "ForCausalLM" if counting else None

    def forward(self, input_ids: Tensor, labels: Tensor, num_items_in_batch: Any = None) -> dict[str, Tensor]:
        logits = self.net(input_ids)
        if self.by_rows:
            each = [token_loss(logits[row : row + 1], labels[row : row + 1]) for row in range(len(labels))]
            return {"loss": torch.stack(each).mean()}
        if num_items_in_batch is None:
            return {"loss": token_loss(logits, labels)}
        return {"loss": token_loss(logits, labels, "sum") / num_items_in_batch}


def fit(
    folder: Any, *, model: Any = None, resume: Any = None, sampling: Any = None, trace: Any = TRACE, **others: Any
) -> Any:
    args = {"learning_rate": 0.1, "optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    args |= {"num_train_epochs": EPOCHS, "data_seed": 0, "remove_unused_columns": False, **QUIET}
    model = Model() if model is None else model
    trainer = VariableBatchTrainer(
        model,
        hf.TrainingArguments(str(folder), **{**args, **others}),  # type: ignore[arg-type]
        train_dataset=Ragged(),
        data_collator=collate,
        optimizers=(torch.optim.SGD(model.parameters(), 0.1, 0.9), None),
        trace=trace,
        rule="linear",
        ref_batchsize=REF,
        sampler_options={**OPTIONS, **(sampling or {})},
    )
    trainer.train(None if resume is None else str(resume))
    return trainer


def check(trainer: Any, since: int = 0) -> None:
    updates, total = len(expected().sizes), EPOCHS * sum(COUNTS)
    optimizer, log = trainer.variable_optimizer, trainer.state.log_history[:-1]
    assert (trainer.state.global_step, trainer.state.max_steps, optimizer.updates) == (updates,) * 3
    assert (optimizer.samples, trainer.state.epoch) == (total, EPOCHS)
    assert difference(trainer.model, expected().weights) < 1e-12
    assert [row["batch_size"] for row in log] == expected().sizes
    assert [row["loss"] for row in log] == pytest.approx(expected().losses, rel=1e-6)


@pytest.mark.parametrize("counting", [True, False])
def test_updates_are_those_of_whole_batches(tmp_path, counting):
    check(fit(tmp_path, model=Model(counting=counting)))


def whole(folder: Any) -> Any:
    found = [fit(folder), fit(folder, resume=folder / "checkpoint-5")]
    return [(weights(trainer.model), trainer.variable_optimizer.samples) for trainer in found]


def part(folder: Any) -> None:
    fit(folder, save_strategy="steps", save_steps=5, max_steps=5)


def test_two_processes_and_resumes_in_other_worlds(tmp_path):
    part(tmp_path / "one")
    for of_rank in in_processes(whole, 2, tmp_path / "one"):
        for vector, samples in of_rank:
            assert samples == EPOCHS * sum(COUNTS)
            torch.testing.assert_close(vector, expected().weights, rtol=0, atol=1e-12)
    in_processes(part, 2, tmp_path / "two")
    check(fit(tmp_path / "two", resume=tmp_path / "two" / "checkpoint-5"))


def test_a_mean_over_rows_counts_rows(tmp_path):
    """Each sample counts one: batches are in rows, and tokens bound microbatches."""
    by_rows = partial(Model, counting=False, by_rows=True)
    trainer = fit(tmp_path, model=by_rows(), sampling={"counts": [1] * len(LENGTHS)}, trace=60, max_steps=1)
    (size,) = (row["batch_size"] for row in trainer.state.log_history[:-1])
    assert size == 60
    twin, rows = by_rows(), [Ragged()[number] for number in range(len(LENGTHS))]
    order = trainer.variable_optimizer.sampler.batches.parts(0, 0)
    numbers = [int(number) for part in order for number in part]
    inner = torch.optim.SGD(twin.parameters(), 0.1, 0.9)
    (sum(twin(**collate([rows[number]]))["loss"] for number in numbers) / len(numbers)).backward()
    inner.step()
    assert difference(trainer.model, weights(twin)) < 1e-12


def test_a_mean_over_rows_that_counts_tokens_is_found(tmp_path):
    with pytest.warns(UserWarning, match="must be a sum over what the rows count, but that of"):
        fit(tmp_path, model=Model(counting=False, by_rows=True), max_steps=1)


def test_lengths_need_a_dataset_with_an_index(tmp_path):
    with pytest.raises(ValueError, match=r"lengths= needs a dataset with an index, .* got group_by_length; omit"):
        fit(tmp_path, train_sampling_strategy="group_by_length", max_steps=4)


def train_gpt(folder: Any, max_tokens: int) -> Any:
    """Train a GPT-2 with a collator of transformers that pads, from columns of which the model takes some."""
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(VOCABULARY)}, unk_token="w0"))
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1", unk_token="w0")
    texts = [[token or 2 for token in Ragged()[number]["input_ids"]] for number in range(len(LENGTHS))]  # 0 pads
    shape = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 20, "vocab_size": VOCABULARY}
    none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    torch.manual_seed(4)
    trainer = VariableBatchTrainer(
        hf.GPT2LMHeadModel(hf.GPT2Config(**shape, **none, bos_token_id=1, eos_token_id=1)).double(),
        hf.TrainingArguments(str(folder), max_steps=6, data_seed=0, **QUIET),
        train_dataset=datasets.Dataset.from_dict({"input_ids": texts, "source": ["web"] * len(texts)}),
        data_collator=hf.DataCollatorForLanguageModeling(tokenizer, mlm=False),
        trace=TRACE,
        rule="root",
        ref_batchsize=REF,
        sampler_options={**OPTIONS, "max_tokens": max_tokens},
    )
    trainer.train()
    return trainer


def test_a_language_model_and_its_collator(tmp_path):
    one, other = train_gpt(tmp_path, 40), train_gpt(tmp_path, 200)
    assert len(one.variable_optimizer.sampler) > len(other.variable_optimizer.sampler)
    assert difference(one.model, weights(other.model)) < 1e-5  # whose loss is in float32
