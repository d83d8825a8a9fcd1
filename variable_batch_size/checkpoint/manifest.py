"""The JSON of a checkpoint and its files of tensors: names, and whether they are intact."""

from __future__ import annotations

import importlib
import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import torch

from variable_batch_size.checkpoint import format, tensor_file
from variable_batch_size.checkpoint.format import MANIFEST
from variable_batch_size.checkpoint.tensor_file import Extent, FileEntry

DAMAGE = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)  # while reading any contents

_STATES = ("state", "random", "tensors", "files", "seal")
_TENSORS = re.compile(r"tensors-(0|[1-9][0-9]*)\.safetensors")


def file_name(rank: int) -> str:
    """Return the name of the file of tensors that a rank writes."""
    return f"tensors-{rank}.safetensors"


def is_file_name(name: str) -> bool:
    """Return whether a file of a checkpoint can have this name."""
    return name == MANIFEST or _TENSORS.fullmatch(name) is not None


def facts_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a manifest says of the training, without the states and where they are."""
    return {name: value for name, value in manifest.items() if name not in _STATES}


def files_of(manifest: Mapping[str, Any]) -> list[FileEntry]:
    """Return the files of tensors; raise one of `DAMAGE` if the manifest has other contents."""
    files = [FileEntry(**entry) for entry in manifest["files"]]
    if not all(_TENSORS.fullmatch(file.name) for file in files):
        raise ValueError("it has files of other names")
    return files


def extents_of(manifest: Mapping[str, Any], file: FileEntry) -> list[Extent]:
    """Return where a file has tensors."""
    chunks = [chunk for tensor in manifest["tensors"].values() for chunk in tensor["chunks"]]
    return [extent_of(chunk) for chunk in chunks if chunk["file"] == file.name]


def extent_of(chunk: Mapping[str, Any]) -> Extent:
    """Return where a file has a chunk of a tensor."""
    return Extent(chunk["begin"], chunk["end"], chunk["sha256"])


def verified_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of the checkpoint in `folder` if all checksums match, else None."""
    try:
        manifest = sealed_manifest(folder)
        for file in files_of(manifest):
            with opened(folder / file.name) as contents:
                if not tensor_file.is_intact(contents, file, extents_of(manifest, file)):
                    return None
        return manifest
    except DAMAGE:
        return None


def is_on_disk(path: object) -> bool:
    """Return whether a path is one of a file system, and not a URL with the methods of one."""
    return isinstance(path, Path)


def is_damage(error: Exception, path: Path) -> bool:
    """Return whether an error of `DAMAGE` means that `path` is damaged, and not that a store cannot be reached."""
    return is_on_disk(path) or not isinstance(error, OSError) or isinstance(error, FileNotFoundError)


def opened(path: Path) -> IO[bytes]:
    """Open a file to read it; on a disk without a buffer, because what is read is large."""
    return path.open("rb", buffering=0) if is_on_disk(path) else path.open("rb")


def read_text(path: Any, errors: str = "strict") -> str:
    """Return the text of a small file; of a store by one request."""
    contents: bytes = path.read_bytes() if is_on_disk(path) else path.fs.cat_file(path.path)
    return contents.decode(errors=errors)


def sealed_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint; raise one of `DAMAGE` if it is missing or has another checksum."""
    return format.loads(read_text(folder / MANIFEST))


def write_manifest(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write the facts and their checksum, and flush them to disk."""
    with (folder / MANIFEST).open("w", encoding="utf-8", newline="\n") as manifest:
        manifest.write(format.dumps(facts))
        flush_file(manifest)


def versions() -> dict[str, str]:
    """Return what writes a checkpoint."""
    return {"library": importlib.import_module("variable_batch_size").__version__, "torch": torch.__version__}


def merged(reports: Iterable[tuple[Any, Mapping[str, Any]]], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a manifest holds of files and tensors.

    Args:
        reports: of each rank that writes, its `FileEntry` and the chunks in that, by tensor.
        tensors: dtype, shape and stride of each, by name.

    Raises:
        ValueError: if a part of a tensor is in no file.
    """
    found = {name: {**facts, "chunks": list[Any]()} for name, facts in tensors.items()}
    entries = []
    for file, chunks in reports:
        if chunks:
            entries.append(file)
        for name, chunk in chunks.items():
            found[name]["chunks"].append({"file": file["name"], **chunk})
    for name, facts in found.items():
        if sum(math.prod(chunk.get("shape", facts["shape"])) for chunk in facts["chunks"]) != math.prod(facts["shape"]):
            raise ValueError(f"ranks have not written all of {name}")
    return {"files": entries, "tensors": found}


def flush_file(file: IO[Any]) -> None:
    """Flush a file to disk."""
    file.flush()
    os.fsync(file.fileno())
