"""The examples in the package's docstrings run and print what they say; messages are short and name titles that are."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path

import pytest

import variable_batch_size as vbs
from helpers.messages import all_messages, messages_in

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


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ('raise ValueError(f"{1 + 1} of {numbers.first:.3f} " + "ab" "c")', "{1 + 1} of {numbers.firs} abc"),
        ('raise value_error("a must be > 1", 1, f"pass {b}")', "a must be > 1; pass {b}"),
        ('warnings.warn("a", UserWarning)', "a"),
        ('raise ValueError(f"a; {REMEDY}")', "a; pass b"),
        ('print("a")', None),
    ],
)
def test_a_message_is_found_with_its_placeholders(source, text):
    assert [found for _, found in messages_in(source, {"REMEDY": "pass b"})] == [text] * (text is not None)


def test_messages_are_short():
    """At most 200 characters, the numbers and names of a training left out: the cause, and what to type."""
    texts = dict(all_messages())
    assert len(texts) > 600
    assert {where: (len(text), text) for where, text in texts.items() if len(text) > 200} == {}
