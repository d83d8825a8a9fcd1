"""The table of rules in the README, rendered from `vbs.RULES` and the docstrings of the rules."""

from __future__ import annotations

import inspect
import re
from typing import Any

import variable_batch_size as vbs


def description(rule: type[Any]) -> dict[str, str]:
    """Return the entries "Scales", "Use when", "Fails when" and "Source" of a rule's docstring, without full stops."""
    found = re.findall(
        r"^(Scales|Use when|Fails when|Source): (.*(?:\n(?!\w[\w ]*:|\n).*)*)", inspect.getdoc(rule) or "", re.M
    )
    return {name: " ".join(text.split()).removesuffix(".") for name, text in found}


def rule_table() -> str:
    """Return the table in Markdown, in the order of `vbs.RULES`."""
    rows = ["| rule | optimizer | scales | use it when | it fails when | source |", "|---|---|---|---|---|---|"]
    named = {kind.rule_name: name for name in vbs.__all__ if hasattr(kind := getattr(vbs, name), "rule_name")}
    for name, rule in vbs.RULES.items():
        about = description(rule)
        source = about.get("Source", "").split(", arXiv")[0]
        cells = [
            f"`{name}`",
            f"`{named[name]}`" if name in named else "",
            about["Scales"],
            about["Use when"],
            about["Fails when"],
            source,
        ]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)
