"""Sentence Transformers' trainer with a variable batch size."""

from __future__ import annotations

import datasets
import numpy as np
import pytest
import sentence_transformers as st
import torch
from sentence_transformers.sentence_transformer.losses import CoSENTLoss, CosineSimilarityLoss
from torch import nn

from helpers.transformers_adapter import QUIET
from variable_batch_size.integrations.transformers import VariableBatchMixin


class Words(nn.Module):
    """A bag of words, in float64, as a module of Sentence Transformers."""

    tokenizer, max_seq_length = None, 16

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(40, 8).double()

    def tokenize(self, texts, **_):
        numbers = [torch.tensor([int(word) for word in text.split()]) for text in texts]
        padded = nn.utils.rnn.pad_sequence(numbers, batch_first=True)
        return {"input_ids": padded, "attention_mask": (padded > 0).long()}

    def forward(self, features, **_):
        mask = features["attention_mask"].double()[..., None]
        summed = (self.embedding(features["input_ids"]) * mask).sum(1)
        return {**features, "sentence_embedding": summed / mask.sum(1)}


class Pairs(VariableBatchMixin, st.SentenceTransformerTrainer):
    """The changed line."""


def pairs(folder, rows, data=None, loss=CosineSimilarityLoss, **options):
    rng = np.random.default_rng(2)
    texts = [[" ".join(map(str, rng.integers(1, 40, rng.integers(2, 8)))) for _ in range(50)] for _ in range(2)]
    data = data or datasets.Dataset.from_dict({"a": texts[0], "b": texts[1], "score": rng.random(50)})
    own = {**QUIET, "optim": "sgd", "learning_rate": 0.05, "per_device_train_batch_size": rows, **options}
    model = st.SentenceTransformer(modules=[Words()], device="cpu")
    arguments = st.SentenceTransformerTrainingArguments(str(folder), num_train_epochs=2, **own)
    trainer = Pairs(model, arguments, train_dataset=data, loss=loss(model), trace="0:24 2:10")
    trainer.train()
    return model[0].embedding.weight.detach().clone()


def test_sentence_transformers_train_on_whole_batches(tmp_path):
    whole, cut = pairs(tmp_path, 24), pairs(tmp_path, 5)
    torch.testing.assert_close(cut, whole, rtol=0, atol=1e-12)
    with pytest.warns(UserWarning, match="updates depend on how they are cut into microbatches"):
        pairs(tmp_path, 5, loss=CoSENTLoss, max_steps=1)  # which compares pairs
    with pytest.raises(ValueError, match=r"batch_sampler=NoDuplicatesBatchSampler;.* NO_DUPLICATES and multi"):
        pairs(tmp_path, 5, batch_sampler="no_duplicates")
    with pytest.raises(TypeError, match="train_dataset must be one dataset, not several by name"):
        pairs(tmp_path, 5, datasets.DatasetDict(x=(one := datasets.Dataset.from_dict({"a": ["1"], "b": ["2"]})), y=one))
