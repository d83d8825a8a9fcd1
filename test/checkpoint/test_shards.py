"""Which rank writes which tensors: all of them once, in equal amounts, by the same decision on every rank."""

from __future__ import annotations

from collections import Counter, OrderedDict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import variable_batch_size as vbs
from helpers.properties import examples
from variable_batch_size.backend.agreement import Agreement
from variable_batch_size.checkpoint import format, publishing, shards
from variable_batch_size.checkpoint.disk import DiskFolder
from variable_batch_size.checkpoint.format import Encoded, encode, identity
from variable_batch_size.checkpoint.manifest import sealed_manifest
from variable_batch_size.checkpoint.publishing import Publisher, Save
from variable_batch_size.checkpoint.saving import Copies
from variable_batch_size.checkpoint.shards import Replicas, assign
from variable_batch_size.testing import run_ranks


@examples(300)
@given(
    sizes=st.lists(st.integers(1, 1000), max_size=30),
    world_size=st.integers(1, 9),
    others=st.integers(0, 3000),
    smallest=st.integers(1, 2000),
)
def test_the_ranks_write_equally_much(sizes: list[int], world_size: int, others: int, smallest: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "SMALLEST", smallest)
        ranks = assign(sizes, world_size, others)
    assert len(ranks) == len(sizes)
    writers = max(1, min(world_size, sum(sizes) // smallest))
    loads = Counter[int]()
    for rank, size in zip(ranks, sizes, strict=True):
        loads[rank] += size
    assert set(loads) <= {index * world_size // writers for index in range(writers)}
    mean = (sum(sizes) + others) / writers
    assert all(load + (0 if rank else others) <= mean + max(sizes) for rank, load in loads.items())


@st.composite
def states(draw: st.DrawFn) -> tuple[dict[str, Any], list[Tensor]]:
    """A state of nested containers whose tensors share some of the drawn storages, and those of them that are equal."""
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=6))
    bases = [torch.arange(float(length)) + 10 * number for number, length in enumerate(lengths)]
    equal = [base for base in bases if draw(st.booleans())]
    tensors = st.sampled_from(bases).flatmap(
        lambda base: st.sampled_from([base, base.detach(), base[: len(base) // 2], torch.nn.Parameter(base)])
    )
    plain = st.sampled_from([None, 1, 0.5, "text", torch.eye(2).to_sparse()])
    leaves = st.one_of(tensors, tensors, plain)
    trees = st.recursive(
        leaves,
        lambda tree: st.one_of(
            st.lists(tree, max_size=4),
            st.lists(tree, max_size=3).map(tuple),
            st.dictionaries(st.sampled_from(["a", "b", 3, "['x']"]), tree, max_size=4),
            st.dictionaries(st.sampled_from("abc"), tree, max_size=3).map(OrderedDict),
        ),
        max_leaves=12,
    )
    return draw(st.dictionaries(st.sampled_from(["model", "optimizer", "part"]), trees, min_size=1)), equal


def named(encoded: Encoded, tensors: list[Tensor]) -> set[str]:
    known = {identity(tensor) for tensor in tensors}
    return {name for name, tensor in encoded.tensors.items() if identity(tensor) in known}


@pytest.mark.slow("saves for many examples")
@examples(80)
@given(state=states(), world_size=st.integers(1, 4), wait=st.booleans(), data=st.data())
def test_what_the_ranks_write_together_is_the_state(
    state: tuple[dict[str, Any], list[Tensor]], world_size: int, wait: bool, data: st.DataObject
) -> None:
    """In any order of the ranks, the last of which publishes the checkpoint."""
    parts, equal = state
    encoded = encode(parts)
    replicas = [Replicas.find(encoded.tensors, named(encoded, equal)) for _ in range(world_size)]
    with TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "SMALLEST", 1)
        patch.setattr(publishing, "_PATIENCE_SECONDS", 0)
        writers = replicas[0].writers([found.summary for found in replicas])
        assert all(found.writers([found.summary] * world_size) == writers for found in replicas)
        folder = DiskFolder(Path(place))
        folder.lock()
        path = folder.next_path(1)
        folder.begin(path)
        ranks, agreements = sorted({0, *writers.values()}), run_ranks(Agreement, world_size)
        facts = {"state": encoded.json, "random": []}
        for rank in data.draw(st.permutations(ranks)):
            assert not path.exists()
            own = {name: tensor for name, tensor in encoded.tensors.items() if writers.get(name, 0) == rank}
            tensors = own if wait else Copies(vbs.backend.LocalBackend()).take(own)
            described = {name: format.described(tensor) for name, tensor in encoded.tensors.items()}
            Publisher(folder, 1, agreements[rank], "test").write(Save(1, path, ranks, tensors, {}, described, facts))
        loaded = vbs.read_checkpoint(path)["parts"]
        folder.unlock()
        assert len(sealed_manifest(path)["files"]) == len({writers.get(name, 0) for name in encoded.tensors})
    found = encode(loaded)
    assert found.json == encoded.json
    for name, tensor in encoded.tensors.items():
        assert torch.equal(found.tensors[name], tensor)
    assert writers.keys() <= named(encoded, equal)


def find(tensors: list[Tensor]) -> Replicas:
    found = encode({"model": tensors}).tensors
    return Replicas.find(found, found)


def test_ranks_that_find_different_tensors_leave_all_to_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "SMALLEST", 1)
    tensors = [torch.ones(3), torch.ones(4)]
    found = find(tensors)
    assert found.writers([found.summary] * 2) == {"model/0": 1}
    for other in (tensors[:1], tensors[::-1], [tensors[0].double(), tensors[1]]):
        different = find(other)
        assert found.writers([found.summary, different.summary]) == {}


def test_a_small_state_is_one_file() -> None:
    tensors = [torch.ones(shards.SMALLEST // 4 - 1) for _ in range(2)]
    found = find(tensors)
    assert found.writers([found.summary] * 2) == {}
    tensors = [torch.ones(shards.SMALLEST // 4) for _ in range(2)]
    found = find(tensors)
    assert found.writers([found.summary] * 2) == {"model/1": 1}
