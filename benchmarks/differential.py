"""Compare two trainings in each setting of a table: what a trainer does by itself, and what it does with this library.

A plain training takes batches of 16 rows. Ours has a trace of 16 rows, in microbatches of at most 5 rows; nothing else
differs. A difference must have its reason in the table, and a reason its difference.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
from safetensors.torch import load_file
from torch import Tensor

from records import Measured
from results import record

QUESTION = "settings in which a trainer's run is the same with ours"
TRAINED = "weights", "logs", "events"
TRAINING = *TRAINED, "files"
PARTS = *TRAINING, "warnings"
EXACT, LOGGED = 1e-12, 2e-6  # what is logged is rounded to float32
TIMES = re.compile(r"_runtime$|_per_second$|_time$")
STATES = re.compile(r"^scheduler|^custom_checkpoint|\.ckpt$|\.pt$")
REFUSALS = AssertionError, TypeError, ValueError, RuntimeError


class Setting(NamedTuple):
    """A row of the table.

    Attributes:
        train: function of whether the training is plain, and of a folder for its files; it returns weights, logs and
            events: nested lists, dictionaries, numbers and tensors.
        why: the reason of each intended difference, by the part (`PARTS`) that differs.
        refused: a part of the error with which ours refuses the setting.
        tolerance: largest difference of tensors in float64, such as weights; of other numbers, such as those of logs,
            it is at least `LOGGED`.
    """

    train: Callable[[bool, Path], tuple[Any, Any, Any]]
    why: Mapping[str, str] = {}
    refused: str = ""
    tolerance: float = EXACT

    def because(self, reason: str, *parts: str) -> Setting:
        """Return the setting with a reason for differences of these parts, or of all that a training leaves."""
        return self._replace(why=dict.fromkeys(parts or TRAINING, reason))

    def refuses(self, error: str) -> Setting:
        """Return the setting, which ours refuses with such an error."""
        return self._replace(refused=error)


class Reader(NamedTuple):
    """What is read of a training.

    Attributes:
        own: how the names begin that only ours has in logs, tables and checkpoints; they are left out.
        read: function that returns the content of files that no other trainer writes.
    """

    own: tuple[str, ...] = ()
    read: Callable[[Path], Any] = lambda _: None

    def cleaned(self, value: Any, folder: Path) -> Any:
        """Return a copy without times and without names of ours, in which the folder of the training has no name."""
        if isinstance(value, Mapping):
            names = [name for name in value if not str(name).startswith(self.own) and not TIMES.search(str(name))]
            return {self.cleaned(str(name), folder): self.cleaned(value[name], folder) for name in names}
        if isinstance(value, (list, tuple)):
            return [self.cleaned(one, folder) for one in value if not isinstance(one, str) or one not in self.own]
        return value.replace(str(folder), "FOLDER") if isinstance(value, str) else value

    def files(self, folder: Path) -> dict[str, Any]:
        """Return the content of the files below a folder, by name."""
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        return {str(path.relative_to(folder)): self.content(path) for path in paths}

    def content(self, path: Path) -> Any:
        """Return what a file of weights, schedules, states or logs holds; None of others, such as optimizers."""
        if path.suffix == ".csv":
            table = pd.read_csv(path)
            names = [name for name in map(str, table) if not name.startswith(self.own)]
            values = [name for name in names if name not in ("step", "epoch")]
            return table[names].dropna(how="all", subset=values).to_dict("records")
        if path.suffix == ".jsonl":
            return [json.loads(line) for line in path.read_text().splitlines()]
        if path.name == "trainer_state.json":
            return json.loads(path.read_text())
        if path.suffix == ".safetensors":
            return load_file(path)
        if STATES.search(path.name) and path.stem != "optimizer":
            return torch.load(path, weights_only=False)
        return self.read(path)


def first_difference(plain: Any, ours: Any, tolerance: float, at: str = "") -> str | None:
    """Return where two nested values differ first, and how, after the path `at`; None if they are alike."""
    logged = max(LOGGED, tolerance)
    if isinstance(plain, Mapping) and isinstance(ours, Mapping):
        if plain.keys() != ours.keys():
            return f"{at}: only plain {sorted({*plain} - {*ours})}, only ours {sorted({*ours} - {*plain})}"
        pairs = [(f"{at}.{name}", plain[name], ours[name]) for name in plain]
    elif isinstance(plain, Sequence) and isinstance(ours, Sequence) and not isinstance(plain, str):
        name = f" ({plain[0]})" if plain and isinstance(plain[0], str) else ""
        pairs = [(f"{at}[{index}]{name}", *pair) for index, pair in enumerate(zip(plain, ours, strict=False))]
        if len(plain) != len(ours):  # after what is in them, which says more
            longer = max(plain, ours, key=len)[min(len(plain), len(ours))]
            pairs.append((f"{at}, length, then {longer!s:.70}", len(plain), len(ours)))
    elif isinstance(plain, Tensor) and isinstance(ours, Tensor):
        if plain.shape != ours.shape:
            return f"{at}: shapes {[*plain.shape]} and {[*ours.shape]}"
        close = tolerance if plain.dtype == torch.float64 else logged
        one, other = plain.detach().double(), ours.detach().double()
        same = torch.allclose(one, other, rtol=close, atol=close, equal_nan=True)
        return None if same else f"{at}: by {float((one - other).abs().max()):.2g}"
    else:
        same = type(plain) is type(ours) and bool(plain == ours)
        if isinstance(plain, (int, float)) and isinstance(ours, (int, float)) and float in (type(plain), type(ours)):
            same = math.isclose(plain, ours, rel_tol=logged, abs_tol=logged) or (plain != plain and ours != ours)
        return None if same else f"{at}: {plain!s:.200} and {ours!s:.200}"
    found = (first_difference(one, other, tolerance, name) for name, one, other in pairs)
    return next(filter(None, found), None)


def differences(setting: Setting, reader: Reader) -> dict[str, str]:
    """Train in both ways, and return the first difference of each part that has one, or the error of ours."""
    runs = []
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for plain in (True, False):
            folder = Path(name, "plain" if plain else "ours")
            folder.mkdir()
            try:
                weights, *rest = setting.train(plain, folder)
            except REFUSALS as error:
                if plain:
                    raise
                text = f"{type(error).__name__}: {error}"
                return {"refused" if setting.refused and setting.refused in text else "raised": text}
            told = {str(one.message) for one in caught if issubclass(one.category, UserWarning)}
            caught.clear()
            rest += [reader.files(folder), sorted(text.replace(str(folder), "FOLDER")[:70] for text in told)]
            runs.append([weights, *(reader.cleaned(part, folder) for part in rest)])
    pairs = zip(PARTS, *runs, strict=True)
    found = {part: first_difference(one, other, setting.tolerance) for part, one, other in pairs}
    return {part: text for part, text in found.items() if text is not None}


def compare(trainer: str, settings: Mapping[str, Setting], reader: Reader) -> None:
    """Print what differs in each setting of a trainer, and exit with 1 if that is not what the table states."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--record", action="store_true", help="append the number of settings that are alike")
    parser.add_argument("names", nargs="*", help="parts of the names of settings; otherwise all")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    counts, reasons, wrong = Counter(alike=0, differ=0, refused=0), Counter[str](), []
    for name, setting in settings.items():
        if flags.names and not any(part in name for part in flags.names):
            continue
        found = differences(setting, reader)
        why = dict.fromkeys(setting.why.values())
        kind = "refused" if "refused" in found else "differ" if found else "alike"
        if {*found} != ({"refused"} if setting.refused else {*setting.why}):
            kind += ", NOT AS STATED"
            wrong.append(name)
        lines = [*(f"{part} {text}" for part, text in found.items()), *(f"reason: {reason}" for reason in why)]
        print(f"{name}: {kind}", *lines, sep="\n    ", flush=True)
        counts[kind.split(",")[0]] += 1
        reasons.update([*why])
    total = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    print(f"{trainer}: {total}; not as stated: {wrong or 'none'}")
    if wrong:
        raise SystemExit(1)
    if flags.record:
        number = counts["alike"] + counts["differ"]
        because = "; ".join(reason + (f" ({count})" if count > 1 else "") for reason, count in reasons.items())
        note = f"of {number}; {counts['refused']} more are refused; the others differ: {because}"
        record(QUESTION, trainer, Measured(counts["alike"], n=number), "settings", where="CPU, 1 process", note=note)
