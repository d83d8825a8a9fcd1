"""The examples in the package's docstrings run and print what they say; messages name titles that there are."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path

import pytest

import variable_batch_size as vbs

PACKAGE = Path(vbs.__file__).parent
MODULES = sorted(
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    for path in PACKAGE.rglob("*.py")
    if path.name != "__init__.py" and ">>>" in path.read_text()
)


@pytest.mark.parametrize("module", MODULES)
def test_examples_run(module):
    results = doctest.testmod(importlib.import_module(module), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert results.failed == 0
    assert results.attempted > 0


def test_messages_name_titles_of_the_documentation():
    source = "".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    named = re.findall(r"in_documentation\([\"'](.+?)[\"']\)", source)
    named += re.findall(r"check_settings\(SETTINGS, .*, \"(.+)\"\)", source)
    pages = "".join(path.read_text() for path in (PACKAGE.parent / "docs").rglob("*.md"))
    assert len(named) >= 6
    assert {*named} <= {*re.findall(r"^#+ (.+)$", pages, re.MULTILINE)}
