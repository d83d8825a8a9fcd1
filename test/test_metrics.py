"""Means over exactly the samples that were trained on, for any trace, world and restart, against float64 by hand."""

from __future__ import annotations

import json
import math
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import variable_batch_size as vbs
from helpers.measured import HITS, VALUES, Measured
from helpers.properties import examples
from helpers.reference import SIZES, batches, training
from variable_batch_size.metrics import compensated_add
from variable_batch_size.testing import run_ranks


def expected(sizes, dataset_size, updates=slice(None)):
    """Return the means over the samples of these updates, in float64."""
    used = [sample for batch in list(batches(sizes, dataset_size))[updates] for sample in batch]
    return {"value": float(VALUES[used].mean()), "hit": float(HITS[used].mean()), "samples": len(used)}


# ------------------------------------------------------------------------------------------------ the right mean


@examples(40)
@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=8),
    tail=st.integers(0, 30),
    world=st.integers(1, 5),
    minibatch_size=st.integers(1, 16),
    fixed_shape=st.booleans(),
)
def test_means_are_over_the_samples_of_the_updates(sizes, tail, world, minibatch_size, fixed_shape):
    dataset_size = max(sizes) + tail

    def measure(backend):
        sampling = {"fixed_shape": fixed_shape}
        run = Measured(sizes, dataset_size, minibatch_size=minibatch_size, sampling=sampling, backend=backend)
        return run.run(len(sizes)).metrics.read()

    found = run_ranks(measure, world)
    assert found[0] == pytest.approx(expected(sizes, dataset_size), rel=1e-12)
    assert found == world * found[:1]


def test_read_and_add_take_no_all_reduce():
    def collectives(backend):
        run, counts = Measured(sizes=[9], dataset_size=90, backend=backend), []
        run.run(2)
        for read in (False, True, True):
            before = backend.collectives
            run.run(1)
            if read:
                run.metrics.read()
            counts.append(backend.collectives - before)
        return counts

    assert run_ranks(collectives, 3) == 3 * [[1, 1, 1]]


def test_replays_have_no_weight_even_if_their_values_are_infinite():
    def measure(backend):
        run = training(vbs.ConstantOptimizer, [2], dataset_size=6, minibatch_size=2, backend=backend)
        metrics = vbs.Accumulator(run.optimizer)
        for indices in run.sampler:
            loss = run.loss(indices)
            metrics.add(loss=loss * (torch.inf if run.optimizer.microbatch.samples == 0 else 0) + 3)
            loss.backward()
            run.optimizer.step()
        return metrics.read()

    assert run_ranks(measure, 3) == 3 * [{"loss": 3, "samples": 6}]


def test_add_accepts_any_number_and_retains_no_autograd_graph():
    run = training(vbs.ConstantOptimizer, [4], dataset_size=8)
    metrics = vbs.Accumulator(run.optimizer)
    for indices in run.sampler:
        loss = run.loss(indices)
        metrics.add(loss=loss)
        metrics.add(half=torch.tensor([[2.5]], dtype=torch.bfloat16), integer=torch.tensor(3), number=np.float32(7))
        loss.backward()
        run.optimizer.step()
    found = metrics.read()
    assert (found["half"], found["integer"], found["number"], found["samples"]) == (2.5, 3, 7, 8)
    assert not any(part.requires_grad for own in metrics._committed.values() for part in own.parts)


def test_a_name_of_some_microbatches_is_a_mean_over_their_samples():
    run = training(vbs.ConstantOptimizer, [4, 2, 4], dataset_size=10)
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


def test_a_nonfinite_value_makes_the_mean_nonfinite():
    for bad in (math.inf, math.nan):
        run = training(vbs.ConstantOptimizer, [4], dataset_size=8)
        metrics = vbs.Accumulator(run.optimizer)
        for indices in run.sampler:
            metrics.add(loss=bad, fine=2.0)
            run.loss(indices).backward()
            run.optimizer.step()
        assert metrics.read() == pytest.approx({"loss": bad, "fine": 2, "samples": 8}, nan_ok=True)


# --------------------------------------------------------------------------------------- only committed steps count


def test_read_in_the_middle_of_a_step_covers_the_committed_updates():
    run, updates = Measured([20], dataset_size=100).run(2), 2
    for indices in run.training.sampler:
        updates += run.microbatch(indices)
        assert run.metrics.read() == pytest.approx(
            expected([20] * 5, dataset_size=100, updates=slice(0, updates)), rel=1e-12
        )


@pytest.mark.parametrize("how", ["discard_step", "set_epoch", "load_state_dict"])
@pytest.mark.parametrize("begun", [1, 2, 4])
def test_a_discarded_step_does_not_count(how, begun):
    run = Measured([20], dataset_size=100).run(2)
    state = run.optimizer.state_dict()
    indices = iter(run.training.sampler)
    for _ in range(begun):
        run.microbatch(next(indices))
    run.metrics.add(value=1e9)  # for a microbatch without step()
    if how == "discard_step":
        run.optimizer.discard_step()
        counted = slice(0, 5)
    elif how == "load_state_dict":
        run.optimizer.load_state_dict(state)
        counted = slice(0, 5)
    else:  # skips the last three steps of the epoch
        with pytest.warns(UserWarning, match="skips 3 updates and 60 samples"):
            run.training.sampler.set_epoch(1)
        counted = slice(0, 2)
    assert run.metrics.read() == pytest.approx(expected([20] * 5, dataset_size=100, updates=slice(0, 2)), rel=1e-12)
    if how == "set_epoch":
        run.run(5)
        found, by_update = run.metrics.read(), list(batches([20] * 10, dataset_size=100))
        used = np.concatenate([*by_update[:2], *by_update[5:]])
        assert found["samples"] == 140
        assert found["value"] == pytest.approx(VALUES[used].mean(), rel=1e-12)
        return
    assert run.run(3).metrics.read() == pytest.approx(expected([20] * 5, dataset_size=100, updates=counted), rel=1e-12)


@pytest.mark.filterwarnings("ignore:set_epoch")
def test_a_discarded_last_step_of_an_epoch_does_not_count():
    run = Measured([20], dataset_size=40).run(1)
    for indices in run.training.sampler:
        run.metrics.add(value=torch.from_numpy(VALUES[indices]).mean())
        if run.optimizer.microbatch.ends_step:
            break
        run.training.loss(indices).backward()
        run.optimizer.step()
    run.training.sampler.set_epoch(1)  # the same position as if that step had been committed
    run.optimizer.set_epoch(1)
    assert run.optimizer.updates == 2
    assert run.metrics.read() == pytest.approx(expected([20, 20], dataset_size=40, updates=slice(0, 1)), rel=1e-12)


@given(skipped=st.sets(st.integers(0, 4)), by_noise=st.booleans())
@examples(20)
def test_the_samples_of_a_skipped_update_do_not_count(skipped, by_noise):
    """Under a `GradScaler`, and if the measured noise is not finite; their values may be nan."""
    options = {"noise": "microbatches"} if by_noise else {}
    run, scaler = Measured([8], dataset_size=40, **options), torch.amp.GradScaler("cpu", init_scale=4.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # skipped an update
        for indices in run.training.sampler:
            poison = torch.nan if run.optimizer.updates in skipped else 1.0
            values = torch.from_numpy(VALUES[indices]).mean() * poison
            loss = run.training.loss(indices) * poison
            run.metrics.add(value=values)
            if by_noise:
                loss.backward()
                run.optimizer.step()
            else:
                run.optimizer.backward(loss, scaler=scaler)
                scaler.step(run.optimizer)
                scaler.update()
    assert run.optimizer.samples == 40
    used = np.concatenate([[], *(b for u, b in enumerate(batches([8] * 5, dataset_size=40)) if u not in skipped)])
    found = run.metrics.read()
    assert found["samples"] == len(used) == 40 - 8 * len(skipped)
    if len(used):
        assert found["value"] == pytest.approx(VALUES[used.astype(int)].mean(), rel=1e-12)


def test_accumulators_are_independent_and_the_optimizer_does_not_keep_them_alive():
    run = Measured().run(2)
    first, second = run.metrics, vbs.Accumulator(run.optimizer)
    run.metrics = second
    run.run(2)
    assert first.read() == pytest.approx(expected(SIZES, dataset_size=50, updates=slice(0, 2)), rel=1e-12)
    assert second.read() == pytest.approx(expected(SIZES, dataset_size=50, updates=slice(2, 4)), rel=1e-12)
    assert len(run.optimizer._observers) == 2
    del first
    assert len(run.optimizer._observers) == 1


# ----------------------------------------------------------------------------------------------------- restarts


@examples(25)
@given(
    stop=st.integers(0, len(SIZES)),
    begun=st.booleans(),
    before=st.tuples(st.integers(1, 9), st.integers(1, 5)),
    after=st.tuples(st.integers(1, 9), st.integers(1, 5)),
)
def test_a_mean_resumes_in_another_world(stop, begun, before, after):
    def before_the_stop(backend):
        run = Measured(minibatch_size=before[0], backend=backend).run(stop)
        saved = run.optimizer.state_dict()["vbs"], run.metrics.state_dict()
        # A microbatch after the checkpoint is lost. No rank may complete the update, for which it needs all others.
        if (
            begun
            and not run.training.sampler.batches.ends_epoch(run.training.sampler.position)
            and run.optimizer.batch.num_microbatches >= 2 * backend.world.size
        ):
            run.microbatch(next(iter(run.training.sampler)))
        return json.dumps(saved[1])

    def after_the_stop(backend):
        run = Measured(minibatch_size=after[0], backend=backend)
        run.optimizer.load_state_dict(state)
        run.metrics.load_state_dict(json.loads(saved[0]))
        return run.run(len(SIZES) - stop).metrics.read()

    saved = run_ranks(before_the_stop, before[1])
    assert saved == before[1] * saved[:1]
    state = training(vbs.ConstantOptimizer, SIZES).run(stop).optimizer.state_dict()
    for found in run_ranks(after_the_stop, after[1]):
        assert found == pytest.approx(expected(SIZES, dataset_size=50), rel=1e-12)


def test_a_loaded_state_is_saved_again_unchanged():
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


def test_a_million_float32_losses_lose_no_digits():
    """A pair of float32 numbers holds the sum, where one of them does not."""
    losses = np.random.default_rng(1).uniform(0, 3, 1000).astype(np.float32)
    high, low = torch.tensor(2.0**26), torch.tensor(0.0)  # as after a million microbatches
    plain = high.clone()
    for loss in torch.from_numpy(losses):
        high, low = compensated_add(high, low, loss)
        plain = plain + loss
    exact = losses.astype(np.float64).sum()
    assert high.dtype == low.dtype == torch.float32
    assert high.double().item() + low.double().item() - 2.0**26 == pytest.approx(exact, rel=1e-6)
    assert abs(plain.item() - 2.0**26 - exact) > 100


def test_means_are_the_same_on_a_device_without_float64(monkeypatch):
    monkeypatch.setattr("variable_batch_size.metrics.WITHOUT_FLOAT64", ("cpu",))
    run = Measured().run(len(SIZES))
    assert len(run.metrics._committed["value"].parts) == 2
    assert run.metrics.read() == pytest.approx(expected(SIZES, dataset_size=50), rel=1e-12)


# --------------------------------------------------------------------------------------------------------- errors


def test_rejects_what_is_not_one_number_and_adds_nothing():
    run = Measured([4], dataset_size=8)
    bad = [
        (torch.ones(3), ValueError, r"^value must be a mean over .* got a tensor of shape \(3,\); pass its"),
        ("0.5", TypeError, r"^value must be a number or a tensor with one element, got '0.5' \(str\); pass"),
        (True, TypeError, r"^value must be a number or a tensor with one element, got True \(bool\); pass"),
    ]
    for value, error, match in bad:
        with pytest.raises(error, match=match):
            run.metrics.add(hit=1e9, value=value)
    with pytest.raises(ValueError, match=r"^the name 'samples' is reserved for the number of samples.*; choose"):
        run.metrics.add(hit=1e9, samples=4)
    assert run.run(2).metrics.read() == pytest.approx(expected([4, 4], dataset_size=8), rel=1e-12)


@given(stop=st.integers(0, 2 * len(SIZES)), world=st.sampled_from([1, 2]), then=st.sampled_from([1, 2]))
@examples(15)
def test_a_restored_loop_reports_the_means_of_each_epoch(stop, world, then):
    """Wherever it was stopped, also at an epoch's end, before the means of that epoch were read."""
    epochs, samples = 3, sum(SIZES)

    def train(backend, state=None, until=-1):
        run, means = Measured([*SIZES, *SIZES, *SIZES], samples, backend=backend), {}
        if state is not None:
            run.optimizer.load_state_dict(state[0])
            run.metrics.load_state_dict(json.loads(state[1]))
        for epoch in range(run.optimizer.epoch, epochs):
            run.training.sampler.set_epoch(epoch)
            run.optimizer.set_epoch(epoch)
            run.metrics.set_epoch(epoch)
            for indices in run.training.sampler:
                if run.optimizer.updates == until and not run.optimizer.inside_step:
                    break
                run.microbatch(indices)
                if run.optimizer.updates == until and not run.optimizer.inside_step:
                    return (run.optimizer.state_dict(), json.dumps(run.metrics.state_dict())), means
            if run.optimizer.updates == until:
                return (run.optimizer.state_dict(), json.dumps(run.metrics.state_dict())), means
            means[epoch] = run.metrics.read()
        return None, means

    ((_, whole),) = run_ranks(train, 1)
    assert [epoch["samples"] for epoch in whole.values()] == [samples] * epochs
    saved = run_ranks(lambda backend: train(backend, until=stop), world)
    for state, before in run_ranks(lambda backend: train(backend, state=saved[0][0]), then):
        assert state is None
        for epoch, means in (saved[0][1] | before).items():
            assert means == pytest.approx(whole[epoch], rel=1e-12)


@pytest.mark.parametrize("names", [["loss", "accuracy"], ["loss", ""], ["", "loss"]])
def test_other_names_on_another_rank_raise_on_every_rank(names):
    def train(backend):
        run = training(backend=backend)
        metrics, own = vbs.Accumulator(run.optimizer), names[backend.world.rank]
        for indices in run.sampler:
            if own:
                metrics.add(**{own: 1.0})
            run.loss(indices).backward()
            run.optimizer.step()
        with pytest.raises(RuntimeError, match="every rank must add values under the same names") as caught:
            metrics.read()
        with pytest.raises(RuntimeError, match="under the same names"):
            metrics.state_dict()
        return str(caught.value)

    first, second = run_ranks(train, 2)
    assert first == second
    assert all((name or "none") in first for name in names)


@pytest.mark.parametrize("reduction", ["mean", "sum", "tokens", "terms"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_what_is_logged_of_a_loss_is_divided_as_its_gradient(reduction, ranks):
    """Whatever the size of a microbatch: a sum of losses was logged as a mean of sums."""
    rows = torch.arange(96.0, dtype=torch.float64).sin()
    tokens = torch.arange(96) % 5 + 1

    def train(backend, size):
        weight = torch.nn.Parameter(torch.ones((), dtype=torch.float64))
        world = backend.world
        sampler = vbs.CustomSampler(96, 96, world.size, world.rank, size)
        inner = torch.optim.SGD([weight], lr=1.0)
        own = {"reduction": "sum" if reduction in ("sum", "tokens") else "mean"}
        optimizer = vbs.ConstantOptimizer(inner, sampler, backend=backend, **own)
        metrics = vbs.Accumulator(optimizer)
        counts = {"counts": lambda indices: {"tokens": int(tokens[indices].sum())}} if reduction == "terms" else {}
        for update in vbs.updates(sampler, optimizer, **counts):
            for indices in update:
                losses = weight * rows[indices] * (tokens[indices] if reduction in ("tokens", "terms") else 1)
                loss = losses.mean() if reduction == "mean" else losses.sum()
                if reduction == "terms":
                    loss = loss / update.counts["tokens"]
                optimizer.backward(loss, divided=reduction == "terms")
                optimizer.log(loss=loss)
                number = tokens[indices].double()
                metrics.add(loss=loss, tokens=number.mean() if reduction == "mean" else number.sum())
                optimizer.step(**({"count": int(tokens[indices].sum())} if reduction == "tokens" else {}))
        means = metrics.read()
        by_tokens = means["loss"] / means["tokens"]
        return optimizer.logged["loss"].item(), means["loss"], by_tokens, 1 - weight.item()

    mean = float(rows.mean())
    if reduction in ("tokens", "terms"):
        mean = float((rows * tokens).sum() / tokens.sum())
    for size in (96, 32, 8, 7):
        for logged, of_samples, by_tokens, gradient in run_ranks(partial(train, size=size), ranks):
            assert gradient == pytest.approx(mean, rel=1e-12)
            assert logged == pytest.approx(mean, rel=1e-6)
            if reduction != "terms":
                assert (by_tokens if reduction == "tokens" else of_samples) == pytest.approx(mean, rel=1e-12)


def test_equal_replays_of_a_slow_rank_are_two_microbatches():
    """A rank of half a share beside one of three microbatches, padded as in FSDP2."""

    def train(backend):
        run = training(sizes=[16, 16], backend=backend, minibatch_size=5, sampling={"speeds": [15, 1]})
        run.sampler.attach(None, spread=True, padded=True)
        metrics = vbs.Accumulator(run.optimizer)
        for indices in run.microbatches(2):
            run.optimizer.backward(loss := run.loss(indices))
            metrics.add(loss=loss)
            run.optimizer.step()
        return metrics.read()["loss"]

    first, second = run_ranks(train, 2)
    assert first == second
