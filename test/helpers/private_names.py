"""The private names of trainers that integrations use: the list, and what finds them in the files."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

INTEGRATIONS = Path(__file__).parents[2] / "variable_batch_size" / "integrations"

LEFT: dict[str, dict[str, set[str]]] = {
    "accelerate": {},
    "transformers": {"trainer.py": {"_metrics"}},  # of trl
    "keras": {"model.py": {"_learning_rate", "_symbolic_build"}, "optimizer.py": {"_learning_rate"}},
    "ignite": {"ignite.py": {"_init_iter", "_prepare_batch"}},
    "lightning": {},
}  # trainer -> file -> names


def private_names(integration: str, objects: Iterable[Any]) -> dict[str, set[str]]:
    """Return the private names of some objects of a trainer that the files of an integration use, by file."""
    theirs = {name for one in objects for name in dir(one) if re.fullmatch(r"_[a-z]\w*", name)}
    used = re.compile(rf"(?:[.\"']|def |import (?:.*, )?)({'|'.join(sorted(theirs))})\b")
    paths = sorted([*INTEGRATIONS.glob(f"{integration}.py"), *INTEGRATIONS.glob(f"{integration}/*.py")])
    return {path.name: names for path in paths if (names := {*used.findall(path.read_text())})}
