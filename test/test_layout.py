"""The structure: who may import whom, as docs/architecture.md says, and what importing the package does."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import variable_batch_size as vbs
from variable_batch_size.optim import named

ROOT = Path(__file__).parent.parent
PACKAGE = Path(vbs.__file__).parent
INDEX_FILE = PACKAGE / "__init__.pyi"
BLOCK = re.search(r"^```text\n(.*?)^```", (ROOT / "docs" / "architecture.md").read_text(), re.DOTALL | re.MULTILINE)
LINES = [line.split("->") for line in BLOCK[1].splitlines()] if BLOCK else []
ARROWS = {room.strip(): {target.strip() for target in targets.split(",") if target.strip()} for room, targets in LINES}
WITHOUT_TORCH = {
    "microbatching",
    "_validation",
    "world",
    "preemption",
    "trace",
    "rules",
    "adaptive",
    "cli",
    "lab.cluster",
    "lab.simulation",
    "_extras",
    "_files",
} | {*(f"data.{module}" for module in ("plan.plan", "plan.deal", "plan.shuffle", "training", "decided", "batches"))}
NAMES_NO_TORCH = {"tracker", "backend._xla_launch"}  # but their package does
WITH_XLA = {"backend.xla"}


def name(path):
    """The module's name inside the package: "" for the package itself."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
MODULES = [module for module in FILES if module not in ("", "lab")]  # which are indexes
INDEX = {name: module for module, name in re.findall(r"from \.(\S+) import .* as (\w+)", INDEX_FILE.read_text())}


@cache
def imports(module):
    """What a file imports, wherever it does."""
    found = set()
    for node in ast.walk(ast.parse(FILES[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports by a relative name"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if node.module == "variable_batch_size":  # what the index names is where that says
                    name = f"{node.module}.{INDEX.get(alias.name, alias.name)}"
                found.add(name if name.removeprefix("variable_batch_size.") in FILES else node.module or "")
    return found


def imports_from(module, library):
    return {found for found in imports(module) if found.split(".")[0] == library}


def room(module):
    return re.match(r"(lab\.)?\w+", module)[0]


def test_every_room_has_a_line_in_the_architecture():
    assert set(map(room, MODULES)) == set(ARROWS)


def own_imports(module):
    return {found.removeprefix("variable_batch_size.") for found in imports_from(module, "variable_batch_size")}


def test_imports_follow_the_arrows():
    rooms = {module: set(map(room, own_imports(module))) - {room(module), *ARROWS[room(module)]} for module in MODULES}
    assert {module: others for module, others in rooms.items() if others} == {}


PLUG_INS = {  # and the tables that may name them
    "optim.noise.differenced": {"optim.abilities"},
    "optim.noise.second_moment": {"optim.abilities"},
    "optim.beside.skipping": {"optim.abilities"},
    "optim.beside.controller": {"optim.abilities"},
    "optim.beside.report": {"optim.abilities"},
    "optim.reproducible": {"optim.abilities", "optim.sums.strategies"},
    "optim.loops.counts": {"optim.abilities", "optim.loops.updates", "optim.loops.arriving"},
    "optim.loops.arriving": {"optim.loops.updates", "checkpoint.parts"},
    "optim.beside.weight_average": {"checkpoint.parts"},
    "data.plan.shares": {"data.sampler"},
    "data.streams": {"optim.loops.updates", "optim.loops.arriving", "data.fit"},
    "data.fit": set(),
    "data.dataset.content": {"data.sampler"},
    "data.tokens": {"data.sampler"},
    "optim.checks.owners": {"optim.abilities"},
    "optim.checks.buffers": {"optim.abilities"},
    "optim.loops.outside": {"optim.optimizer"},
    "optim.loops.stages": {"optim.optimizer"},
    "optim.loops.whole_batch": set(),
}


@pytest.mark.parametrize("plug_in", PLUG_INS)
def test_the_core_does_not_know_an_ability(plug_in):
    """It is a file that adds itself to a table; an import within a function counts, too."""
    assert any(module.startswith(plug_in) for module in MODULES)
    core = {module for module in MODULES if room(module) in ("data", "optim", "backend") or PLUG_INS[plug_in] == set()}
    others = {module for module in core if not module.startswith(plug_in)} - PLUG_INS[plug_in]
    assert [module for module in others if any(found.startswith(plug_in) for found in own_imports(module))] == []


def test_arrows_point_to_earlier_lines():
    earlier = set()
    for start, targets in ARROWS.items():
        assert targets <= earlier
        earlier.add(start)


LAB = [module for module in MODULES if module.startswith("lab.")]


def test_nothing_but_the_command_imports_the_lab():
    others = {module for module in MODULES if room(module) not in ("cli", "__main__")} - {*LAB}
    assert [module for module in others if any(found.startswith("lab") for found in own_imports(module))] == []


def test_the_lab_knows_a_training_by_public_names():
    """Those of an index; of trace, rules and adaptive, pure functions with which both compute, all without a `_`."""
    inside = re.compile(r"variable_batch_size\.(backend|data|optim|checkpoint|metric\w*|tracker)\.")
    for module in LAB:
        nodes = [*ast.walk(ast.parse(FILES[module].read_text()))]
        assert not [one.module for one in nodes if isinstance(one, ast.ImportFrom) and inside.match(one.module or "")]
        reached = {(one.attr, ast.unparse(one.value)) for one in nodes if isinstance(one, ast.Attribute)}
        own = {name for name, value in reached if value == "self"} | {"_replace", "_fields", "_asdict"}
        assert not [name for name, _ in reached if re.match("_[a-z]", name) and name not in own], module


def test_importing_what_trains_imports_nothing_of_the_lab():
    script = """
import sys, tempfile, torch, variable_batch_size as vbs
model, folder = torch.nn.Linear(1, 1), tempfile.mkdtemp()
data = torch.utils.data.TensorDataset(torch.ones(8, 1))
sampler = vbs.CustomSampler(data, "0:3 2:2", num_replicas=1, rank=0, minibatch_size=2)
with vbs.Tracker(folder) as tracker:
    inner = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = vbs.AdaScaleOptimizer(inner, sampler, ref_batchsize=2, tracker=tracker)
    with vbs.Checkpoint(folder, model=model, optimizer=optimizer) as checkpoint:
        for (batch,) in torch.utils.data.DataLoader(data, batch_sampler=sampler):
            optimizer.backward(model(batch).mean())
            optimizer.step()
        checkpoint.save()
for name in vbs.__all__:
    name == "lab" or getattr(vbs, name)
assert not [name for name in sys.modules if name.startswith("variable_batch_size.lab")]
"""
    assert run_python(script) == (0, "", "")


def test_a_folder_of_the_engine_has_at_most_ten_files():
    for room in ("data", "optim"):
        for folder in [PACKAGE / room, *(path for path in (PACKAGE / room).iterdir() if path.is_dir())]:
            assert len([path for path in folder.glob("*.py") if path.name != "__init__.py"]) <= 10, folder


def test_modules_import_each_other_in_no_circle():
    arrows = {module: own_imports(module) for module in MODULES}
    standing = set()
    while free := {module for module, targets in arrows.items() if module not in standing and targets <= standing}:
        standing |= free
    assert set(MODULES) - standing == set()


def test_no_two_classes_share_a_name():
    modules = dict[str, list[str]]()
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                modules.setdefault(node.name, []).append(str(file.relative_to(PACKAGE)))
    assert {name: files for name, files in modules.items() if len(files) > 1} == {}


def test_importing_a_module_without_torch_does_not_import_it_indirectly():
    modules = [module for module in MODULES if {module, room(module)} & WITHOUT_TORCH]
    script = f"""
import importlib, sys
import variable_batch_size as vbs
for module in {modules}:
    importlib.import_module(f"variable_batch_size.{{module}}")
    assert "torch" not in sys.modules, module
vbs.BatchTrace, vbs.AdaptiveTrace, vbs.rules.RULES, vbs.rules.LinearRule, vbs.Preemption
assert "torch" not in sys.modules
"""
    assert run_python(script) == (0, "", "")


def test_only_the_xla_backend_imports_torch_xla_and_by_the_function_that_does_it_when_used():
    assert not [module for module in MODULES if imports_from(module, "torch_xla")]
    naming = {module for module in MODULES if '"torch_xla.' in FILES[module].read_text()}
    assert naming == WITH_XLA


def run_python(script):
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    return done.returncode, done.stdout, done.stderr


def test_importing_the_package_has_no_side_effects():
    script = """
import logging, os, sys, warnings
before = dict(os.environ), warnings.filters[:]
import variable_batch_size
assert dict(os.environ) == before[0], "changes the environment"
assert not {"torch", "numpy", "pandas"} & set(sys.modules), "imports what takes long, or is not installed yet"
import torch, torch._dynamo  # which names the folder of its cache in the environment since torch 2.15
before = dict(os.environ)
handlers, threads, rng = logging.root.handlers[:], torch.get_num_threads(), torch.get_rng_state()
for name in variable_batch_size.__all__:
    getattr(variable_batch_size, name)
assert "torch_xla" not in sys.modules, "imports torch_xla"
assert len(variable_batch_size.BatchTrace.from_csv("traces/test_trace.csv")) > 0
assert "pandas" not in sys.modules, "imports pandas, which takes longer than all of the package"
assert logging.root.handlers == handlers == [] and logging.root.level == logging.WARNING, "configures logging"
assert dict(os.environ) == before, "changes the environment"
assert torch.get_num_threads() == threads and bool((torch.get_rng_state() == rng).all()), "changes torch"
assert not torch.distributed.is_initialized()
"""
    assert run_python(script) == (0, "", "")


def test_the_index_is_sorted_and_complete():
    assert vbs.__all__ == sorted(vbs.__all__)
    assert set(vbs.__all__) <= set(dir(vbs))
    assert dir(vbs) == vbs.__all__
    assert {"rules", "backend", "adaptive", "lab", "testing"} < set(vbs.__all__)
    names = {kind.rule_name for kind in vars(named).values() if isinstance(kind, type) and "rule_name" in vars(kind)}
    assert names <= {*vbs.rules.RULES}
    with pytest.raises(AttributeError, match=r"No variable_batch_size attribute Nonsense$"):
        vbs.Nonsense  # noqa: B018
    script = "import variable_batch_size as vbs; vbs.backend.xla.launch, vbs.testing.run_ranks, vbs.lab.cluster.read"
    assert run_python(script) == (0, "", "")
    found = {}
    exec("from variable_batch_size import *", found)
    assert set(vbs.__all__) <= set(found)
