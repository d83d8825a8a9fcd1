"""What rank 0 says of checkpoints: which one was restored or is damaged, and what to resume from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from variable_batch_size.checkpoint.manifest import is_on_disk

UNCALLED_STEP = (
    "Checkpoint.step() was never called, so that nothing was saved at the interval `every`; call it in the loop, after "
    "every optimizer.step()"
)


def damaged(folder: Path, reasons: Mapping[str, str], restored: Path) -> str:
    """Return the warning that these checkpoints are damaged, and what is restored instead."""
    names, verb = list(reasons), "is" if len(reasons) == 1 else "are"
    subject = f"Checkpoint {names[0]}" if len(names) == 1 else f"Checkpoints {', '.join(names)}"
    why = ", ".join(dict.fromkeys(reasons.values()))
    return f"{subject} in {folder} {verb} damaged ({why}); restoring {restored.name} instead"


def unreadable(folder: Path, reasons: Mapping[str, str], best: bool) -> str:
    """Return the error that all checkpoints, or all with a reported value, are damaged."""
    each = ", ".join(f"{name} ({reason})" for name, reason in reasons.items())
    which, other = (" with a reported value", "; restore() takes the newest one,") if best else ("", ";")
    return (
        f"no checkpoint{which} in {folder} can be read: {each}{other} copy intact ones there, or choose another folder"
    )


def absent(folder: Path, best: bool) -> str:
    """Return the line that there is nothing to restore."""
    where = folder.absolute() if is_on_disk(folder) else folder
    return f"No checkpoint{' with a reported value' * best} in {where}: nothing is restored."


def restored(
    path: Path,
    worlds: tuple[int, int],
    sizes: tuple[int, int],
    position: tuple[int, int, int],
    lost: str,
    newer: Sequence[str] = (),
) -> str:
    """Return the line that a checkpoint was restored.

    Args:
        path: the checkpoint.
        worlds: number of ranks that have saved it, and that restore it; 0: unknown.
        sizes: batch size of the last update, and of the next one; 0: unknown.
        position: updates, the epoch with which the training resumes, and samples so far.
        lost: number of updates that were made after it, in words.
        newer: names of the checkpoints that the next save deletes.
    """
    saved, own = worlds
    updates, epoch, samples = position
    world = f"world {saved} -> {own}, " if saved not in (0, own) else ""
    size = f"batch size {sizes[0]} -> {sizes[1]}, " if all(sizes) and sizes[0] != sizes[1] else ""
    deleted = f"; the next save deletes {', '.join(newer)}" if newer else ""
    at = f"update {updates}, epoch {epoch}, {samples} samples, lost {lost}"
    return f"Checkpoint {path.name} restored: {world}{size}{at}{deleted}."


def interrupted(folder: Path, path: Path | None, lost: int, best: bool) -> str:
    """Return the line that tells after an exception what to resume from.

    Args:
        folder: folder of the checkpoints.
        path: the checkpoint to resume from, or None.
        lost: number of updates that it does not hold.
        best: whether it was restored as the best one, and newer ones are still in the folder.
    """
    later = {0: "no update is lost", 1: "1 later update is lost"}.get(lost, f"{lost} later updates are lost")
    if path is None:
        return f"No checkpoint is in {folder}; {later.replace('later ', '')}, and the training has to begin again."
    which, call = ("best", "restore(best=True)") if best else ("newest", "restore()")
    return f"Checkpoint {path.name} is the {which} one; {later}; {call} resumes from it."
