"""Compare two runs of one setting: what a plain trainer does, and what it does with this library.

The scripts differential_transformers.py and differential_accelerate.py run a table of settings in both ways. The plain
side takes batches of 16 rows; ours has a constant global batch of 16, in microbatches of at most 5 rows. A difference
must have its reason in the table, and a reason its difference.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from safetensors.torch import load_file

from records import Measured
from results import record

QUESTION = "settings in which a trainer's run is the same with ours"
TRAINING = "weights", "logs", "events", "files"
PARTS = *TRAINING, "warnings"
EXACT, ROUNDED = 1e-12, 2e-5  # of float64; of sums in float32
TIMES = re.compile(r"_runtime$|_per_second$|_time$")


@dataclass(frozen=True)
class Setting:
    """A row of the table.

    Attributes:
        options: what is set, read by the script.
        why: the reason of each intended difference, by the part of the run (`PARTS`) that differs.
        close: largest difference of weights and values in files.
        close_logs: largest relative difference of logged values; Trainer sums losses in float32.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    why: Mapping[str, str] = field(default_factory=dict)
    close: float = EXACT
    close_logs: float = 1e-6

    def because(self, reason: str, *parts: str) -> Setting:
        """Return the setting with a reason for differences of these parts."""
        return replace(self, why=dict.fromkeys(parts, reason))


@dataclass
class Run:
    """What a run has come to, each part as nested lists, dictionaries, numbers and tensors."""

    weights: Any
    logs: Any
    events: Any
    files: Any
    warnings: Any = ()


def cleaned(value: Any, folder: Path, left_out: Sequence[str] = ()) -> Any:
    """Return a copy without times and without these names, in which the folder of the run has no name."""
    if isinstance(value, Mapping):
        names = [name for name in value if name not in left_out and not TIMES.search(str(name))]
        return {name: cleaned(value[name], folder, left_out) for name in names}
    if isinstance(value, (list, tuple)):
        return [cleaned(one, folder, left_out) for one in value if not isinstance(one, str) or one not in left_out]
    return value.replace(str(folder), "FOLDER") if isinstance(value, str) else value


def files_in(folder: Path) -> dict[str, Any]:
    """Return the files below a folder, by name, with the content of those that both sides should have alike."""
    return {str(path.relative_to(folder)): content(path) for path in sorted(folder.rglob("*")) if path.is_file()}


def content(path: Path) -> Any:
    """Return the content of a file of weights, schedules, states or logs; None of others."""
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    if path.name == "trainer_state.json":
        return json.loads(path.read_text())
    if path.suffix == ".safetensors":
        return load_file(path)
    return torch.load(path, weights_only=False) if path.name.startswith(("scheduler", "custom_checkpoint")) else None


def first_difference(plain: Any, ours: Any, close: float, at: str = "") -> str | None:
    """Return where two nested values differ first, and how; None if they are alike."""
    if isinstance(plain, Mapping) and isinstance(ours, Mapping):
        if plain.keys() != ours.keys():
            return (
                f"{at}: only plain {sorted(plain.keys() - ours.keys())}, only ours {sorted(ours.keys() - plain.keys())}"
            )
        pairs = [(f"{at}.{name}", plain[name], ours[name]) for name in plain]
    elif isinstance(plain, Sequence) and isinstance(ours, Sequence) and not isinstance(plain, str):
        name = f" ({plain[0]})" if plain and isinstance(plain[0], str) else ""
        pairs = [(f"{at}[{number}]{name}", *pair) for number, pair in enumerate(zip(plain, ours, strict=False))]
        if len(plain) != len(ours):
            longer = max(plain, ours, key=len)[min(len(plain), len(ours))]
            pairs.append((f"{at}, length, then {longer!s:.70}", len(plain), len(ours)))
    elif isinstance(plain, torch.Tensor) and isinstance(ours, torch.Tensor) and plain.shape == ours.shape:
        same = torch.allclose(plain.double(), ours.double(), rtol=close, atol=close, equal_nan=True)
        return None if same else f"{at}: by {float((plain - ours).abs().max()):.2g}"
    elif isinstance(plain, (int, float)) and isinstance(ours, (int, float)):
        same = math.isclose(plain, ours, rel_tol=close, abs_tol=close) or (plain != plain and ours != ours)
        return None if same else f"{at}: {plain:.10g} and {ours:.10g}"
    else:
        same = type(plain) is type(ours) and plain == ours
        simple = all(isinstance(one, (str, int, float, NoneType)) for one in (plain, ours))
        shown = [str(one)[:200] if simple else type(one).__name__ for one in (plain, ours)]
        return None if same else f"{at}: {' and '.join(shown)}"
    return next(filter(None, (first_difference(one, other, close, name) for name, one, other in pairs)), None)


def differences(setting: Setting, plain: Run, ours: Run) -> dict[str, str]:
    """Return the first difference of each part of two runs that has one."""
    found = {}
    for part in PARTS:
        close = setting.close if part in ("weights", "files") else setting.close_logs
        difference = first_difference(getattr(plain, part), getattr(ours, part), close)
        if difference is not None:
            found[part] = difference
    return found


def observed(run: Callable[[Setting, bool], Run], setting: Setting, variable: bool) -> Run:
    """Make a run, with the beginnings of the UserWarnings that it gives."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = run(setting, variable)
    made.warnings = sorted({str(one.message)[:70] for one in caught if issubclass(one.category, UserWarning)})
    return made


def compare(trainer: str, settings: Mapping[str, Setting], run: Callable[[Setting, bool], Run]) -> None:
    """Run each setting in both ways, print what differs, and exit with 1 if the table does not say so.

    Args:
        trainer: its name.
        settings: the table.
        run: function that makes a run: of a plain trainer, or of ours if its second argument is True.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--record", action="store_true", help="append the number of settings that are alike")
    parser.add_argument("--only", default="", help="a part of the names of the settings that are run")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    alike, stated, wrong = 0, [], []
    chosen = {name: setting for name, setting in settings.items() if flags.only in name}
    for name, setting in chosen.items():
        found = differences(setting, *(observed(run, setting, variable) for variable in (False, True)))
        unexplained = {part: text for part, text in found.items() if part not in setting.why}
        vanished = [part for part in setting.why if part not in found]
        print(f"{name}: {'; '.join(f'{part} {text}' for part, text in found.items()) or 'alike'}", flush=True)
        if found and not unexplained:
            reasons = "; ".join(dict.fromkeys(setting.why.values()))
            print(f"    intended: {reasons}", flush=True)
            stated.append(f"{name}: {reasons}")
        if unexplained or vanished:
            print(
                f"    WRONG: without a reason {list(unexplained)}, a reason without a difference {vanished}", flush=True
            )
            wrong.append(name)
        alike += not found
    print(f"{trainer}: {alike} of {len(chosen)} alike, {len(stated)} differ as intended, wrong: {wrong or 'none'}")
    if wrong:
        raise SystemExit(1)
    if flags.record:
        note = f"of {len(chosen)}; intended: {'; '.join(stated)}".replace("|", "/")
        record(QUESTION, trainer, Measured(alike, n=len(chosen)), "settings", where="CPU, 1 process", note=note)
