"""What docs/api.md documents: the objects by name."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from typing import Any

import variable_batch_size as vbs
from helpers.pages import DOCS

DIRECTIVE = re.compile(
    r"^ *(?:\.\. (currentmodule|autoclass|autofunction|autoexception|automodule):: ([\w.]+)|:members:(.*))",
    re.MULTILINE,
)


def documented() -> Iterator[tuple[str, Any]]:
    """Yield the name and the object of each directive, and of its members, in the order of the page."""
    module, owner, named = vbs, None, ""
    for kind, name, listed in DIRECTIVE.findall((DOCS / "api.md").read_text()):
        if kind == "currentmodule":
            module = importlib.import_module(name)
        elif kind == "automodule":
            named, owner = name, importlib.import_module(name)
            yield named, owner
        elif kind:
            path, _, short = name.rpartition(".")
            owner = getattr(importlib.import_module(path) if path else module, short)
            named = f"{owner.__module__}.{short}"
            yield named, owner
        else:
            for member in re.findall(r"\w+", listed) or public_members(owner):
                yield f"{named}.{member}", getattr(owner, member, None)


def public_members(owner: Any) -> list[str]:
    """Return the public names of a module or of a class itself, without those of its bases."""
    return getattr(owner, "__all__", None) or [name for name in vars(owner) if not name.startswith("_")]
