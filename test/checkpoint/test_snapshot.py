"""Copies of a state in host memory: equal to it, independent of it, and in reused memory."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import variable_batch_size as vbs
from variable_batch_size.checkpoint.snapshot import Snapshot

SHARED = torch.arange(12.0)
TENSORS: dict[str, Tensor] = {
    "matrix": torch.randn(3, 4),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
    "integers": torch.arange(5),
    "booleans": torch.tensor([True, False]),
    "half": torch.randn(3).bfloat16(),
    "complex": torch.randn(3, dtype=torch.complex64),
    "transposed": torch.randn(3, 4).T,
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "expanded": torch.randn(3, 1).expand(3, 4),
    "every other": SHARED[::2],
    "overlapping": SHARED[1:5],
    "the same": SHARED[1:5],
    "other shape": SHARED.view(3, 4),
    "parameter": nn.Parameter(torch.randn(3)),
    "conjugated": torch.randn(3, dtype=torch.complex64).conj(),
    "sparse": torch.eye(3).to_sparse(),
}


def snapshot() -> Snapshot:
    return Snapshot(vbs.LocalBackend())


def dense(tensor: Tensor) -> Tensor:
    return tensor.detach().to_dense()


def test_copies_equal_tensors_of_every_kind() -> None:
    snap = snapshot()
    for _ in range(2):  # the second copies reuse the memory of the first
        copies = snap.copy({"part": TENSORS})["part"]
        for name, tensor in TENSORS.items():
            copy = copies[name]
            assert (type(copy), copy.dtype, copy.layout) == (Tensor, tensor.dtype, tensor.layout), name
            assert torch.equal(dense(copy), dense(tensor)), name


@pytest.mark.parametrize("name", sorted({*TENSORS} - {"expanded"}))  # torch cannot fill an expanded tensor
def test_a_copy_does_not_change_with_the_tensor(name: str) -> None:
    tensor = TENSORS[name].detach()
    copy, before = snapshot().copy({"part": tensor})["part"], dense(tensor).clone()
    try:
        tensor.zero_()
        assert torch.equal(dense(copy), before)
    finally:
        tensor.copy_(copy)


def test_a_tensor_that_occurs_twice_is_copied_once() -> None:
    tied = nn.Linear(3, 3)
    model = nn.Sequential(tied, tied)
    copy = snapshot().copy({"model": model.state_dict()})["model"]
    assert copy["0.weight"] is copy["1.weight"]
    assert copy["0.weight"] is not copy["0.bias"]


def test_memory_is_reused_for_tensors_of_the_same_layout_and_freed_otherwise() -> None:
    snap = snapshot()

    def addresses(*shapes: tuple[int, ...]) -> list[int]:
        state = {"part": [torch.randn(shape) for shape in shapes]}
        return [copy.data_ptr() for copy in snap.copy(state)["part"]]

    first = addresses((3, 4), (3, 4), (5,))
    assert len(set(first)) == 3
    assert sorted(addresses((5,), (3, 4), (3, 4))) == sorted(first)
    buffers = snap._buffers
    addresses((7,))
    assert [len(copies) for copies in snap._buffers.values()] == [1]
    assert len(buffers) == 2


def test_containers_are_copied_and_the_tensors_of_a_view_are_not() -> None:
    state: dict[str, Any] = {"a": [1, (2.5, None)], "b": OrderedDict(c=torch.ones(2))}
    snap = snapshot()
    copy, view = snap.copy({"part": state})["part"], snap.view({"part": state})["part"]
    state["a"].append(3)
    state["b"]["c"].zero_()
    assert copy["a"] == view["a"] == [1, (2.5, None)]
    assert (copy["b"]["c"].tolist(), view["b"]["c"].tolist()) == ([1, 1], [0, 0])


def test_rejects_a_tensor_subclass_that_cannot_be_loaded(tmp_path: Path) -> None:
    class Own(torch.Tensor):
        pass

    part = {"part": {"own": torch.ones(2).as_subclass(Own)}}
    snapshot = Snapshot(vbs.LocalBackend())
    for to_host in (snapshot.view, snapshot.copy):
        with pytest.raises(TypeError, match=r"plain Python values, got a .*Own at part\['own'\]; return"):
            to_host(part)
    kept = {"part": {"parameter": torch.nn.Parameter(torch.ones(2)), "buffer": torch.nn.Buffer(torch.ones(2))}}
    torch.save(snapshot.view(kept), tmp_path / "kept")
    assert torch.load(tmp_path / "kept", weights_only=True)["part"].keys() == {"parameter", "buffer"}
