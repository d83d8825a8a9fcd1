"""The checker of losses: no word about means over rows, and a warning about what depends on the microbatch."""

from __future__ import annotations

import random
import warnings
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, dropout
from torch.utils.checkpoint import checkpoint

from variable_batch_size.data.streams.rows import has_tensor_rows
from variable_batch_size.testing import check_loss

ROWS = 8


def batch_of(rows=ROWS):
    """Texts of 2 to 6 tokens, the others are 0."""
    generator = torch.Generator().manual_seed(1)
    texts = torch.randint(1, 9, (rows, 6), generator=generator)
    return {"texts": texts * (torch.arange(6) < torch.arange(2, 2 + rows)[:, None] % 7), "x": torch.rand(rows, 3)}


def model_of():
    embedding = nn.Embedding(9, 9).double()
    torch.nn.init.normal_(embedding.weight, generator=torch.Generator().manual_seed(2))
    return nn.Sequential(embedding, nn.Dropout(0.5), nn.BatchNorm1d(6).double())


def by_token(model, batch, **options):
    texts = batch["texts"]
    return cross_entropy(model(texts).mT[..., :-1], texts[:, 1:], ignore_index=0, **options)


def by_row(model, batch):
    return by_token(model, batch, reduction="none").sum(dim=1).mean()


def summed(model, batch):
    return by_token(model, batch, reduction="sum")


def contrastive(model, batch):
    found = model(batch["texts"]).mean(dim=1)
    return cross_entropy(found @ found.T, torch.arange(len(found)))


def weighing_classes(model, batch):
    return by_token(model, batch, weight=torch.arange(1.0, 10.0).double())


def drawn(model, batch):
    return by_token(model, batch) + random.random() + dropout(torch.ones(3), 0.5).sum()


def multi_label(model, batch):
    return binary_cross_entropy_with_logits(model(batch["texts"]).mean(dim=(1, 2)), batch["x"][:, 0].double())


def counts():
    return (batch_of()["texts"][:, 1:] != 0).sum(dim=1)


def said(loss, batch=None, **options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_loss(model_of(), loss, batch_of() if batch is None else batch, **options)
    return " ".join(str(one.message) for one in caught)


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        (by_row, {}),
        (multi_label, {}),
        (summed, {"reduction": "sum"}),
        (by_token, {"counts": counts()}),
        (by_token, {"counts": counts().tolist()}),
        (drawn, {}),
        (by_token, {"batch": batch_of(1)}),
        (by_token, {"tolerance": 1.0}),
    ],
)
def test_losses_that_are_right(loss, options):
    assert not said(loss, **options)


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        (by_token, {}),
        (weighing_classes, {}),
        (contrastive, {}),
        (summed, {}),
        (by_row, {"counts": counts()}),
        (by_token, {"reduction": "sum"}),
        (by_token, {"batch": batch_of(2)}),
    ],
)
def test_losses_that_depend_on_the_microbatch(loss, options):
    words = said(loss, **options)
    assert words.startswith("the loss of a microbatch must be a ")
    assert (
        'pass reduction="sum" to the optimizer and how many they are to step(count=), see "Means over tokens"' in words
    )


def test_short_and_long_texts_are_set_apart():
    """The first third has as many tokens a row as the others, so that a cut there would find nothing."""
    texts = torch.randint(1, 9, (12, 6), generator=torch.Generator().manual_seed(1))
    batch = {"x": torch.rand(12, 3), "texts": texts * (torch.arange(6) < torch.tensor([2, 6] * 6)[:, None])}
    assert "that of 12 rows is" in said(by_token, batch)
    for counted in torch.full((12,), 5), (batch["texts"][:, 1:] != 0).sum(dim=1):
        assert bool(said(by_token, batch, counts=counted)) == (counted.unique().numel() == 1)


def test_rows_in_a_list_are_collated_by_the_loss():
    texts = [{"texts": text} for text in batch_of()["texts"]]

    def collated(model, rows):
        return by_token(model, torch.utils.data.default_collate(rows))

    assert "that of 8 rows is" in said(collated, texts)
    assert not said(collated, texts, counts=counts())
    nested = [[batch_of()["texts"], batch_of()["x"]], batch_of()["x"]]  # fields, as a loader collates pairs of pairs
    assert "that of 8 rows is" in said(lambda model, batch: by_token(model, {"texts": batch[0][0]}), nested)
    assert said(collated, texts, remedy="sum").endswith("; sum")


def test_nothing_is_changed():
    model, batch = model_of(), batch_of()
    model[1].eval()
    model.register_buffer("calls", torch.zeros(1))

    def counting(model, batch):
        model.calls += 1
        return drawn(model, batch) + np.random.rand()

    before = {name: value.clone() for name, value in model.state_dict().items()}
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    check_loss(model, counting, batch)
    assert [module.training for module in model] == [True, False, True]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.array_equal(np.random.get_state()[1], states[2])
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_cannot_be_cut_is_refused():
    assert has_tensor_rows(batch_of(), 8)
    assert not any(
        has_tensor_rows(batch, 3)
        for batch in ({"x": torch.ones(3), "y": torch.ones(2)}, (torch.ones(3), None), torch.ones(()), torch.ones(2))
    )
    with pytest.raises(TypeError, match="each field of a batch must have rows"):
        check_loss(model_of(), by_row, {"texts": 3})
    with pytest.raises(ValueError, match=r"a number for each of 8 rows, got \(3,\); pass one for each"):
        check_loss(model_of(), by_row, batch_of(), counts=[1, 2, 3])


def test_buffers_that_a_forward_replaces_are_put_back():
    class Averaged(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(3))

        def forward(self, x):
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
            return x

    model = Averaged()
    before = model.mean
    check_loss(model, lambda model, batch: model(batch).square().mean(), torch.randn(6, 3))
    assert torch.equal(model.mean, torch.zeros(3))
    assert before.sum() == 0


class OfNumbers(nn.Module):
    """A loss of each row by parameters that are sparse, complex, recomputed or not used."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.embedding, self.linear = nn.Embedding(9, 4, sparse=kind == "sparse"), nn.Linear(4, 3)
        self.turn, self.unused = nn.Parameter(torch.randn(3, dtype=torch.complex64)), nn.Parameter(torch.ones(2))
        if kind == "frozen":
            self.requires_grad_(False)

    def forward(self, texts):
        embedded = self.embedding(texts).mean(1)
        if self.kind == "recomputed":
            return checkpoint(self.linear, embedded, use_reentrant=True)
        if self.kind == "differentiated twice":
            embedded = embedded.detach().requires_grad_()
            embedded = torch.autograd.grad(self.linear(embedded).tanh().sum(), embedded, create_graph=True)[0]
        output = self.linear(embedded)
        return (output * self.turn).abs() if self.kind == "complex" else output


@pytest.mark.parametrize("kind", ["sparse", "complex", "recomputed", "differentiated twice", "frozen"])
def test_gradients_of_all_kinds(kind):
    torch.manual_seed(0)
    model, batch = OfNumbers(kind), batch_of()
    for wrong in False, True:

        def loss(model, batch, wrong=wrong):
            mean = cross_entropy(model(batch["texts"]), batch["texts"][:, 0] % 3)
            return mean * (1 + wrong * batch["x"].mean())

        with pytest.warns(UserWarning, match="that of 8 rows is") if wrong else nullcontext():
            check_loss(model, loss, batch)
