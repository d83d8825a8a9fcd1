"""Which world a process is in."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import sys
import torch
import variable_batch_size as vbs

model = torch.nn.Linear(2, 1)
kind, explicit = sys.argv[1], sys.argv[2] == "explicit"
world = {"num_replicas": 1, "rank": 0} if explicit else {}
if kind == "init":
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
sampler = vbs.CustomSampler(8, 4, **world)
optimizer = vbs.ConstantOptimizer(torch.optim.SGD(model.parameters()), sampler)
print("trains in", sampler.world, type(optimizer.backend).__name__)
if kind == "init":
    torch.distributed.destroy_process_group()
"""


def run(kind: str, explicit: bool, world_size: str | None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "RANK")}
    environment |= {} if world_size is None else {"WORLD_SIZE": world_size, "RANK": "0"}
    command = [sys.executable, "-c", SCRIPT, kind, "explicit" if explicit else ""]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=100)


@pytest.mark.slow("starts processes")
@pytest.mark.parametrize(
    ("kind", "explicit", "world_size"),
    [
        ("sampler", True, "2"),
        pytest.param("init", False, "2", marks=pytest.mark.nightly("starts a process")),
        pytest.param("sampler", False, "1", marks=pytest.mark.nightly("starts a process")),
        pytest.param("sampler", False, None, marks=pytest.mark.nightly("starts a process")),
    ],
)
def test_a_process_finds_its_world(kind: str, explicit: bool, world_size: str | None) -> None:
    found = run(kind, explicit, world_size)
    backend = "DistributedBackend" if kind == "init" else "LocalBackend"
    assert found.stdout.endswith(f"trains in World(rank=0, size=1) {backend}\n"), found.stderr
