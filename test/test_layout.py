"""Who may import whom, read from the source; and what importing the package does and does not do."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import variable_batch_size as vbs

PACKAGE = Path(vbs.__file__).parent
# Who may import whom: a room (a folder, or a module beside them) imports itself and what its line names, and what those
# may import. The lines stand from the ground up: a room is named after all that it may import.
ARROWS: dict[str, set[str]] = {
    "_validation": set(),
    "_lazy": set(),
    "world": {"_validation"},
    "preemption": set(),
    "tracker": set(),
    "trace": {"_validation"},
    "rules": {"_validation"},
    "backend": {"world", "preemption", "_validation"},
    "data": {"trace", "backend", "world", "_validation", "_lazy"},
    "optim": {"data", "rules", "backend", "tracker", "_validation"},
    "metrics": {"optim"},
    "testing": {"optim"},
    "checkpoint": {"optim", "backend", "preemption", "world", "_validation"},
}
WITHOUT_TORCH = {"_lazy", "_validation", "world", "preemption", "tracker", "trace", "rules"} | {
    *(f"data.{module}" for module in ("plan", "clock", "shuffle")),
    *(f"checkpoint.{module}" for module in ("folder", "background")),
    "backend._xla_launch",
}
WITH_XLA = {"backend.xla"}


def name(path: Path) -> str:
    """The module's name inside the package: "" for the package itself."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
MODULES = [module for module in FILES if module]
every_module = pytest.mark.parametrize("module", MODULES)


def imports(module: str) -> Iterator[tuple[str, bool]]:
    """What a file imports, wherever it does, and whether it does so when it is itself imported."""
    tree = ast.parse(FILES[module].read_text())
    later = {node for function in ast.walk(tree) if is_function(function) for node in ast.walk(function)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node not in later) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports by a relative name"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            inner = [name for name in names if name.removeprefix("variable_batch_size.") in FILES]
            yield from ((name, node not in later) for name in inner or [node.module or ""])


def is_function(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)


def imports_from(module: str, library: str) -> set[str]:
    return {found for found, _ in imports(module) if found.split(".")[0] == library}


def room(module: str) -> str:
    return module.split(".")[0]


def reach(start: str) -> set[str]:
    """A room and all that it may import, directly or through another."""
    return {start}.union(*map(reach, ARROWS[start]))


def test_every_room_has_a_line() -> None:
    assert set(map(room, MODULES)) == set(ARROWS)


@every_module
def test_imports_follow_the_arrows(module: str) -> None:
    own = {found.removeprefix("variable_batch_size.") for found in imports_from(module, "variable_batch_size")}
    assert set(map(room, own)) <= reach(room(module))


def test_arrows_point_downwards() -> None:
    below: set[str] = set()
    for start, targets in ARROWS.items():
        assert targets <= below
        below.add(start)


def test_no_module_imports_itself_through_others() -> None:
    arrows = {
        module: {found.removeprefix("variable_batch_size.") for found in imports_from(module, "variable_batch_size")}
        for module in MODULES
    }
    standing: set[str] = set()
    while free := {module for module, targets in arrows.items() if module not in standing and targets <= standing}:
        standing |= free
    assert set(MODULES) - standing == set()


@pytest.mark.parametrize("module", [module for module in MODULES if {module, room(module)} & WITHOUT_TORCH])
def test_what_needs_no_torch_does_not_import_it(module: str) -> None:
    assert not imports_from(module, "torch")


@every_module
def test_torch_xla_is_imported_late_and_in_one_place(module: str) -> None:
    found = [late for name, at_once in imports(module) if name.split(".")[0] == "torch_xla" for late in [not at_once]]
    assert all(found)
    assert not found or module in WITH_XLA


@every_module
def test_a_file_stays_readable(module: str) -> None:
    assert len(FILES[module].read_text().splitlines()) <= 400


def test_importing_the_package_has_no_side_effects() -> None:
    script = """
import logging, os, sys, warnings
before = dict(os.environ), warnings.filters[:]
import torch
handlers, threads, rng = logging.root.handlers[:], torch.get_num_threads(), torch.get_rng_state()
import variable_batch_size
assert "torch_xla" not in sys.modules, "imports torch_xla"
assert len(variable_batch_size.BatchTrace.from_csv("traces/test_trace.csv")) > 0
assert "pandas" not in sys.modules, "imports pandas, which takes longer than all of the package"
assert logging.root.handlers == handlers == [] and logging.root.level == logging.WARNING, "configures logging"
assert dict(os.environ) == before[0], "changes the environment"
assert torch.get_num_threads() == threads and bool((torch.get_rng_state() == rng).all()), "changes torch"
assert not torch.distributed.is_initialized()
"""
    root = Path(__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_index_is_sorted_and_complete() -> None:
    tree = ast.parse(FILES[""].read_text())
    assert all(isinstance(node, ast.Expr | ast.ImportFrom | ast.Assign) for node in tree.body)
    imported = [alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert vbs.__all__ == sorted(imported)


def public_things() -> Iterator[tuple[str, object]]:
    """Everything in the index, and what a user can call or read on it."""
    for public in vbs.__all__:
        thing = getattr(vbs, public)
        yield public, thing
        for key, member in vars(thing).items() if isinstance(thing, type) else ():
            if not key.startswith("_") and (inspect.isfunction(member) or isinstance(member, property | classmethod)):
                yield f"{public}.{key}", member


def test_every_public_name_says_what_it_is() -> None:
    first_lines = {public: (inspect.getdoc(thing) or "").split("\n")[0] for public, thing in public_things()}
    assert {public for public, line in first_lines.items() if not line.endswith((".", ":"))} == set()
    assert len(first_lines) > 60
