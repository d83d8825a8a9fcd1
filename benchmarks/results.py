"""One row a measurement in RESULTS.md, with what is needed to make it again."""

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
    """Print an answer and append it, with command, commit and versions, to RESULTS.md."""
    root = RESULTS.parent.parent
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True).stdout
    changed = subprocess.run(
        ["git", "status", "--porcelain", "--", "variable_batch_size"], cwd=root, capture_output=True
    )
    command = " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, numpy {np.__version__}"
    where = f"{commit.strip()}{' with changes' if changed.stdout else ''}"
    print(f"{question}: {answer}", flush=True)
    with RESULTS.open("a") as file:
        file.write(f"| {date.today()} | {question} | {answer} | `{command}` | {where} | {versions} |\n")


def spread(ratios: list[float]) -> str:
    """Median and quartiles of ratios, each from one interleaved pair."""
    low, median, high = np.percentile(ratios, [25, 50, 75])
    return f"{median:.3f} ({low:.3f} to {high:.3f}, {len(ratios)} pairs)"
