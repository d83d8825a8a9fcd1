"""Processes end with the code that their script gives, whatever threads torch has left."""

from __future__ import annotations

import subprocess
import sys

import pytest

from helpers.commands import environment, free_port

SCRIPT = """
import torch
import torch.distributed as dist
import variable_batch_size as vbs

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
sampler = vbs.CustomSampler(1000, 8, minibatch_size=4)
optimizer = vbs.LinearRuleOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), sampler, ref_batchsize=8)
cycle = [optimizer]
cycle.append(cycle)

def train(optimizer):
    for indices in sampler:
        model(torch.ones(len(indices), 4)).sum().backward()
        if optimizer.step() and optimizer.updates == 5:
            {end}

{train}
"""


@pytest.mark.slow("starts processes")
@pytest.mark.parametrize(
    ("train", "end"),
    [
        ("train(optimizer)", "raise SystemExit(143)"),
        *(
            pytest.param(train, end, marks=[pytest.mark.nightly("starts two processes"), pytest.mark.torch])
            for train in ("train(optimizer)", "cycle.append(train); del optimizer; train(cycle.pop(0))")
            for end in ("dist.destroy_process_group(); raise SystemExit(143)", "raise ValueError")
        ),
    ],
)
def test_a_process_ends_with_its_own_code(tmp_path, end, train):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(end=end, train=train))
    settings = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env=environment(**settings, RANK=str(rank)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    expected = 1 if "ValueError" in end else 143
    assert [rank.returncode for rank in ranks] == [expected] * 2, outputs
