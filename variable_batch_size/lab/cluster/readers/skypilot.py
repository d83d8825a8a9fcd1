"""SkyPilot's spot traces: JSON with the number of nodes at each tick."""

from __future__ import annotations

import re
from typing import final

from variable_batch_size.lab.cluster.readers.base import Reader, ReaderOptions, Rows, Text, json_values


@final
class SkyPilotReader(Reader):
    """`{"metadata": {"gap_seconds": 300}, "data": [0, 3, 16], "prices": [0.9, 0.9, 1.1]}`: the nodes at each tick.

    The first tick is at 0, and the trace ends `gap_seconds` after the last one. `prices` may be absent or null; they
    are those of a node, per hour, one for each tick. Other keys are ignored.

    With `inverted=True` 1 means that the only node is not available, and 0 that it is. The file of a larger cluster
    does not say how many nodes there are: with `inverted=16` they are 16 minus the number of each tick.

    Source: `github.com/skypilot-org/spot-traces` (Wu et al., "Can't Be Late", NSDI 2024).
    """

    name = "skypilot"
    example = '{"metadata": {"gap_seconds": 300}, "data": [0, 3]}'
    options = frozenset({"inverted"})

    def recognizes(self, text: Text) -> bool:
        """Return whether the file is an object with one of the two keys of the format."""
        keys = r'"gap_seconds"|"data"\s*:\s*\['
        return text.lines[0][1].startswith("{") and re.search(keys, text.content) is not None

    def read(self, text: Text, options: ReaderOptions) -> Rows:
        """Return the number of nodes at each tick, and their prices if the file has them."""
        line, first = text.lines[0]
        documents = [document for _, document in json_values(text, text.content)]
        content = documents[0] if len(documents) == 1 and isinstance(documents[0], dict) else {}
        metadata, data, prices = (content.get(key) for key in ("metadata", "data", "prices"))
        if not (isinstance(metadata, dict) and "gap_seconds" in metadata and isinstance(data, list) and data):
            requirement = f"the file must hold gap_seconds and at least one tick, as {self.example} does"
            raise text.error(line, requirement, first, "add them, or write lines of seconds,nodes")
        seconds = text.number(line, "gap_seconds", metadata["gap_seconds"])
        nodes = [int(number) for number in _read_numbers(text, line, "data", data, whole=True)]
        if options.inverted:
            nodes = _invert(text, line, nodes, options.inverted)
        if prices is not None and not (isinstance(prices, list) and len(prices) == len(data)):
            found = f"{len(prices)} prices" if isinstance(prices, list) else prices
            requirement = f"prices must be a list of {len(data)} numbers, one for each tick"
            raise text.error(line, requirement, found, "correct them, or leave them out")
        costs = None if prices is None else _read_numbers(text, line, "prices", prices)
        return Rows([tick * seconds for tick in range(len(data))], nodes, len(data) * seconds, costs)


def _read_numbers(text: Text, line: int, key: str, values: list[object], whole: bool = False) -> list[float]:
    """Return a list of the file as numbers; raise LogError if a value is not one.

    Args:
        text: the file, for the error.
        line: number of the line, for the error.
        key: the key of the list, for the error.
        values: the list.
        whole: whether they must be integers.
    """
    return [text.number(line, f"{key}[{index}]", value, whole) for index, value in enumerate(values)]


def _invert(text: Text, line: int, nodes: list[int], size: int) -> list[int]:
    """Return how many nodes of a cluster are available at each tick, if the file counts those that are not.

    Args:
        text: the file, for the error.
        line: number of the line, for the error.
        nodes: number of nodes that are not available at each tick.
        size: number of nodes of the cluster.

    Raises:
        LogError: if a number is larger than the cluster.
    """
    for tick, unavailable in enumerate(nodes):
        if unavailable > size:
            requirement = f"data[{tick}] must be <= {size}, the nodes of the cluster, with inverted={size}"
            remedy = "pass the number of nodes of the cluster as inverted= (--inverted)"
            raise text.error(line, requirement, unavailable, remedy)
    return [size - unavailable for unavailable in nodes]
