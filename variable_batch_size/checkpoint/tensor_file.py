"""Files of tensors in the layout of safetensors, with the SHA-256 of the header and of each tensor.

A reader that needs some of the tensors reads and verifies these alone. Every byte of a file is covered by one hash.
The layout is written and read here, because the library copies all tensors in memory before it writes the first one,
and reads from local files only.

Source: https://github.com/huggingface/safetensors (format: length of the header, header as JSON, bytes of the tensors)
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import IO, Any, Final

import torch
from torch import Tensor

DTYPES: Final = {
    str(kind).removeprefix("torch."): kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)
}
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
# safetensors has no complex numbers: they are written as pairs of floats, in a last dimension of size 2. Dtypes in
# neither table are written as bytes ("U8"), in a last dimension of the size of an element.
_PAIRS: Final = {torch.complex64: "F32", torch.complex128: "F64"}


def write(file: IO[bytes], tensors: Mapping[str, Tensor], facts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Write tensors in host memory to a file, and return the description that `check` and `read` need.

    Args:
        file: written from its begin to its end, without a seek.
        tensors: dense tensors by name.
        facts: further entries of the description of each tensor, by its name.

    Returns:
        The number of `bytes` of the file and of its `header`, the `sha256` of the header, and the `chunks`, by the name
        of the tensor: its first byte and the one after its last byte in the file, its SHA-256, and its `facts`.

    Raises:
        OSError: if they cannot be written.
    """
    # The largest elements come first, so that each tensor begins at a multiple of the size of its elements.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    entries, chunks, begin = dict[str, Any](), dict[str, Any](), 0
    for name in order:
        tensor = tensors[name]
        shape = [*tensor.shape]
        if tensor.dtype in _NAMES:
            dtype = _NAMES[tensor.dtype]
        elif tensor.dtype in _PAIRS:
            dtype = _PAIRS[tensor.dtype]
            shape.append(2)
        else:
            dtype = "U8"
            shape.append(tensor.element_size())
        end = begin + tensor.nbytes
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        begin = end
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)  # the tensors begin at a multiple of 8 bytes
    header = len(header).to_bytes(8, "little") + header
    file.write(header)
    for name in order:
        contents = bytes_of(tensors[name].resolve_conj().resolve_neg().contiguous())
        file.write(contents)
        first, end = (len(header) + offset for offset in entries[name]["data_offsets"])
        digest = hashlib.sha256(contents).hexdigest()
        chunks[name] = {"begin": first, "end": end, "sha256": digest, **facts[name]}
    sizes = {"bytes": len(header) + begin, "header": len(header)}
    return {**sizes, "sha256": hashlib.sha256(header).hexdigest(), "chunks": chunks}


def check(file: IO[bytes], facts: Mapping[str, Any]) -> None:
    """Check the size and the header of a file; `read` verifies each tensor.

    Args:
        file: the file.
        facts: the description of the file that `write` returned.

    Raises:
        ValueError: if the file has another size or header.
    """
    size = file.seek(0, 2)
    file.seek(0)
    if size != facts["bytes"] or hashlib.sha256(file.read(facts["header"])).hexdigest() != facts["sha256"]:
        raise ValueError("the file has another size or header")


def read(file: IO[bytes], chunk: Mapping[str, Any], dtype: str) -> Tensor:
    """Read a tensor, or the part of it that the file has, and verify its checksum.

    Args:
        file: the file.
        chunk: the entry of the tensor in the `chunks` that `write` returned, with the `shape` of what is in the file.
        dtype: its name in torch, such as "float32".

    Raises:
        ValueError: if the file has other bytes at this place.
        MemoryError: if the host has too little memory.
    """
    size = math.prod(chunk["shape"]) * DTYPES[dtype].itemsize
    if size != chunk["end"] - chunk["begin"]:
        raise ValueError("a tensor has another size than its shape")
    try:
        tensor = torch.empty(chunk["shape"], dtype=DTYPES[dtype])
    except RuntimeError as error:  # which would say that the file is damaged
        raise MemoryError(
            f"{size:,} bytes for a tensor of a checkpoint cannot be allocated; free host memory"
        ) from error
    contents = bytes_of(tensor)  # the memory of the tensor, into which the file is read
    total = 0
    file.seek(chunk["begin"])
    while total < len(contents) and (num_read := file.readinto(contents[total:])):  # type: ignore[attr-defined]
        total += num_read
    if total != len(contents) or hashlib.sha256(contents).hexdigest() != chunk["sha256"]:
        raise ValueError("the bytes of a tensor have another checksum")
    return tensor


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor in host memory: its memory itself, and not a copy."""
    flat = tensor.as_strided((tensor.numel(),), (1,))  # a single element of a view may have another stride
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]
