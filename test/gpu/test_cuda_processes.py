"""Two processes on one GPU with gloo, or on two GPUs with NCCL, train as one process does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

from helpers.gpu import DEVICE, GPUS, MARKS, ON_GPU, TOLERANCES
from helpers.gpu_jobs import CASES, train, weights
from helpers.reference import assert_equal

pytestmark = MARKS

two_gpus = pytest.mark.skipif(not ON_GPU or GPUS < 2, reason=f"NCCL needs two GPUs, found {GPUS}")


@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=two_gpus)])
def test_two_processes_on_gpus_equal_one(backend: str, tmp_path: Path) -> None:
    mp.start_processes(train, (2, backend, DEVICE, tmp_path), nprocs=2, start_method="spawn")  # type: ignore[no-untyped-call]
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    for case, one, other in zip(CASES, first, second, strict=True):
        found = [tensor.numpy() for tensor in one]
        assert_equal(found, weights(*case, DEVICE), TOLERANCES[case[1]])
        assert_equal([tensor.numpy() for tensor in other], found, 0)
