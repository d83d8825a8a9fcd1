"""A controller in real processes, with checkpoints and a tracker, which another world continues."""

from __future__ import annotations

import csv
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import variable_batch_size as vbs
from helpers.processes import run_job
from variable_batch_size.adaptive import Goodput, NoiseScale, PerDevice

SAMPLES = 200
X = torch.randn(SAMPLES, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Y = X @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64) + torch.sin(7 * X[:, 0])


def train(backend, folder, trace, updates):
    """Train up to so many updates in all, restored from the folder and saved to it; the world is detected.

    A tracker has a row for each update. Return the weights, the runs of the trace, and what was measured.
    """
    torch.manual_seed(2)
    model = nn.Linear(3, 1).double()
    sampler = vbs.CustomSampler(SAMPLES, trace, minibatch_size=4, seed=7, fixed_shape=False)
    loader = DataLoader(TensorDataset(X, Y), batch_sampler=sampler)
    inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    tracker = vbs.Tracker(folder / "runs")
    optimizer = vbs.AdaScaleOptimizer(inner, sampler, ref_batchsize=8, tracker=tracker, log_steps=1)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    scheduler = vbs.ProgressScheduler(cosine, optimizer, by="samples")
    metrics = vbs.Accumulator(optimizer)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "metrics": metrics}
    checkpoint = vbs.Checkpoint(folder / "checkpoints", **parts, every=7)
    checkpoint.restore()
    means = []  # of the epochs that ended in this run, and of the one under way
    for _ in vbs.remaining_epochs(sampler, optimizer, until=100):
        for x, y in loader:
            loss = ((model(x)[:, 0] - y) ** 2).mean()
            loss.backward()
            metrics.add(loss=loss)
            if optimizer.step():
                scheduler.step()
                checkpoint.step()
                optimizer.zero_grad()
                if optimizer.updates == updates:
                    break
        if optimizer.updates == updates:
            break
        means.append(metrics.read()["loss"])
        metrics.reset()
    means.append(metrics.read()["loss"])
    checkpoint.save(wait=True)
    checkpoint.close()
    tracker.close()
    assert sampler.world == backend.world
    return model.state_dict(), [row.tolist() for row in sampler.trace.runs], [*means, scheduler.passed]


NOISE_SCALE = vbs.AdaptiveTrace(NoiseScale(2.0), start=8, bounds=(4, 64), every=5, delay=12)


def elastic(folder, trace, parts):
    for size, updates in parts:
        found, *_ = run_job("gloo", train, folder, trace, updates, ranks=size)
    return found


def rows(folder):
    with (folder / "runs" / "scalars.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow("starts processes")
def test_processes_that_come_and_go_decide_as_one(tmp_path):
    parts = [(2, 23), (3, 41), (1, 60)]
    weights, runs, measured = elastic(tmp_path, NOISE_SCALE, parts)
    alone = tmp_path / "alone"
    alone.mkdir()
    expected, runs_alone, measured_alone = train(vbs.backend.LocalBackend(), alone, NOISE_SCALE, 60)
    assert runs == runs_alone
    assert len(runs[0]) > 2
    for name, weight in weights.items():
        assert torch.allclose(weight, expected[name], rtol=0, atol=1e-12)
    assert measured == pytest.approx(measured_alone[-len(measured) :], rel=1e-9)
    found = rows(tmp_path)
    assert [int(row["update"]) for row in found] == list(range(1, 61))
    first, *later = [row for row in found if row["decision/batch_size"]]
    assert (first["update"], first["decision/batch_size"], first["decision/noise_scale"]) == ("1", "8", "")
    starts = {int(row["update"]): row for row in later if int(row["update"]) in (24, 42)}  # of the processes
    assert {update: int(row["decision/begins"]) < update for update, row in starts.items()} == {24: True, 42: True}
    chosen = [row for row in later if int(row["update"]) not in starts]
    assert [int(float(row["decision/updates"])) for row in chosen] == list(range(5, 58, 5))
    assert [int(row["update"]) for row in chosen] == list(range(8, 61, 5))
    for row in chosen:
        assert float(row["decision/begins"]) == float(row["decision/updates"]) + 12
        scale = float(row["decision/sigma2"]) / float(row["decision/mu2"])
        assert float(row["decision/noise_scale"]) == pytest.approx(scale)
        if 0 < scale < 100:
            assert float(row["decision/batch_size"]) == min(max(round(2 * scale), 4), 64)


@pytest.mark.nightly("starts processes")
@pytest.mark.torch
def test_two_processes_explore_by_the_clock_of_one(tmp_path):
    """What is measured depends on the machine: the record is replayed."""
    trace = vbs.AdaptiveTrace(Goodput((8, 64)), start=16, every=5, delay=12)
    weights, runs, _ = elastic(tmp_path, trace, [(2, 60)])
    begins, sizes = runs
    assert sizes[:2] == [16, 32]
    record = vbs.BatchTrace.from_runs(sizes, [*(b - a for a, b in pairwise(begins)), 1000], on_end="hold")
    again = tmp_path / "again"
    again.mkdir()
    replayed, _, _ = elastic(again, record, [(2, 60)])
    assert all(torch.equal(weight, replayed[name]) for name, weight in weights.items())  # to the last bit


@pytest.mark.nightly("starts processes")
@pytest.mark.torch
def test_the_batch_follows_the_processes(tmp_path):
    trace = vbs.AdaptiveTrace(PerDevice(8), every=4, delay=8)
    parts = [(3, 10), (2, 21), (1, 30)]
    weights, runs, _ = elastic(tmp_path, trace, parts)
    assert runs == [[0, 10, 21], [24, 16, 8]]
    record = vbs.BatchTrace.from_runs([24, 16, 8], [10, 11, 9], on_end="hold")
    again = tmp_path / "again"
    again.mkdir()
    replayed, _, _ = elastic(again, record, parts)
    assert all(torch.equal(weight, replayed[name]) for name, weight in weights.items())  # to the last bit
