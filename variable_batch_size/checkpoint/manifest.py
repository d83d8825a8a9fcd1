"""The manifest of a checkpoint: facts in JSON, the files of the state with their checksums, and its own checksum.

The state of a training is in `state.pt`, which rank 0 writes, and in larger worlds also in `shard-1.pt` and so on,
named after the ranks that write them. The manifest holds the size and SHA-256 of each and, under "seal", the SHA-256 of
itself.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, final

from variable_batch_size.checkpoint.hashed_file import HashingReader

STATE, MANIFEST = "state.pt", "manifest.json"
DAMAGE = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)  # while reading any contents

_SHARD = re.compile(r"shard-[1-9][0-9]*\.pt")


@final
class StateFile(NamedTuple):
    """A file of the state, as the manifest describes it."""

    name: str
    bytes: int
    sha256: str


def file_name(rank: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"shard-{rank}.pt" if rank else STATE


def is_file_name(name: str) -> bool:
    """Return whether a file of a checkpoint can have this name."""
    return name in (STATE, MANIFEST) or _SHARD.fullmatch(name) is not None


def state_files(manifest: Mapping[str, Any]) -> list[StateFile]:
    """Return the files of the state, that of rank 0 first; raise one of `DAMAGE` if the manifest has other contents."""
    state, *shards = files = [
        StateFile(**manifest["file"]),
        *(StateFile(**file) for file in manifest.get("shards", ())),
    ]
    if state.name != STATE or not all(_SHARD.fullmatch(shard.name) for shard in shards):
        raise ValueError("the manifest has files of other names")
    return files


def facts_of_files(files: Sequence[StateFile]) -> dict[str, Any]:
    """Return what a manifest holds of these files, that of rank 0 first."""
    state, *shards = (file._asdict() for file in files)
    return {"file": state, "shards": shards} if shards else {"file": state}


def verified_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of the checkpoint in `folder` if its checksums match, else None."""
    try:
        manifest = sealed_manifest(folder)
        files = state_files(manifest)
        if any((folder / file.name).stat().st_size != file.bytes for file in files):
            return None
        for file in files:
            with HashingReader(folder / file.name) as contents:
                if contents.checksum() != (file.bytes, file.sha256):
                    return None
        return manifest
    except DAMAGE:
        return None


def sealed_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint; raise one of `DAMAGE` if it is missing or has another checksum."""
    return _parse_manifest((folder / MANIFEST).read_bytes().decode())


def write_manifest(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write the facts and their checksum, and flush them to disk."""
    with (folder / MANIFEST).open("w", encoding="utf-8", newline="\n") as manifest:
        manifest.write(format_manifest(facts))
        flush_file(manifest)


def format_manifest(facts: Mapping[str, Any]) -> str:
    """Return the facts and their SHA-256 as JSON text; equal facts give equal text."""
    seal = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return json.dumps({**facts, "seal": seal}, indent=2, sort_keys=True) + "\n"


def _parse_manifest(text: str) -> dict[str, Any]:
    """Return the facts, with their SHA-256, of a text that `format_manifest` returned; raise ValueError for others."""
    manifest: dict[str, Any] = json.loads(text)
    facts = {key: value for key, value in manifest.items() if key != "seal"}
    if format_manifest(facts) != text:
        raise ValueError("checksum mismatch")
    return manifest


def flush_file(file: IO[Any]) -> None:
    """Flush a file to disk."""
    file.flush()
    os.fsync(file.fileno())
