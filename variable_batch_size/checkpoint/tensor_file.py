"""Files of tensors in the layout of safetensors, whose SHA-256 is that of the header and of each tensor.

A reader that needs some of the tensors reads and verifies these alone. Every byte of a file is covered by one hash.
The layout is written and read here, because the library copies all tensors in memory before it writes the first one,
and reads from local files only.

Source: https://github.com/huggingface/safetensors (format: length of the header, header as JSON, bytes of the tensors)
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import IO, Any, Final, NamedTuple, final

import torch
from torch import Tensor

from variable_batch_size.checkpoint.format import DTYPES, Json

_NAMES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_PAIRS: Final = {torch.complex64: "F32", torch.complex128: "F64"}  # as pairs of these; all others are written as bytes


@final
class FileEntry(NamedTuple):
    """A file, as the JSON of a checkpoint describes it.

    Attributes:
        name: its name.
        bytes: its size.
        header: SHA-256 of all bytes before those of the tensors.
    """

    name: str
    bytes: int
    header: str


@final
class Extent(NamedTuple):
    """Where a file has a tensor: bytes from `begin` to `end`, with their SHA-256."""

    begin: int
    end: int
    sha256: str


def write(file: IO[bytes], name: str, tensors: Mapping[str, Tensor]) -> tuple[FileEntry, dict[str, Extent]]:
    """Write tensors in host memory, and return what the JSON of the checkpoint says of the file and of each tensor.

    Args:
        file: where to write, in order.
        name: name of the file.
        tensors: dense tensors.

    Raises:
        OSError: if it cannot be written.
    """
    entries, begin = dict[str, Any](), 0
    by_alignment = sorted(tensors, key=lambda key: (-tensors[key].element_size(), key))
    for key in by_alignment:
        tensor = tensors[key]
        kind, size = tensor.dtype, tensor.element_size()
        last = [] if kind in _NAMES else [2 if kind in _PAIRS else size]
        name_of_kind = _NAMES.get(kind) or _PAIRS.get(kind, "U8")
        end = begin + tensor.numel() * size
        entries[key] = {"dtype": name_of_kind, "shape": [*tensor.shape, *last], "data_offsets": [begin, end]}
        begin = end
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    header = len(header).to_bytes(8, "little") + header
    _write_all(file, header)
    extents = {}
    for key in by_alignment:
        contents = _bytes_of(tensors[key].resolve_conj().resolve_neg().contiguous())
        _write_all(file, contents)
        start, stop = (len(header) + offset for offset in entries[key]["data_offsets"])
        extents[key] = Extent(start, stop, hashlib.sha256(contents).hexdigest())
    return FileEntry(name, len(header) + begin, hashlib.sha256(header).hexdigest()), extents


def read(file: IO[bytes], extent: Extent, facts: Mapping[str, Json]) -> Tensor:
    """Return a tensor that a file has.

    Args:
        file: the file.
        extent: where it has the tensor.
        facts: what the JSON says of the tensor: dtype, shape and stride.

    Raises:
        ValueError: if the file has other bytes there.
    """
    dtype, shape = DTYPES[facts["dtype"]], facts["shape"]
    if math.prod(shape) * dtype.itemsize != extent.end - extent.begin:
        raise ValueError("a tensor has another size than its shape")
    tensor = torch.empty(shape, dtype=dtype)
    contents = _bytes_of(tensor)
    file.seek(extent.begin)
    if _read_into(file, contents) != len(contents) or hashlib.sha256(contents).hexdigest() != extent.sha256:
        raise ValueError("the bytes of a tensor have another checksum")
    if "stride" not in facts:
        return tensor
    return torch.empty_strided(shape, facts["stride"], dtype=dtype).copy_(tensor)


def check(file: IO[bytes], entry: FileEntry, extents: Sequence[Extent]) -> None:
    """Check the size of a file, and its header; that its tensors are right shows when they are read.

    Raises:
        ValueError: if they are not those that the JSON of the checkpoint says.
    """
    first = min((extent.begin for extent in extents), default=entry.bytes)
    last = max((extent.end for extent in extents), default=entry.bytes)
    size = file.seek(0, 2)
    file.seek(0)
    if size != entry.bytes or last != size or _digest(file, first) != entry.header:
        raise ValueError("the file has another size or header")


def is_intact(file: IO[bytes], entry: FileEntry, extents: Sequence[Extent]) -> bool:
    """Return whether a file has all bytes that the JSON of the checkpoint says."""
    try:
        check(file, entry, extents)
    except ValueError:
        return False
    return all(_digest(file, extent.end - extent.begin) == extent.sha256 for extent in sorted(extents))


_BLOCK = 1 << 20  # bytes


def _digest(file: IO[bytes], length: int) -> str:
    digest, block = hashlib.sha256(), memoryview(bytearray(min(_BLOCK, length)))
    while length > 0:
        count = _read_into(file, block[:length])
        if not count:
            break
        digest.update(block[:count])
        length -= count
    return digest.hexdigest()


def _write_all(file: IO[bytes], contents: bytes | memoryview) -> None:
    """Write all bytes: a file without a buffer takes at most 2 GiB at a time, and less where the space ends."""
    left = memoryview(contents)
    while left:
        left = left[file.write(left) :]


def _read_into(file: IO[bytes], buffer: memoryview) -> int:
    count = 0
    while count < len(buffer) and (more := file.readinto(buffer[count:])):  # type: ignore[attr-defined]
        count += more
    return count


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
