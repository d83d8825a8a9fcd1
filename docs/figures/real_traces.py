"""Print the table of benchmarks/NOTEBOOK.md, from what `vbs simulate LOG LOG ... --json` prints.

vbs simulate LOG LOG ... --json | python docs/figures/real_traces.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from variable_batch_size.lab import cluster

COLUMNS = {
    "productive": ("productive_share", "{:.1%}"),
    "redone": ("redone_share", "{:.1%}"),
    "preemptions": ("preemptions", "{:.0f}"),
    "efficiency": ("efficiency", "{:.2f}"),
    "progress an hour": ("progress_per_hour", "{:,.0f}"),
    "progress a node-hour": ("progress_per_node_hour", "{:,.0f}"),
    "cost per progress": ("cost_per_progress", "{:.2e}"),
}  # heading -> fact and format; without the facts that no run has


def table(runs: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    """Return the lines of a Markdown table with a row for each log and policy."""
    facts = {fact for policies in runs.values() for row in policies.values() for fact in row}
    columns = {heading: column for heading, column in COLUMNS.items() if column[0] in facts}
    lines = [
        _line("log", "hours", "nodes, mean", "policy", *columns),
        _line("---", *["--:"] * 2, "---", *["--:"] * len(columns)),
    ]
    for log, policies in sorted(runs.items(), key=lambda item: Path(item[0]).name):
        capacity = cluster.read(log)
        size = f"{capacity.end / 3600:,.0f}", f"{capacity.nodes.min()} to {capacity.nodes.max()}, {capacity.mean:.1f}"
        first = f"`{Path(log).name}`", *size
        for policy, row in policies.items():
            lines.append(_line(*first, f"`{policy}`", *(_cell(row.get(fact), form) for fact, form in columns.values())))
            first = "", "", ""
    return lines


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print("\n".join(table(json.load(sys.stdin)["runs"])))
