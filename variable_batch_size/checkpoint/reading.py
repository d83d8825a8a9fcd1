"""Read a checkpoint: every file once, verified, and without executing code from it."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from variable_batch_size._validation import value_error
from variable_batch_size.checkpoint.folder import CheckpointFolder
from variable_batch_size.checkpoint.hashed_file import HashingReader
from variable_batch_size.checkpoint.manifest import DAMAGE, STATE, StateFile, sealed_manifest, state_files
from variable_batch_size.checkpoint.snapshot import map_tensors


@final
class DamagedError(ValueError):
    """A checkpoint is not intact; the message says why."""


def read_checkpoint(path: str | os.PathLike[str], *, best: bool = False) -> dict[str, Any]:
    """Return the contents of a checkpoint in host memory, whichever number of files it has.

    It reads each file once, verifies its checksum and executes no code from it. The state of the model is
    ``read_checkpoint("runs/a")["parts"]["model"]``.

    Args:
        path: the folder of the training, of which the newest intact checkpoint is read; or that of a checkpoint, such
            as `checkpoint.latest`.
        best: whether to read the best checkpoint of the training, by the criterion with which the newest of them was
            reported. One that is damaged is skipped with a RuntimeWarning.

    Returns:
        The state dicts by name under "parts", and the host RNG states by rank under "rng".

    Raises:
        ValueError: if there is no intact checkpoint, with what is wrong; or `best` is True and no value was reported.
    """
    folder = CheckpointFolder(Path(path))
    if not folder.path.exists():
        raise value_error("path must be the folder of a checkpoint or of a training", path, "there is no such folder")
    within = folder.candidates(best=best)
    if best and not within:
        requirement = "best=True needs the folder of a training with a reported value"
        raise value_error(requirement, path, 'pass best="min:loss" to its Checkpoint, and call report(loss=...)')
    damaged: list[str] = []
    for candidate in within or [folder.path]:
        try:
            contents = read_verified(candidate)[0]
        except DamagedError as error:
            damaged.append(f"{candidate} ({error})")
            continue
        if damaged:
            message = f"Skipped damaged checkpoints: {', '.join(damaged)}; reading {candidate}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        return contents
    requirement = "path must be the folder of an intact checkpoint, or of a training that has one"
    raise value_error(requirement, ", ".join(damaged), "pass another one")


def read_verified(path: Path) -> tuple[dict[str, Any], str]:
    """Return the contents of a checkpoint and the checksums of its files.

    Raises:
        DamagedError: if it is missing or damaged.
    """
    try:
        files = state_files(sealed_manifest(path))
    except DAMAGE as error:
        raise _damaged(error, "the manifest") from None
    state, *shards = [_read(path / file.name, file) for file in files]
    try:
        state = {"parts": dict(state["parts"]), "rng": list(state["rng"])}
        if shards:
            tensors = {where: tensor for shard in shards for where, tensor in shard.items()}
            state["parts"] = map_tensors(state["parts"], lambda tensor, where: _filled(tensor, tensors.get(where)))
    except DAMAGE as error:  # another program can have published any content with a valid checksum
        raise _damaged(error, STATE) from None
    return state, " ".join(file.sha256 for file in files)


def _read(path: Path, expected: StateFile) -> Any:
    error: Exception | None = None
    contents = None
    try:
        if path.stat().st_size != expected.bytes:
            raise DamagedError(f"checksum mismatch of {path.name}")
        with HashingReader(path) as file:
            try:
                contents = torch.load(file, map_location="cpu", weights_only=True)  # type: ignore[arg-type]
            except Exception as unreadable:  # perhaps because of the damage that the checksum shows
                error = unreadable
            if file.checksum() != (expected.bytes, expected.sha256):
                raise DamagedError(f"checksum mismatch of {path.name}")
    except OSError as missing:
        raise _damaged(missing, path.name) from None
    if isinstance(error, MemoryError):
        raise error
    if error is not None:
        raise _damaged(error, path.name)
    return contents


def _filled(tensor: Tensor, saved: Tensor | None) -> Tensor:
    """Return the tensor that another rank has saved in place of one on the meta device."""
    if not tensor.is_meta:
        return tensor
    if saved is None or (saved.shape, saved.dtype) != (tensor.shape, tensor.dtype):
        raise ValueError("a tensor is in none of its files")
    return saved


def _damaged(error: Exception, what: str) -> DamagedError:
    return DamagedError(f"{what} is {'missing' if isinstance(error, FileNotFoundError) else 'unreadable'}")
