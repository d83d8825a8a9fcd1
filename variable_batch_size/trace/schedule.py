"""Schedule strings such as "0:128 2000:256 10K:1024": the first step of each run of steps and its batch size."""

from __future__ import annotations

import re

from variable_batch_size._validation import MAX_INT, check_int, type_error, value_error

EXAMPLE = '"0:128 2000:256 10K:1024"'
_ENTRY = re.compile(r"([0-9]{1,20})([kKmM]?):([0-9]{1,20})([kKmM]?)")
_BEGINNING = re.compile(r"\s*[0-9]+[kKmM]?\s*(:|$)")
_ONE_SIZE = re.compile(r"[0-9]{1,20}[kKmM]?")


def is_schedule(text: str) -> bool:
    """Return whether `text` begins like a schedule, and not like a path.

    >>> is_schedule("0:128 2000:256"), is_schedule("64"), is_schedule("traces/a.csv")
    (True, True, False)
    """
    return _BEGINNING.match(text) is not None


def parse_schedule(schedule: str) -> list[tuple[int, int]]:
    """Return the first step and the batch size (samples) of each entry of a schedule; one size alone begins at step 0.

    >>> parse_schedule("0:128, 2K:256"), parse_schedule("64")
    ([(0, 128), (2000, 256)], [(0, 64)])

    Raises:
        TypeError: if `schedule` is not a string.
        ValueError: if there is no entry, if an entry is not "step:batch_size", if a batch size is not in [1, 2**53], if
            the first entry does not start at step 0, or if the steps do not increase.
    """
    if not isinstance(schedule, str):
        raise type_error("a schedule must be a string", schedule, f"write it like {EXAMPLE}")
    words = schedule.replace(",", " ").split()
    if not words:
        raise value_error("a schedule must have at least one entry", repr(schedule), f"write it like {EXAMPLE}")
    if len(words) == 1 and _ONE_SIZE.fullmatch(words[0]):
        words = [f"0:{words[0]}"]
    entries: list[tuple[int, int]] = []
    for number, word in enumerate(words, 1):
        minimum = entries[-1][0] + 1 if entries else 0
        entries.append(_parse_entry(word, number, minimum))
    return entries


def _parse_entry(word: str, number: int, minimum: int) -> tuple[int, int]:
    """Return the step and the batch size of one entry, whose step must be at least `minimum`."""
    where, match = f"schedule entry {number} ({word!r:.60})", _ENTRY.fullmatch(word)
    if match is None:
        requirement = f"schedule entry {number} must be step:batch_size in integers (K = 1000, M = 10^6)"
        raise value_error(requirement, f"{word!r:.60}", f"write the schedule like {EXAMPLE}")
    step, size = (int(match[i]) * 1000 ** " km".index(match[i + 1].lower() or " ") for i in (1, 3))
    if number == 1 and step != 0:
        raise value_error(f"{where} must start at step 0", step, "begin the schedule with 0:batch_size")
    check_int(step, f"{where}: step", minimum, MAX_INT, "order the entries by increasing step")
    return step, check_int(size, f"{where}: batch_size", 1, MAX_INT, "correct the entry or remove it")
