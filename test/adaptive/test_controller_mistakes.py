"""What users are told who change a controller, on one rank or in a restored training, and loaders that wait."""

from __future__ import annotations

import threading
import time
import warnings

import numpy as np
import pytest
import torch

import variable_batch_size as vbs
from helpers.adaptive_training import Setting, Wild, part, trained
from helpers.controllers import smoothed
from variable_batch_size.adaptive import ConstantBatch, NoiseScale, PerDevice
from variable_batch_size.data import growing
from variable_batch_size.testing import ThreadBackend, run_ranks
from variable_batch_size.world import World


def setting(start: int, every: int = 10) -> Setting:
    trace = vbs.AdaptiveTrace(Wild(3, needs_noise=False), start=start, every=every, delay=8)
    return Setting(trace, 4, False, "linear")


def test_a_restored_training_warns_if_it_is_asked_at_other_updates_and_not_of_another_start() -> None:
    state, weights, _ = trained(setting(8), [(1, 30)])
    part(setting(9), World(), None, state, 40, weights)
    with pytest.warns(UserWarning, match=r"chosen by .*, every=10, delay=8, and are by .*, every=7, delay=8 from now"):
        part(setting(8, every=7), World(), None, state, 40, weights)


@pytest.mark.parametrize("stop", [7, 30, 50])
@pytest.mark.parametrize("every", [5, 50, None])
def test_a_training_goes_on_with_a_controller_that_reads_the_noise(stop: int, every: int | None) -> None:
    before = vbs.AdaptiveTrace(ConstantBatch(16), every=every, delay=9)
    after = vbs.AdaptiveTrace(smoothed(NoiseScale(), 0.5, 1), start=16, every=5, delay=9)
    state, weights, _ = trained(Setting(before, 4, False, "linear"), [(1, stop)])
    with pytest.warns(UserWarning, match="^Resumed with another AdaptiveTrace"):
        _, _, runs = part(Setting(after, 4, False, "linear"), World(), None, state, 90, weights)
    assert runs[0] == (0, 16)
    assert len(runs) > 1


def test_ranks_are_told_what_their_controller_is() -> None:
    def rank(backend: ThreadBackend) -> None:
        kind = Setting(vbs.AdaptiveTrace(PerDevice(8), bounds=(1, 30 + backend.world.rank)), 4, False, "linear")
        part(kind, backend.world, backend, None, 40, torch.zeros(1, 3, dtype=torch.float64))

    controller = r"PerDevice\(samples=8\), bounds=\(1, 3"
    told = rf"controller with its arguments, but it is {controller}0\).* on rank 0 and {controller}1\).* on rank 1"
    with pytest.raises(RuntimeError, match=told):
        run_ranks(rank, 2)


def test_ranks_and_later_runs_are_told_what_a_function_has_from_around_it() -> None:
    def setting_of(size: int) -> Setting:
        trace = vbs.AdaptiveTrace(smoothed(ConstantBatch(size), 0.5, 1), start=8, every=5, delay=9)
        return Setting(trace, 4, False, "linear")

    def rank(backend: ThreadBackend) -> None:
        size = 20 + backend.world.rank
        part(setting_of(size), backend.world, backend, None, 40, torch.zeros(1, 3, dtype=torch.float64))

    with pytest.raises(RuntimeError, match=r"batch_size=20\), .*weight=.* on rank 0 and .*batch_size=21\).* on rank 1"):
        run_ranks(rank, 2)
    state, weights, runs = trained(setting_of(20), [(1, 30)])
    assert runs[0] == (0, 8)
    assert runs[-1][1] == 20
    part(setting_of(20), World(), None, state, 40, weights)  # does not warn
    with pytest.warns(UserWarning, match=r"chosen by .*batch_size=20\), .* are by .*batch_size=21\), .*weight="):
        _, _, runs = part(setting_of(21), World(), None, state, 60, weights)
    assert runs[-1][1] == 21


def test_bounds_may_be_an_array() -> None:
    trace = vbs.AdaptiveTrace(PerDevice(8), bounds=np.array([1, 5]))
    assert vbs.CustomSampler(100, trace, num_replicas=1, rank=0).max_batch_size == 5


def test_a_loader_in_a_thread_waits_says_so_and_ends_when_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growing, "WARN_SECONDS", 0.0)
    monkeypatch.setattr(growing, "WAIT_SECONDS", 0.001)
    trace = vbs.AdaptiveTrace(PerDevice(4), every=2, delay=4)
    sampler = vbs.CustomSampler(100, trace, num_replicas=1, rank=0, minibatch_size=4)
    optimizer = vbs.CustomOptimizer(torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1), sampler, 4)
    sizes: list[int] = []
    thread = threading.Thread(target=lambda: sizes.extend(map(len, sampler)), daemon=True)
    with warnings.catch_warnings(record=True, action="always") as told:
        thread.start()
        while not told:
            time.sleep(0.001)
        assert sizes == [4] * 6  # known at the beginning
        optimizer.discard_step()  # nobody reads this iteration any more
        thread.join()
    assert "pass a larger delay to the AdaptiveTrace" in str(told[0].message)
    assert len(told) == 1
