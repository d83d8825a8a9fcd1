"""The script of docs/ddp.md; test_coming_from.py runs the columns."""

from __future__ import annotations

import re

import pytest

from helpers.commands import run
from helpers.pages import DOCS, blocks, commands

PAGE = DOCS / "ddp.md"


@pytest.mark.nightly("starts processes")
@pytest.mark.torch
@pytest.mark.parametrize("processes", [1, 2])
def test_the_script_prints_what_the_page_shows_on_any_number_of_processes(processes: int) -> None:
    (line,) = commands(PAGE)
    words = line.replace("--nproc-per-node=2", f"--standalone --nproc-per-node={processes}").split()
    done = run(*words, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    printed = re.findall(r"\d+ \d+ \d+ \d\.\d{4}$", done.stdout, re.MULTILINE)  # gloo prints lines, too
    assert printed == blocks(PAGE, "text")[0].splitlines()
