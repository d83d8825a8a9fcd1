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
from variable_batch_size.checkpoint import publication, shards
from variable_batch_size.checkpoint.folder import CheckpointFolder
from variable_batch_size.checkpoint.manifest import sealed_manifest
from variable_batch_size.checkpoint.publication import Publisher, Save
from variable_batch_size.checkpoint.shards import Replicas, assign
from variable_batch_size.checkpoint.snapshot import Snapshot, map_tensors


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


def tensors_of(parts: dict[str, Any]) -> dict[str, Tensor]:
    found = {}

    def look(tensor: Tensor, where: str) -> Tensor:
        found[where] = tensor
        return tensor

    map_tensors(parts, look)
    return found


@pytest.mark.slow("saves for many examples")
@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")  # of torch 2.15, in torch.load
@examples(80)
@given(state=states(), world_size=st.integers(1, 4), wait=st.booleans(), data=st.data())
def test_what_the_ranks_write_together_is_the_state(
    state: tuple[dict[str, Any], list[Tensor]], world_size: int, wait: bool, data: st.DataObject
) -> None:
    """In any order of the ranks, the last of which publishes the checkpoint."""
    parts, equal = state
    replicas = [Replicas.find(parts, equal) for _ in range(world_size)]
    with TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "SMALLEST", 1)
        patch.setattr(publication, "_PATIENCE_SECONDS", 0)
        writers = replicas[0].writers([found.summary for found in replicas])
        assert all(found.writers([found.summary] * world_size) == writers for found in replicas)
        folder, store = CheckpointFolder(Path(place)), torch.distributed.HashStore()
        folder.lock()
        path = folder.next_path(1)
        folder.begin(path)
        ranks = sorted({0, *writers.values()})
        for rank in data.draw(st.permutations(ranks)):
            assert not path.exists()
            snapshot = Snapshot(vbs.LocalBackend())
            to_host = snapshot.view if wait else snapshot.copy
            own = {where: replicas[rank].tensors[where] for where, writer in writers.items() if writer == rank}
            contents = to_host(own) if rank else {"parts": to_host(parts, writers), "rng": []}
            Publisher(folder, 1, rank, store).write(Save(1, path, ranks, contents, {}))
        loaded = vbs.read_checkpoint(path)["parts"]
        folder.unlock()
        assert len(sealed_manifest(path).get("shards", ())) == len(ranks) - 1
    expected, found = tensors_of(parts), tensors_of(loaded)
    assert list(found) == list(expected)
    for where, tensor in expected.items():
        assert torch.equal(found[where].to_dense(), tensor.detach().to_dense())
    storages = {id(base): base.untyped_storage().data_ptr() for base in equal if len(base)}
    for where in writers:
        assert expected[where].untyped_storage().data_ptr() in storages.values()
        tied = [other for other in writers if expected[other].data_ptr() == expected[where].data_ptr()]
        assert {writers[other] for other in tied} == {writers[where]}


def test_ranks_that_find_different_tensors_leave_all_to_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "SMALLEST", 1)
    tensors = [torch.ones(3), torch.ones(4)]
    found = Replicas.find({"model": tensors}, tensors)
    assert found.writers([found.summary] * 2) == {"model[0]": 1}
    for other in ({"model": tensors[:1]}, {"model": [*tensors[::-1]]}, {"model": [tensors[0].double(), tensors[1]]}):
        different = Replicas.find(other, [*other["model"]])
        assert found.writers([found.summary, different.summary]) == {}


def test_a_small_state_is_one_file() -> None:
    tensors = [torch.ones(shards.SMALLEST // 4 - 1) for _ in range(2)]
    found = Replicas.find({"model": tensors}, tensors)
    assert found.writers([found.summary] * 2) == {}
    tensors = [torch.ones(shards.SMALLEST // 4) for _ in range(2)]
    found = Replicas.find({"model": tensors}, tensors)
    assert found.writers([found.summary] * 2) == {"model[1]": 1}
