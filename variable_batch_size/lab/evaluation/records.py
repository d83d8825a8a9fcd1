"""What evaluations have brought: a file of JSON lines that one process appends to, and its trainings as one table."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, final

from variable_batch_size._validation import value_error

if TYPE_CHECKING:
    import pandas as pd

FORMAT: Final = 2
NAME: Final = "evaluation.jsonl"
REFERENCE: Final = "the reference"  # name of the trace of the constant batch size `ref_batchsize`
DIFFERS_IN: Final = {
    "task_version": "version",
    "samples": "samples",
    "ref_batchsize": "reference batch size",
    "start": "from",
    "tuned": "learning rate",
    "warmup": "warm-up",
}  # what tells tasks of a report apart, beside their names, and the word for it
_DEFAULTS: Final = {"task_version": "", "end": "samples", "start": "", "warmup": 0}  # of what a cell may leave out
_CONDITIONS: Final = {
    "trace_fingerprint": "trace",
    "minibatch_size": "minibatch_size",
    "max_grad_norm": "max_grad_norm",
    "between": "interval between evaluations",
    "task_arguments": "task",
    "start_hash": "checkpoint",
}  # what is equal in all runs that a report shows as the same, but for their rules, and the word for it
_FACTS = ("minibatch_size", "max_grad_norm", "between", "task_arguments", "start_hash")  # told with the environment


@final
@dataclass(frozen=True)
class EvaluationPlan:
    """The training runs that one command asks for, fixed before any of them starts.

    Attributes:
        command: as a user would type it; "" for a call from Python.
        keys: names of these runs, including the reference runs.
        baseline: the rule against which it judges the others; None: not chosen.
    """

    command: str
    keys: tuple[str, ...]
    baseline: str | None = None


@final
@dataclass(frozen=True, eq=False)
class Evaluation:
    """The runs of a folder that have ended, and the plans that requested them.

    Attributes:
        trainings: a row for each run, in the order of the plans. `key` names what determines the training, and `plan`
            is the number of the first plan that has it. `task`, `task_version`, `trace` (the name that users read),
            `end`, `rule`, `lr`, `lr_factor`, `seed`, `samples`, `ref_batchsize`, `warmup` and `start` (the checkpoint,
            "" without one) are what was trained. `status` is "finished", "diverged" or "killed" (its process died
            twice). `curve` has lists of equal lengths: the first row is the model before the training, then comes one
            each `between` samples, and one at the end. `updates`, `samples` and `progress` so far; simulated `seconds`
            and `cost` where they are known; of the updates since the row before `batch_size` (mean), `batch_least`,
            `batch_most`, `lr` (mean effective learning rate) and `train_loss`; and the metrics of the evaluation.
            `untrained` is the loss of the untrained model, `environment` the versions and what else there is to know.
        plans: in the order in which they were asked for; none in a table of earlier versions.
    """

    trainings: pd.DataFrame
    plans: tuple[EvaluationPlan, ...]


def check_traces(cells: Iterable[Mapping[str, Any]]) -> None:
    """Raise ValueError if runs under one name of a trace had different conditions: a report would mix them.

    Args:
        cells: the settings of each run, as `Cell.as_json` returns them.
    """
    conditions_of_name = dict[tuple[Any, ...], dict[str, str]]()
    for cell in cells:
        settings = {**_DEFAULTS, **cell, "tuned": tuned_rate(cell["lr"], cell["lr_factor"])}
        shown_in_report = tuple(settings.get(name) for name in ("task", "trace", "end", "seed", *DIFFERS_IN))
        conditions = {word: json_of(cell.get(name)) for name, word in _CONDITIONS.items()}
        earlier = conditions_of_name.setdefault(shown_in_report, conditions)
        if differing := [word for word in conditions if conditions[word] != earlier[word]]:
            raise value_error(
                f"a folder must have one {', '.join(differing)} for each name of a trace",
                f"several for {cell['trace']!r} and seed {cell['seed']}, as after an edit",
                "pass another --name, or another --folder",
            )


def json_of(value: object) -> str:
    """Return a value of JSON as text that is the same before and after it was in a file."""
    return json.dumps(value, sort_keys=True)


def tuned_rate(lr: float, lr_factor: float) -> str:
    """Return the learning rate of a run without its factor, as text of nine digits, which rounding does not change."""
    return f"{lr / lr_factor:.9g}"


def read(place: str | os.PathLike[str]) -> Evaluation:
    """Read the training runs and plans of an evaluation.

    Args:
        place: its folder; or its file `evaluation.jsonl`, also compressed (.gz); or a table `*.csv.gz` of earlier
            versions.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is damaged, or of another format.
    """
    path = Path(place) / NAME if Path(place).is_dir() else Path(place)
    if not path.is_file():
        remedy = "pass the --folder of vbs evaluate, or its file"
        raise FileNotFoundError(f"an evaluation must be a folder with {NAME}, got {os.fspath(place)!r}; {remedy}")
    if path.name.endswith(".csv.gz"):
        return Evaluation(_trainings_frame([(0, row) for row in _read_table(path)]), ())
    content = path.read_bytes()
    lines = _parse_lines(gzip.decompress(content) if path.suffix == ".gz" else content, path)
    plans = tuple(
        EvaluationPlan(line["command"], tuple(line["keys"]), line.get("baseline")) for line in lines if "keys" in line
    )
    latest_first = reversed([*enumerate(plans)])  # so that the first plan of a key counts
    place_in_plans = {key: (number, place) for number, plan in latest_first for place, key in enumerate(plan.keys)}
    unplanned = len(plans), 0  # after all that is planned
    runs = sorted((place_in_plans.get(line["key"], unplanned), line["key"], line) for line in lines if "key" in line)
    return Evaluation(_trainings_frame([(number, line) for (number, _), _, line in runs]), plans)


def tidy(trainings: pd.DataFrame) -> pd.DataFrame:
    """Return the learning curves as one long table: a row for each evaluation during each run, with its settings.

    The `lr` of the curve is `effective_lr`, and the `samples` of the training are `planned_samples`.
    """
    import pandas as pd

    curves = {
        index: pd.DataFrame({"effective_lr" if name == "lr" else name: column for name, column in curve.items()})
        for index, curve in trainings["curve"].items()
    }
    rows = pd.concat(curves, names=["training", None]).reset_index("training")
    facts = trainings.drop(columns=["curve", "environment"]).rename(columns={"samples": "planned_samples"})
    return facts.merge(rows, left_index=True, right_on="training").drop(columns="training").reset_index(drop=True)


@final
class Journal:
    """The results file of an evaluation, to which one process at a time appends JSON lines.

    Args:
        folder: folder of the file, created if needed.

    Attributes:
        lines: the lines that the file had, parsed; an incomplete last line, of a process that was killed, is removed.

    Raises:
        OSError: if the folder cannot be created, or another process has it.
        ValueError: if the file is damaged, or of another format.
    """

    def __init__(self, folder: Path) -> None:
        """Open and lock the file, cut off an incomplete last line, and read the lines before it."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / NAME).open("a+b")
        except OSError as error:
            found = f"{os.fspath(folder)!r}: {error.strerror}"
            raise type(error)(f"folder must be one that can be created, got {found}; choose another one") from None
        try:
            _lock(self._file, folder)
            self._file.seek(0)
            content = self._file.read()
            self._file.truncate(content.rfind(b"\n") + 1)  # without an incomplete last line
            self.lines = _parse_lines(content, folder / NAME)
        except BaseException:
            self._file.close()
            raise

    def append_plan(self, command: str, keys: Iterable[str], baseline: str | None = None) -> None:
        """Append an `EvaluationPlan`, unless the last plan in the file asks for the same runs."""
        planned = list(dict.fromkeys(keys))  # each once
        earlier_plans = [set(line["keys"]) for line in self.lines if "keys" in line]
        if not earlier_plans or earlier_plans[-1] != set(planned):
            self.append({"format": FORMAT, "command": command, "keys": planned, "baseline": baseline})

    def append(self, line: Mapping[str, Any]) -> None:
        """Append a line at once, so that it stays if the process is killed afterwards."""
        self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
        self._file.flush()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        self._file.close()


def _lock(file: Any, folder: Path) -> None:
    """Lock the file of an evaluation until it is closed, so that only one process appends to it.

    Args:
        file: the open file.
        folder: its folder, for the error.

    Raises:
        BlockingIOError: if another process has locked it.
    """
    with suppress(ImportError):  # on Windows, which has no fcntl, nothing is locked
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            found = f"{os.fspath(folder)!r}, which another one trains in"
            remedy = "wait until it ends, or choose another folder"
            raise BlockingIOError(f"a folder must have one evaluation at a time, got {found}; {remedy}") from None


def _parse_lines(content: bytes, path: Path) -> list[dict[str, Any]]:
    """Return the JSON lines of a file as dictionaries, without an incomplete last line."""
    lines: list[dict[str, Any]] = []
    for number, text in enumerate(content.split(b"\n")[:-1], 1):
        try:
            line = json.loads(text)
            if not {"keys", "cell"} & set(line):
                raise ValueError("neither a plan nor a run")
        except (ValueError, TypeError) as error:
            remedy = "delete the line; its run is then repeated"
            raise value_error(f"{path}:{number} must be a line of an evaluation", error, remedy) from None
        if (version := line.get("format", FORMAT)) != FORMAT:
            remedy = "read it with the version that has written it"
            raise value_error(f"{path}:{number} must be of format {FORMAT}", f"format {version}", remedy)
        lines.append(line)
    return lines


def _read_table(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a CSV file of earlier versions, whose fields are JSON, as nested dictionaries.

    The column `curve.loss` becomes `row["curve"]["loss"]`. An empty field is left out.
    """
    import pandas as pd

    try:
        frame = pd.read_csv(path, dtype=str, keep_default_na=False)
        rows: list[dict[str, Any]] = []
        for values in frame.to_dict("records"):
            row: dict[str, Any] = {}
            for column, text in values.items():
                name, _, inner_name = str(column).partition(".")
                if text and inner_name:
                    row.setdefault(name, {})[inner_name] = json.loads(text)
                elif text:
                    row[name] = json.loads(text)
            rows.append(row | {"untrained": row["curve"]["loss"][0]})
    except (OSError, EOFError, ValueError, KeyError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        found = f"{type(error).__name__}: {error}"
        raise value_error(f"{path} must be a table of runs", found, "copy it again") from None
    return rows


def _trainings_frame(lines: Sequence[tuple[int, Mapping[str, Any]]]) -> pd.DataFrame:
    """Return the table of training runs, a row for each, as `Evaluation.trainings` has it.

    Args:
        lines: for each run the number of its plan, and its line in the file.
    """
    import pandas as pd

    types: dict[str, Any] = {
        **dict.fromkeys(("key", "task", "task_version", "trace", "end", "rule", "start", "status"), str),
        "trace_fingerprint": str,
        **dict.fromkeys(("plan", "seed", "samples"), int),
        **dict.fromkeys(("lr", "lr_factor", "ref_batchsize", "warmup", "wall_seconds", "untrained"), float),
        **dict.fromkeys(("curve", "environment"), object),
    }
    defaults = {**_DEFAULTS, "trace_fingerprint": ""}  # of what lines of earlier versions do not have
    records = []
    for plan, line in lines:
        settings = {**defaults, **line["cell"]}
        environment = line["environment"] | {name: settings[name] for name in _FACTS if name in settings}
        curve = {name: column for name, column in line["curve"].items() if column is not None}
        values = {**settings, **line, "plan": plan, "curve": curve, "environment": environment}
        records.append({name: values.get(name) for name in types})
    frame = pd.DataFrame(records, columns=list(types))
    return frame.astype({name: kind for name, kind in types.items() if kind in (int, float)})
