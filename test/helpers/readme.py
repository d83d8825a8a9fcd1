"""What the README tells people to type."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def commands() -> list[str]:
    lines = [line.split("#")[0].strip() for block in blocks("sh") for line in block.splitlines()]
    return [line for line in lines if line]
