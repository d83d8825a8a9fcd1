"""The examples of the pages on what arrives and on tokens: packed documents are exact, and a policy learns."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

import variable_batch_size as vbs
from helpers.commands import run
from helpers.pages import ROOT

EXAMPLES = ROOT / "examples"
LAUNCHERS = [[sys.executable], ["torchrun", "--standalone", "--nproc-per-node=2"]]


@pytest.fixture
def example(request, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module(request.param)


@pytest.mark.parametrize("example", ["packed_documents"], indirect=True)
def test_an_update_of_packed_documents_is_that_of_the_documents(example):
    torch.manual_seed(0)
    model = example.PackedGPT(1).double()
    documents = example.paragraphs(40)
    source = vbs.ArrivingBatches(
        max_tokens=512, counts=example.predicted, collate_fn=example.pack, num_replicas=1, rank=0
    )
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = vbs.ConstantOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), source)
    for update in vbs.updates([documents], optimizer):
        for packed in update:
            assert len(packed["tokens"]) <= 512
            optimizer.backward(example.loss_of(model, packed))
            optimizer.step()
    moved = [old - parameter.detach() for old, parameter in zip(before, model.parameters(), strict=True)]
    total = sum(example.predicted(documents))
    assert (optimizer.samples, optimizer.updates) == (total, 1)
    with torch.no_grad():
        for old, parameter in zip(before, model.parameters(), strict=True):
            parameter.copy_(old)
    model.zero_grad()
    for document in documents:
        loss = example.loss_of(model, example.pack([document]))
        (loss * (len(document) - 1) / total).backward()
    for step, parameter in zip(moved, model.parameters(), strict=True):
        torch.testing.assert_close(step, parameter.grad, rtol=0, atol=1e-12)


@pytest.mark.nightly("trains")
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_script_of_packed_documents_trains(launcher):
    flags = ["--documents", "1200", "--schedule", "0:2k 10k:4k"]
    done = run(*launcher, str(EXAMPLES / "packed_documents.py"), *flags, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in done.stdout.splitlines() if "loss" in line]
    assert losses, done.stdout
    assert min(losses) < 4.5  # of bytes: log(256) is 5.5


@pytest.mark.parametrize("example", ["rollouts"], indirect=True)
@pytest.mark.parametrize("rule", ["root", "adamscale"])
def test_a_policy_learns_from_groups_of_any_number(rule, example):
    shares, sizes = example.train(rule, 0.04, 0, updates=30)
    assert len(sizes) == len(shares) == 30
    assert max(sizes) > min(sizes)
    assert sum(shares[-5:]) > 2 * sum(shares[:5])


@pytest.mark.parametrize("example", ["rollouts"], indirect=True)
def test_trimmed_and_padded_batches_have_their_sizes(example):
    _, trimmed = example.train("constant", 0.01, 0, updates=6, cut="trim")
    assert all(size % 8 == 0 for size in trimmed)
    _, padded = example.train("constant", 0.01, 0, updates=2, cut="pad")
    assert padded == [example.CONTEXTS] * 2


@pytest.mark.nightly("trains")
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_script_of_rollouts_prints_what_the_policy_learns(launcher):
    flags = ["--rule", "adamscale", "--updates", "20"]
    done = run(*launcher, str(EXAMPLES / "rollouts.py"), *flags, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "of the rollouts succeed" in line]
    assert [line.split(":")[0] for line in lines] == ["update 0", "update 10"]


def test_the_examples_are_on_their_pages():
    for name, page in {"packed_documents": "tokens", "rollouts": "arriving"}.items():
        assert f"examples/{name}.py" in (Path(ROOT) / "docs" / f"{page}.md").read_text()
