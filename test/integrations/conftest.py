"""Tests of the integrations need their frameworks: `make test-integrations` installs them."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from helpers.frameworks import missing


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out the files whose frameworks are not there; test_frameworks.py says whether all are."""
    return True if missing(collection_path.stem) else None


@pytest.fixture
def new_state() -> Iterator[None]:
    """Leave no state of Accelerate, which it keeps for a whole process, to other tests."""
    jobs = import_module("helpers.accelerate_jobs")
    jobs.reset()
    yield
    jobs.reset()
