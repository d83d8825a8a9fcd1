"""Schedule strings such as "0:128 2000:256 10K:1024": where each size begins, in steps, samples, tokens or epochs."""

from __future__ import annotations

import re
from fractions import Fraction
from itertools import pairwise
from typing import Literal, NamedTuple, TypeAlias, get_args

from variable_batch_size._validation import MAX_INT, check_choice, check_int, type_error, value_error

_MAX_INCREMENTS = 10**6  # computed one after the other, because where one begins depends on the one before


def first_steps(thresholds: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the first step of each batch size, given after how many samples it begins.

    A step has the batch size of the last threshold that the samples of all steps before it have reached. A batch size
    is left out if no step has it.

    >>> first_steps([(0, 128), (1000, 256)])  # 7 steps have 896 samples, and 8 steps 1024
    [(0, 128), (8, 256)]

    Args:
        thresholds: samples and batch size (samples), by increasing samples from 0.
    """
    runs: list[tuple[int, int]] = []
    step = samples = 0  # the first step of the next run, and the samples of all steps before it
    for threshold, size in thresholds:
        if threshold > samples:
            _, previous_size = runs[-1]
            steps = -(-(threshold - samples) // previous_size)  # rounded up: the last one may exceed the threshold
            step, samples = step + steps, samples + steps * previous_size
        if runs and runs[-1][0] == step:  # the run before has no step
            runs.pop()
        runs.append((step, size))
    return runs


class Dataset(NamedTuple):
    """The number of samples of a dataset, and whether the incomplete update at the end of an epoch is dropped."""

    size: int
    drop_last: bool = False

    def steps(self, batch_size: int) -> int:
        """Return the number of steps of an epoch; raise ValueError if there is none."""
        if batch_size > self.size:
            requirement = f"a batch size of a schedule in epochs must be <= {self.size}, the size of the dataset"
            raise value_error(requirement, batch_size, "correct the entry, or dataset_size")
        return self.size // batch_size if self.drop_last else -(-self.size // batch_size)


def first_steps_of_epochs(epochs: list[tuple[int, int]], dataset: Dataset) -> list[tuple[int, int]]:
    """Return the first step of each batch size, given the epoch in which it begins.

    >>> first_steps_of_epochs([(0, 128), (60, 640)], Dataset(1000))  # 8 steps an epoch
    [(0, 128), (480, 640)]
    """
    runs, step = [(0, epochs[0][1])], 0
    for (begin, size), (end, next_size) in pairwise(epochs):
        step += (end - begin) * dataset.steps(size)
        # With drop_last, the samples that the last epoch of a size drops must not suffice for a step of the next size.
        dropped_samples = dataset.size % size
        if dataset.drop_last and next_size <= dropped_samples:
            least_size = f"{dropped_samples}, what epoch {end - 1} drops"
            requirement = f"with drop_last=True the batch size from epoch {end} on must be > {least_size}"
            raise value_error(requirement, f"{next_size}, which would begin in it", "omit drop_last")
        runs.append((step, next_size))
    dataset.steps(runs[-1][1])  # raises an error if an epoch has no step of the last size
    return runs


def ramp_steps(start: int, end: int, increment: int, samples: int) -> list[tuple[int, int]]:
    """Return the first step of each batch size `start`, `start + increment`, ..., `end` of a ramp over `samples`.

    >>> ramp_steps(16, 32, 8, samples=101)  # 24 begins after 101 / 2 samples or more
    [(0, 16), (4, 24), (6, 32)]

    Raises:
        TypeError: if an argument is not an integer.
        ValueError: if an argument is not in [1, 2**53], or if `end` is not `start` plus 1 to 10^6 increments.
    """
    arguments = {"start": start, "end": end, "increment": increment, "samples": samples}
    start, end, increment, samples = (check_int(value, name, 1, MAX_INT) for name, value in arguments.items())
    increments, rest = divmod(end - start, increment)
    if rest or increments < 1:
        requirement = f"end must be start + n * increment with n >= 1, here {start} + n * {increment}"
        raise value_error(requirement, end, "change one of the three")
    if increments > _MAX_INCREMENTS:
        raise value_error("a ramp must have at most 10^6 increments", increments, "pass a larger increment")
    return first_steps([(-(-i * samples // increments), start + i * increment) for i in range(increments + 1)])


Unit: TypeAlias = Literal["steps", "samples", "tokens", "epochs"]

EXAMPLE = '"0:128 2000:256 10K:1024"'
_NUMBER = r"[0-9]{1,20}(?:\.[0-9]{1,20})?(?:[eE][0-9]{1,2})?[kKmMbBtT]?"
_ENTRY = re.compile(f"({_NUMBER}):({_NUMBER})")
_BEGINNING = re.compile(r"\s*[0-9]+(\.[0-9]+)?([eE][0-9]+)?[kKmMbBtT]?\s*(:|$)")
_ONE_SIZE = re.compile(_NUMBER)


def is_schedule(text: str) -> bool:
    """Return whether `text` begins like a schedule, and not like a path.

    >>> is_schedule("0:128 2000:256"), is_schedule("64"), is_schedule("traces/a.csv")
    (True, True, False)
    """
    return _BEGINNING.match(text) is not None


def parse_schedule(
    schedule: str, unit: Unit = "steps", sequence_length: int | None = None, dataset: Dataset | None = None
) -> list[tuple[int, int]]:
    """Return the first step and the batch size (samples) of each entry of a schedule; one size alone begins at step 0.

    An entry that no step has, because the step before it exceeds the next threshold too, is left out. A schedule whose
    last word is "epochs" has that unit.

    >>> parse_schedule("0:128, 2K:256"), parse_schedule("64")
    ([(0, 128), (2000, 256)], [(0, 64)])
    >>> parse_schedule("0:128 1000:256", "samples")
    [(0, 128), (8, 256)]

    Raises:
        TypeError: if `schedule` or `unit` is not a string, or `sequence_length` is not an integer where it is required.
        ValueError: if there is no entry, if an entry is not "threshold:batch_size", if a batch size is not in
            [1, 2**53], if the first entry does not start at 0, if the thresholds do not increase, if `unit` or
            `sequence_length` is not valid, or if epochs lack a dataset, or have no step of a batch size.
    """
    if not isinstance(schedule, str):
        raise type_error("a schedule must be a string", schedule, f"write it like {EXAMPLE}")
    words = schedule.replace(",", " ").split()
    if words[1:] and words[-1] == "epochs":
        unit = "epochs"
        words.pop()
    divisor = _divisor_of(unit, sequence_length)
    if unit == "epochs" and dataset is None:
        requirement = "a schedule in epochs needs the size of the dataset"
        raise value_error(requirement, "none", "pass it to vbs.CustomSampler, or dataset_size= to BatchTrace.parse")
    if not words:
        raise value_error("a schedule must have at least one entry", repr(schedule), f"write it like {EXAMPLE}")
    if len(words) == 1 and _ONE_SIZE.fullmatch(words[0]):
        words = [f"0:{words[0]}"]
    entries: list[tuple[int, int]] = []
    for number, word in enumerate(words, 1):
        minimum = entries[-1][0] + 1 if entries else 0
        entries.append(_parse_entry(word, number, minimum, unit, divisor))
    if dataset is not None and unit == "epochs":
        return first_steps_of_epochs(entries, dataset)
    return entries if unit == "steps" else first_steps(entries)


def _divisor_of(unit: Unit, sequence_length: int | None) -> int:
    """Return the number by which thresholds are divided: the tokens of a sample if they are tokens, otherwise 1."""
    check_choice(unit, "unit", get_args(Unit))
    if unit == "tokens":
        remedy = "pass the number of tokens in a sample"
        return check_int(sequence_length, 'sequence_length for unit="tokens"', 1, MAX_INT, remedy)
    if sequence_length is not None:
        requirement = f'sequence_length must be None for unit="{unit}"'
        raise value_error(requirement, f"{sequence_length!r:.60}", 'omit it, or pass unit="tokens"')
    return 1


def _parse_entry(word: str, number: int, minimum: int, unit: Unit, divisor: int) -> tuple[int, int]:
    """Return the threshold and the batch size of one entry of a schedule, such as "2000:256".

    Args:
        word: the text of the entry.
        number: its number in the schedule, from 1, for errors.
        minimum: the least threshold that is allowed.
        unit: what the threshold counts, for errors.
        divisor: the threshold is divided by this number, and rounded down: tokens of a sample, or 1.
    """
    match = _ENTRY.fullmatch(word)
    threshold, size = map(parse_count, match.groups()) if match else (None, None)
    if threshold is None or size is None:
        form = f"{unit[:-1]}:batch_size in integers (K = 1000, M = 10^6, B = 10^9, T = 10^12)"
        remedy = f"write the schedule like {EXAMPLE}"
        raise value_error(f"schedule entry {number} must be {form}", f"{word!r:.60}", remedy)
    where = f"schedule entry {number} ({word!r:.60})"
    first = threshold // divisor
    if number == 1 and first != 0:
        raise value_error(f"{where} must start at {unit[:-1]} 0", threshold, "begin the schedule with 0:batch_size")
    name = "tokens // sequence_length" if unit == "tokens" else unit[:-1]
    check_int(first, f"{where}: {name}", minimum, MAX_INT, f"order the entries by increasing {name}")
    return first, check_int(size, f"{where}: batch_size", 1, MAX_INT, "correct the entry or remove it")


def parse_count(text: str) -> int | None:
    """Return a number such as "60k", "250B" or "1.5M", or None if it is not an integer.

    >>> parse_count("1.5K"), parse_count("2e3"), parse_count("1.5"), parse_count("k")
    (1500, 2000, None, None)
    """
    if not _ONE_SIZE.fullmatch(text):
        return None
    factor = 1000 ** max(0, " KMBT".find(text[-1].upper()))  # find() returns -1 for a digit
    number = Fraction(text.rstrip("kKmMbBtT")) * factor  # exact: in float64, 2.01K would not be 2010
    return number.numerator if number.denominator == 1 else None
