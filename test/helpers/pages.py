"""The commands and code blocks of the README and of the pages in docs/."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS, README = ROOT / "docs", ROOT / "README.md"
TOUR = "test/variable_train_mnist.py"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    """Return the code blocks of a page in `language`, in order."""
    return re.findall(rf"^ *```{language}\n(.*?)^ *```", page.read_text(), re.DOTALL | re.MULTILINE)


def commands(page: Path) -> list[str]:
    """Return the command lines of the shell blocks of a page, without comments."""
    text = "\n".join(blocks(page, "sh")).replace("\\\n", " ")
    lines = [re.sub(r"(^|\s)#.*", "", line).strip() for line in text.splitlines()]
    return [" ".join(line.split()) for line in lines if line]
