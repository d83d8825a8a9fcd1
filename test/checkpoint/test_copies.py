"""Copies of a state in host memory: equal to it, independent of it, and in reused memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import variable_batch_size as vbs
from variable_batch_size.checkpoint.saving import Copies

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


def copies_of() -> Copies:
    return Copies(vbs.backend.LocalBackend())


def dense(tensor: Tensor) -> Tensor:
    return tensor.detach().to_dense()


def test_copies_equal_tensors_of_every_kind() -> None:
    kept = copies_of()
    for _ in range(2):  # the second copies reuse the memory of the first
        copies = kept.take(TENSORS)
        for name, tensor in TENSORS.items():
            copy = copies[name]
            assert (type(copy), copy.dtype, copy.layout) == (Tensor, tensor.dtype, tensor.layout), name
            assert torch.equal(dense(copy), dense(tensor)), name


@pytest.mark.parametrize("name", sorted({*TENSORS} - {"expanded"}))  # torch cannot fill an expanded tensor
def test_a_copy_does_not_change_with_the_tensor(name: str) -> None:
    tensor = TENSORS[name].detach()
    copy, before = copies_of().take({"part": tensor})["part"], dense(tensor).clone()
    try:
        tensor.zero_()
        assert torch.equal(dense(copy), before)
    finally:
        tensor.copy_(copy)


def test_memory_is_reused_for_tensors_of_the_same_layout_and_freed_otherwise() -> None:
    kept = copies_of()

    def addresses(*shapes: tuple[int, ...]) -> list[int]:
        tensors = {str(number): torch.randn(shape) for number, shape in enumerate(shapes)}
        return [copy.data_ptr() for copy in kept.take(tensors).values()]

    first = addresses((3, 4), (3, 4), (5,))
    assert len(set(first)) == 3
    assert sorted(addresses((5,), (3, 4), (3, 4))) == sorted(first)
    buffers = kept._buffers
    addresses((7,))
    assert [len(copies) for copies in kept._buffers.values()] == [1]
    assert len(buffers) == 2
