"""The golden files of capacity traces: one in each format, and beside it what it says; both were written by hand."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from variable_batch_size.lab.cluster import CapacityTrace

GOLDEN = Path(__file__).parents[1] / "lab" / "cluster" / "golden"
COLLECTION = Path(os.environ.get("CAPACITY_TRACES", Path(__file__).parents[3] / "shared" / "traces"))  # of real files


class Places(NamedTuple):
    """A number of nodes and a time in a golden file, with what stands around them; empty in formats without one."""

    number: str
    time: str


PLACES = {
    "csv": Places("60,us-east-1a,<2>", "\n<90.5>"),
    "skypilot": Places("<3>, 16", "<300>"),
    "bamboo-events": Places("", "\n<600500>"),
    "bamboo-counts": Places("7.5,<4>", "\n<7.5>"),
    "gcloud": Places(":50, <70>", ""),
    "parcae": Places("", "<180000>"),
    "eth": Places("218.35,<6>", "<1651064218.35>"),
    "sacct": Places("Unknown|<3>", ""),
}
TIMES = {  # the times of a row, after what stands before them, and how many of them are a second
    "csv": (r"(?m)^()([0-9.]+)", 1),
    "bamboo-events": (r"(?m)^()([0-9.]+)", 1000),
    "bamboo-counts": (r"(?m)^()([0-9.]+)", 1),
    "parcae": (r"(?m)^(\[)([0-9]+)", 1000),
    "eth": (r"(?m)^([0-9]+,)([0-9.]+)", 1),
}
TEXTS = {name: (GOLDEN / f"{name}.txt").read_text() for name in PLACES}


def meaning(name: str) -> CapacityTrace:
    """Return what a golden file says: a row for each time, then the end."""
    table = np.genfromtxt(GOLDEN / f"{name}.csv", delimiter=",", names=True)  # not by the package
    prices = table["price"][:-1] if "price" in table.dtype.names else None
    return CapacityTrace(table["seconds"][:-1], table["nodes"][:-1].astype(int), table["seconds"][-1], prices)


def parcae_line(time: float, event: str, nodes: list[str], duration: float = 60000) -> str:
    return json.dumps([time, event, {"nodes": nodes, "duration": duration}]) + "\n"


def with_number(name: str, value: str) -> str:
    """Return the golden file with another number of nodes."""
    return _replaced(TEXTS[name], PLACES[name].number, value)


def with_time(name: str, value: str) -> str:
    """Return the golden file with another time."""
    return _replaced(TEXTS[name], PLACES[name].time, value)


def moved(name: str, seconds: float, factor: float = 1) -> str:
    """Return the golden file with times that begin at `seconds`, then times a factor."""
    pattern, unit = TIMES[name]
    times = [float(match[2]) for match in re.finditer(pattern, TEXTS[name])]

    def move(match: re.Match[str]) -> str:
        return match[1] + repr(factor * (float(match[2]) - times[0] + seconds * unit))

    return re.sub(pattern, move, TEXTS[name])


def _replaced(text: str, place: str, value: str) -> str:
    before, inside, after = re.split("[<>]", place)
    assert text.count(before + inside + after) == 1
    return text.replace(before + inside + after, before + value + after)
