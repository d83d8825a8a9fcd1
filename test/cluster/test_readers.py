"""What each format of capacity traces means beyond the contract, and the errors that only it has."""

from __future__ import annotations

import json
import re
import warnings
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.capacity_files import TEXTS, parcae_line
from helpers.properties import examples
from variable_batch_size.cluster import CapacityTrace, read


@pytest.fixture
def rows(tmp_path: Path):
    """Return a function that reads a text, and returns rows and end."""

    def reading(text: str, **options):
        (tmp_path / "trace").write_text(text, encoding="utf-8")
        trace = read(tmp_path / "trace", **options)
        return list(zip(trace.seconds.tolist(), trace.nodes.tolist(), strict=True)), trace.end

    return reading


@pytest.fixture
def error(tmp_path: Path):
    """Return a function that reads a text, and returns the message of the error."""

    def message(text: str, **options) -> str:
        path = tmp_path / "trace"
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match="capacity trace") as caught:
            read(path, **options)
        return str(caught.value).replace(f"capacity trace ({path}", "").removeprefix(":")

    return message


# ----------------------------------------------------------------------------------------------------------------- csv


def test_own_columns_in_any_order_and_others_are_ignored(tmp_path):
    path = tmp_path / "own.csv"
    path.write_text(f",nodes,zone,price,seconds\n0,{2**53},a,1.5,0\n1,2,b,2.5,60\n2,2,b,2.5,90\n")
    trace = read(path)
    assert (trace.seconds.tolist(), trace.nodes.tolist(), trace.end) == ([0, 60], [2**53, 2], 90)
    assert trace.prices is not None
    assert trace.prices.tolist() == [1.5, 2.5]


@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 99)), min_size=1).map(sorted),
    st.sampled_from([",", ";", "\t", " , ", " ;", "\t "]),
    st.sampled_from(["seconds", "Seconds", "time", "TIME"]),
    st.sampled_from(["nodes", "Nodes"]),
    st.sampled_from([None, "Z", "", "+00:00", "-07:30"]),
)
def test_own_files_of_other_programs(tmp_path_factory, rows, separator, time, nodes, zone):
    """Capitals, separators and ISO times say the same as seconds,nodes; dates begin at the first row."""
    path = tmp_path_factory.mktemp("own") / "trace"
    rows = [*rows, (rows[-1][0] + 1, 0)]
    first = 0 if zone is None else rows[0][0]
    moments = [datetime(2024, 2, 28, 10, 0, 0) + timedelta(seconds=second) for second, _ in rows]
    times = [row[0] for row in rows] if zone is None else [moment.isoformat() + zone for moment in moments]
    lines = [separator.join([str(when), str(row[1])]) for when, row in zip(times, rows, strict=True)]
    path.write_text("\n".join([separator.join([time, nodes]), *lines]))
    assert read(path) == CapacityTrace([second - first for second, _ in rows], [number for _, number in rows])


def test_own_times_of_several_zones(rows, error):
    text = "time;nodes\n2024-05-01T08:00Z;2\n2024-05-01 11:30:00+02:00;1\n2024-05-01T11:00:00.500;3\n"
    assert rows(text) == ([(0, 2), (5400, 1), (10800.5, 3)], 10800.5)
    requirement = "must be a time such as 2026-11-24T10:00:00Z, as that of the first row"
    for wrong in ("2024-02-30T08:00:00Z", "20240501T0900", "90", "2024-05-01"):
        assert error(f"{text}{wrong};4\n") == f"5): time {requirement}, got {wrong!r}; correct it"
    assert error("seconds,nodes\n0,4\n2024-05-01T08:00Z,2\n") == (
        "3): seconds must be a finite number >= 0, got '2024-05-01T08:00Z'; correct it"
    )
    assert error(text + "2024-05-01T08:00Z;4\n").startswith("5): time must be >= 10800.5, the time of the row before")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("seconds,nodes\n", "1): there must be at least one row, got 'seconds,nodes'; add rows"),
        ("seconds,nodes\n0,4\n\n60\n", "4): a row must have the cells of seconds,nodes, got '60'; correct the row"),
        (
            "seconds,nodes,nodes\n0,4,5\n",
            "1): the header must be seconds,nodes or seconds,nodes,price, got 'seconds,nodes,nodes'; correct it",
        ),
        ("seconds,nodes\n0,4\n60,-2\n", "3): nodes must be an integer in [0, 2**53], got '-2'; correct it"),
        ("seconds,nodes,price\n0,4,nan\n", "2): price must be a finite number >= 0, got 'nan'; correct it"),
        (
            "seconds,nodes\n60,4\n30,2\n",
            "3): seconds must be >= 60, the time of the row before, got 30.0; sort the rows by time",
        ),
    ],
)
def test_own_errors(text, expected, error):
    assert error(text) == expected


def test_line_numbers_are_those_of_an_editor(error):
    assert error("seconds,nodes\n0,4\u2028\n60,x\u000c\n").startswith("3): nodes must be")


# ------------------------------------------------------------------------------------------------------------ skypilot


def test_skypilot_prices(tmp_path):
    path = tmp_path / "trace"
    path.write_text('{"prices": [1, 2.5, 2.5], "data": [1, 1, 2], "metadata": {"gap_seconds": 30.5}}')
    trace = read(path)
    assert (trace.seconds.tolist(), trace.nodes.tolist(), trace.end) == ([0, 30.5, 61], [1, 1, 2], 91.5)
    assert trace.prices is not None
    assert trace.prices.tolist() == [1, 2.5, 2.5]
    path.write_text('{"prices": null, "data": [1], "metadata": {"gap_seconds": 30}}')
    assert read(path).prices is None


def test_skypilot_of_the_other_polarity(rows):
    text = '{"metadata": {"gap_seconds": 60}, "data": [0, 1, 1, 0]}'
    assert rows(text) == ([(0, 0), (60, 1), (180, 0)], 240)
    assert rows(text, inverted=True) == ([(0, 1), (60, 0), (180, 1)], 240)


HEAD = '{"metadata": {"gap_seconds": 300},\n"data": '
SHAPE = (
    'the file must hold gap_seconds and at least one tick, as {"metadata": {"gap_seconds": 300}, "data": [0, 3]} does'
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (HEAD + "[0, 3", "2): the text must be JSON (expecting ',' delimiter, column 14), got 'the end'; "),
        (HEAD + "[0,\n3,\n-1]}", "4): data[2] must be an integer in [0, 2**53], got -1; correct it"),
        (HEAD + "[0, true]}", "2): data[1] must be an integer in [0, 2**53], got True; correct it"),
        (HEAD + '["3"]}', "2): data[0] must be an integer in [0, 2**53], got '3'; correct it"),
        (HEAD + "[[0]]}", "2): data[0] must be an integer in [0, 2**53], got [0]; correct it"),
        (HEAD + "[]}", f"1): {SHAPE}, got "),
        (HEAD + "3}", f"1): {SHAPE}, got "),
        ('{"data": [1], "metadata": {}}', f"1): {SHAPE}, got "),
        ('{"data": [1], "metadata": 3}', f"1): {SHAPE}, got "),
        (HEAD + '[0, 1],\n"data": [1, 1]}', "3): an object must have each key once, got 'data'; leave one of them out"),
        (
            HEAD + '[0, 1],\n"prices": [1]}',
            "3): prices must be a list of 2 numbers, one for each tick, got '1 prices'; ",
        ),
        (
            HEAD + '[0, 1],\n"prices": [1, 1, 1]}',
            "3): prices must be a list of 2 numbers, one for each tick, got '3 prices'",
        ),
        (HEAD + '[0, 1],\n"prices": 0}', "3): prices must be a list of 2 numbers, one for each tick, got 0; "),
        (HEAD + '[0, 1],\n"prices": [1,\nnull]}', "4): prices[1] must be a finite number >= 0, got None; correct it"),
        (HEAD + '[0],\n"x": ' + "[" * 100_000, "1): the JSON must not be nested so deeply, got "),
        (HEAD + "[0,\n" + "9" * 5000 + "]}", "3): data[1] must be an integer in [0, 2**53], got inf"),
        ('{"data": [1], "metadata": {"gap_seconds": -3}}', "1): gap_seconds must be a finite number >= 0, got -3; "),
    ],
)
def test_skypilot_errors(text, expected, error):
    assert error(text).startswith(expected)


def test_skypilot_of_several_nodes_and_the_other_polarity(rows, error):
    text = HEAD + "[0,\n1,\n4]}"
    assert rows(text, inverted=4) == ([(0, 4), (300, 3), (600, 0)], 900)
    for inverted in (True, 1):
        assert error(text, inverted=inverted) == (
            "4): data[2] must be <= 1, the nodes of the cluster, with inverted=1, got 4; "
            "pass the number of nodes of the cluster as inverted="
        )


# ---------------------------------------------------------------------------------------------------------------- JSON


@pytest.mark.parametrize("name", ["skypilot", "parcae"])
@pytest.mark.parametrize("indent", [0, 1, "\t"])
def test_json_may_be_pretty_printed(name, indent, rows):
    compact = [line for line in TEXTS[name].splitlines() if not line.startswith("#")]
    documents = map(json.loads, compact if name == "parcae" else ["".join(compact)])
    assert rows("\n".join(json.dumps(document, indent=indent) for document in documents)) == rows(TEXTS[name])


def test_errors_of_pretty_printed_json_name_the_line(error):
    text = json.dumps([0, "add", {"nodes": ["a"], "duration": 1}], indent=1) + "\n"
    lines = text.count("\n")
    assert error(text + text) == f"{lines + 1}): {KNOWN.format('a')}"
    found = text.replace('"duration"', '"nodes"', 1)
    assert error(text + found).startswith(f"{2 * lines - 2}): an object must have each key once, got 'nodes'; ")
    assert error(text + text[:-3]).startswith(f"{2 * lines - 1}): the text must be JSON (expecting ',' delimiter, col")


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("several", [True, False])
def test_the_json_of_kubectl_is_an_unknown_format(indent, several, error):
    event = {"apiVersion": "v1", "kind": "Event", "metadata": {"name": "a"}, "data": {"reason": "NodeReady"}}
    document = [event, event] if several else {"apiVersion": "v1", "items": [event], "kind": "List"}
    message = error(json.dumps(document, indent=indent))
    assert message.startswith("1): a file must begin like seconds,nodes (csv) or ")
    assert message.endswith("; write it as seconds,nodes, as in docs/capacity.md under Any other log, or pass format=")


# ------------------------------------------------------------------------------------------------ bamboo-events, parcae


UNKNOWN = "must be in the cluster, got {!r}; add it before, or correct its name"
KNOWN = "a node that is added must not be in the cluster yet, got {!r}; remove it before, or correct its name"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0,add,a\n5,add,a\n", "2): " + KNOWN.format("a")),
        ("0,add,a\n5,remove,b\n", "2): a node that is removed " + UNKNOWN.format("b")),
        ("0,add,a\n5,remove,a\n5,remove,a\n", "3): a node that is removed " + UNKNOWN.format("a")),
        ("0,add,a\n5,ad,b\n", "2): the event must be add or remove, got 'ad'; correct the row"),
        ("0,add,a\n5,add\n", "2): a row must have the cells of 480000,add,node1, got '5,add'; correct the row"),
        ("0,add,a\n5,add,\n", "2): a row must name a node, got '5,add,'; correct the row"),
        ("-5,add,a\n", "1): milliseconds must be a finite number >= 0, got '-5'; correct it"),
    ],
)
def test_bamboo_events_errors(text, expected, error):
    assert error(text) == expected


def test_parcae_lasts_for_the_duration_of_the_last_row(rows):
    text = parcae_line(0, "add", ["a"], 999_000) + parcae_line(60_000, "no-op", ["a"], 0)
    assert rows(text) == ([(0, 1)], 60)
    assert rows(text + parcae_line(90_000, "remove", ["a"], 500)) == ([(0, 1), (90, 0)], 90.5)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (parcae_line(5, "add", ["b", "b"]), KNOWN.format("b")),
        (parcae_line(5, "remove", ["a", "a"]), "a node that is removed " + UNKNOWN.format("a")),
        (parcae_line(5, "migration", ["a", "b"]), "a node that is named " + UNKNOWN.format("b")),
        (parcae_line(5, "lost", []), "the event must be one of add, remove, migration, no-op, got 'lost'; "),
        (parcae_line(5, "no-op", "a"), "nodes must be a list of names, got 'a'; "),  # type: ignore[arg-type]
        (parcae_line(5, "no-op", [3]), "nodes must be a list of names, got [3]; "),  # type: ignore[list-item]
        ('[5, "no-op", {"nodes": []}]', "duration must be a finite number >= 0, got None; correct it"),
        ('[5, "no-op", {"duration": 1, "duration": 2}]', "an object must have each key once, got 'duration'; "),
        ('[5, null, {"nodes": []}]', "the event must be one of add, remove, migration, no-op, got None; "),
        ('[5, "no-op", {"nodes": []}, 0]', "a row must have the form "),
        ('[5, "no-op", []]', 'a row must have the form [0, "add", {"nodes": ["node-0"], "duration": 60000}], got '),
        ('[5, "no-op", {"nodes": [', "the text must be JSON (expecting value, column 25), got 'the end'; "),
        (parcae_line(-5, "no-op", []), "milliseconds must be a finite number >= 0, got -5; correct it"),
        ("[" * 100_000, "the JSON must not be nested so deeply, got "),
        (f'[{"9" * 400}, "no-op", {{}}]', "nodes must be a list of names, got None; "),
    ],
)
def test_parcae_errors(line, expected, error):
    assert error(parcae_line(0, "add", ["a"]) + "\n" + line).startswith(f"3): {expected}")


def test_parcae_of_comments_alone(error):
    assert error("# one\n# two\n", format="parcae") == "2): there must be at least one row, got '# two'; add rows"


# -------------------------------------------------------------------------------------------------------------- gcloud


def test_gcloud_warns_at_the_line_of_the_user(tmp_path):
    path = tmp_path / "trace"
    path.write_text(
        "2021-12-10, 13:08:00, 8\n2021-12-10, 13:07:30, 7\n2021-12-10, 13:07:30, 6\n2021-12-10, 13:07:00, 5\n"
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trace = read(path)
    assert [(warning.filename, warning.category) for warning in caught] == [(__file__, UserWarning)]
    assert str(caught[0].message) == (
        f"capacity trace ({path}) must be in ascending order of time, got 2 of 4 rows that go back; sorted them by "
        "time, sort the file to avoid this warning"
    )
    assert (trace.seconds.tolist(), trace.nodes.tolist(), trace.end) == ([0, 30, 60], [5, 6, 8], 60)


def test_gcloud_gaps(rows):
    text = "2021-12-31, 23:59:00, 8\n2022-01-01, 00:00:00, 7\n2022-01-01, 00:10:00, 7\n2022-01-01, 00:11:00, 7\n"
    assert rows(text) == ([(0, 8), (60, 7)], 720)
    assert rows(text, max_gap=60) == ([(0, 8), (60, 7), (120, 0), (660, 7)], 720)
    assert rows(text, max_gap=600) == rows(text)


@pytest.mark.parametrize(
    "row",
    [
        "2021-02-29, 13:07:45, 8",
        "2021-12-10, 24:00:00, 8",
        "2021-12-10, 13:07, 8",
        "2021-12-10, 13:07:45Z, 8",
        "10.12.2021, 13:07:45, 8",
    ],
)
def test_gcloud_dates_that_are_none(row, error):
    found = row.rpartition(",")[0]
    assert error(f"2021-12-10, 13:07:45, 80\n{row}\n") == (
        "2): a row must begin with a date and a time of day, such as 2021-12-10, 13:07:45, "
        f"got {found!r}; correct the row"
    )


@examples(100)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3)), min_size=1, max_size=8),
    st.sampled_from([0.5, 1, 2, 3, 10, 100]),
)
def test_gcloud_in_any_order_with_any_gap(tmp_path_factory, rows, gap):
    path = tmp_path_factory.mktemp("gcloud") / "trace"
    lines = [f"2021-12-10, 13:07:{second:02}, {nodes}" for second, nodes in [*rows, (50, 2)]]
    path.write_text("\n".join(lines))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        trace = read(path, max_gap=gap)
    start = min(second for second, _ in rows)
    assert trace.end == 50 - start
    for time in np.arange(start, 50, 0.25):
        before = sorted((second, place) for place, (second, _) in enumerate(rows) if second <= time)
        second, place = before[-1]
        assert trace.at(time - start) == (rows[place][1] if time - second < gap else 0)


# ----------------------------------------------------------------------------------------------------------------- eth


def test_eth_fractions_count_to_the_microsecond(rows):
    text = ",Time,TPU_cores\n0,1651064158.1,8.0\n1,1651064158.4,16\n9,1651064158.400001,8\n"
    assert rows(text) == ([(0, 8), (0.3, 16), (0.300001, 8)], 0.300001)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            ",Time,GPUs,TPU_cores\n0,5,8,8\n",
            "1): the header must be ,Time,GPUs or ,Time,TPU_cores, got ',Time,GPUs,TPU_cores'; keep one of the columns",
        ),
        (",Time,GPUs\n", "1): there must be at least one row, got ',Time,GPUs'; add rows"),
        (",Time,GPUs\n0,5,8\n1,6,\n", "3): GPUs must be an integer in [0, 2**53], got ''; correct it"),
        (",Time,GPUs\n0,5\n", "2): a row must have the cells of ,Time,GPUs, got '0,5'; correct the row"),
        (
            ",Time,GPUs\n0,5,8\n1,4,8\n",
            "3): Time must be >= 5, the time of the row before, got 4.0; sort the rows by time",
        ),
    ],
)
def test_eth_errors(text, expected, error):
    assert error(text) == expected


def test_a_long_value_is_shortened(error):
    assert re.fullmatch(r"2\): nodes must be .*, got 'x{59}; correct it", error("seconds,nodes\n0," + "x" * 10_000))
