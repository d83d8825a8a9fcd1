"""The benchmark of controllers: its trainings end at the target, its sums are right, and the page shows its figures."""

from __future__ import annotations

import importlib
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import variable_batch_size as vbs
from helpers.adaptive_tasks import TASKS, Images, Training
from helpers.pages import DOCS, ROOT
from variable_batch_size.adaptive import Throughput

TASK = replace(TASKS["MNIST"], small=8, large=64, target=0.5, samples=4000, between=100, lr=0.01, microbatch=4)
FIGURE = DOCS / "figures" / "adaptive.py"
RUNS = st.lists(st.tuples(st.integers(1, 300), st.integers(1, 9)), min_size=1, max_size=9)  # batch sizes, updates


@pytest.fixture(scope="module")
def adaptive() -> Any:
    """benchmarks/adaptive.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        return importlib.import_module("adaptive")


def squares(name: str, train: bool) -> Images:
    """Images of noise in which a bright row is the label."""
    generator = torch.Generator().manual_seed(int(train))
    labels = torch.randint(10, (1000 if train else 200,), generator=generator)
    images = torch.randn(len(labels), 1, 28, 28, generator=generator)
    images[torch.arange(len(labels)), 0, 2 * labels + 4] += 2
    return images, labels


def trained(adaptive: Any, trace: Any, longer: int = 1, **changes: Any) -> Any:
    task = replace(TASK, **changes)
    training = Training(task, squares, seed=0)
    sampler = vbs.CustomSampler(1000, trace, 1, 0, task.microbatch, max_samples=task.samples)
    return adaptive.run(training, sampler, *training.optimizer(sampler), longer)


def test_a_training_ends_with_the_first_evaluation_at_the_target(adaptive: Any) -> None:
    result = trained(adaptive, 8)
    *before, last = [loss for *_, loss in result.evaluations]
    assert result.reached == len(before)
    assert last <= TASK.target < min(before)
    assert result.end[:2] == (sum(n for _, n in result.sizes), sum(size * n for size, n in result.sizes))
    assert [samples // TASK.between for _, samples, _, _ in result.evaluations] == [*range(1, len(before) + 2)]


def test_the_constant_training_goes_on_for_a_longer_noise_curve(adaptive: Any) -> None:
    short, long = (trained(adaptive, 8, longer) for longer in (1, 2))
    assert long.end == short.end
    assert 2 * short.end[1] <= sum(size * n for size, n in long.sizes) < 2 * short.end[1] + 8


def test_a_training_without_the_target_uses_its_samples(adaptive: Any) -> None:
    result = trained(adaptive, 8, target=0.0, samples=300)
    assert result.reached is None
    assert result.end[1] == 300


def test_each_trace_that_is_compared_trains(adaptive: Any) -> None:
    task = replace(TASK, scheduled=True)
    for name, trace in adaptive.traces(task, Throughput.simple(1000)).items():
        sizes = {
            size for size, _ in trained(adaptive, trace, samples=800, target=0.0, scheduled=True, rule="root").sizes
        }
        assert max(sizes) <= 64
        assert (64 if name == "largest" else 8) in sizes


@given(RUNS, st.integers(1, 100), st.integers(1, 64))
def test_the_time_is_that_of_the_updates_to_the_target(
    adaptive: Any, runs: list[tuple[int, int]], updates: int, devices: int
) -> None:
    model = Throughput(0.01, 0.002, 0.1, 0.01)
    each = [size for size, number in runs for _ in range(number)][:updates]
    result = adaptive.Result([(len(each), sum(each), 0.0, 1.0)], runs, None, 0.0)
    expected = sum(model.seconds(size, devices, 16) for size in each)
    assert result.time(model, devices, 16) == pytest.approx(expected, rel=1e-12)


@given(RUNS)
def test_the_batch_size_at_a_sample_is_that_of_its_update(adaptive: Any, runs: list[tuple[int, int]]) -> None:
    of_sample = np.repeat(*np.array([(size, size * number) for size, number in runs]).T)
    assert adaptive.at_samples(runs, np.arange(len(of_sample)), 10**9).tolist() == of_sample.tolist()


def test_a_shortened_update_at_the_end_of_an_epoch_counts_as_the_next_one(adaptive: Any) -> None:
    assert adaptive.at_samples([(8, 3), (6, 1), (9, 2)], range(48), 30).tolist() == [8] * 24 + [9] * 24


def test_the_page_shows_what_was_measured(adaptive: Any, tmp_path: Any) -> None:
    """And the committed picture has the labels of the one that is drawn now."""
    out = tmp_path / "adaptive.svg"
    done = subprocess.run([sys.executable, str(FIGURE), "--out", str(out)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    page = (DOCS / "controllers.md").read_text()
    assert all(part in page for part in done.stdout.strip().split("\n\n")), "run: python docs/figures/adaptive.py"
    runs = pd.read_csv(adaptive.RUNS)
    for text in (out.read_text(), (DOCS / "_static" / "adaptive.svg").read_text()):
        assert all(f">{name}<" in text for name in [*runs["task"].unique(), "NoiseScale", "Seesaw"])
