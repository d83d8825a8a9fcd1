"""A Sphinx extension: a section of two scripts side by side, with the lines that differ highlighted.

A section begins with a comment such as `# 5. The loop.`, or is a function. Indentation does not count as a difference.
"""

from __future__ import annotations

import re
import textwrap
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "examples" / "language_model"
SCRIPTS = ("plain.py", "variable.py")


def section(text: str, name: str) -> list[str]:
    """Return the lines of a section, without its comment or the `def` line's decorators."""
    numbered = rf"^ *# {re.escape(name)}\.\n(.*?)(?=^ *# \d+\. |^\S)"
    function = rf"^(def {re.escape(name)}\(.*?)(?=^[^\s)]|\Z)"
    found = re.search(numbered, text, re.DOTALL | re.MULTILINE) or re.search(function, text, re.DOTALL | re.MULTILINE)
    if found is None:
        raise ValueError(f"no section {name!r}")
    return textwrap.dedent(found[1]).strip().splitlines()


def changed(lines: list[str], others: list[str]) -> list[int]:
    """Return the numbers, from 1 on, of the lines that the others do not have."""
    stripped = [[line.strip() for line in some] for some in (others, lines)]
    opcodes = SequenceMatcher(None, *stripped, autojunk=False).get_opcodes()
    numbers = [number for tag, _, _, begin, end in opcodes if tag != "equal" for number in range(begin, end)]
    return [number + 1 for number in numbers if lines[number].strip()]


def side_by_side(name: str) -> str:
    """Return a grid of the two scripts' sections in Markdown."""
    sections = [section((FOLDER / script).read_text(encoding="utf-8"), name) for script in SCRIPTS]
    cells = []
    for script, lines, others in zip(SCRIPTS, sections, sections[::-1], strict=True):
        options = [f":caption: {script}"]
        if numbers := changed(lines, others):
            options.append(f":emphasize-lines: {','.join(map(str, numbers))}")
        code = "\n".join(["```{code-block} python", *options, "", *lines, "```"])
        cells.append(f":::{{grid-item}}\n{code}\n:::")
    return "\n".join(["::::{grid} 1 1 1 2", ":gutter: 2", ":class-container: side-by-side", "", *cells, "::::"])


def setup(app: Any) -> dict[str, bool]:
    """Register the directive `{side-by-side}`, whose argument is the name of a section."""
    from sphinx.util.docutils import SphinxDirective  # only a build of the site needs Sphinx

    class SideBySide(SphinxDirective):
        required_arguments = 1
        final_argument_whitespace = True

        def run(self) -> list[Any]:
            for script in SCRIPTS:
                self.env.note_dependency(str(FOLDER / script))
            return list(self.parse_text_to_nodes(side_by_side(self.arguments[0])))

    app.add_directive("side-by-side", SideBySide)
    app.add_css_file("side_by_side.css")
    return {"parallel_read_safe": True}
