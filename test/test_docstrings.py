"""The examples in the package's docstrings run and print what they say."""

from __future__ import annotations

import doctest
import importlib
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
def test_examples_run(module: str) -> None:
    results = doctest.testmod(importlib.import_module(module), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert results.failed == 0
    assert results.attempted > 0
