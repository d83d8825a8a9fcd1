"""The second readers of capacity traces: each written from the description of its format alone, in the plainest way.

They import nothing of the package.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

Table = list[list[str]]


class Slow(NamedTuple):
    """A trace: (time, nodes, price of a node or None) in the order in which they count, and the end."""

    rows: list[tuple[float, int, float | None]]
    end: float

    def steps(self) -> dict[float, tuple[int, float | None]]:
        """Return time -> (nodes, price) from then on, beginning at 0."""
        before = (0.0, 0, self.rows[0][2])
        return {time: (nodes, price) for time, nodes, price in [before, *self.rows]}  # at one time the last one counts


def demand(condition: object) -> None:
    if not condition:
        raise ValueError("damaged")


def lines(path: Path) -> list[str]:
    with path.open(encoding="utf-8-sig") as file:
        found = [line.strip() for line in file]
    return [line for line in found if line]


def table(path: Path) -> Table:
    return [[cell.strip() for cell in line.split(",")] for line in lines(path)]


def number(cell: object) -> float:
    if isinstance(cell, str):
        demand(re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", cell))
    demand(isinstance(cell, str | int | float) and cell is not True and cell is not False)
    try:
        value = float(cell)  # type: ignore[arg-type]
    except OverflowError:
        raise ValueError from None
    demand(math.isfinite(value) and value >= 0)
    return value


def whole(cell: object) -> int:
    value = number(cell)
    demand(value == int(value) and value <= 2**53)
    demand(not str(cell).isdigit() or int(cell) <= 2**53)  # type: ignore[call-overload]
    return int(value)


def trace(rows: list[tuple[float, int, float | None]], end: float | None = None) -> Slow:
    demand(rows)
    demand(all(rows[i][0] <= rows[i + 1][0] for i in range(len(rows) - 1)))
    result = Slow(rows, rows[-1][0] if end is None else end)
    demand(0 < result.end < math.inf)
    return result


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    demand(len({key for key, _ in pairs}) == len(pairs))
    return dict(pairs)


def own(path: Path) -> Slow:
    header, *rows = table(path)
    demand({"seconds", "nodes"} <= set(header) and len(header) == len(set(header)))
    demand(header[0][:1] not in ("[", "{", "#"))
    demand(all(len(row) == len(header) for row in rows))
    time, nodes = header.index("seconds"), header.index("nodes")
    price = header.index("price") if "price" in header else None
    prices = [None if price is None else number(row[price]) for row in rows]
    return trace([(number(row[time]), whole(row[nodes]), cost) for row, cost in zip(rows, prices, strict=True)])


def skypilot(path: Path) -> Slow:
    document = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=unique)
    demand(isinstance(document, dict))
    metadata, data, prices = document.get("metadata"), document.get("data"), document.get("prices")
    demand(isinstance(metadata, dict) and isinstance(data, list))
    demand(prices is None or (isinstance(prices, list) and len(prices) == len(data)))
    gap = number(metadata.get("gap_seconds"))
    costs = [None] * len(data) if prices is None else [number(price) for price in prices]
    return trace([(tick * gap, whole(data[tick]), costs[tick]) for tick in range(len(data))], len(data) * gap)


def bamboo_events(path: Path) -> Slow:
    rows: list[tuple[float, int, float | None]] = []
    there: list[str] = []
    for row in table(path):
        demand(len(row) == 3)
        time, event, name = row
        demand(name and event in ("add", "remove") and (name in there) == (event == "remove"))
        there = [*there, name] if event == "add" else [other for other in there if other != name]
        rows.append((number(time) / 1000, len(there), None))
    return trace(rows)


def bamboo_counts(path: Path) -> Slow:
    rows = table(path)
    demand(all(len(row) == 2 for row in rows))
    return trace([(number(time), whole(count), None) for time, count in rows])


def gcloud(path: Path, max_gap: float = math.inf) -> Slow:
    moments: list[tuple[datetime, int]] = []
    for row in table(path):
        demand(len(row) == 3)
        date, time, count = row
        demand(f"{date}{time}".isascii() and len(date) == 10 and len(time) == 8 and " " not in date + time)
        moments.append((datetime.strptime(f"{date} {time}", "%Y-%m-%d %H:%M:%S"), whole(count)))
    demand(moments)
    start = min(moment for moment, _ in moments)
    instants = sorted({moment for moment, _ in moments})
    rows: list[tuple[float, int, float | None]] = []
    for i, instant in enumerate(instants):
        second = (instant - start).total_seconds()
        rows.append((second, [count for moment, count in moments if moment == instant][-1], None))
        if i + 1 < len(instants) and (instants[i + 1] - instant).total_seconds() > max_gap:
            rows.append((second + max_gap, 0, None))
    return trace(rows)


def parcae(path: Path) -> Slow:
    rows: list[tuple[float, int, float | None]] = []
    there: list[str] = []
    end = 0.0
    for line in lines(path):
        if line.startswith("#"):
            continue
        row = json.loads(line, object_pairs_hook=unique)
        demand(isinstance(row, list) and len(row) == 3 and isinstance(row[2], dict))
        demand(not isinstance(row[0], str) and not isinstance(row[2].get("duration"), str))
        names = row[2].get("nodes")
        demand(isinstance(names, list) and all(isinstance(name, str) for name in names))
        demand(row[1] in ("add", "remove", "migration", "no-op"))
        if row[1] in ("add", "remove"):
            demand(len(set(names)) == len(names))
        demand(all((name in there) == (row[1] != "add") for name in names))
        if row[1] == "add":
            there = there + names
        if row[1] == "remove":
            there = [name for name in there if name not in names]
        rows.append((number(row[0]) / 1000, len(there), None))
        end = rows[-1][0] + number(row[2].get("duration")) / 1000
    return trace(rows, end)


def eth(path: Path) -> Slow:
    header, *rows = table(path)
    demand(len(header) == 3 and header[:2] == ["", "Time"] and header[2] in ("GPUs", "TPU_cores"))
    demand(all(len(row) == 3 for row in rows))
    found = [(number(row[1]), whole(row[2]), None) for row in rows]
    demand(found and all(found[i][0] <= found[i + 1][0] for i in range(len(found) - 1)))
    return trace([(round(time - found[0][0], 6), devices, None) for time, devices, _ in found])


SLOW: dict[str, Callable[[Path], Slow]] = {
    "csv": own,
    "skypilot": skypilot,
    "bamboo-events": bamboo_events,
    "bamboo-counts": bamboo_counts,
    "gcloud": gcloud,
    "parcae": parcae,
    "eth": eth,
}
