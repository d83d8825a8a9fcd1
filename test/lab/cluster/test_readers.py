"""What each format of capacity traces means beyond the contract."""

from __future__ import annotations

import json
import warnings
from datetime import datetime, timedelta

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.capacity_files import TEXTS, parcae_line
from helpers.properties import examples
from variable_batch_size.lab.cluster import CapacityTrace, read


@pytest.fixture
def rows(tmp_path):
    """Return a function that reads a text, and returns rows and end."""

    def reading(text, **options):
        (tmp_path / "trace").write_text(text, encoding="utf-8")
        trace = read(tmp_path / "trace", **options)
        return list(zip(trace.seconds.tolist(), trace.nodes.tolist(), strict=True)), trace.end

    return reading


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


def test_own_times_of_several_zones(rows):
    text = "time;nodes\n2024-05-01T08:00Z;2\n2024-05-01 11:30:00+02:00;1\n2024-05-01T11:00:00.500;3\n"
    assert rows(text) == ([(0, 2), (5400, 1), (10800.5, 3)], 10800.5)


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


def test_skypilot_of_several_nodes_and_the_other_polarity(rows):
    text = HEAD + "[0,\n1,\n4]}"
    assert rows(text, inverted=4) == ([(0, 4), (300, 3), (600, 0)], 900)


# ---------------------------------------------------------------------------------------------------------------- JSON


@pytest.mark.parametrize("name", ["skypilot", "parcae"])
@pytest.mark.parametrize("indent", [0, 1, "\t"])
def test_json_may_be_pretty_printed(name, indent, rows):
    compact = [line for line in TEXTS[name].splitlines() if not line.startswith("#")]
    documents = map(json.loads, compact if name == "parcae" else ["".join(compact)])
    assert rows("\n".join(json.dumps(document, indent=indent) for document in documents)) == rows(TEXTS[name])


# ------------------------------------------------------------------------------------------------ bamboo-events, parcae


def test_parcae_lasts_for_the_duration_of_the_last_row(rows):
    text = parcae_line(0, "add", ["a"], 999_000) + parcae_line(60_000, "no-op", ["a"], 0)
    assert rows(text) == ([(0, 1)], 60)
    assert rows(text + parcae_line(90_000, "remove", ["a"], 500)) == ([(0, 1), (90, 0)], 90.5)


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


@pytest.mark.parametrize("header", ["", "seconds,nodes\n"])
def test_times_that_look_like_hours_are_warned_of(header, tmp_path):
    """As in four of eleven public logs of Bamboo."""
    path = tmp_path / "trace"
    path.write_text(header + "".join(f"{0.48 * row:.2f},{row % 3}\n" for row in range(180)))
    with pytest.warns(UserWarning, match=r"changes 179 times in 85.92 seconds, as if .* hours; .* --scale-time 3600"):
        read(path)
    path.write_text(header + "".join(f"{5.5 * row:.2f},{row % 3}\n" for row in range(180)))
    read(path)  # warnings are errors


# ----------------------------------------------------------------------------------------------------------------- eth


def test_eth_fractions_count_to_the_microsecond(rows):
    text = ",Time,TPU_cores\n0,1651064158.1,8.0\n1,1651064158.4,16\n9,1651064158.400001,8\n"
    assert rows(text) == ([(0, 8), (0.3, 16), (0.300001, 8)], 0.300001)
