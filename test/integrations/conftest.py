"""Tests of the integrations need their frameworks: `make test-integrations` installs them."""

from __future__ import annotations

from pathlib import Path

from helpers.frameworks import missing


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out the files whose frameworks are not there; test_frameworks.py says whether all are."""
    return True if missing(collection_path.stem) else None
