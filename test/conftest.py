"""What holds for all tests: the profile of Hypothesis, which process runs which test, and how long a test may take."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

import helpers.properties  # noqa: F401
from helpers.collection import pytest_xdist_make_scheduler  # noqa: F401
from helpers.limits import pytest_runtest_call  # noqa: F401

settings.load_profile("default")  # before --hypothesis-profile, which overrides it


def pytest_configure(config: pytest.Config) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell lets its background jobs ignore
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Told(config))


def pytest_sessionstart() -> None:  # not earlier: pytest itself may have colors
    os.environ.pop("FORCE_COLOR", None)


class Told:
    """Names a test when it fails, since a run that is killed has no summary, and at the end those that take long."""

    def __init__(self, config: pytest.Config) -> None:
        self._config, self._long = config, list[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        reporter: Any = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and reporter is not None:
            reporter.ensure_newline()
            if reporter._tw.width_of_current_line:  # letters of pytest-xdist
                reporter.line("")
            reporter.write_line(f"FAILED {report.nodeid} ({report.when})", red=True)
        if report.when == "call":
            self._long += [str(text) for name, text in report.user_properties if name == "takes long"]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for line in self._long:
            terminalreporter.write_line(line, yellow=True)


@pytest.fixture(scope="session")
def published_mnist() -> Path:
    """The cache of MNIST, which is filled if it is empty; without a network the test is skipped."""
    from variable_batch_size.lab.evaluation.tasks import mnist_files  # not for tests of other parts

    try:
        return mnist_files.fetch()
    except OSError as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def forgotten_stores() -> Iterator[None]:
    """Forget the stores that a test has joined: their servers end with it, and torch would print a trace at exit."""
    yield
    if departure := sys.modules.get("variable_batch_size.backend.departure"):
        for party in list(departure._open_parties):
            party.leave.detach()
        departure._open_parties.clear()
        departure._last_joined.clear()


@pytest.fixture(autouse=True)
def abandoned_loops() -> Iterator[None]:
    """Collect a reproducible loop that a test has left by an exception, which lies in a cycle with its traceback.

    It gives random numbers back when it is collected: within another test, Hypothesis would find them changed.
    """
    yield
    seeding = sys.modules.get("variable_batch_size.optim.reproducible.seeding")
    if seeding and seeding._latest.training() is not None:
        gc.collect()
