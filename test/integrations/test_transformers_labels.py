"""Means over all labels of an update, by transformers' Trainer with a variable batch size."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
)

from helpers.transformers_jobs import (
    EPS,
    LR,
    VOCABULARY,
    Texts,
    gpt2,
    mean_of_microbatch,
    mean_over_tokens,
    sum_in_float64,
    trainer_of,
)
from helpers.yardstick import MAX_GRAD_NORM, by_hand, difference, twin_of, weights
from variable_batch_size.integrations.transformers import VariableBatchMixin

EXACT = 1e-12


def adamw(model: Any) -> AdamW:
    """The optimizer that Trainer makes by default, without weight decay."""
    return AdamW(model.parameters(), lr=LR, weight_decay=0.0, eps=EPS)


def test_labels_are_averaged_over_all_tokens_of_an_update(tmp_path: Path) -> None:
    model, twin = gpt2(), gpt2()
    options = {"compute_loss_func": sum_in_float64}
    tokens = {"include_num_input_tokens_seen": "non_padding"}
    trainer = trainer_of(tmp_path, model, train_dataset=Texts(), options=options, **tokens)
    trainer.train()
    by_hand(twin, adamw(twin), loss=mean_over_tokens, max_grad_norm=MAX_GRAD_NORM)
    assert difference(model, weights(twin)) < EXACT
    assert trainer.state.num_input_tokens_seen == 3 * int(Texts().lengths.sum())
    per_token = 6 * model.num_parameters(exclude_embeddings=True)
    assert trainer.state.total_flos == per_token * 3 * Texts().ids.numel()


class Derived(GPT2LMHeadModel):
    """A class of the user's."""


class TakesNoCount(LlamaForCausalLM):
    """A language model whose class does not want the number of labels, as many of those with images."""

    accepts_loss_kwargs = False


def llama() -> Any:
    """A Llama of one layer in float64."""
    torch.manual_seed(4)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return TakesNoCount(LlamaConfig(**shape, vocab_size=VOCABULARY, pad_token_id=0, initializer_range=0.2)).double()


@pytest.mark.parametrize("create", [gpt2, lambda: Derived(gpt2().config).double(), llama], ids=["gpt2", "below", "no"])
def test_a_language_model_s_own_loss_counts_the_labels_that_it_predicts(tmp_path: Path, create: Any) -> None:
    """GPT-2 has no loss_type, so Trainer counts the first label of each row, which nothing predicts."""
    model = create()
    twin = twin_of(model)
    inner = SGD(model.parameters(), LR)
    trainer = trainer_of(tmp_path, model, train_dataset=Texts(), options={"optimizers": (inner, None)})
    trainer.train()
    losses = by_hand(twin, SGD(twin.parameters(), LR), loss=mean_over_tokens, max_grad_norm=MAX_GRAD_NORM)
    assert difference(model, weights(twin)) < 1e-5  # it computes in float32
    assert [entry["loss"] for entry in trainer.state.log_history[:-1]] == pytest.approx(losses, rel=1e-5)


def bert() -> Any:
    """A BERT of one layer, whose loss is the mean, whatever number of labels it is given."""
    torch.manual_seed(4)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(**shape, **none, vocab_size=VOCABULARY, initializer_range=0.2)).double()


def t5() -> Any:
    """A T5 of one layer; so is its loss."""
    torch.manual_seed(4)
    shape = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
    return T5ForConditionalGeneration(T5Config(**shape, vocab_size=VOCABULARY, decoder_start_token_id=0)).double()


def of_all_labels(model: Any, indices: Any) -> Any:
    """The mean loss over all labels of these texts, none of which is left out."""
    texts = Texts()
    labels = texts.labels[indices]
    logits = model(input_ids=texts.ids[indices], attention_mask=texts.mask[indices], labels=labels).logits
    return cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("create", [bert, t5])
def test_a_model_whose_loss_ignores_the_number_of_labels(tmp_path: Path, create: Any) -> None:
    model, by_samples = create(), create()
    twin = twin_of(model)
    trainer = trainer_of(tmp_path, model, train_dataset=Texts(), optim="sgd")
    trainer.train()
    losses = by_hand(twin, SGD(twin.parameters(), LR), loss=of_all_labels, max_grad_norm=MAX_GRAD_NORM)
    assert difference(model, weights(twin)) < 1e-9  # T5 computes its norms in float32
    assert [entry["loss"] for entry in trainer.state.log_history[:-1]] == pytest.approx(losses, rel=1e-6)
    by_samples.accepts_loss_kwargs = False  # the mean over samples, for a loss that is one
    with pytest.warns(UserWarning, match="a mean over rows or labels"):  # it is not
        trainer_of(tmp_path, by_samples, train_dataset=Texts(), optim="sgd").train()
    assert 1e-5 < difference(by_samples, weights(twin)) < 1


class Sparse(Texts):
    """Texts of which most have no labels, so that some microbatches have none."""

    def __init__(self) -> None:
        super().__init__()
        self.labels[torch.arange(len(self)) % 3 > 0] = -100


def test_microbatches_without_labels_have_no_weight(tmp_path: Path) -> None:
    """The mean of no labels is not a number."""
    model, twin, texts = gpt2(), gpt2(), Sparse()
    options = {"compute_loss_func": mean_of_microbatch}
    trainer = trainer_of(
        tmp_path, model, train_dataset=texts, optim="sgd", per_device_train_batch_size=2, options=options
    )
    trainer.train()

    def mean(own: Any, indices: Any) -> Any:
        outputs = own(input_ids=texts.ids[indices], attention_mask=texts.mask[indices])
        return sum_in_float64(outputs, texts.labels[indices])

    losses = by_hand(twin, SGD(twin.parameters(), LR), loss=mean, max_grad_norm=MAX_GRAD_NORM)
    assert difference(model, weights(twin)) < EXACT
    assert math.isnan(losses.pop())  # the last update has three texts, and no labels
    assert [entry["loss"] for entry in trainer.state.log_history[:-1]] == pytest.approx([*losses, 0.0], rel=1e-6)


class Steps(Trainer):
    """A trainer with a training step of its own, which calls no compute_loss()."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
        loss = sum_in_float64(outputs, inputs["labels"])
        self.accelerator.backward(loss)
        return loss.detach()


class VariableSteps(VariableBatchMixin, Steps):
    """The changed line."""


def test_a_step_without_compute_loss(tmp_path: Path) -> None:
    model, twin = gpt2(), gpt2()
    trainer = trainer_of(tmp_path, model, kind=VariableSteps, train_dataset=Texts())
    trainer.train()
    losses = by_hand(twin, adamw(twin), loss=mean_over_tokens, max_grad_norm=MAX_GRAD_NORM)
    assert difference(model, weights(twin)) < EXACT
    assert [entry["loss"] for entry in trainer.state.log_history[:-1]] == pytest.approx(losses, rel=1e-6)


def test_rows_of_a_fixed_shape_count_once(tmp_path: Path) -> None:
    model, twin = gpt2(), gpt2()
    options = {"compute_loss_func": sum_in_float64}
    shape = {"fixed_shape": True}
    trainer_of(tmp_path, model, train_dataset=Texts(), options=options, sampler_options=shape).train()
    by_hand(twin, adamw(twin), loss=mean_over_tokens, max_grad_norm=MAX_GRAD_NORM)
    assert difference(model, weights(twin)) < EXACT


def test_an_update_without_labels_changes_nothing_but_the_averages(tmp_path: Path) -> None:
    texts = Texts()
    texts.labels[:] = -100
    model = gpt2()
    before = weights(model)
    inner = SGD(model.parameters(), LR)
    trainer_of(tmp_path, model, train_dataset=texts, max_steps=3, options={"optimizers": (inner, None)}).train()
    assert difference(model, before) == 0
