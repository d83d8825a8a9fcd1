"""What a saved position holds and in which version, and how the past of the trace is compared."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, final

import numpy as np

if TYPE_CHECKING:
    from variable_batch_size.trace.batch_trace import BatchTrace

from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Final

from variable_batch_size._validation import value_error

VERSION = 2  # 1: without rows, and what earlier samplers have dealt
ROWS: Final = "rows of the dataset"
REGARDLESS = "pass strict=False to resume regardless"  # callers without `strict` replace this text in errors

Kinds = Mapping[str, tuple[type, ...]]

POSITION: Final[Kinds] = {
    **dict.fromkeys(("epoch", "step", "samples", "first_step", "samples_before", "epoch_samples"), (int,)),
    **dict.fromkeys(("dataset_size", "seed"), (int,)),
    **dict.fromkeys(("ended", "end_pending", "shuffle", "drop_last", "fixed_shape"), (bool, int)),
    **dict.fromkeys(("stage", "earlier_updates", "earlier_samples"), (int,)),
    **dict.fromkeys(("trace", "past", ROWS), (str,)),
}
GROWTH: Final[Kinds] = {
    **dict.fromkeys(("runs", "decisions", "questions"), (list, tuple)),
    **dict.fromkeys(("decides", "asked"), (str,)),
}
NUMBER = (float, int)


def check_position(state: Mapping[str, Any]) -> None:
    """Check that a saved state of a sampler is of the version that this release reads, with possible numbers.

    Args:
        state: what a checkpoint holds of a sampler; it may be damaged, or of another release.

    Raises:
        ValueError: if not.
    """
    if not isinstance(state, Mapping):
        raise value_error("a state must be a dictionary", f"{state!r:.60}", "restore one as it was saved")
    if (version := state.get("version", "unknown")) != VERSION:
        remedy = "load it with the release of variable_batch_size that has saved it"
        raise value_error(f"a state must be of version {VERSION}", f"one of version {version}", remedy)
    check_entries(state, POSITION)
    dealt_samples = state["samples_before"] + state["epoch_samples"]  # trained on or skipped by set_epoch
    updates_of_epoch = state["step"] - state["first_step"]
    # With `lengths=` steps end at the ends of samples, so that more tokens may be trained on than the trace says.
    too_many_samples = state["samples"] > dealt_samples and "lengths or counts" not in state
    if updates_of_epoch < 0 or state["epoch_samples"] > state["dataset_size"] or too_many_samples:
        numbers = ", ".join(f"{name} {state[name]}" for name, types in POSITION.items() if types == (int,))
        raise value_error("the numbers of a state must agree with one another", numbers, "restore one as it was saved")
    if "growth" in state:
        check_entries(state, {"growth": (dict,)})
        check_entries(state["growth"], GROWTH, "growth.")


def check_same_samples(state: Mapping[str, Any], here: Mapping[str, Any], past: str) -> None:
    """Check that a state was saved by a run that used the same samples, in the same order, up to its position.

    Args:
        state: the state.
        here: what determines the order of the samples in this run, by name.
        past: a hash of the batch sizes that this run's trace has before the position.

    Raises:
        ValueError: if not, naming each difference; the rows only if nothing else differs.
    """
    differing = [f"{key} was {state.get(key)!r} and is {here[key]!r}" for key in here if state.get(key) != here[key]]
    if len(differing) > 1:  # a different order reads different rows first: their hash says nothing more
        differing = [text for text in differing if not text.startswith(ROWS)]
    # The two errors that follow are for differences with a remedy of their own.
    if differing and all(text.startswith("reproducible ") for text in differing):
        raise ValueError(
            f"a state can be restored to the last bit only as it was saved, but {differing[0]}; pass and set the same, "
            f"or {REGARDLESS}"
        )
    only_rows_differ = len(differing) == 1 and differing[0].startswith(ROWS)
    if only_rows_differ and past == state["past"]:
        raise ValueError(
            f"a state can be restored only with the rows it was saved with, but {ROWS} are others; pass the same "
            f"dataset, split with a seeded generator, or {REGARDLESS}"
        )
    if past != state["past"]:
        differing.append(f"the first {int(state['step'])} batch sizes of the trace are not the same")
    if differing:
        raise ValueError(
            f"a state can be restored only with the samples it was saved with, but {', '.join(differing)}; restore "
            f"these arguments, or {REGARDLESS}"
        )


def check_entries(state: Mapping[str, Any], kinds: Kinds, where: str = "") -> None:
    """Check that a state has entries of these types, before any of them is used.

    Args:
        state: the state, or a part of it.
        kinds: the allowed types of each entry, by name.
        where: prefix of the names in the error: the name of the part, and a full stop.

    Raises:
        ValueError: if one is missing or damaged.
    """
    for name, allowed in kinds.items():
        if name not in state or not _is_one_of(state[name], allowed):
            problem = f"has {state[name]!r:.60}" if name in state else "lacks it"
            types = " or ".join("None" if kind is NoneType else kind.__name__ for kind in allowed)
            raise ValueError(
                f"a state of version {VERSION} must hold {where}{name}, of type {types}, but this one {problem}; "
                f"restore one as it was saved"
            )


def check_items(values: Sequence[Any], allowed: tuple[type, ...], name: str) -> None:
    """Check that all items of a list in a saved state have one of these types; raise ValueError if not.

    Args:
        values: the list.
        allowed: the types.
        name: the name of the list in the state, for the error.
    """
    entries = {str(index): value for index, value in enumerate(values)}
    check_entries(entries, dict.fromkeys(entries, allowed), f"{name}.")


def _is_one_of(value: Any, allowed: tuple[type, ...]) -> bool:
    """Return whether a value has one of these types; a bool is no int, and an int must fit into 64 bits, unsigned."""
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        return False
    return not isinstance(value, int) or 0 <= value < 2**64


_CHUNK = 65536  # steps that are hashed at once


@final
class Past:
    """Hashes the batch sizes before a step; a later step costs only the sizes in between.

    It depends on the sizes alone: not on what follows, nor on how the trace was created.
    """

    def __init__(self, trace: BatchTrace) -> None:
        self._trace = trace
        self._step, self._hash = 0, hashlib.sha256()

    def fingerprint(self, step: int) -> str:
        """Return the SHA-256, in hexadecimal, of the batch sizes of the steps 0 to `step` - 1.

        The hash so far is kept, so that a later step hashes only the sizes in between.
        """
        if step < self._step:  # a hash cannot go back: begin again
            self._step, self._hash = 0, hashlib.sha256()
        for begin in range(self._step, step, _CHUNK):
            sizes = self._trace.batch_sizes(np.arange(begin, min(step, begin + _CHUNK)))
            self._hash.update(sizes.astype("<i8").tobytes())
        self._step = step
        return self._hash.hexdigest()

    def __reduce__(self) -> tuple[Any, ...]:
        return Past, (self._trace,)  # a hash object cannot be pickled or copied
