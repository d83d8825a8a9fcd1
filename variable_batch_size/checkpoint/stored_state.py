"""A state as it is in a checkpoint: how it is written there, and read without running anything."""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any, NamedTuple, final

import torch

from variable_batch_size.checkpoint.folder import STATE, CheckpointFolder, whole


@final
class StoredState(NamedTuple):
    """What was read from a checkpoint that is whole."""

    path: Path
    sha256: str
    parts: dict[str, Any]
    rng: list[str]  # by rank


def write(
    folder: CheckpointFolder, keep: int, path: Path, facts: dict[str, Any], parts: dict[str, Any], rng: list[str]
) -> None:
    """Publish a state, and give up what is too old; a thread that does it holds nothing of the training.

    Raises:
        OSError: when it cannot be written; the text says what to do.
    """

    def save(file: IO[bytes]) -> None:
        torch.save({"parts": parts, "rng": rng}, file)

    try:
        folder.publish(path, facts, save)
    except OSError as error:
        raise OSError(
            f"a checkpoint must be written whole, but the one of update {facts['updates']} could not be, in "
            f"{folder.path} ({error.strerror}); make room or choose another folder (earlier checkpoints are as they "
            f"were)"
        ) from error
    folder.prune(keep)


def read(path: Path) -> StoredState | None:
    """The state of a checkpoint that is whole."""
    facts = whole(path)
    if facts is None:
        return None
    try:
        state = torch.load(path / STATE, map_location="cpu", weights_only=True)
        return StoredState(path, facts["file"]["sha256"], dict(state["parts"]), list(state["rng"]))
    except MemoryError:
        raise
    except Exception:  # whatever it is made of, somebody else has made it
        return None
