"""The documentation: it builds, it is complete, and what it tells to type runs here or says why not."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import variable_batch_size as vbs
from helpers.pages import DOCS, PAGES, ROOT, blocks, commands

TOUR = "test/variable_train_mnist.py"  # test_readme.py and test_elastic.py run its lines
LANGUAGE_MODEL = "examples/language_model/"  # test_language_model.py runs its lines
MAKE = {"train", "test", "docs", "fuzz", "bench", "test-newest"}
ELSEWHERE = {
    "pip install": "installs; test_wheel.py installs the wheel",
    "tensorboard --logdir": "a server; test_tracker.py reads the events",
}  # beginning of a command that no test runs as it is -> why


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "sphinx", "-W", "--keep-going", "-q", str(DOCS), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    site = (tmp_path / "api.html").read_text()
    missing = [name for name in vbs.__all__ if not re.search(rf'id="variable_batch_size\.(\w+\.)*{name}"', site)]
    assert not missing, f"add these to docs/api.md: {missing}"


def test_each_command_runs_here_or_says_why_not() -> None:
    for page in PAGES:
        for line in commands(page):
            known = TOUR in line or LANGUAGE_MODEL in line or (line.startswith("make ") and line.split()[1] in MAKE)
            assert known or any(line.startswith(begin) for begin in ELSEWHERE), f"{page.name}: {line}"


@pytest.mark.parametrize("page", [DOCS / "quickstart.md"], ids=lambda page: page.stem)
def test_the_first_block_prints_what_the_page_shows(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exec(blocks(page, "python")[0], {})
    assert capsys.readouterr().out == blocks(page, "text")[0]
