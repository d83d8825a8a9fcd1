"""What the page of stable things says is so: the versions of formats, public names, keys of states."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import variable_batch_size as vbs
from helpers.pages import DOCS
from variable_batch_size.checkpoint import contents, events
from variable_batch_size.data.plan import state
from variable_batch_size.data.streams import shards
from variable_batch_size.lab.evaluation import records

PAGE = (DOCS / "stability.md").read_text()
VERSIONS = {
    contents.MANIFEST: contents.VERSION,
    "optimizer.state_dict": state.VERSION,
    "the state of streams": shards._VERSION,
    events.FILE: events.VERSION,
    records.NAME: records.FORMAT,
}
ROOMS: list[Any] = [vbs, vbs.rules, vbs.adaptive, vbs.backend, vbs.testing]


@pytest.mark.parametrize("name", VERSIONS)
def test_the_versions_of_formats_are_those_of_the_page(name):
    (row,) = [line for line in PAGE.splitlines() if line.startswith("|") and name in line]
    assert row.split("|")[2].strip() == str(VERSIONS[name])


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.__name__)
def test_every_public_name_is_in_the_reference(room):
    reference = (DOCS / "api.md").read_text()
    names = [name for name in room.__all__ if not inspect.ismodule(getattr(room, name))]
    missing = [name for name in names if not re.search(rf"\b{name}\b", reference)]
    assert missing == [] or f".. automodule:: {room.__name__}\n" in reference


def test_the_state_of_an_optimizer_has_the_keys_of_the_page():
    dataset, model = TensorDataset(torch.zeros(8, 1)), torch.nn.Linear(1, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = vbs.LinearRuleOptimizer(inner, vbs.CustomSampler(dataset, 4, 1, 0, 2), 4)
    saved = optimizer.state_dict()
    assert saved.keys() == {*inner.state_dict(), "vbs"}
    assert {"sampler", "optimizer"} <= saved["vbs"].keys()
    torch.optim.SGD(model.parameters(), lr=1.0).load_state_dict({name: saved[name] for name in inner.state_dict()})
