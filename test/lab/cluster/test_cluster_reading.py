"""The contract of every reader of capacity traces, what each format means, and its errors."""

from __future__ import annotations

import re
import sys
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.capacity_files import COLLECTION, PLACES, TEXTS, TIMES, meaning, moved, with_number, with_time
from helpers.commands import run
from helpers.pages import DOCS
from helpers.properties import examples
from variable_batch_size.lab.cluster import LogError, read
from variable_batch_size.lab.cluster.readers.base import Text
from variable_batch_size.lab.cluster.reading import READERS

every_format = pytest.mark.parametrize("name", READERS)
with_numbers = pytest.mark.parametrize("name", [name for name in READERS if name in PLACES and PLACES[name].number])
with_times = pytest.mark.parametrize("name", [name for name in READERS if name in PLACES and PLACES[name].time])


@pytest.fixture
def file(tmp_path):
    """Return a function that writes a file and returns its path."""

    def write(text):
        path = tmp_path / "trace"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    return write


def error_of(path, *arguments, **options):
    """Return the message of the ValueError, with "FILE" for the path."""
    with pytest.raises(ValueError, match=r", got .*; ") as caught:
        read(path, *arguments, **options)
    return str(caught.value).replace(str(path), "FILE")


# ------------------------------------------------------------------------------------------------------- the contract


def test_a_damaged_file_is_not_a_wrong_argument(file):
    for text in ("seconds,nodes\n0,x\n", "", "nothing known"):
        with pytest.raises(LogError):
            read(file(text))
    with pytest.raises(ValueError, match=r"^format must be") as caught:
        read(file("seconds,nodes\n0,1\n9,1\n"), "sky")
    assert not isinstance(caught.value, LogError)


def test_every_format_has_a_golden_file_and_a_docstring():
    assert set(READERS) == set(TEXTS)
    for name, reader in READERS.items():
        assert reader.name == name
        assert f"`{name}`: `{reader.example}`" in (read.__doc__ or "")


@every_format
def test_a_file_is_recognized_and_read(name, file):
    path = file(TEXTS[name])
    assert [other for other in READERS if READERS[other].recognizes(Text.load(path))] == [name]
    assert meaning(name) == read(path) == read(str(path), name) == read(path, format=name)


@every_format
def test_the_example_of_the_message_is_recognized(name, file):
    recognized = [other for other in READERS if READERS[other].recognizes(Text.load(file(READERS[name].example)))]
    assert recognized == [name]


@every_format
@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("\n", "\r\n"),
        lambda text: text.replace("\n", "\r"),
        lambda text: text.replace("\n", "\n\n"),
        lambda text: text.replace("\n", "  \n\t"),
        lambda text: text.rstrip(),
        lambda text: "\ufeff" + text,
    ],
    ids=["CRLF", "CR", "blank lines", "spaces", "no last line feed", "byte order mark"],
)
def test_ends_of_lines_and_blanks_do_not_matter(name, change, file):
    trace = read(file(TEXTS[name]))
    assert read(file(change(TEXTS[name]))) == trace


@pytest.mark.parametrize("name", TIMES)
@examples(20)
@given(shift=st.integers(10**9, 4 * 10**9))
def test_unix_times_begin_at_the_first_row_and_milliseconds_are_refused(name, shift, tmp_path_factory):
    path = tmp_path_factory.mktemp("moved") / "trace"
    path.write_text(moved(name, 0))
    trace = read(path)
    path.write_text(moved(name, shift))
    assert read(path) == trace
    path.write_text(moved(name, shift, 1000))
    assert re.search(r"times must be seconds, got \d+.*, which looks like Unix milliseconds; divide", error_of(path))


# ----------------------------------------------------------------------------------------- errors that all formats have


@with_numbers
@pytest.mark.parametrize(
    "value", ["-1", "NaN", "Infinity", "1e999", "2.5", "9007199254740993", "1" * 5000, "null", "1_0", "\u0663"]
)
def test_a_number_of_nodes_must_be_an_integer(name, value, file):
    message = error_of(file(with_number(name, value)), name)
    assert re.match(
        r"capacity trace \(FILE:\d\): (nodes|data\[1\]|the count|GPUs|NNodes|the text|an integer) must be ", message
    )


@with_times
@pytest.mark.parametrize("value", ["-1", "NaN", "Infinity", "1e999", "1" * 5000, "null", "1_0"])
def test_a_time_must_be_a_finite_number(name, value, file):
    assert re.match(r"capacity trace \(FILE:\d\): .* must be ", error_of(file(with_time(name, value)), name))


@pytest.mark.parametrize("name", [name for name in READERS if name not in ("skypilot", "gcloud", "sacct")])
def test_times_must_not_go_back(name, file):
    assert re.fullmatch(
        r"capacity trace \(FILE:\d\): (seconds|Time) must be >= [0-9.]+, the time of the row before, got [0-9.]+; "
        "sort the rows by time",
        error_of(file(with_time(name, "6.5")), name),
    )


@every_format
@pytest.mark.parametrize("content", ["", "\n \r\n", "\ufeff"])
def test_an_empty_file(name, content, file):
    expected = "capacity trace (FILE) must have at least one row, got an empty file; pass another"
    assert error_of(file(content)) == error_of(file(content), name) == expected


@every_format
def test_bytes_that_are_not_utf8(name, file):
    path = file(TEXTS[name].encode() + b"\n\xff")
    line = TEXTS[name].count("\n") + 2
    expected = f"capacity trace (FILE:{line}) must be UTF-8 text, got byte 0xff; save it as text in UTF-8"
    assert error_of(path) == error_of(path, name) == expected


def test_the_recipe_of_the_message_is_there():
    assert "\n### Any other log\n" in (DOCS / "capacity.md").read_text()


@every_format
def test_a_file_of_another_format(name, file):
    for other in set(READERS) - {name}:
        assert error_of(file(TEXTS[other]), name).startswith("capacity trace (FILE:")


@every_format
@pytest.mark.parametrize(("option", "value", "able"), [("inverted", 16, "skypilot"), ("max_gap", 60, "gcloud")])
def test_an_option_that_the_format_does_not_have(name, option, value, able, file):
    path = file(TEXTS[name])
    if name == able:
        read(path, **{option: value})
        return
    assert error_of(path, **{option: value}) == (
        f"{option} must be left out except for the format {able}, got the format {name} (FILE); remove {option}="
    )


# ---------------------------------------------------------------------------------------------------------- real files


@pytest.mark.skipif(not COLLECTION.is_dir(), reason="the collection of real traces is not here")
@pytest.mark.parametrize(
    ("file_name", "name", "changes", "end", "mean"),
    [
        ("bamboo-counts-g4dn-us-east-1c.csv", "bamboo-counts", 56, 88194, 8.1506),
        ("bamboo-events-g4dn.csv", "bamboo-events", 99, 38760, 12.6022),
        ("bamboo-gcloud-v100x1-east1c.txt", "gcloud", 134, 87013, 76.3295),
        ("parcae-bert-hl.txt", "parcae", 10, 3600, 29.6333),
        ("skypilot-availability-16-node-us-east-2b_v100_1.json", "skypilot", 284, 974100, 8.7579),
        ("skypilot-availability-16-node-us-west-2c_v100_1.json", "skypilot", 244, 1420800, 6.8321),
        ("skypilot-preemption-1-node-gcp-us-central1-a_c3-88.json", "skypilot", 1, 164280, 0.9998),
        ("skypilot-preemption-4-node-us-east-1f_v100_1.json", "skypilot", 263, 1099200, 1.3755),
    ],
)
def test_real_files(file_name, name, changes, end, mean):
    path = COLLECTION / file_name
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trace = read(path)
    assert [re.findall(r"got (\d+) of", str(warning.message)) for warning in caught] == [["15"]] * (name == "gcloud")
    assert (trace.changes, trace.end, round(trace.mean, 4)) == (changes, end, mean)
    assert READERS[name].recognizes(Text.load(path))
    if name == "gcloud":
        with pytest.warns(UserWarning, match="15 of 1477 rows"):
            assert round(read(path, max_gap=300).mean, 4) == 72.929


def test_reading_imports_no_pandas():
    names = "import sys, variable_batch_size as vbs; vbs.lab.cluster.read"
    script = f"{names}; assert not {{'pandas', 'torch'}} & set(sys.modules)"
    assert run(sys.executable, "-c", script).returncode == 0
