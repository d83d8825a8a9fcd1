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
BACKENDS = {"backend", "backend.base", "backend.local", "backend.distributed", "backend.xla"}
CHECKPOINT = {
    f"checkpoint.{part}" for part in ("background", "folder", "random_states", "snapshot", "stop", "stored_state")
}

# The house from the ground up: a module may import those that its line names. A new module needs a line.
ARROWS: dict[str, set[str]] = {
    "world": set(),
    "preemption": set(),
    "validate": set(),
    "trace_csv": {"validate"},
    "trace": {"trace_csv", "validate"},
    "shuffle": {"validate"},
    "rules": {"validate"},
    "plan": {"trace", "validate", "world"},
    "clock": {"plan"},
    "backend.base": {"world"},
    "backend.local": {"backend.base", "world"},
    "backend.distributed": {"backend.base", "world"},
    "backend._xla_launch": {"preemption"},
    "backend.xla": {"backend.base", "backend._xla_launch", "preemption", "world"},
    "backend": BACKENDS | {"world"},
    "tracker": set(),
    "sampler": {"backend", "clock", "plan", "shuffle", "trace", "validate", "world"},
    "loop": {"backend", "clock", "plan", "sampler"},
    "gradients": {"backend"},
    "moments": {"backend", "gradients", "rules"},
    "progress": set(),
    "agreement": {"backend"},
    "hyperparameters": {"backend", "rules"},
    "wrapper": set(),
    "bias_correction": {"backend", "hyperparameters", "rules"},
    "updater": {
        "backend",
        "bias_correction",
        "gradients",
        "hyperparameters",
        "moments",
        "plan",
        "progress",
        "rules",
        "validate",
    },
    "optimizer": {
        "agreement",
        "backend",
        "clock",
        "hyperparameters",
        "loop",
        "plan",
        "rules",
        "sampler",
        "tracker",
        "updater",
        "validate",
        "wrapper",
    },
    "metrics": {"agreement", "optimizer", "plan"},
    "schedules": {"optimizer", "validate"},
    "fit": {"backend", "plan", "validate"},
    "checkpoint.folder": set(),
    "checkpoint.background": set(),
    "checkpoint.random_states": set(),
    "checkpoint.snapshot": {"backend"},
    "checkpoint.stored_state": {"checkpoint.folder"},
    "checkpoint.stop": {"world"},
    "checkpoint": CHECKPOINT | {"optimizer", "preemption", "validate"},
    "testing": {"backend", "backend.xla", "optimizer", "sampler", "world"},
    "rule_optimizers": {"hyperparameters", "optimizer", "rules", "sampler", "validate"},
}
WITHOUT_TORCH = {
    "world",
    "validate",
    "trace",
    "trace_csv",
    "shuffle",
    "rules",
    "plan",
    "clock",
    "checkpoint.folder",
    "checkpoint.background",
    "backend._xla_launch",
    "preemption",
    "tracker",
}
WITH_XLA = {"backend.xla", "backend._xla_launch"}


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


def test_every_module_has_a_line() -> None:
    assert set(MODULES) == set(ARROWS)


@every_module
def test_imports_follow_the_arrows(module: str) -> None:
    own = {found.removeprefix("variable_batch_size.") for found in imports_from(module, "variable_batch_size")}
    assert own <= ARROWS[module]


def test_arrows_point_downwards() -> None:
    below: set[str] = set()
    for module, targets in ARROWS.items():
        assert targets - below <= {module}
        below.add(module)


@pytest.mark.parametrize("module", sorted(WITHOUT_TORCH))
def test_the_ground_floor_needs_no_torch(module: str) -> None:
    assert not imports_from(module, "torch")
    assert ARROWS[module] <= WITHOUT_TORCH


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
