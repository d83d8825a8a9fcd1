"""A Sphinx extension: the page of learning-rate rules, from `vbs.rules.RULES` and the docstrings of the rules."""

from __future__ import annotations

import inspect
import re
from typing import Any

import variable_batch_size as vbs

ENTRIES = ("Scales", "Progress", "Use when", "Fails when", "Source")


def optimizers() -> dict[str, str]:
    """Return the name of the optimizer of each rule that has one of its own."""
    return {kind.rule_name: name for name in vbs.__all__ if hasattr(kind := getattr(vbs, name), "rule_name")}


def description(rule: type[Any]) -> dict[str, str]:
    """Return the entries of a rule's docstring, see `ENTRIES`, without full stops."""
    found = re.findall(
        rf"^({'|'.join(ENTRIES)}): (.*(?:\n(?!\w[\w ]*:|\n).*)*)", inspect.getdoc(rule) or "", re.MULTILINE
    )
    return {name: " ".join(text.split()).removesuffix(".") for name, text in found}


def rule_table() -> str:
    """Return a table of all rules in Markdown, in the order of `vbs.rules.RULES`."""
    rows = ["| rule | use it for | scales | source |", "|---|---|---|---|"]
    for name, rule in vbs.rules.RULES.items():
        about = description(rule)
        cells = f"`{name}`", about["Use when"], about["Scales"], about.get("Source", "").split(", arXiv")[0]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def rule_sections() -> str:
    """Return a section about each rule in Markdown."""
    named, sections = optimizers(), []
    for name, rule in vbs.rules.RULES.items():
        text, about = inspect.getdoc(rule) or "", description(rule)
        paragraphs = text.split("\n\nScales:")[0].split("\n\n")
        entries = [f"- **{entry}**: {about[entry]}." for entry in ENTRIES if entry in about]
        if name in named:
            entries.insert(0, f"- **Optimizer**: {{py:class}}`~variable_batch_size.{named[name]}`")
        sections.append("\n\n".join([f"## `{name}`", *paragraphs, "\n".join(entries)]))
    return "\n\n".join(sections)


def setup(app: Any) -> dict[str, bool]:
    """Register the directive `{rule-sections}`."""
    from sphinx.util.docutils import SphinxDirective  # only a build of the site needs Sphinx

    class Generated(SphinxDirective):
        def run(self) -> list[Any]:
            return list(self.parse_text_to_nodes(rule_sections(), allow_section_headings=True))

    app.add_directive("rule-sections", Generated)
    return {"parallel_read_safe": True}
