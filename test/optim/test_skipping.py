"""Updates that are skipped because their gradient is too large, against a loop by hand; see test_skipping_xla.py."""

import math

import numpy as np
import pytest
import torch

import variable_batch_size as vbs
from helpers.checkpoints import checkpoint
from helpers.reference import ADAM, SGD, assert_equal, training
from variable_batch_size.checkpoint import events
from variable_batch_size.checkpoint.storage import Storage
from variable_batch_size.testing import run_ranks

SIZES = (20, 7, 1, 33, 12, 50, 3, 9, 14, 2)
INNER = {torch.optim.SGD: SGD, torch.optim.AdamW: ADAM}


def train(run, until):
    """Train up to an update; return the numbers of those whose step() returned False."""
    skipped = []
    for indices in run.microbatches(until):
        if not (run.step(indices) or run.optimizer.inside_step):
            skipped.append(run.optimizer.updates - 1)
    return skipped


@pytest.mark.parametrize("noise", ["microbatches", "differenced"])
def test_the_noise_does_not_take_a_gradient_that_is_skipped(noise):
    """It is that of a training in which the batches of these updates are skipped by a `GradScaler`."""
    run = training(vbs.AdaScaleOptimizer, SIZES, noise=noise, skip_grad_norm=2.0)
    skipped = train(run, 10)
    assert skipped
    other, scaler = training(vbs.AdaScaleOptimizer, SIZES, noise=noise), torch.amp.GradScaler("cpu", init_scale=4.0)
    for indices in other.microbatches(10):
        factor = torch.inf if other.optimizer.updates in skipped else 1.0
        other.optimizer.backward(other.loss(indices) * factor, scaler=scaler)
        scaler.step(other.optimizer)
        scaler.update(4.0)
    assert_equal(run.weights(), other.weights())
    np.testing.assert_allclose(
        [*vars_of(run.optimizer.noise()), run.optimizer.progress],
        [*vars_of(other.optimizer.noise()), other.optimizer.progress],
        rtol=1e-10,
    )


def vars_of(noise):
    return noise.sigma2, noise.mu2, noise.gain


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_norm_that_is_no_number_is_too_large(value):
    run = training(sizes=(4,), minibatch_size=4, skip_grad_norm=1e6)
    for indices in run.microbatches(3):
        run.optimizer.backward(run.loss(indices) * (value if run.optimizer.updates == 1 else 1))
        updated = run.optimizer.step()
        assert updated is (run.optimizer.updates != 2)
    assert run.optimizer.skipped == 1
    assert all(np.isfinite(weights).all() for weights in run.weights())


def test_the_first_update_is_made_and_twenty_in_a_row_warn_once():
    run = training(sizes=(4,), minibatch_size=4, skip_grad_norm=1e-9)
    assert train(run, 20) == [*range(1, 20)]
    state = run.optimizer.state_dict()
    with pytest.warns(RuntimeWarning, match=r"^Skipped 20 updates in a row.* skip_grad_norm or .*; pass a larger one"):
        train(run, 21)
    train(run, 25)  # a second warning would be an error
    run.optimizer.load_state_dict(state)
    assert run.optimizer.skipped == 19
    train(run, 23)
    assert run.optimizer.skipped == 22
    again = training(sizes=(4,), minibatch_size=4, skip_grad_norm=1e-9)
    again.optimizer.load_state_dict(state)
    with pytest.warns(RuntimeWarning, match=r"^Skipped 20 updates in a row"):
        assert train(again, 21) == [20]


def test_it_is_an_event_and_a_scalar(tmp_path):
    tracker = vbs.Tracker(tmp_path / "log")
    run = training(sizes=SIZES, skip_grad_norm=2.0, tracker=tracker, log_steps=1)
    skipped = []
    with checkpoint(tmp_path / "saved", run) as saves:
        for update in range(1, 11):
            skipped += train(run, update)
            saves.step()
        saves.save()
    tracker.close()
    rows = [line for line in events.read_events(Storage(tmp_path / "saved")) if line["event"] == "skip"]
    assert [(row["update"], row["large"]) for row in rows] == [(update + 1, 1) for update in skipped]
    header, *lines = (tmp_path / "log" / "scalars.csv").read_text().splitlines()
    column = header.split(",").index("vbs/skipped")
    assert [int(line.split(",")[column]) for line in lines] == [sum(x < n for x in skipped) for n in range(1, 11)]
    again = training(sizes=SIZES, skip_grad_norm=2.0)
    with checkpoint(tmp_path / "saved", again) as saves:
        saves.restore()
        assert again.optimizer.skipped == len(skipped)
        again.optimizer._abilities.skipper._is_too_large(torch.tensor(0.0), 2.0, first=False)
        saves.step()
    rows = [line for line in events.read_events(Storage(tmp_path / "saved")) if line["event"] == "skip"]
    assert len(rows) == len(skipped)


def test_rank_0_decides_for_all():
    """As where the last bits of a norm differ between ranks."""

    def decide(backend):
        run = training(sizes=SIZES, backend=backend, skip_grad_norm=1.0)
        large = run.optimizer._abilities.skipper
        assert large is not None
        norm = torch.tensor(1.0 + (backend.world.rank == 1) * 1e-9, dtype=torch.float64)
        return large._is_too_large(norm, 1.0, first=False)

    assert run_ranks(decide, 2) == [False, False]
