"""Runs the code blocks of the pages: each block is a test item, and those of a page share a namespace.

A page continues with the objects of the quick start: `dataset`, `model`, `sampler`, `loader`, `inner`, `optimizer`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

from helpers.collection import pytest_xdist_make_scheduler  # noqa: F401
from helpers.frameworks import missing

DOCS = Path(__file__).parent
TRAINERS = sorted((DOCS / "trainers").glob("*.md"))


def quick_start(namespace: dict[str, Any]) -> None:
    """Define the objects of the quick start in the namespace of a page."""
    text = (DOCS / "quickstart.md").read_text(encoding="utf-8")
    found = re.search(r"^```python\n(.*?)^for ", text, re.DOTALL | re.MULTILINE)
    assert found is not None
    exec(found[1], namespace)


pytest_collect_file = Sybil(
    parsers=[SkipParser(), PythonCodeBlockParser()],
    pattern="*.md",
    excludes=[f"trainers/{page.name}" for page in TRAINERS if missing(page.stem)],
    setup=quick_start,
).pytest()
