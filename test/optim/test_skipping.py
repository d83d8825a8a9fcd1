"""Updates that are skipped because their gradient is too large, against a loop by hand; see test_skipping_xla.py."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import variable_batch_size as vbs
from helpers.checkpoints import checkpoint
from helpers.elastic_threads import ElasticThreads, Script
from helpers.fingerprint import compile_on_the_cpu
from helpers.interrupts import Interrupt
from helpers.properties import examples
from helpers.reference import ADAM, REF, SGD, Array, Training, assert_equal, batches, training
from variable_batch_size.backend import Backend
from variable_batch_size.checkpoint import events
from variable_batch_size.checkpoint.storage import Storage
from variable_batch_size.testing import run_ranks
from variable_batch_size.world import World

Limit = float | Callable[[int], float]
SIZES = (20, 7, 1, 33, 12, 50, 3, 9, 14, 2)
INNER: dict[Any, dict[str, Any]] = {torch.optim.SGD: SGD, torch.optim.AdamW: ADAM}


class ByHand:
    """A plain loop with the linear rule, one big batch an update, which skips."""

    def __init__(self, kind: Any, sizes: list[int], limit: Limit, max_norm: float = math.inf) -> None:
        run = training(vbs.ConstantOptimizer)
        inner = kind(run.model.parameters(), **INNER[kind])
        self.skipped, self.progress, self.norms = list[int](), 0.0, list[float]()
        for update, batch in enumerate(batches(sizes, 50)):
            run.loss(batch.tolist()).backward()
            norm = float(torch.nn.utils.clip_grad_norm_(run.model.parameters(), max_norm))
            self.norms.append(norm)
            if update > 0 and norm > (limit(len(batch)) if callable(limit) else limit):
                self.skipped.append(update)
            else:
                inner.param_groups[0]["lr"] = INNER[kind]["lr"] * len(batch) / REF
                inner.step()
                self.progress += len(batch) / REF
            inner.zero_grad()
        self.weights = run.weights()


def train(run: Training, until: int) -> list[int]:
    """Train up to an update; return the numbers of those whose step() returned False."""
    skipped = list[int]()
    while run.optimizer.updates < until:
        for updated in run.steps():
            if not (updated or run.optimizer.inside_step):
                skipped.append(run.optimizer.updates - 1)
            if run.optimizer.updates == until:
                break
    return skipped


worlds = st.integers(1, 3)


@examples(100)
@given(
    kind=st.sampled_from([*INNER]),
    sizes=st.lists(st.integers(1, 50), min_size=3, max_size=12),
    mu=st.floats(0.5, 4),
    sigma=st.floats(0, 4),
    max_norm=st.sampled_from([math.inf, 0.5]),
    minibatch_size=st.integers(1, 9),
    stop=st.integers(1, 11),
    before=worlds,
    after=worlds,
)
def test_the_weights_are_those_of_a_loop_by_hand_in_any_world_from_any_state(
    kind: Any,
    sizes: list[int],
    mu: float,
    sigma: float,
    max_norm: float,
    minibatch_size: int,
    stop: int,
    before: int,
    after: int,
) -> None:
    def limit(batch_size: int) -> float:
        return math.hypot(mu, sigma / batch_size**0.5)

    stop = min(stop, len(sizes) - 1)
    right = ByHand(kind, sizes, limit, max_norm)
    options: dict[str, Any] = {"inner": kind, "hyperparameters": INNER[kind], "minibatch_size": minibatch_size}
    options |= {"skip_grad_norm": limit, "max_grad_norm": max_norm}

    def begin(backend: Backend) -> tuple[list[int], Any]:
        run = training(sizes=sizes, backend=backend, **options)
        skipped = train(run, stop)
        return skipped, copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict()))

    def resume(backend: Backend) -> tuple[list[int], Training]:
        run = training(sizes=sizes, backend=backend, **options)
        run.model.load_state_dict(state[0])
        run.optimizer.load_state_dict(copy.deepcopy(state[1]))
        return train(run, len(sizes)), run

    earlier, state = run_ranks(begin, before)[0]
    for later, run in run_ranks(resume, after):
        assert [*earlier, *later] == right.skipped
        assert run.optimizer.skipped == len(right.skipped)
        assert (run.optimizer.updates, run.optimizer.samples) == (len(sizes), sum(map(len, batches(sizes, 50))))
        assert run.optimizer.progress == pytest.approx(right.progress, rel=1e-12)
        assert_equal(run.weights(), right.weights)
        norm = run.optimizer.grad_norm
        assert norm is not None
        assert float(norm) == pytest.approx(right.norms[-1])


def test_what_follows_progress_does_not_move() -> None:
    def begin(**options: Any) -> tuple[Training, vbs.WeightAverage, vbs.ProgressScheduler]:
        run = training(vbs.RootRuleOptimizer, SIZES, **options)
        schedule = torch.optim.lr_scheduler.LambdaLR(run.optimizer.inner, lambda update: 0.9**update)
        average = vbs.WeightAverage(run.model.parameters(), 0.9, run.optimizer)
        return run, average, vbs.ProgressScheduler(schedule, run.optimizer)

    run, average, scheduler = begin(skip_grad_norm=2.0)
    hooks = list[int]()
    run.optimizer.register_step_pre_hook(lambda *_: hooks.append(run.optimizer.updates))
    for update in range(1, 11):
        before = run.weights(), [one.clone() for one in average.averages], scheduler.passed, run.optimizer.progress
        skipped = train(run, update)
        scheduler.step()
        if skipped:
            assert_equal(run.weights(), before[0], 0)
            assert_equal([one.numpy() for one in average.averages], [one.numpy() for one in before[1]], 0)
            assert run.optimizer.progress == before[3]
    assert len(hooks) == 10 - run.optimizer.skipped
    assert 0 < run.optimizer.skipped < 9


@pytest.mark.parametrize("noise", ["microbatches", "differenced"])
def test_the_noise_does_not_take_a_gradient_that_is_skipped(noise: str) -> None:
    """It is that of a training in which the batches of these updates are skipped by a `GradScaler`."""
    run = training(vbs.AdaScaleOptimizer, SIZES, noise=noise, skip_grad_norm=2.0)
    skipped = train(run, 10)
    assert skipped
    other, scaler = training(vbs.AdaScaleOptimizer, SIZES, noise=noise), torch.amp.GradScaler("cpu", init_scale=4.0)
    while other.optimizer.updates < 10:
        for indices in other.sampler:
            factor = torch.inf if other.optimizer.updates in skipped else 1.0
            other.optimizer.backward(other.loss(indices) * factor, scaler=scaler)
            scaler.step(other.optimizer)
            scaler.update(4.0)
            if other.optimizer.updates == 10:
                break
    assert_equal(run.weights(), other.weights())
    np.testing.assert_allclose(
        [*vars_of(run.optimizer.noise()), run.optimizer.progress],
        [*vars_of(other.optimizer.noise()), other.optimizer.progress],
        rtol=1e-10,
    )


def vars_of(noise: vbs.rules.Noise) -> tuple[float, ...]:
    return noise.sigma2, noise.mu2, noise.gain


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_norm_that_is_no_number_is_too_large(value: float) -> None:
    run = training(sizes=(4,), minibatch_size=4, skip_grad_norm=1e6)
    for indices in run.sampler:
        run.optimizer.backward(run.loss(indices) * (value if run.optimizer.updates == 1 else 1))
        updated = run.optimizer.step()
        assert updated is (run.optimizer.updates != 2)
        if run.optimizer.updates == 3:
            break
    assert run.optimizer.skipped == 1
    assert all(np.isfinite(weights).all() for weights in run.weights())


def test_the_first_update_is_made_and_twenty_in_a_row_warn_once() -> None:
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


def test_updates_that_are_made_in_between_end_a_row() -> None:
    """A warning would be an error."""
    run = training(sizes=(4, 5) * 30, minibatch_size=4, skip_grad_norm=lambda size: math.inf if size == 4 else 1e-9)
    skipped = train(run, 60)
    assert len(skipped) > 20


def test_an_infinite_limit_skips_nothing_and_a_training_without_one_has_skipped_none() -> None:
    run = training(sizes=SIZES, skip_grad_norm=math.inf)
    assert train(run, 10) == []
    plain = training(sizes=SIZES)
    train(plain, 10)
    assert_equal(run.weights(), plain.weights(), 0)
    assert (run.optimizer.skipped, plain.optimizer.skipped) == (0, 0)
    assert "skipped" not in plain.optimizer.state_dict()["vbs"]
    plain.optimizer.load_state_dict(run.optimizer.state_dict())


def test_it_is_an_event_and_a_scalar(tmp_path: Path) -> None:
    tracker = vbs.Tracker(tmp_path / "log")
    run = training(sizes=SIZES, skip_grad_norm=2.0, tracker=tracker, log_steps=1)
    skipped = list[int]()
    with checkpoint(tmp_path / "saved", run) as saves:
        for update in range(1, 11):
            skipped += train(run, update)
            saves.step()
        saves.save()
    tracker.close()
    rows = [line for line in events.read(Storage(tmp_path / "saved")) if line["event"] == "skip"]
    assert [(row["update"], row["large"]) for row in rows] == [(update + 1, 1) for update in skipped]
    header, *lines = (tmp_path / "log" / "scalars.csv").read_text().splitlines()
    column = header.split(",").index("vbs/skipped")
    assert [int(line.split(",")[column]) for line in lines] == [sum(x < n for x in skipped) for n in range(1, 11)]
    again = training(sizes=SIZES, skip_grad_norm=2.0)
    with checkpoint(tmp_path / "saved", again) as saves:
        saves.restore()
        assert again.optimizer.skipped == len(skipped)
        again.optimizer._updater.large.judge(0.0, 1, first=False)  # type: ignore[union-attr]
        saves.step()
    rows = [line for line in events.read(Storage(tmp_path / "saved")) if line["event"] == "skip"]
    assert len(rows) == len(skipped)


def interrupted(line: int) -> tuple[int, list[Array], bool]:
    """A training of which the second update, which is skipped, is interrupted at a line and made again."""
    run = training(sizes=SIZES, minibatch_size=50, skip_grad_norm=1e-9)
    train(run, 1)
    indices = next(iter(run.sampler))
    run.loss(indices).backward()
    interrupt, raised = Interrupt(line), False
    try:
        with interrupt:
            run.optimizer.step()
    except KeyboardInterrupt:
        raised = True
    run.optimizer.discard_step()
    train(run, 4)
    return run.optimizer.skipped, run.weights(), raised


def test_an_interrupt_counts_an_update_once() -> None:
    skipped, weights, _ = interrupted(10**9)
    assert skipped == 3
    line, raised = 1, True
    while raised:
        count, own, raised = interrupted(line)
        assert (line, count) == (line, 3)
        assert_equal(own, weights, 0)
        line += 7


def unlike(backend: Backend) -> str:
    run = training(sizes=SIZES, backend=backend, skip_grad_norm=2.0 + backend.world.rank)
    with pytest.raises(RuntimeError) as error:
        train(run, 2)
    return str(error.value)


def test_ranks_must_have_the_same_limit() -> None:
    for message in run_ranks(unlike, 2):
        assert "skip_grad_norm" in message
        assert "pass the same value on every rank" in message


def test_rank_0_decides_for_all() -> None:
    """As where the last bits of a norm differ between ranks."""

    def decide(backend: Backend) -> bool | torch.Tensor:
        run = training(sizes=SIZES, backend=backend, skip_grad_norm=1.0)
        large = run.optimizer._updater.large
        assert large is not None
        return large.judge(1.0 + (backend.world.rank == 1) * 1e-9, 20, first=False)

    assert run_ranks(decide, 2) == [False, False]


@pytest.mark.parametrize(
    ("limit", "kind", "message"),
    [
        (0, ValueError, r"^skip_grad_norm must be a finite number > 0, got 0\.0; pass one, or a function of the batch"),
        (-1.0, ValueError, r"^skip_grad_norm must be a finite number >= 0, got -1\.0; pass one, or a function"),
        ("1", TypeError, r"^skip_grad_norm must be a finite number >= 0, got '1' \(str\); pass one, or a function"),
    ],
)
def test_refuses_a_limit_that_is_none(limit: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        training(skip_grad_norm=limit)


def test_refuses_what_a_function_returns_if_it_is_no_norm() -> None:
    run = training(sizes=SIZES, skip_grad_norm=lambda batch_size: 10.0 - batch_size)
    with pytest.raises(ValueError, match=r"^skip_grad_norm\(20\) must be a finite number >= 0, got -10\.0; return a"):
        train(run, 1)


def test_refuses_replica_groups_that_come_and_go() -> None:
    with pytest.raises(ValueError, match=r"^skip_grad_norm needs a fixed world, .*, got a \w+, which .*; clip with"):
        training(skip_grad_norm=1.0, backend=ElasticThreads(Script(1, []), 0))


def test_devices_that_compile_graphs_refuse_what_they_cannot_count() -> None:
    with (
        compile_on_the_cpu(),
        pytest.raises(TypeError, match=r"needs an optimizer whose state it can select .*, but Adafactor is another"),
    ):
        training(vbs.ConstantOptimizer, inner=torch.optim.Adafactor, hyperparameters={}, **OF_ONE)


OF_ONE: dict[str, Any] = {"world": World(0, 1), "skip_grad_norm": 1.0}
