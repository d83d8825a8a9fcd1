"""A Sphinx extension: tables of benchmarks/records.csv, and the commands that measured them.

    ```{measured} time of an update
    :where: CPU, 1 process
    :lines: what on
    :columns: case
    ```

shows the newest rows of these questions (separated by semicolons) whose `where` is the given one (those that begin with
it if it ends with `*`), with quartiles.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, ClassVar

from records import Record, newest, read
from results import table


def chosen(questions: str, where: str | None) -> list[Record]:
    """Return the newest rows of these questions."""
    names = [name.strip() for name in questions.split(";")]
    rows = [row for row in newest(read()) if row.question in names]
    if where is not None and where.endswith("*"):
        rows = [row for row in rows if row.where.startswith(where[:-1])]
    elif where is not None:
        rows = [row for row in rows if row.where == where]
    if not rows:
        raise ValueError(f"the questions must be in benchmarks/records.csv, got {questions!r} where {where!r}")
    return rows


def commands(rows: list[Record]) -> str:
    """Return a sentence with the commands that measured rows, each with its newest day and commit."""
    found = {row.command: f"`{row.command}` ({row.commit}, {row.date})" for row in rows}
    return f"Measured by {', '.join(found.values())}."


def setup(app: Any) -> dict[str, bool]:
    """Register the directive `{measured}`."""
    from docutils.parsers.rst import directives  # only a build of the site needs Sphinx
    from sphinx.util.docutils import SphinxDirective

    class Measured(SphinxDirective):
        required_arguments = 1
        final_argument_whitespace = True
        option_spec: ClassVar = dict.fromkeys(("title", "where", "lines", "columns"), directives.unchanged_required)

        def run(self) -> list[Any]:
            self.env.note_dependency(str(Path(sys.modules["records"].RECORDS)))
            rows = chosen(self.arguments[0], self.options.get("where"))
            lines, columns = self.options["lines"].split(), self.options["columns"].split()
            text = table(rows, self.options.get("title", self.arguments[0]), lines, columns, full=True)
            return list(self.parse_text_to_nodes(f"{text}\n\n{commands(rows)}"))

    app.add_directive("measured", Measured)
    return {"parallel_read_safe": True}
