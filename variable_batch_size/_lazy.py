"""A lazy index of a package: its names are imported when they are first used (Scientific Python's SPEC 1)."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def lazy_index(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package whose `__init__.py` is `file`.

    The index is what that file imports under `if TYPE_CHECKING:`, where type checkers read it: `from module import
    name as name` is imported when `name` is first used, `from module import *` at once, for the names in its `__all__`.
    Submodules are imported when they are first used, too: `package.backend.xla` needs no import of its own.

    Example::

        if TYPE_CHECKING:
            from variable_batch_size.metrics import Accumulator as Accumulator
        else:
            __getattr__, __dir__, __all__ = lazy_index(__name__, __file__)
    """
    homes: dict[str, str] = {}  # name -> module
    for node in _imports_for_type_checkers(file):
        module = str(node.module)
        for alias in node.names:
            names = importlib.import_module(module).__all__ if alias.name == "*" else [alias.name]
            homes |= dict.fromkeys(names, module)
    public = sorted(homes)

    def getattr_(name: str) -> Any:
        if name in homes:
            value = getattr(importlib.import_module(homes[name]), name)
        elif not name.startswith("_") and importlib.util.find_spec(f"{package}.{name}") is not None:
            return importlib.import_module(f"{package}.{name}")  # which sets the attribute
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}{_elsewhere(package, file, name)}")
        setattr(sys.modules[package], name, value)  # found without this function from now on
        return value

    return getattr_, lambda: sorted({*vars(sys.modules[package]), *public}), public


def _elsewhere(package: str, file: str, name: str) -> str:
    """Return where a name of a subpackage is found, as the end of an error; nothing is imported."""
    for index in sorted(Path(file).parent.glob("*/__init__.py")) if name.isidentifier() and name[0] != "_" else ():
        nodes = ast.walk(ast.parse(index.read_text(encoding="utf-8")))
        if any(alias.name == name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names):
            return f"; it is in {package}.{index.parent.name}"
    return ""


def _imports_for_type_checkers(file: str) -> list[ast.ImportFrom]:
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    guarded = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    return [node for block in guarded for node in block.body if isinstance(node, ast.ImportFrom)]
