"""The scripts in examples/trainers."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from unittest.mock import patch

FOLDER = Path(__file__).parents[2] / "examples" / "trainers"


def run_script(name: str, *flags: str) -> None:
    """Run a script in this process, as `python examples/trainers/NAME FLAGS` does."""
    path = str(FOLDER / name)
    with patch.object(sys, "argv", [path, *flags]):
        runpy.run_path(path, run_name="__main__")
