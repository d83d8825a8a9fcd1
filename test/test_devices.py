"""The commands of docs/devices.md that are not of the tour."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from helpers.commands import run
from helpers.pages import DOCS, blocks, commands


@pytest.mark.nightly("starts XLA")
@pytest.mark.xla
def test_the_xla_example_prints_what_the_page_shows() -> None:
    if importlib.util.find_spec("torch_xla") is None:
        pytest.skip("torch_xla is not installed")
    (line,) = (line for line in commands(DOCS / "devices.md") if "examples/xla.py" in line and "CPU" in line)
    *settings, _, script = line.split()
    done = run(sys.executable, script, **dict(setting.split("=") for setting in settings))
    assert done.returncode == 0, done.stderr
    assert done.stdout == blocks(DOCS / "devices.md", "text")[0]
