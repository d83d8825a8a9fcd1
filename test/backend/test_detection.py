"""A process that a launcher has started beside others trains alone if its sampler says so."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import torch
import variable_batch_size as vbs
sampler = vbs.CustomSampler(8, 4, num_replicas=1, rank=0)
optimizer = vbs.ConstantOptimizer(torch.optim.SGD(torch.nn.Linear(2, 1).parameters()), sampler)
print("trains in", sampler.world, type(optimizer.backend).__name__)
"""


@pytest.mark.slow("starts a process")
def test_an_explicit_world_is_that_of_the_training():
    environment = os.environ | {"WORLD_SIZE": "2", "RANK": "0"}
    command = [sys.executable, "-c", SCRIPT]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=100)
    assert found.stdout == "trains in World(rank=0, size=1) LocalBackend\n", found.stderr
