"""What the tests and the measurements on a GPU share: the device, deviations from the twin, and updates to count."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import variable_batch_size as vbs
from helpers.reference import EQUATIONS, Training, filled, training, twin, wrap

# Without a GPU, VBS_GPU_TESTS_ON=cpu tries the tests themselves, apart from those that a CPU cannot run.
DEVICE = os.environ.get("VBS_GPU_TESTS_ON", "cuda")
ON_GPU = DEVICE == "cuda"
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of a driver that is too old, on machines that run other tests only
    GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
MARKS = [
    pytest.mark.cuda,
    pytest.mark.skipif(ON_GPU and not GPUS, reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),  # the first backward of a process creates a context
]

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5}


def on_device(kind: type[vbs.CustomOptimizer], sizes: Sequence[int], **options: Any) -> Training:
    """Return a training on the device, with the arguments of `training`."""
    return training(kind, sizes, device=DEVICE, **options)


def deviation(
    kind: type[vbs.CustomOptimizer],
    sizes: Sequence[int],
    dtype: torch.dtype,
    *,
    dataset_size: int = 50,
    minibatch_size: int = 4,
    fixed_shape: bool = False,
    seed: int = 0,
    max_grad_norm: float | None = None,
) -> float:
    """Train on the device; return the largest difference of a weight to that of the twin / the largest weight."""
    common: dict[str, Any] = {"dataset_size": dataset_size, "minibatch_size": minibatch_size}
    common |= {"dtype": dtype, "max_grad_norm": max_grad_norm}
    run = on_device(kind, sizes, sampling={"seed": seed, "fixed_shape": fixed_shape}, **common)
    return difference(run.run(len(sizes)), twin(kind, sizes, seed=seed, fixed_shape=fixed_shape, **common))


def difference(run: Training, expected: Sequence[Any]) -> float:
    """Return the largest difference of a weight / the largest weight."""
    largest = max(float(np.abs(weights).max()) for weights in expected)
    pairs = zip(run.weights(), expected, strict=True)
    return max(float(np.abs(found - weights).max()) for found, weights in pairs) / largest


# Updates whose data is on the device: the host only starts them. -----------------------------------------------------

ROWS = 16  # of a microbatch
PARAMETERS = 6  # of the network
VARYING = [16, 40, 7, 64, 33]  # batch sizes: 1, 3, 1, 4 and 3 microbatches


def network_and_samples(device: str) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a network, and the rows of a microbatch, (ROWS, 64) and (ROWS, 10)."""
    layers = nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    rng = np.random.default_rng(0)
    x, target = (torch.from_numpy(rng.normal(size=(ROWS, width))).float().to(device) for width in (64, 10))
    return filled(nn.Sequential(*layers)).to(device), x, target


def updates(
    kind: type[vbs.CustomOptimizer], sizes: Sequence[int], device: str = DEVICE, *, logs: bool = False, **options: Any
) -> Iterator[None]:
    """Make one update with the library each time. `logs`: whether the loss of each microbatch is logged, and a 1."""
    model, x, target = network_and_samples(device)
    sampler = vbs.CustomSampler(1_000_000, vbs.BatchTrace.from_sizes(sizes, on_end="cycle"), 1, 0, ROWS)
    optimizer = wrap(kind, EQUATIONS[kind].inners[0](model.parameters(), lr=1e-4), sampler, **options)  # type: ignore[call-arg]
    for indices in sampler:
        rows = len(indices)
        loss = (model(x[:rows]) - target[:rows]).square().mean()
        loss.backward()
        if logs:
            optimizer.log(loss=loss, one=1)
        if optimizer.step():
            yield


def divided_updates(sizes: Sequence[int], device: str = DEVICE) -> Iterator[None]:
    """Make one update with two denominators each time; one is counted on the host, the other on the device."""
    model, x, target = network_and_samples(device)
    sampler = vbs.CustomSampler(1_000_000, vbs.BatchTrace.from_sizes(sizes, on_end="cycle"), 1, 0, ROWS)
    optimizer = vbs.LinearRuleOptimizer(torch.optim.SGD(model.parameters(), lr=1e-4), sampler, 64)

    def counts(indices: list[int]) -> dict[str, Tensor | float]:
        return {"rows": len(indices), "positive": (target[: len(indices)] > 0).sum()}

    for update in vbs.updates(sampler, optimizer, counts=counts):  # type: ignore[arg-type]
        for indices in update:
            rows, totals = len(indices), update.counts
            squares = (model(x[:rows]) - target[:rows]).square()
            positive = (squares * (target[:rows] > 0)).sum() / totals["positive"]
            optimizer.backward(squares.sum() / totals["rows"] + positive, divided=True)
            optimizer.step()
        yield


def updates_by_hand(sizes: Sequence[int]) -> Iterator[None]:
    """Make one update of SGD without the library each time; the sizes are multiples of ROWS."""
    model, x, target = network_and_samples(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for size in cycle(sizes):
        for _ in range(size // ROWS):
            ((model(x) - target).square().mean() / (size // ROWS)).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def make(each: Iterator[None], number: int) -> None:
    """Make so many updates."""
    for _ in range(number):
        next(each)


LAUNCHES = "cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchCooperativeKernel"  # how the names of their events begin


def launches(each: Iterator[None], number: int = 8) -> float:
    """Return the launches of CUDA kernels in an update: the mean of so many, after as many others."""
    make(each, number)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of the profiler, which differ between versions of torch
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            make(each, number)
            torch.cuda.synchronize()
        return sum(event.name.startswith(LAUNCHES) for event in profiled.events()) / number
