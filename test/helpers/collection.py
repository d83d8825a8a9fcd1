"""What happens to the tests that were found: which process runs which, and who must say why it is slow."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    from helpers.scheduling import FileScheduling  # here, because test/gpu runs without pytest-xdist, too

    return FileScheduling(config, log) if config.getoption("dist") == "loadgroup" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Check that each slow test says why."""
    for item in items:
        for mark in item.iter_markers("slow"):
            if len(mark.args) != 1 or not isinstance(mark.args[0], str) or mark.kwargs:
                raise pytest.UsageError(f'{item.nodeid}: slow must say why, as in pytest.mark.slow("starts XLA twice")')
