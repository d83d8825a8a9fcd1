"""What a training has brought, as a JSON file that is complete at any instant, or as a row of a table."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, final

from variable_batch_size._files import written
from variable_batch_size._validation import value_error
from variable_batch_size.lab.evaluation.end import End, reached
from variable_batch_size.lab.evaluation.table import is_table, read_table, write_table

FORMAT = 1
MARGIN = "margin of the task"
DEFAULT_MARGIN = 0.05
_NAME = re.compile(r"[0-9a-f]{16}\.json")


@final
@dataclass(frozen=True)
class Record:
    """What a training has brought.

    The first row of the curve is the untrained model, at 0 samples; then comes one each `between` samples, with the
    first update that has reached them, and one at the end. A training that diverges ends: the rest is missing.

    Attributes:
        key: name of the cell.
        cell: the fields of the cell.
        status: "finished", or "diverged": a loss of training or of the evaluation was not finite, or above 10 times
            that of the untrained model.
        curve: columns of the same length. `updates`, `samples` and `progress` so far; simulated `seconds` and `cost`,
            or None in their place; of the updates since the row before `batch_size` (mean, samples), `batch_least` and
            `batch_most`, `lr` (mean effective learning rate) and `train_loss` (mean over the samples), None in the
            first row; and `loss` and the other metrics of the evaluation.
        wall_seconds: seconds that all of it took, over all sittings.
        environment: versions, commit of the library (None if it is not known) and processor.
    """

    key: str
    cell: Mapping[str, Any]
    status: Literal["finished", "diverged"]
    curve: Mapping[str, Sequence[Any] | None]
    wall_seconds: float
    environment: Mapping[str, Any]

    def write(self, folder: str | os.PathLike[str]) -> Path:
        """Write it to `folder`/`key`.json, and return the path."""
        path = path_of(folder, self.key)
        with written(path) as file:
            json.dump({"format": FORMAT, **asdict(self)}, file, allow_nan=False)
        return path

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Record:
        """Read a record.

        Raises:
            OSError: if the file cannot be read.
            ValueError: if it is not a record of this format.
        """
        remedy = "delete it, and run the evaluation again"
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise _not_a_record(path, error, remedy) from error
        return _record_of(content, path, remedy)


def status_of(record: Record) -> Literal["finished", "failed", "short", "diverged"]:
    """Return the status of a training; each one but "finished" is a failure.

    "failed": it finished with a loss that is hardly below the untrained one, final loss > (1 - margin) * loss of the
    untrained model, if that is positive; `MARGIN` is in the environment. "short": it did not reach its `End`.
    """
    losses = record.curve.get("loss") or ()
    if record.status == "finished" and not _reached_its_end(record):
        return "short"
    if record.status == "diverged" or len(losses) < 2 or None in (losses[0], losses[-1]) or losses[0] <= 0:
        return record.status
    margin = record.environment.get(MARGIN, DEFAULT_MARGIN)
    return "finished" if losses[-1] <= (1 - margin) * losses[0] else "failed"


def _reached_its_end(record: Record) -> bool:
    end = End.of(record.cell.get("end", "samples"))
    return end.amount is None or reached((record.curve.get(end.by) or [0.0])[-1] / end.amount)


def path_of(folder: str | os.PathLike[str], key: str) -> Path:
    """Return the path of a record."""
    return Path(folder) / f"{key}.json"


def keys_in(folder: str | os.PathLike[str]) -> set[str]:
    """Return the keys of the records in a folder, none if there is no such folder."""
    try:
        return {entry.name[:16] for entry in os.scandir(folder) if _NAME.fullmatch(entry.name)}
    except FileNotFoundError:
        return set()


def write_records(records: Iterable[Record], path: str | os.PathLike[str]) -> None:
    """Write records as one table, a gzipped CSV with a row for each, which `read_records` and `vbs report` read.

    A field is JSON: `curve.loss` is a list. The same records make the same file.

    Args:
        records: at least one, of different keys.
        path: the file, `*.csv.gz`.

    Raises:
        OSError: if the file cannot be written.
        ValueError: if the name does not end with ".csv.gz", there is no record, or two have the same key.
    """
    rows = [{"format": FORMAT, **asdict(record)} for record in records]
    _check_keys([row["key"] for row in rows], path, "pass each once")
    write_table(rows, path)


def read_records(path: str | os.PathLike[str]) -> list[Record]:
    """Read the records of a folder, in the order of their keys, or of a table of `write_records`, in its order.

    Args:
        path: the folder, or the table, `*.csv.gz`.

    Raises:
        OSError: if a file cannot be read.
        ValueError: if a file or a row is not a record of this format.
    """
    if is_table(path):
        rows, remedy = read_table(path), "write the table again, by write_records of this version"
        found = [_record_of(row, f"{path}, row {number},", remedy) for number, row in enumerate(rows, 1)]
        _check_keys([record.key for record in found], path, "leave out one of the rows")
        return found
    records = {key: Record.read(path_of(path, key)) for key in sorted(keys_in(path))}
    for key, record in records.items():
        if record.key != key:
            remedy = "rename or delete the file"
            raise value_error(f"{path_of(path, key)} must be the record of its name", f"that of {record.key}", remedy)
    return list(records.values())


def _check_keys(keys: Iterable[str], path: str | os.PathLike[str], remedy: str) -> None:
    twice = [key for key, number in Counter(keys).items() if number > 1]
    if twice:
        raise value_error(f"the records of the table {path} must have different keys", f"{twice[0]} twice", remedy)


def _record_of(content: Any, where: object, remedy: str) -> Record:
    """Return the record that values of JSON are, or raise an error that says where they are not one."""
    try:
        found = content.pop("format")
        if found == FORMAT:
            return _checked(Record(**content))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _not_a_record(where, error, remedy) from error
    raise value_error(f"{where} must be a record of format {FORMAT}", f"format {found}", remedy)


def _not_a_record(where: object, error: Exception, remedy: str) -> ValueError:
    return value_error(f"{where} must be a record", f"{type(error).__name__}: {error}", remedy)


def _checked(record: Record) -> Record:
    """Return a record that has what everything else reads; raise ValueError, TypeError or KeyError otherwise."""
    missing = {"task", "task_arguments", "trace", "rule", "lr", "lr_factor", "seed", "samples"} - set(record.cell)
    if missing:
        raise ValueError(f"no {', '.join(sorted(missing))} in the cell")
    if record.status not in ("finished", "diverged"):
        raise ValueError(f"status {record.status!r}")
    length = len(record.curve["samples"] or ())
    if not length or any(len(column) != length for column in record.curve.values() if column is not None):
        raise ValueError("columns of different lengths, or empty ones, in the curve")
    return record
