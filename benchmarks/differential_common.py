"""Compare a trainer's own training with ours at a constant batch size: weights, logs, events and files.

A script has a table of settings. Each one is trained twice, with whole batches of `BATCH` rows, and with a trace of
`BATCH` rows whose microbatches have at most `ROWS`; nothing else differs. What differs in what the training leaves has
to be stated in the table, with the reason.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from records import Measured
from results import record

BATCH, ROWS = 16, 5
QUESTION = "settings in which a trainer's run is the same with ours"
WEIGHTS, REST = 1e-12, 2e-6  # largest differences; values that are logged are rounded to float32
REFUSALS = AssertionError, TypeError, ValueError, RuntimeError


class Outcome(NamedTuple):
    """What a training leaves; each part is a structure of dicts, lists, numbers, tensors and strings."""

    weights: Any
    logs: Any
    events: Any
    files: Any


class Setting(NamedTuple):
    """A setting of a trainer.

    Attributes:
        train: function of whether the training is plain, and of a folder for its files.
        differs: the parts of an `Outcome` that differ, each with the reason.
        refused: whether ours raises an error that names the setting.
        tolerance: the largest difference of a weight; of other numbers, too, if it is above `REST`.
    """

    train: Callable[[bool, Path], Outcome]
    differs: Mapping[str, str] = {}
    refused: bool = False
    tolerance: float = WEIGHTS


def files(folder: Path, own: Sequence[str] = ("vbs",), read: Callable[[Path], Any] = lambda _: None) -> dict[str, Any]:
    """Return what the files of a folder hold, but for the columns of tables and the keys of checkpoints of ours.

    Args:
        folder: the folder, whose name is left out of texts.
        own: what the names of these columns and keys begin with.
        read: function that returns what a file of another kind holds.
    """

    def portable(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {str(portable(key)): portable(one) for key, one in value.items() if not mine(key)}
        if isinstance(value, (list, tuple)):
            return [portable(one) for one in value]
        return value.replace(str(folder), "") if isinstance(value, str) else value

    def mine(name: Any) -> bool:
        return isinstance(name, str) and name.startswith(tuple(own))

    def number(cell: str) -> Any:
        try:
            return float(cell)
        except ValueError:
            return cell

    def content(path: Path) -> Any:
        if path.suffix == ".csv":
            with path.open() as file:
                rows = [{name: cell for name, cell in row.items() if cell} for row in csv.DictReader(file)]
            rows = [row for row in rows if not all(mine(name) or name in ("step", "epoch") for name in row)]
            return [{name: number(cell) for name, cell in portable(row).items()} for row in rows]
        if path.suffix in (".ckpt", ".pt"):
            return portable(torch.load(path, weights_only=False))
        return read(path)

    return {str(path.relative_to(folder)): content(path) for path in sorted(folder.rglob("*")) if path.is_file()}


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield what is in a structure, with the path to it."""
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from leaves(value[key], f"{path}/{key}")
    elif isinstance(value, (tuple, list)):
        yield f"{path}/length", len(value)
        for number, part in enumerate(value):
            yield from leaves(part, f"{path}/{number}")
    elif isinstance(value, Tensor):
        yield f"{path}/shape", [*value.shape]
        yield path, value.detach().double().flatten()
    else:
        yield path, value


def alike(one: Any, other: Any, tolerance: float) -> bool:
    """Return whether two leaves are the same, numbers within a tolerance."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.allclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)
    if isinstance(one, float) and isinstance(other, (int, float)):
        return math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance) or (math.isnan(one) and math.isnan(other))
    return type(one) is type(other) and bool(one == other)


def first_difference(plain: Any, ours: Any, tolerance: float) -> str:
    """Return where two structures differ first, or nothing."""
    if isinstance(plain, Sequence) and isinstance(ours, Sequence) and not isinstance(plain, str):
        for number, (one, other) in enumerate(zip_longest(plain, ours)):  # not their lengths, which say less
            if found := first_difference(one, other, tolerance):
                return f"/{number}{found}"
        return ""
    for (path, one), (other_path, other) in zip_longest(leaves(plain), leaves(ours), fillvalue=("", None)):
        if path != other_path or not alike(one, other, tolerance):
            return f"{path}: {_short(one)} plain, {'' if path == other_path else other_path + ': '}{_short(other)} ours"
    return ""


def _short(value: Any) -> str:
    return str(value if not isinstance(value, Tensor) else [round(each, 7) for each in value[:3].tolist()])[:160]


def compare(what: str, settings: Mapping[str, Setting]) -> None:
    """Train each setting in both ways, print what differs, and exit with 1 if that is not what the table states."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", help="add a row to records.csv")
    parser.add_argument("names", nargs="*", help="some of the settings")
    flags = parser.parse_args()
    counts, notes, wrong = {"alike": 0, "differ": 0, "refused": 0}, [], []
    for name, setting in settings.items():
        if flags.names and name not in flags.names:
            continue
        kind, found, lines = _compared(setting)
        counts[kind] += 1
        if found != ({"refused"} if setting.refused else {*setting.differs}):
            wrong.append(name)
        notes += [f"{name}: {reason}" for reason in dict.fromkeys(setting.differs.values())]
        mark = "  NOT AS STATED" if name in wrong else ""
        reasons = [f"reason: {reason}" for reason in dict.fromkeys(setting.differs.values())]
        print(f"{name}: {kind}{mark}", *lines, *reasons, sep="\n    ", flush=True)
    print(", ".join(f"{number} {kind}" for kind, number in counts.items()), "; not as stated:", wrong or "none")
    if flags.record and not wrong:
        number = counts["alike"] + counts["differ"]
        note = (
            f"of {number}, batches of {BATCH}, microbatches of {ROWS}; refused {counts['refused']}; {'; '.join(notes)}"
        )
        record(QUESTION, what, Measured(counts["alike"], n=number), "settings", where="CPU, 1 process", note=note)
    sys.exit(bool(wrong))


def _compared(setting: Setting) -> tuple[str, set[str], list[str]]:
    with tempfile.TemporaryDirectory() as folder:
        plain = setting.train(True, Path(folder, "plain"))
        try:
            ours = setting.train(False, Path(folder, "ours"))
        except REFUSALS as error:
            return "refused", {"refused"}, [f"{type(error).__name__}: {error}"]
    lines, found = [], set()
    for part, one, other in zip(Outcome._fields, plain, ours, strict=True):
        tolerance = setting.tolerance if part == "weights" else max(REST, setting.tolerance)
        if text := first_difference(one, other, tolerance):
            found.add(part)
            lines.append(f"{part} {text}")
    return "differ" if found else "alike", found, lines
