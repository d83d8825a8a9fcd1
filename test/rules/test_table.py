"""A new rule is two files: its own, and the table. Checked with one more rule in a copy of the package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from rule_pages import description, rule_sections, rule_table

import variable_batch_size as vbs

RULE = '''"""Multiply the learning rate by the cube root of k."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from variable_batch_size.rules.base import RuleInput, Scaling


@final
@dataclass(frozen=True, slots=True)
class CubeRootRule:
    """Multiply the learning rate by k^(1/3), k = B / ref_batchsize.

    Scales: lr by the cube root of k.
    Progress: k.
    Use when: this test runs.
    Fails when: never.
    """

    def __call__(self, update: RuleInput) -> Scaling:
        """Return the cube root of k as the factor on lr."""
        return Scaling(lr=update.ratio ** (1 / 3), progress=update.ratio)
'''
SCRIPT = """
import torch
import variable_batch_size as vbs
from helpers.reference import OPTIMIZERS, SIZES, assert_equal, training, twin
from rule_pages import rule_table
assert vbs.rules.CubeRootRule is vbs.rules.RULES["cube-root"] and "CubeRootRule" in vbs.rules.__all__
kind = OPTIMIZERS["cube-root"]  # which the contract suite goes through
assert_equal(training(kind, SIZES).run(len(SIZES)).weights(), twin(kind, SIZES))
assert training(vbs.CustomOptimizer, rule="cube-root").optimizer.rules == (vbs.rules.CubeRootRule(),)
assert "this test runs" in rule_table()
print(vbs.__file__)
"""


@pytest.mark.nightly("runs pytest in a copy")
def test_one_more_rule_touches_two_files(tmp_path):
    package = shutil.copytree(Path(vbs.__file__).parent, tmp_path / "variable_batch_size")
    (package / "rules" / "cube_root.py").write_text(RULE)
    table = package / "rules" / "table.py"
    imported = "from variable_batch_size.rules.legw import LEGWRule as LEGWRule\n"
    added = "from variable_batch_size.rules.cube_root import CubeRootRule as CubeRootRule\n"
    text = (
        table.read_text()
        .replace(imported, added + imported)
        .replace('"legw"', '"cube-root": CubeRootRule,\n        "legw"')
    )
    table.write_text(text)
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(tmp_path), str(root / "test"), str(root / "docs")])

    def run(*arguments):
        variables = {**os.environ, "PYTHONPATH": path}
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert run("-c", SCRIPT).strip() == str(package / "__init__.py")
    rules = str(root / "test" / "rules" / "test_rules.py")
    assert " passed" in run("-m", "pytest", "-p", "no:cacheprovider", rules, "-k", "CubeRoot")


def test_every_rule_describes_itself():
    for rule in vbs.rules.RULES.values():
        assert set(description(rule)) >= {"Scales", "Progress", "Use when", "Fails when"}, rule.__name__


def test_the_page_of_rules_describes_each_rule():
    for name, rule in vbs.rules.RULES.items():
        about = description(rule)
        assert f"| `{name}` |" in rule_table()
        assert f"## `{name}`" in rule_sections()
        assert about["Fails when"] in rule_sections()
