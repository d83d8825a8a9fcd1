"""Numbers of the user go to a device by one door, `Backend.number`: moved as they are, 0 and 1 would be constants."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import variable_batch_size as vbs

PACKAGE = Path(vbs.__file__).parent
# Functions that move something to a device, and what it is.
MOVES = {
    ("backend/base.py", "number"): "one that is on a device already",
    ("backend/base.py", "vectors"): "rows",
    ("backend/sent_numbers.py", "copy_to_device"): "what is sent, on a device whose graphs have no such constants",
    ("optim/checks/consistency.py", "broadcast_tensors"): "(1,)",
    ("optim/noise/differenced.py", "_replace_previous"): "gradients",
    ("optim/sums/participation.py", "message"): "one for each parameter",
    ("optim/tensors/arithmetic.py", "squared_norm"): "norms, from one device to another",
    ("optim/update.py", "_clip"): "a norm, from one device to another",
    ("optim/scaling/bias_correction.py", "_update_counts"): "counts of the inner optimizer",
    ("optim/beside/means.py", "part"): "all names",
    ("optim/loops/whole_batch.py", "whole_batch"): "places of rows",
    ("optim/loops/whole_batch.py", "_gather"): "embeddings",
    ("optim/loops/whole_batch.py", "_differentiate"): "a scale, from one device to another",
    ("optim/beside/weight_average.py", "_placed_as"): "weights",
}


def moves(path):
    """The functions in a file that call `.to` with a device."""
    found = set()
    for function in ast.walk(ast.parse(path.read_text())):
        if isinstance(function, ast.FunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "to":
                    arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
                    if any("device" in ast.unparse(argument) for argument in arguments):
                        found.add((str(path.relative_to(PACKAGE)), function.name))
    return found


def test_no_other_function_moves_a_number_to_a_device():
    files = [path for room in ("optim", "backend", "adaptive") for path in (PACKAGE / room).rglob("*.py")]
    found = {move for path in files for move in moves(path)}
    assert found == {*MOVES}


@pytest.mark.parametrize("value", [0, 1, 2.5, torch.tensor(1), torch.tensor([0.5]), torch.tensor(2, dtype=torch.int64)])
def test_where_the_host_reads_a_number_stays_one(value):
    found = vbs.backend.LocalBackend().number(value, torch.zeros(()))
    assert type(found) in (int, float)
    assert found == float(value)
