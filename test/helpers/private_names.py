"""Which private names of a trainer an integration uses, and where."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

INTEGRATIONS = Path(__file__).parents[2] / "variable_batch_size" / "integrations"


def private_names(integration: str, objects: Iterable[Any]) -> dict[str, set[str]]:
    """Return the private names of some objects of a trainer that the files of an integration use, by file."""
    theirs = {name for one in objects for name in dir(one) if re.fullmatch(r"_[a-z]\w*", name)}
    used = re.compile(rf"[.\"'](?:{'|'.join(sorted(theirs))})\b|def (?:{'|'.join(sorted(theirs))})\b")
    return {
        path.name: {re.sub(r"^(\W|def )", "", name) for name in used.findall(path.read_text())}
        for path in sorted((INTEGRATIONS / integration).glob("*.py"))
        if used.search(path.read_text())
    }
