"""Record measurements in RESULTS.md: one row each, with the command, the commit and the versions to reproduce it."""

from __future__ import annotations

import platform
import subprocess
import sys
from datetime import date
from pathlib import Path

import numpy as np
import torch

RESULTS = Path(__file__).with_name("RESULTS.md")


def record(question: str, answer: str) -> None:
    """Print an answer, and append a row to RESULTS.md.

    Args:
        question: what was measured, with the unit if `answer` has none; the same words for the same measurement.
        answer: the measured values.
    """
    root = RESULTS.parent.parent
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True).stdout
    changed = subprocess.run(
        ["git", "status", "--porcelain", "--", "variable_batch_size"], cwd=root, capture_output=True
    )
    path = ["PYTHONPATH=test"] if "helpers" in sys.modules else []
    command = " ".join([*path, "python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, numpy {np.__version__}"
    where = f"{commit.strip()}{' with changes' if changed.stdout else ''}"
    print(f"{question}: {answer}", flush=True)
    with RESULTS.open("a") as file:
        file.write(f"| {date.today()} | {question} | {answer} | `{command}` | {where} | {versions} |\n")


def spread(ratios: list[float]) -> str:
    """Return the median and the quartiles of ratios, one per interleaved pair of measurements, as text."""
    low, median, high = np.percentile(ratios, [25, 50, 75])
    return f"{median:.3f} ({low:.3f} to {high:.3f}, {len(ratios)} pairs)"
