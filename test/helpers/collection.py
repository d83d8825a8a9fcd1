"""Which process of pytest-xdist runs which test: a hook for the files conftest.py."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    from helpers.scheduling import FileScheduling  # here, because test/gpu runs without pytest-xdist, too

    return FileScheduling(config, log) if config.getoption("dist") == "loadgroup" else None
