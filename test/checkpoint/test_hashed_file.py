"""Files that hash what passes through them: each byte is read once, in any order of reading the checksum is right."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.properties import examples
from variable_batch_size.checkpoint import hashed_file
from variable_batch_size.checkpoint.hashed_file import HashingReader

reads = st.lists(st.tuples(st.integers(0, 120), st.integers(0, 50)), max_size=8)


@examples(200)
@given(contents=st.binary(max_size=100), reads=reads, block=st.integers(1, 40))
def test_any_order_of_reads_gives_the_contents_and_the_checksum(
    contents: bytes, reads: list[tuple[int, int]], block: int
) -> None:
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(hashed_file, "_BLOCK", block)
        path = Path(folder, "file")
        path.write_bytes(contents)
        with HashingReader(path) as file:
            for offset, length in reads:
                assert file.seek(offset) == file.tell() == offset
                assert file.read(length) == contents[offset : offset + length]
                assert file.tell() == offset + len(contents[offset : offset + length])
            assert file.seek(-min(3, len(contents)), os.SEEK_END) == max(0, len(contents) - 3)
            assert file.checksum() == (len(contents), hashlib.sha256(contents).hexdigest())


def test_torch_reads_a_large_file_once(tmp_path: Path) -> None:
    state = {"tensors": [torch.randn(300_000) for _ in range(10)], "number": 3}
    torch.save(state, tmp_path / "file")
    with HashingReader(tmp_path / "file") as file:
        loaded = torch.load(file, map_location="cpu", weights_only=True)
        size, digest = file.checksum()
        assert file.bytes_read < 1.01 * size
    assert digest == hashlib.sha256((tmp_path / "file").read_bytes()).hexdigest()
    assert all(map(torch.equal, loaded["tensors"], state["tensors"]))
