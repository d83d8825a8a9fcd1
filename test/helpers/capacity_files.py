"""Small capacity traces, one in each format, and what they say."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from helpers.slow_readers import Slow
from variable_batch_size.cluster import CapacityTrace

COLLECTION = Path(os.environ.get("CAPACITY_TRACES", Path(__file__).parents[3] / "shared" / "traces"))  # of real files


class Example(NamedTuple):
    """A file: its text, what it says, and the numbers and times in it that a test replaces by wrong ones."""

    text: str
    rows: list[tuple[float, int]]
    end: float
    number: str  # of nodes, with what stands around it; empty in formats that name nodes
    time: str


def parcae_line(time: float, event: str, nodes: list[str], duration: float = 60000, **more: Any) -> str:
    return json.dumps([time, event, {"nodes": nodes, "duration": duration, **more}]) + "\n"


EXAMPLES = {
    "csv": Example("seconds,nodes\n5,4\n60,2\n60,3\n90.5,3\n", [(0, 0), (5, 4), (60, 3)], 90.5, "60,<2>", "\n<90.5>"),
    "skypilot": Example(
        '{"metadata": {"gap_seconds": 300, "zone": "a"},\n"data": [0, 3, 16,\n16],\n"prices": [1, 1, 2.5, 2]}\n',
        [(0, 0), (300, 3), (600, 16)],
        1200,
        "<3>, 16",
        "<300>",
    ),
    "bamboo-events": Example(
        "480000,add,node1\n540000,add,node2\n540000,remove,node1\n600500,add,node1\n",
        [(0, 0), (480, 1), (600.5, 2)],
        600.5,
        "",
        "\n<600500>",
    ),
    "bamboo-counts": Example(
        "0,0\n7,0\n7.5,4\n21.25,4\n21.25,2\n", [(0, 0), (7.5, 4), (21.25, 2)], 21.25, "7.5,<4>", "\n<7.5>"
    ),
    "gcloud": Example(
        "2021-12-10, 23:59:30, 80\n2021-12-10, 23:59:50, 70\n2021-12-11, 00:00:30, 70\n2021-12-11, 01:00:00, 60\n",
        [(0, 80), (20, 70), (3630, 60)],
        3630,
        ":50, <70>",
        "",
    ),
    "parcae": Example(
        "# a comment\n"
        + parcae_line(1000, "add", ["a", "b", "c"], throughput_opt_strategy=[9, 3])
        + parcae_line(60000, "migration", ["a"])
        + parcae_line(120000, "remove", ["b", "a"])
        + parcae_line(180000, "no-op", [], 30500),
        [(0, 0), (1, 3), (120, 1)],
        210.5,
        "",
        "<180000>",
    ),
    "eth": Example(
        ",Time,GPUs\n0,1651064158.25,8\n1,1651064188.5,8\n2,1651064218.35,6\n3,1651064300,6\n",
        [(0, 8), (60.1, 6)],
        141.75,
        "218.35,<6>",
        "<1651064218.35>",
    ),
}  # fmt: skip


def with_number(name: str, value: str) -> str:
    """Return the file with another number of nodes."""
    example = EXAMPLES[name]
    return _replaced(example.text, example.number, value)


def with_time(name: str, value: str) -> str:
    """Return the file with another time."""
    example = EXAMPLES[name]
    return _replaced(example.text, example.time, value)


def _replaced(text: str, place: str, value: str) -> str:
    before, inside, after = re.split("[<>]", place)
    assert text.count(before + inside + after) == 1
    return text.replace(before + inside + after, before + value + after)


def assert_same(trace: CapacityTrace, slow: Slow) -> None:
    """Assert that a trace is what a slow reader says, at the time of each row and between them."""
    steps = slow.steps()
    times = np.array(list(steps))
    between = times / 2 + np.append(times[1:], slow.end) / 2
    nodes, prices = zip(*steps.values(), strict=True)
    assert trace.end == slow.end
    for probes in (times, between):
        assert trace.at(probes).tolist() == list(nodes)
        rows = trace.seconds.searchsorted(probes, side="right") - 1
        found = [None] * len(rows) if trace.prices is None else trace.prices[rows].tolist()
        assert found == list(prices)
