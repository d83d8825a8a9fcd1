"""A loss of the whole batch equals that of one big batch by plain torch, in any cut and world."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy, normalize
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import variable_batch_size as vbs
from helpers.processes import run_job
from variable_batch_size.testing import run_ranks

SAMPLES, UPDATES, REF = 157, 12, 24
TRACE = "0:24 3:10 6:37 9:5"
MOST = 2.0  # norm of a gradient


class Towers(nn.Module):
    """Two encoders; `parts` of the model besides: "scale" in forward, "norm" for batch normalization, "dropout"."""

    def __init__(self, *parts: str) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(16) if "norm" in parts else nn.Identity()
        dropout = nn.Dropout(0.4) if "dropout" in parts else nn.Identity()
        self.image = nn.Sequential(nn.Linear(12, 16), norm, nn.Tanh(), dropout, nn.Linear(16, 8)).double()
        self.text = nn.Sequential(nn.Linear(7, 16), nn.Tanh(), nn.Linear(16, 8)).double()
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.inside = "scale" in parts
        generator = torch.Generator().manual_seed(1)  # ranks that are threads share that of torch
        with torch.no_grad():
            for parameter in [*self.image.parameters(), *self.text.parameters()]:
                parameter.uniform_(-0.3, 0.3, generator=generator)

    def forward(self, image, text):
        scale = self.scale.exp() if self.inside else 1
        return normalize(self.image(image), dim=1) * scale, normalize(self.text(text), dim=1)


def pairs():
    generator = torch.Generator().manual_seed(0)
    columns = [torch.randn(SAMPLES, width, dtype=torch.float64, generator=generator) for width in (12, 7)]
    return TensorDataset(*columns, torch.randint(9, (SAMPLES,), generator=generator))


def clip_loss(image, text, *, temperature=None):
    logits = image @ text.T * (1 if temperature is None else temperature.exp())
    labels = torch.arange(len(logits))
    return (cross_entropy(logits, labels) + cross_entropy(logits.T, labels)) / 2


def loss_of_classes(first, second, *, label, odd):
    """Pull together rows of one class, beside an order that only the plan's has: neighbors differ."""
    same = (label[:, None] == label).double()
    agreement = first @ second.T
    assert odd.dtype == torch.bool
    neighbors = (first[1:] * second[:-1]).sum() / len(first)
    return (agreement.logsumexp(1) - (agreement * same).sum(1) / same.sum(1) + odd * agreement[0]).mean() + neighbors


@dataclass(frozen=True)
class Kind:
    """A training: its model, what the loop passes, and what the optimizer and the sampler get."""

    parts: tuple[str, ...] = ("scale",)
    temperature: bool = False  # whether the loss has a parameter
    classes: bool = False  # whether it has targets, and embeddings by name
    scaled: bool = False
    two: bool = False  # whether each tower has an optimizer of its own
    options: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)

    def calls(self, net, model):
        """Return encode, loss and targets."""
        if self.classes:

            def encode(rows):
                return dict(zip(("first", "second"), net(*rows[:2]), strict=True))

            return encode, loss_of_classes, lambda rows: {"label": rows[2], "odd": rows[2] % 2 == 1}
        loss = partial(clip_loss, temperature=model.scale) if self.temperature else clip_loss
        return lambda rows: net(*rows[:2]), loss, None


KINDS = {
    "clip": Kind(),
    "fixed shape": Kind(sampling={"fixed_shape": True}),
    "temperature of the loss": Kind((), temperature=True),
    "targets, by name": Kind(classes=True),
    "a sum": Kind(options={"reduction": "sum"}),
    "a sum, fixed shape, temperature": Kind(
        (), temperature=True, options={"reduction": "sum"}, sampling={"fixed_shape": True}
    ),
    "clipped": Kind(options={"max_grad_norm": MOST}),
    "skipped": Kind(options={"skip_grad_norm": MOST}),
    "a GradScaler": Kind((), temperature=True, scaled=True),
    "two optimizers": Kind(two=True),
}


def train(backend, kind, by="bare", minibatch_size=4):
    """Train; return the weights, and the loss of each update."""
    model, world = Towers(*kind.parts), backend.world
    net: Any = model
    if by == "ddp":
        net = DistributedDataParallel(model)
    if by == "fsdp2":
        net = fully_shard(model)
    data = pairs()
    sampler = vbs.CustomSampler(
        data, TRACE, world.size, world.rank, minibatch_size, max_updates=UPDATES, **kind.sampling
    )
    create = partial(vbs.RootRuleOptimizer, sampler=sampler, ref_batchsize=REF, model=net, **kind.options)
    if by == "bare":
        create = partial(create, backend=backend)
    groups = [model.image.parameters(), [*model.text.parameters(), model.scale]] if kind.two else [net.parameters()]
    optimizer, *others = [create(torch.optim.AdamW(list(group), lr=0.01)) for group in groups]
    encode, loss, targets = kind.calls(net, model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10) if kind.scaled else None
    options: dict[str, Any] = {"targets": targets, "scaler": scaler, "others": others}
    loader, losses = DataLoader(data, batch_sampler=sampler), []
    for _ in vbs.remaining_epochs(sampler, optimizer):
        for update in vbs.updates(loader, optimizer):
            losses.append(float(vbs.whole_batch(optimizer, update, encode=encode, loss=loss, **options)))
            assert float(optimizer.logged["loss"]) == pytest.approx(losses[-1], rel=1e-6)  # float32
    weights = [one.full_tensor() if isinstance(one, DTensor) else one for one in model.parameters()]
    return torch.cat([weight.detach().flatten() for weight in weights]), losses


def train_by_hand(kind):
    """Train by plain torch, on whole batches."""
    model = Towers(*kind.parts)
    encode, loss, targets = kind.calls(model, model)
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    data, sampler = pairs(), vbs.CustomSampler(SAMPLES, TRACE, 1, 0, max_updates=UPDATES)
    losses, limit = [], kind.options.get("skip_grad_norm", np.inf)
    for epoch in range(2):
        place = sampler.batches.plan.epoch(epoch)
        for number in range(place.first_step, place.end_step):
            step = sampler.batches.plan.step(place, number)
            rows = data[sampler.batches.order(epoch)(np.arange(step.start, step.start + step.batch_size))]
            inner.param_groups[0]["lr"] = 0.01 * (step.batch_size / REF) ** 0.5
            inner.zero_grad()
            found = encode(rows)
            by_name = found if isinstance(found, dict) else {}
            value = loss(*(() if by_name else found), **by_name, **({} if targets is None else targets(rows)))
            value.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), kind.options.get("max_grad_norm", np.inf))
            losses.append(value.item())
            if norm <= limit or len(losses) == 1:  # the first update is made
                inner.step()
    return torch.cat([one.detach().flatten() for one in model.parameters()]), losses


def check(found, kind):
    expected, losses = train_by_hand(kind)
    for weights, losses_of_rank in found:
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(losses_of_rank, losses, rtol=1e-12, atol=0)


@pytest.mark.parametrize("minibatch_size", [4, 7])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", KINDS)
def test_it_equals_one_big_batch(name, ranks, minibatch_size):
    kind = KINDS[name]
    check(run_ranks(lambda backend: train(backend, kind, minibatch_size=minibatch_size), ranks), kind)


def train_all(backend, by, names, sizes):
    return {(name, size): train(backend, KINDS[name], by, size) for name in names for size in sizes}


ALL = pytest.mark.slow("each kind in both cuts")
FITS = {"ddp": list(KINDS), "fsdp2": [name for name in KINDS if not (KINDS[name].temperature or KINDS[name].two)]}


@pytest.mark.parametrize(
    ("ranks", "quick"), [(2, True), *(pytest.param(ranks, False, marks=ALL) for ranks in (1, 2, 3))]
)
@pytest.mark.parametrize("by", FITS)
def test_it_equals_one_big_batch_whoever_sums(by, ranks, quick):
    names, sizes = (FITS[by][:2], (4,)) if quick else (FITS[by], (4, 7))
    by_rank = run_job("gloo", train_all, by, names, sizes, ranks=ranks)
    for name, size in by_rank[0]:
        check([of_rank[name, size] for of_rank in by_rank], KINDS[name])


def record_passes(backend, by, parts):
    """Return what `encode` has returned for each microbatch, in both passes, and the buffers at the end."""
    model, data = Towers(*parts), pairs()
    net: Any = DistributedDataParallel(model) if by == "ddp" else model
    sampler = vbs.CustomSampler(data, TRACE, backend.world.size, backend.world.rank, 4, max_updates=8)
    optimizer = vbs.RootRuleOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), sampler, REF, model=net)
    seen: dict[tuple[int, int], list[torch.Tensor]] = {}
    torch.manual_seed(backend.world.rank)

    def encode(rows):
        found = net(*rows[:2])
        seen.setdefault((optimizer.updates, int(rows[0].sum() * 1e6)), []).append(found[0].detach())
        return found

    states = []
    for update in vbs.updates(DataLoader(data, batch_sampler=sampler), optimizer):
        vbs.whole_batch(optimizer, update, encode=encode, loss=clip_loss)
        states.append(torch.get_rng_state())
    assert any(not torch.equal(states[0], state) for state in states) == ("dropout" in parts)
    return [*seen.values()], {name: buffer.clone() for name, buffer in model.named_buffers()}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("by", ["bare", "ddp"])
def test_both_passes_draw_the_same_and_write_buffers_once(by, ranks):
    parts = ("scale", "norm", "dropout")
    for passes, buffers in run_job("gloo", record_passes, by, parts, ranks=ranks):
        assert all(len(found) == 2 and torch.equal(*found) for found in passes)
        if ranks == 1:  # others have microbatches that they replay
            assert buffers["image.1.num_batches_tracked"] == len(passes)


def attempt(*, encode=None, loss=clip_loss, sampling=None, options=None, read=0, targets=None, counts=None):
    model = Towers("scale")
    sampler = vbs.CustomSampler(pairs(), TRACE, 1, 0, **{"minibatch_size": 8, **(sampling or {})})
    kind = (options or {}).pop("kind", vbs.RootRuleOptimizer)
    optimizer = kind(torch.optim.SGD(model.parameters(), lr=0.1), sampler, REF, **(options or {}))
    for update in vbs.updates(DataLoader(pairs(), batch_sampler=sampler), optimizer, counts=counts):
        for _ in range(read):
            next(iter(update))
        calls = {"encode": encode or (lambda rows: model(*rows[:2])), "loss": loss, "targets": targets}
        vbs.whole_batch(optimizer, update, **calls)
        return


@pytest.mark.parametrize(
    ("mistake", "error", "message"),
    [
        ({"encode": lambda rows: None}, TypeError, "encode must return tensors with a row for each of the 8 of its"),
        ({"encode": lambda rows: rows[0][:3]}, ValueError, "a row for each of the 8 .* got one of shape (3, 12)"),
        ({"encode": lambda rows: rows[0].sum()}, ValueError, "a row for each of the 8 .* got one of shape ()"),
        (
            {"encode": lambda rows: rows[:2], "loss": lambda x, y: x.sum()},
            ValueError,
            "return tensors that depend on",
        ),
        ({"loss": lambda x, y: 3.0}, TypeError, "loss must return a tensor with one element, got 3.0"),
        ({"loss": lambda x, y: x}, ValueError, "loss must return a tensor with one element, got one of shape (24, 8)"),
        ({"loss": lambda x, y: x.detach().sum()}, ValueError, "loss must depend on the embeddings of the batch"),
        ({"targets": lambda rows: rows[2]}, TypeError, "targets must return a dict of tensors"),
        ({"targets": lambda rows: {"label": rows[2][:1]}}, ValueError, "targets must return tensors with a row for"),
        ({"read": 1}, RuntimeError, "needs all microbatches of an update, but 1 of 3 were read before"),
        ({"counts": lambda rows: {"rows": len(rows[0])}}, ValueError, "needs updates without counts"),
        ({"sampling": {"reproducible": True}}, ValueError, "got reproducible=True, which seeds one after the other"),
        ({"options": {"kind": vbs.AdaScaleOptimizer}}, ValueError, "a rule that does not compare microbatches"),
        ({"options": {"noise": "microbatches"}}, ValueError, "a rule that does not compare microbatches"),
        (
            {"sampling": {"minibatch_size": None, "lengths": [1] * SAMPLES, "max_tokens": 8}},
            ValueError,
            "batches of rows that a plan deals, got lengths=",
        ),
    ],
)
def test_a_mistake_is_told(mistake, error, message):
    pattern = ".*".join(map(re.escape, message.split(" .* ")))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        with pytest.raises(error, match=pattern):
            attempt(**mistake)


def test_autocast_around_it_trains_the_weights():
    """Pass 1 casts weights without a graph, which autocast would keep for pass 2."""
    model = nn.Linear(12, 8)
    data = TensorDataset(torch.randn(24, 12))
    sampler = vbs.CustomSampler(data, "0:24", 1, 0, 8, max_updates=1)
    optimizer = vbs.RootRuleOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), sampler, REF)
    before = model.weight.detach().clone()
    for update in vbs.updates(DataLoader(data, batch_sampler=sampler), optimizer):
        with torch.autocast("cpu", torch.bfloat16):
            calls = {"encode": lambda rows: model(rows[0]), "loss": lambda x: (x @ x.T).square().mean()}
            vbs.whole_batch(optimizer, update, **calls)
    assert not torch.equal(model.weight, before)


# What encode and loss may do. ------------------------------------------------------------------------------------


def trained_by(encode, loss=clip_loss, parts=(), minibatch_size=4, **options):
    """Train by SGD; return the model."""
    model, data = Towers(*parts), pairs()
    sampler = vbs.CustomSampler(data, "0:8 2:11", 1, 0, minibatch_size, max_updates=5)
    optimizer = vbs.ConstantOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), sampler, model=model, **options)
    for update in vbs.updates(DataLoader(data, batch_sampler=sampler), optimizer):
        vbs.whole_batch(optimizer, update, encode=partial(encode, model), loss=loss)
    return model


def test_encode_may_enable_gradients():
    def encode(model, rows):
        with torch.enable_grad():
            return model(*rows[:2])

    found, wanted = trained_by(encode), trained_by(lambda model, rows: model(*rows[:2]))
    for one, other in zip(found.parameters(), wanted.parameters(), strict=True):
        assert torch.equal(one, other)


def test_rows_that_encode_changes_raise():
    with pytest.raises(RuntimeError, match=r"leave the rows of a microbatch as they are.* but changed them in place"):
        trained_by(lambda model, rows: model(rows[0].div_(2), rows[1]))


@pytest.mark.parametrize("minibatch_size", [4, 64])
def test_running_statistics_are_those_of_one_pass(minibatch_size):
    wanted = Towers("norm").image[1]

    def encode(model, rows):
        if torch.is_grad_enabled():  # the pass that trains
            with torch.no_grad():
                wanted.double()(model.image[0](rows[0]))
        return model(*rows[:2])

    found = trained_by(encode, parts=("norm",), minibatch_size=minibatch_size).image[1]
    assert found.num_batches_tracked == wanted.num_batches_tracked > 0
    torch.testing.assert_close(found.running_mean, wanted.running_mean)
    torch.testing.assert_close(found.running_var, wanted.running_var)


def test_a_loss_draws_other_numbers_in_each_update():
    drawn = []

    def loss(image, text):
        drawn.append(torch.rand(()).item())
        return clip_loss(image, text)

    trained_by(lambda model, rows: model(*rows[:2]), loss)
    assert len({*drawn}) == len(drawn) == 5
