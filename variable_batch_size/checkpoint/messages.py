"""What rank 0 says of checkpoints: which one was restored or is damaged, and what to resume from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

UNCALLED_STEP = (
    "Checkpoint.step() was never called, so that nothing was saved at the interval `every`; call it in the loop, after "
    "every optimizer.step()"
)


def damage(folder: str, reasons: Mapping[str, str], restored: str) -> str:
    """Return the warning that these checkpoints are damaged, and what is restored instead."""
    listed = ", ".join(f"{name} ({reason})" for name, reason in reasons.items())
    return f"Damaged checkpoints in {folder}: {listed}; restoring {restored} instead"


def no_intact(folder: str, reasons: Mapping[str, str], which: str) -> str:
    """Return the error that all checkpoints, or all with a reported value, are damaged."""
    listed = ", ".join(f"{name} ({reason})" for name, reason in reasons.items())
    other = " restore() takes the newest one," if which else ""
    return f"no checkpoint{which} in {folder} can be read: {listed};{other} copy an intact one to another folder"


def restored_line(
    name: str,
    worlds: tuple[int, int],
    sizes: tuple[int, int],
    at: tuple[int, int, int],
    lost: str,
    newer: Sequence[str],
) -> str:
    """Return the line that a checkpoint was restored."""
    world = f"world {worlds[0]} -> {worlds[1]}, " if worlds[0] not in (0, worlds[1]) else ""
    size = f"batch size {sizes[0]} -> {sizes[1]}, " if all(sizes) and sizes[0] != sizes[1] else ""
    deleted = f"; the next save deletes {', '.join(newer)}" if newer else ""
    position = f"update {at[0]}, epoch {at[1]}, {at[2]} samples, lost {lost}"
    return f"Checkpoint {name} restored: {world}{size}{position}{deleted}."


def ranks_suffix(names: Sequence[str]) -> str:
    """Return what follows a line, if the ranks of another world have got what rank 0 had of these."""
    return f" In this world all ranks have what rank 0 had of {_few_of(names)}." if names else ""


def saved_for_each_line(names: Sequence[str], size: int) -> str:
    """Return the line that ranks differ in these, so that each one's are saved, of so many bytes a rank."""
    return f"Saved for each rank, because they differ: {_few_of(names)} ({size:,} bytes a rank)."


def kept_of_first_warning(names: Sequence[str]) -> str:
    """Return the warning that ranks differ in these, and only rank 0 can save."""
    return (
        f"ranks differ in {_few_of(names)}, and only rank 0 saves its own, because not all of them share the folder; "
        f"choose a folder that all ranks share"
    )


def rounding_warning(described: str, rank: int) -> str:
    """Return the warning that a tensor of a rank differs from that of rank 0 by rounding."""
    return (
        f"ranks should hold the same parameters and states of optimizers, but {described} on rank {rank} differs by "
        f"rounding from that on rank 0, as on devices of different kinds; that of one rank is saved"
    )


def _few_of(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} others" if len(names) > 3 else "")


def interrupted_line(folder: str, name: str | None, lost: int, best: bool) -> str:
    """Return the line that tells after an exception what to resume from."""
    updates = "1 update is" if lost == 1 else f"{lost or 'no'} update{'s are' if lost else ' is'}"
    if name is None:
        return f"No checkpoint is in {folder}; {updates} lost, and the training has to begin again."
    which, call = ("best", "restore(best=True)") if best else ("newest", "restore()")
    return f"Checkpoint {name} is the {which} one; {updates} lost; {call} resumes from it."
