"""What rank 0 says of checkpoints: which one was restored or is damaged, and what to resume from."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

UNCALLED_STEP = (
    "Checkpoint.step() was never called, so that nothing was saved at the interval `every`; call it in the loop, after "
    "every optimizer.step()"
)


def say(line: str) -> None:
    """Print a line to standard error."""
    print(line, file=sys.stderr, flush=True)


def damaged(folder: Path, reasons: Mapping[str, str], restored: Path | None, best: bool) -> str:
    """Return the warning that these checkpoints are damaged, and what is restored instead.

    Args:
        folder: folder of the checkpoints.
        reasons: by the names of the checkpoints, what is wrong with them.
        restored: the checkpoint that is restored, or None.
        best: whether only checkpoints with a reported value count.
    """
    names, verb = list(reasons), "is" if len(reasons) == 1 else "are"
    subject = f"Checkpoint {names[0]}" if len(names) == 1 else f"Checkpoints {', '.join(names)}"
    why = ", ".join(dict.fromkeys(reasons.values()))
    if restored:
        action = f"restoring {restored.name} instead"
    elif best:
        action = "restoring nothing, because no other checkpoint with a reported value is left"
    else:
        action = "starting from the beginning, because no other checkpoint is left"
    return f"{subject} in {folder} {verb} damaged ({why}); {action}"


def absent(folder: Path, best: bool) -> str:
    """Return the line that there is nothing to restore."""
    return f"No checkpoint{' with a reported value' * best} in {folder.absolute()}: nothing is restored."


def restored(path: Path, epoch: int, samples: int, newer: Sequence[str] = ()) -> str:
    """Return the line that a checkpoint was restored.

    Args:
        path: the checkpoint.
        epoch: the epoch with which the training resumes.
        samples: number of samples of the training so far.
        newer: names of the checkpoints that the next save deletes.
    """
    deleted = f"; the next save deletes {', '.join(newer)}" if newer else ""
    return f"Checkpoint {path.name} restored: epoch {epoch}, {samples} samples{deleted}."


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
