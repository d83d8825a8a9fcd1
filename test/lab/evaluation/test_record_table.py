"""Many records in one file: what is read is what was written, and another file says what is wrong with it."""

from __future__ import annotations

import gzip
import json
import re
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from helpers.evaluations import records
from helpers.properties import examples
from variable_batch_size.lab.evaluation import Record, read_records, write_records
from variable_batch_size.lab.evaluation.table import write_table

NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
TEXT = st.text(max_size=8)
NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), max_size=8)  # of metrics and fields
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
CELLS = st.fixed_dictionaries(
    dict.fromkeys(("task", "task_arguments", "trace", "rule", "lr", "lr_factor", "seed", "samples"), VALUES)
)


@st.composite
def a_record(draw: st.DrawFn) -> Record:
    """Draw a record of at most four rows."""
    length = draw(st.integers(1, 4))
    column = st.lists(st.none() | NUMBERS, min_size=length, max_size=length)
    return Record(
        draw(TEXT),
        draw(st.dictionaries(NAMES, VALUES, max_size=2)) | draw(CELLS),
        draw(st.sampled_from(["finished", "diverged"])),
        draw(st.dictionaries(NAMES, st.none() | column, max_size=3)) | {"samples": draw(column)},
        draw(NUMBERS),
        draw(st.dictionaries(NAMES, VALUES, max_size=2)),
    )


@examples(40)
@given(st.lists(a_record(), min_size=1, max_size=4, unique_by=lambda record: record.key))
@example([replace(record, wall_seconds=1e-320) for record in records(seeds=1, traces=["64"])])
def test_records_are_read_back_bit_for_bit(found: list[Record]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "records.csv.gz"
        write_records(found, path)
        assert path.read_bytes()[4:8] == bytes(4)  # no time
        again = read_records(path)
    assert again == found
    texts, before = ([json.dumps(asdict(one), sort_keys=True) for one in both] for both in (again, found))
    assert texts == before  # in which 0.0, -0.0 and 0 differ


def row(**changes: Any) -> dict[str, Any]:
    """Return a row of a table, with changes; None removes a field."""
    content = {"format": 1, **asdict(records(seeds=1, traces=["64"])[0]), **changes}
    return {name: value for name, value in content.items() if value is not None}


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"format": 7}, "must be a record of format 1, got format 7"),
        ({"format": None}, "must be a record, got KeyError: 'format'"),
        ({"status": None}, r"must be a record, got TypeError: .*'status'"),
        ({"cell": {"task": "a"}}, "must be a record, got ValueError: no lr, lr_factor, rule, .* in the cell"),
        ({"curve": {"samples": [0], "loss": [1, 2]}}, "must be a record, got ValueError: columns of different lengths"),
        ({"more": 1}, r"must be a record, got TypeError: .*'more'"),
    ],
)
def test_a_row_that_is_no_record_is_named(changes: dict[str, Any], found: str, tmp_path: Path) -> None:
    path = tmp_path / "records.csv.gz"
    write_table([row(), row(**changes)], path)
    with pytest.raises(ValueError, match=rf"records\.csv\.gz, row 2, {found}.*; write the table again, by write_rec"):
        read_records(path)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda content: content[:-20], "EOFError: "),
        (lambda content: content[:40] + b"\0\0\0" + content[43:], "error: |BadGzipFile: "),
        (lambda content: b"format,key", "BadGzipFile: Not a gzipped file"),
        (lambda content: b"", "EmptyDataError: "),
        (lambda content: gzip.compress(b"format,key\n"), "none"),
        (lambda content: gzip.compress(b"format,key\n1,key\n"), "JSONDecodeError: "),
        (lambda content: gzip.compress(b"format,key\n1,\xff\n"), "UnicodeDecodeError: "),
        (lambda content: gzip.compress(b"curve,curve.loss\n1,2\n"), "TypeError: "),
    ],
)
def test_a_damaged_file_is_named(change: Callable[[bytes], bytes], found: str, tmp_path: Path) -> None:
    path = tmp_path / "records.csv.gz"
    write_records(records(seeds=1), path)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(
        ValueError,
        match=rf"records\.csv\.gz must be a table with rows of JSON, got ({found}).*; copy or write it again",
    ):
        read_records(path)


def test_what_cannot_be_written_or_is_not_there(tmp_path: Path) -> None:
    one = records(seeds=1, traces=["64"])[0]
    with pytest.raises(ValueError, match=r"the name of a table must end with \.csv\.gz, got '.*a\.csv'; rename it"):
        write_records([one], tmp_path / "a.csv")
    with pytest.raises(ValueError, match=r"a\.csv\.gz must have at least one row, got none; pass one"):
        write_records([], tmp_path / "a.csv.gz")
    with pytest.raises(ValueError, match=f"must have different keys, got {one.key} twice; pass each once"):
        write_records([one, one], tmp_path / "a.csv.gz")
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_records([replace(one, wall_seconds=float("nan"))], tmp_path / "a.csv.gz")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileNotFoundError):
        read_records(tmp_path / "a.csv.gz")


def test_a_table_with_a_record_twice_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "joined.csv.gz"
    write_table([row(), row(key="b"), row()], path)
    with pytest.raises(
        ValueError, match=rf"the table {re.escape(str(path))} must have different keys, got \w+ twice; leave"
    ):
        read_records(path)


def test_a_folder_may_have_the_name_of_a_table(tmp_path: Path) -> None:
    folder = tmp_path / "runs.csv.gz"
    folder.mkdir()
    (record, *_) = records(seeds=1, traces=["64"])
    record.write(folder)
    assert read_records(folder) == [record]
