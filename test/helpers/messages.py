"""The messages of errors and warnings in the package; `python -m helpers.messages` prints a table of them."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import variable_batch_size as vbs

PACKAGE = Path(vbs.__file__).parent


def text_of(node: ast.AST, names: Mapping[str, Any]) -> str:
    """The static text of a string; of each placeholder, the first 12 characters of its source in braces.

    `names`: those of the module, in whose place the texts are that they stand for.
    """
    if isinstance(node, ast.Name) and isinstance(names.get(node.id), str):
        return names[node.id]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.FormattedValue):
        return text_of(node.value, names) or f"{{{ast.unparse(node.value)[:12]}}}"
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(value, names) for value in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left, names) + text_of(node.right, names)
    return ""


def messages_in(source: str, names: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    """The line and the text of each error and warning of a module, in which `names` stand for objects."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    for call in calls:
        name = ast.unparse(call.func).rpartition(".")[2]
        if name.endswith(("Error", "_error", "Warning")) or name == "warn":
            yield call.lineno, "; ".join(filter(None, (text_of(argument, names) for argument in call.args)))


def names_of(path: Path) -> Mapping[str, Any]:
    """The objects of a module by name; none if it needs a package that is not installed."""
    try:
        return vars(importlib.import_module(".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)))
    except ImportError:
        return {}


def all_messages() -> Iterator[tuple[str, str]]:
    """Yield the file and line of each message, and its text."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for line, text in messages_in(path.read_text(), names_of(path)):
            yield f"{path.relative_to(PACKAGE)}:{line}", text


if __name__ == "__main__":
    for where, text in all_messages():
        print(where, text, sep="\t")
