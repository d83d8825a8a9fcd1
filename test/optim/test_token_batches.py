"""Batches in tokens: the updates are those of whole batches, counted in tokens, in any world, whatever sums."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import variable_batch_size as vbs
from helpers.processes import run_job
from helpers.properties import examples
from variable_batch_size.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:With lengths= batch sizes are in tokens")  # of any trace
REF, LR = 40, 0.02
LENGTHS = np.random.default_rng(1).integers(1, 25, 90)
MARKS = np.minimum(LENGTHS, 7) * (np.arange(90) % 4 > 0)  # what counts in the loss
FEW = np.where(LENGTHS > 12, MARKS, 0)  # some microbatches have nothing that counts
TRACE = "0:60 2:150 4:25 9:200"


def text(number: int, length: int) -> torch.Tensor:
    """A sample: (tokens, 3)."""
    return torch.randn(length, 3, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


def model_of(width: int = 4) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1)).double()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.cos(number + torch.arange(float(parameter.numel()))).view_as(parameter))
    return model


def loss_of(model: nn.Module, rows: Any, lengths: Any, marks: Any, reduction: str) -> torch.Tensor:
    """The loss over the tokens that count: the first ones of each text, as many as `marks` says."""
    tokens = torch.cat([text(int(row), int(lengths[row])) for row in rows])
    counted = torch.cat([torch.arange(int(lengths[row])) < int(marks[row]) for row in rows])
    each = (model(tokens).squeeze(1) - tokens.sum(1).sin()).square() * counted
    total = each.sum()
    return total if reduction == "sum" else total / max(1, int(counted.sum()))


def train(backend, by="plain", lengths=LENGTHS, trace=TRACE, kind="linear", until=None, state=None, **options):
    """Train over two epochs, and return what ranks must have in common."""
    world = backend.world
    marks = options.pop("marks", lengths)
    sampling = {"max_tokens": 50, "epochs": 2, "on_end": "hold"} | options.pop("sampling", {})
    sampler = vbs.CustomSampler(len(lengths), trace, world.size, world.rank, lengths=lengths, counts=marks, **sampling)
    model = model_of()
    module = DistributedDataParallel(model) if by == "ddp" else fully_shard(model) if by == "fsdp" else model
    if by != "plain":
        options["model"] = module
    inner = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    wrapper = vbs.AdaScaleOptimizer if kind == "adascale" else vbs.LinearRuleOptimizer
    optimizer = wrapper(inner, sampler, REF, backend=backend, **options)
    if state is not None:
        state = copy.deepcopy(state)  # torch keeps its tensors
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=kind == "scaled")
    sizes = []
    for _ in vbs.remaining_epochs(sampler, optimizer):
        for update in vbs.updates(sampler, optimizer):
            sizes.append(optimizer.batch.batch_size)
            for rows in update:
                loss = loss_of(module, rows, lengths, marks, optimizer.reduction)
                if kind == "raw":
                    loss.backward()
                    optimizer.step()
                elif kind == "scaled":
                    optimizer.backward(loss, scaler=scaler)
                    scaler.step(optimizer)
                    scaler.update()
                else:
                    optimizer.backward(loss)
                    optimizer.step()
            if optimizer.updates == until:
                return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    weights = [parameter.full_tensor() if by == "fsdp" else parameter for parameter in model.parameters()]
    return [weight.tolist() for weight in weights], sizes, optimizer.samples, optimizer.updates


def whole_batches(lengths=LENGTHS, trace=TRACE, marks=None):
    """The plain loop of torch over whole batches, whose samples are those of the sampler in one process."""
    marks = lengths if marks is None else marks
    sampler = vbs.CustomSampler(len(lengths), trace, 1, 0, lengths=lengths, counts=marks, max_tokens=50, on_end="hold")
    model, sizes = model_of(), []
    inner = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    for number in range(2):
        epoch = sampler.batches.plan.epoch(number)
        for step in range(epoch.first_step, epoch.end_step):
            rows = np.concatenate(sampler.batches.parts(number, step))
            sizes.append(int(np.asarray(marks)[rows].sum()))
            inner.param_groups[0]["lr"] = LR * sizes[-1] / REF
            inner.zero_grad()
            loss_of(model, rows, lengths, marks, "mean").backward()
            inner.step()
    return [weight.tolist() for weight in model.parameters()], sizes, sum(sizes), len(sizes)


def assert_same(found, expected):
    assert found[1:] == expected[1:]
    for one, other in zip(found[0], expected[0], strict=True):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("linear", {}),
        ("raw", {}),
        ("scaled", {}),
        ("linear", {"reduction": "sum"}),
        ("raw", {"reduction": "sum"}),
        ("linear", {"sampling": {"pad": True}}),
        ("linear", {"sampling": {"reproducible": True}}),
        ("linear", {"noise": "microbatches"}),
        ("linear", {"marks": MARKS}),
        ("linear", {"marks": FEW, "noise": "microbatches", "sampling": {"reproducible": True}}),
    ],
    ids=lambda value: value if isinstance(value, str) else ", ".join(value),
)
def test_the_updates_are_those_of_whole_batches(kind, options, ranks):
    if options.get("sampling", {}).get("reproducible") and kind != "linear":
        pytest.skip("loops over updates")
    expected = whole_batches(marks=options.get("marks"))
    for found in run_ranks(lambda backend: train(backend, kind=kind, **options), ranks):
        assert_same(found, expected)


@pytest.mark.slow("starts processes")
@pytest.mark.parametrize("by", ["ddp", "fsdp"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_they_are_in_what_wraps_a_model(by, ranks):
    expected = whole_batches()
    for found in run_job("gloo", train, by, ranks=ranks):
        assert_same(found, expected)


@given(
    lengths=st.lists(st.integers(1, 20), min_size=2, max_size=40),
    trace=st.lists(st.integers(1, 60), min_size=1, max_size=6),
    ranks=st.integers(1, 4),
    after=st.integers(1, 3),
    stop=st.integers(1, 20),
)
@examples(60)
def test_any_lengths_any_trace_any_world_and_a_resume(lengths, trace, ranks, after, stop):
    try:
        expected = whole_batches(lengths, trace)
    except ValueError:
        assume(False)
    stop = min(stop, expected[3] - 1)
    state = run_ranks(lambda backend: train(backend, lengths=lengths, trace=trace, until=stop), ranks)[0]
    found = run_ranks(lambda backend: train(backend, lengths=lengths, trace=trace, state=state), after)
    for weights, sizes, samples, updates in found:
        assert_same((weights, expected[1][:stop] + sizes, samples, updates), expected)


def test_bits_do_not_depend_on_the_world():
    sampling = {"reproducible": True}
    first, *others = [run_ranks(lambda b: train(b, sampling=sampling), ranks)[0] for ranks in (1, 2, 3)]
    assert others == [first] * 2


def test_adascale_measures_the_noise_of_a_token_in_any_world():
    first, *others = [run_ranks(lambda b: train(b, kind="adascale"), ranks)[0] for ranks in (1, 2, 3)]
    for other in others:
        assert_same(other, first)


def test_the_estimate_of_the_noise_is_unbiased_if_microbatches_count_unequally():
    """Tokens whose gradients are independent: sigma^2 is that of one token, mu^2 that of the mean."""
    rng, mu, sigma = np.random.default_rng(0), 0.3, 2.0
    found = []
    for _ in range(4000):
        counts = rng.integers(1, 60, 5)
        groups = mu + sigma * rng.standard_normal(5) / np.sqrt(counts)
        total = counts.sum()
        mean = (counts * groups).sum() / total
        spread = (counts * groups**2).sum() / total
        found.append((total * (spread - mean**2) / 4, (5 * mean**2 - spread) / 4))
    sigma2, mu2 = np.mean(found, axis=0)
    assert sigma2 == pytest.approx(sigma**2, rel=0.05)
    assert mu2 == pytest.approx(mu**2, rel=0.1)


def test_a_second_denominator_is_refused():
    sampler = vbs.CustomSampler(4, 10, 1, 0, lengths=[3, 4, 5, 6], max_tokens=9)
    model = nn.Linear(1, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = vbs.ConstantOptimizer(inner, sampler, reduction="sum")
    with pytest.raises(ValueError, match="batches in tokens have one denominator, got counts= beside lengths="):
        vbs.updates(sampler, optimizer, counts=lambda rows: {"rows": len(rows)})
    for rows in sampler:
        optimizer.backward(model(torch.ones(len(rows), 1)).sum())
        with pytest.raises(ValueError, match="lengths= of the sampler counts tokens already"):
            optimizer.step(count=3)
        break
