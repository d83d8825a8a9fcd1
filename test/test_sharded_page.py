"""The script of docs/sharded.md, on several numbers of processes, also if it stops and resumes on another number."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from helpers.commands import run
from helpers.pages import DOCS, blocks, commands

PAGE = DOCS / "sharded.md"


def losses(processes: int, *flags: str) -> list[str]:
    (line,) = commands(PAGE)
    words = line.replace("--nproc-per-node=2", f"--standalone --nproc-per-node={processes}").split()
    done = run(*words, *flags, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    return re.findall(r"\d+ \d+ \d\.\d{4}$", done.stdout, re.MULTILINE)  # gloo prints lines, too


@pytest.mark.nightly("trains a GPT")
@pytest.mark.torch
def test_the_script_prints_what_the_page_shows_if_it_stops_and_resumes_elsewhere(tmp_path: Path) -> None:
    folder = f"--folder={tmp_path}"
    assert losses(3, folder, "--updates=50") + losses(2, folder) == blocks(PAGE, "text")[0].splitlines()


@pytest.mark.slow("starts processes")
def test_bfloat16_stays_near() -> None:
    (shown,) = losses(2, "--updates=20", "--bfloat16")
    first = blocks(PAGE, "text")[0].splitlines()[0]
    assert float(shown.split()[-1]) == pytest.approx(float(first.split()[-1]), abs=2e-3)
