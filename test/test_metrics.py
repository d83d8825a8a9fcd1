"""Means over exactly the samples that were trained on: any trace, world and restart, against float64 by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import variable_batch_size as vbs
from helpers.reference import SIZES, batches, examples, training
from variable_batch_size.backend import Backend
from variable_batch_size.metrics import added, in_singles
from variable_batch_size.testing import run_ranks

VALUES = np.random.default_rng(3).normal(5, 2, size=1000)  # of each sample
HITS = VALUES > 5


def expected(sizes: Sequence[int], dataset_size: int, updates: slice = slice(None)) -> dict[str, float]:
    """Over the samples of some of the updates."""
    used = [sample for batch in list(batches(sizes, dataset_size))[updates] for sample in batch]
    return {"value": float(VALUES[used].mean()), "hit": float(HITS[used].mean()), "samples": len(used)}


class Measured:
    """A training that adds to an accumulator."""

    def __init__(self, sizes: Sequence[int] = SIZES, dataset_size: int = 50, **options: Any) -> None:
        self.training = training(vbs.ConstantOptimizer, sizes, dataset_size, **options)
        self.optimizer = self.training.optimizer
        self.metrics = vbs.Accumulator(self.optimizer)

    def microbatch(self, indices: list[int]) -> bool:
        run = self.training
        self.metrics.add(value=torch.from_numpy(VALUES[indices]).mean(), hit=float(HITS[indices].mean()))
        run.loss(indices).backward()
        return run.optimizer.step()

    def run(self, updates: int) -> Measured:
        """Go on for so many updates, over as many epochs as it takes."""
        run = self.training
        while updates:
            if len(run.sampler) == 0:
                epoch = run.optimizer.epoch + 1
                run.sampler.set_epoch(epoch)
                run.optimizer.set_epoch(epoch)
            for indices in run.sampler:
                updates -= self.microbatch(indices)
                if updates == 0:
                    break
        return self


# ------------------------------------------------------------------------------------------------- the right mean


@examples(40)
@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=8),
    tail=st.integers(0, 30),
    world=st.integers(1, 5),
    minibatch_size=st.integers(1, 16),
    fixed_shape=st.booleans(),
)
def test_means_are_those_over_the_samples(
    sizes: list[int], tail: int, world: int, minibatch_size: int, fixed_shape: bool
) -> None:
    dataset_size = max(sizes) + tail

    def measure(backend: Backend) -> dict[str, float]:
        sampling = {"fixed_shape": fixed_shape}
        run = Measured(sizes, dataset_size, minibatch_size=minibatch_size, sampling=sampling, backend=backend)
        return run.run(len(sizes)).metrics.read()

    found = run_ranks(measure, world)
    assert found[0] == pytest.approx(expected(sizes, dataset_size), rel=1e-12)
    assert found == world * found[:1]


def test_reading_takes_one_all_reduce_and_adding_none() -> None:
    def calls(backend: Backend) -> list[int]:
        run, counts = Measured(sizes=[9], dataset_size=90, backend=backend), []
        run.run(2)
        for read in (False, True, True):
            before = backend.collectives  # type: ignore[attr-defined]
            run.run(1)
            if read:
                run.metrics.read()
            counts.append(backend.collectives - before)  # type: ignore[attr-defined]
        return counts

    assert run_ranks(calls, 3) == 3 * [[1, 2, 2]]


def test_replays_count_nothing_even_where_they_are_infinite() -> None:
    def measure(backend: Backend) -> dict[str, float]:
        run = training(vbs.ConstantOptimizer, [2], 6, minibatch_size=2, backend=backend)
        metrics = vbs.Accumulator(run.optimizer)
        for indices in run.sampler:
            loss = run.loss(indices)
            metrics.add(loss=loss * (torch.inf if run.optimizer.microbatch.samples == 0 else 0) + 3)
            loss.backward()
            run.optimizer.step()
        return metrics.read()

    assert run_ranks(measure, 3) == 3 * [{"loss": 3, "samples": 6}]


def test_no_graph_is_kept_and_any_number_is_taken() -> None:
    run = training(vbs.ConstantOptimizer, [4], 8)
    metrics = vbs.Accumulator(run.optimizer)
    for indices in run.sampler:
        loss = run.loss(indices)
        metrics.add(loss=loss)
        metrics.add(half=torch.tensor([[2.5]], dtype=torch.bfloat16), whole=torch.tensor(3), number=np.float32(7))
        loss.backward()
        run.optimizer.step()
    found = metrics.read()
    assert (found["half"], found["whole"], found["number"], found["samples"]) == (2.5, 3, 7, 8)
    assert not any(part.requires_grad for own in metrics._committed.values() for part in own.parts)


def test_a_value_that_only_some_microbatches_have_is_a_mean_over_their_samples() -> None:
    run = training(vbs.ConstantOptimizer, [4, 2, 4], 10)
    metrics = vbs.Accumulator(run.optimizer)
    for indices in run.sampler:
        step = run.optimizer.microbatch.step
        metrics.add(always=step)
        if step != 1:
            metrics.add(sometimes=step)
        run.loss(indices).backward()
        run.optimizer.step()
    assert metrics.read() == {"always": 1.0, "sometimes": 1.0, "samples": 10}
    assert metrics.state_dict()["sometimes"]["samples"] == 8


def test_an_infinite_loss_is_seen() -> None:
    for bad in (math.inf, math.nan):
        run = training(vbs.ConstantOptimizer, [4], 8)
        metrics = vbs.Accumulator(run.optimizer)
        for indices in run.sampler:
            metrics.add(loss=bad, fine=2.0)
            run.loss(indices).backward()
            run.optimizer.step()
        assert metrics.read() == pytest.approx({"loss": bad, "fine": 2, "samples": 8}, nan_ok=True)


def test_before_the_first_update_there_is_nothing() -> None:
    metrics = Measured().metrics
    assert metrics.read() == {"samples": 0}
    assert metrics.state_dict() == {}


# ------------------------------------------------------------------------------------- only what was committed counts


def test_in_the_middle_of_a_step_the_updates_before_are_told() -> None:
    run, updates = Measured([20], 100).run(2), 2
    for indices in run.training.sampler:
        updates += run.microbatch(indices)
        assert run.metrics.read() == pytest.approx(expected([20] * 5, 100, slice(0, updates)), rel=1e-12)


@pytest.mark.parametrize("how", ["discard_step", "set_epoch", "load_state_dict"])
@pytest.mark.parametrize("begun", [1, 2, 4])
def test_a_step_that_was_dropped_does_not_count(how: str, begun: int) -> None:
    run = Measured([20], 100).run(2)
    state = run.optimizer.state_dict()
    done = iter(run.training.sampler)
    for _ in range(begun):
        run.microbatch(next(done))
    run.metrics.add(value=1e9)  # of a microbatch that does not come to its step()
    if how == "discard_step":
        run.optimizer.discard_step()
        rest = slice(0, 5)
    elif how == "load_state_dict":
        run.optimizer.load_state_dict(state)
        rest = slice(0, 5)
    else:  # the epoch has three steps more, which are left out
        run.training.sampler.set_epoch(1)
        run.optimizer.set_epoch(1)
        rest = slice(0, 2)
    assert run.metrics.read() == pytest.approx(expected([20] * 5, 100, slice(0, 2)), rel=1e-12)
    if how == "set_epoch":
        run.run(5)
        found, all_of_them = run.metrics.read(), list(batches([20] * 10, 100))
        used = np.concatenate([*all_of_them[:2], *all_of_them[5:]])
        assert found["samples"] == 140
        assert found["value"] == pytest.approx(VALUES[used].mean(), rel=1e-12)
        return
    assert run.run(3).metrics.read() == pytest.approx(expected([20] * 5, 100, rest), rel=1e-12)


def test_the_last_step_of_an_epoch_that_was_dropped_does_not_count() -> None:
    run = Measured([20], 40).run(1)
    for indices in run.training.sampler:
        run.metrics.add(value=torch.from_numpy(VALUES[indices]).mean())
        if run.optimizer.microbatch.ends_step:
            break
        run.training.loss(indices).backward()
        run.optimizer.step()
    run.training.sampler.set_epoch(1)  # the optimizer then stands where it would if that step had been committed
    run.optimizer.set_epoch(1)
    assert run.optimizer.updates == 2
    assert run.metrics.read() == pytest.approx(expected([20, 20], 40, slice(0, 1)), rel=1e-12)


def test_an_update_that_is_left_out_has_passed_its_samples() -> None:
    run = Measured([8], 24)
    for turn, indices in enumerate(run.training.sampler):
        run.optimizer.found_inf = torch.tensor(float(turn < 2))  # type: ignore[attr-defined]  # of the first step
        run.microbatch(indices)
    assert run.optimizer.samples == 24
    assert run.metrics.read() == pytest.approx(expected([8] * 3, 24), rel=1e-12)


def test_after_a_reset_only_what_follows_counts() -> None:
    run = Measured().run(3)
    run.metrics.reset()
    assert run.metrics.read() == {"samples": 0}
    assert run.run(2).metrics.read() == pytest.approx(expected(SIZES, 50, slice(3, 5)), rel=1e-12)


def test_several_accumulators_do_not_mix_and_none_is_kept() -> None:
    run = Measured().run(2)
    first, second = run.metrics, vbs.Accumulator(run.optimizer)
    run.metrics = second
    run.run(2)
    assert first.read() == pytest.approx(expected(SIZES, 50, slice(0, 2)), rel=1e-12)
    assert second.read() == pytest.approx(expected(SIZES, 50, slice(2, 4)), rel=1e-12)
    assert len(run.optimizer._loop.watchers) == 2
    del first
    assert len(run.optimizer._loop.watchers) == 1


# ----------------------------------------------------------------------------------------------------- restarts


@examples(25)
@given(
    stop=st.integers(0, len(SIZES)),
    begun=st.booleans(),
    before=st.tuples(st.integers(1, 9), st.integers(1, 5)),
    after=st.tuples(st.integers(1, 9), st.integers(1, 5)),
)
def test_a_mean_goes_on_in_another_world(
    stop: int, begun: bool, before: tuple[int, int], after: tuple[int, int]
) -> None:
    def begin(backend: Backend) -> str:
        run = Measured(minibatch_size=before[0], backend=backend).run(stop)
        saved = run.optimizer.state_dict()["vbs"], run.metrics.state_dict()
        if begun and len(run.training.sampler):  # what happens after the checkpoint is lost
            run.microbatch(next(iter(run.training.sampler)))
        return json.dumps(saved[1])

    def go_on(backend: Backend) -> dict[str, float]:
        run = Measured(minibatch_size=after[0], backend=backend)
        run.optimizer.load_state_dict(state)
        run.metrics.load_state_dict(json.loads(saved[0]))
        return run.run(len(SIZES) - stop).metrics.read()

    saved = run_ranks(begin, before[1])
    assert saved == before[1] * saved[:1]
    state = training(vbs.ConstantOptimizer, SIZES).run(stop).optimizer.state_dict()
    for found in run_ranks(go_on, after[1]):
        assert found == pytest.approx(expected(SIZES, 50), rel=1e-12)


def test_a_state_is_taken_again_before_anything_is_added() -> None:
    run = Measured().run(3)
    state = run.metrics.state_dict()
    other = Measured().metrics
    other.load_state_dict(state)
    assert other.state_dict() == state
    for metrics in (other, run.metrics):
        metrics.load_state_dict(state)  # replaces, and does not add
        assert metrics.state_dict() == state
    other.reset()
    assert other.read() == {"samples": 0}


# ------------------------------------------------------------------------------------------------------ precision


def test_a_million_float32_losses_lose_no_digits() -> None:
    """In the sum that devices without float64 keep, and in that of all others."""
    losses = np.random.default_rng(1).uniform(0, 3, 1000).astype(np.float32)
    high, low = torch.tensor(2.0**26), torch.tensor(0.0)  # as after a million microbatches
    plain = high.clone()
    for loss in torch.from_numpy(losses):
        high, low = added(high, low, loss)
        plain = plain + loss
    exact = losses.astype(np.float64).sum()
    assert high.dtype == low.dtype == torch.float32
    assert high.double().item() + low.double().item() - 2.0**26 == pytest.approx(exact, rel=1e-6)
    assert abs(plain.item() - 2.0**26 - exact) > 100


def test_a_device_without_float64_tells_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("variable_batch_size.metrics._WITHOUT_FLOAT64", ("cpu",))
    run = Measured().run(len(SIZES))
    assert len(run.metrics._committed["value"].parts) == 2
    assert run.metrics.read() == pytest.approx(expected(SIZES, 50), rel=1e-12)


@examples(200)
@given(st.lists(st.one_of(st.floats(1e-20, 1e20), st.integers(0, 2**53).map(float)), min_size=1, max_size=5))
def test_three_single_numbers_hold_a_double(numbers: list[float]) -> None:
    singles = np.float32(in_singles(numbers)).reshape(3, -1)
    assert singles.astype(np.float64).sum(axis=0).tolist() == numbers


# ------------------------------------------------------------------------------------------------------- refusals


def test_what_is_no_single_value_is_refused_and_leaves_nothing() -> None:
    run = Measured([4], 8)
    bad: list[tuple[Any, type[Exception], str]] = [
        (torch.ones(3), ValueError, r"^value must be a mean over .* got a tensor of shape \(3,\); pass its"),
        ("0.5", TypeError, "^value must be a number or a 0-D tensor, got '0.5'; pass"),
    ]
    for value, error, match in bad:
        with pytest.raises(error, match=match):
            run.metrics.add(hit=1e9, value=value)
    with pytest.raises(ValueError, match=r"^the name 'samples' is that of their number.*; leave"):
        run.metrics.add(hit=1e9, samples=4)
    assert run.run(2).metrics.read() == pytest.approx(expected([4, 4], 8), rel=1e-12)


def test_a_second_value_for_a_microbatch_is_refused() -> None:
    run = Measured([4], 8)
    run.metrics.add(value=1.0)
    run.metrics.add(other=1.0)
    with pytest.raises(RuntimeError, match=r"^a microbatch gives one value a name, .* 'value' came in step 0; call"):
        run.metrics.add(value=1.0)


def test_adding_after_the_last_step_is_refused() -> None:
    run = Measured([4], 8).run(2)
    with pytest.raises(RuntimeError, match=r"^add\(\) needs a microbatch whose step\(\) is to come, .*; call it"):
        run.metrics.add(value=1.0)


def test_the_wrapped_optimizer_is_not_the_one() -> None:
    with pytest.raises(TypeError, match=r"must be the vbs\.CustomOptimizer of the loop, got SGD; pass"):
        vbs.Accumulator(training().optimizer.inner)  # type: ignore[arg-type]
