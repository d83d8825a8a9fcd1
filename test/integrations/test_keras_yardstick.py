"""Keras with a trace against one whole batch an update by hand, in float64, in one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import keras_jobs as jobs
from helpers.keras_backend import keras
from helpers.yardstick import ENDS, EPOCHS, MAX_GRAD_NORM, REF, SAMPLES, SIZES, STOPS, UPDATES, by_hand, network
from helpers.yardstick import weights as flat
from variable_batch_size.integrations.keras import VariableBatchCheckpoint

CYCLE = {"on_end": "cycle"}


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jobs.float64():
        yield


@pytest.mark.parametrize("name", jobs.OPTIMIZERS)
@pytest.mark.parametrize("rule", ["root", "adascale"])
@pytest.mark.parametrize("loader", [False, True])
def test_it_makes_the_updates_of_whole_batches(name: str, rule: str, loader: bool) -> None:
    model = jobs.variable(jobs.OPTIMIZERS[name][0](), rule=rule, optimizer_options={"max_grad_norm": MAX_GRAD_NORM})
    jobs.fit(model, loader=loader)
    want = jobs.expected(name, rule=rule, max_grad_norm=MAX_GRAD_NORM)
    assert model.custom_optimizer.updates == int(model.optimizer.iterations) == UPDATES
    assert jobs.difference(model, want) < 1e-12


def test_the_optimizers_of_keras_compute_what_the_page_says() -> None:
    for name, (make, twin_of) in jobs.OPTIMIZERS.items():
        model, twin = jobs.variable(make()), network()
        jobs.fit(model)
        by_hand(twin, twin_of(twin.parameters()))
        assert jobs.difference(model, flat(twin)) < (1e-12 if name == "SGD" else 1e-5)


def test_keras_clips_the_gradient_of_a_whole_update() -> None:
    model, twin = jobs.variable(keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=MAX_GRAD_NORM)), network()
    jobs.fit(model)
    by_hand(twin, jobs.SGDTwin(twin.parameters(), 0.1, global_clipnorm=MAX_GRAD_NORM))
    assert jobs.difference(model, flat(twin)) < 1e-7  # Keras' norm is in float32
    by_hand(other := network(), jobs.SGDTwin(other.parameters(), 0.1))
    assert jobs.difference(model, flat(other)) > 1e-2


def test_schedules_of_keras_count_updates() -> None:
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, decay_steps=1, decay_rate=0.9)
    optimizer = keras.optimizers.SGD(schedule, momentum=0.9)
    model, twin = jobs.variable(optimizer), network()
    jobs.fit(model)
    inner = jobs.SGDTwin(twin.parameters(), 0.1)
    by_hand(twin, inner, scheduler=torch.optim.lr_scheduler.ExponentialLR(inner, 0.9))
    assert jobs.difference(model, flat(twin)) < 1e-7  # Keras computes the schedule in float32
    assert float(optimizer.learning_rate) == pytest.approx(0.1 * 0.9**UPDATES)
    assert optimizer.get_config()["learning_rate"]["class_name"] == "ExponentialDecay"


def test_the_rate_of_a_callback_and_of_a_function_is_scaled() -> None:
    rates = [0.1 * 0.5**epoch for epoch in range(EPOCHS)]
    scheduled = jobs.variable(keras.optimizers.SGD(0.1, momentum=0.9))
    history = jobs.fit(scheduled, callbacks=[keras.callbacks.LearningRateScheduler(lambda epoch, _: rates[epoch])])
    assert float(scheduled.optimizer.learning_rate) == rates[-1]
    twin = network()
    inner = jobs.SGDTwin(twin.parameters(), 0.1)
    by_hand(twin, inner, scheduler=torch.optim.lr_scheduler.MultiStepLR(inner, ENDS[:2], 0.5))
    assert jobs.difference(scheduled, flat(twin)) < 1e-12
    last = [SAMPLES - sum(SIZES[begin : end - 1]) for begin, end in zip((0, *ENDS), ENDS, strict=False)]
    effective = [rate * (size / REF) ** 0.5 for rate, size in zip(rates, last, strict=True)]
    assert history.history["effective_learning_rate"] == pytest.approx(effective)


@pytest.mark.parametrize("stop", STOPS)
def test_a_resume_after_any_update_changes_nothing(stop: int, tmp_path: Path) -> None:
    def saved() -> Any:
        return VariableBatchCheckpoint(tmp_path, every=1)

    make = jobs.OPTIMIZERS["SGD"][0]
    whole = jobs.variable(make(), rule="adascale", dropout=0.3)
    history = jobs.fit(whole).history
    first = jobs.variable(make(), rule="adascale", dropout=0.3)
    with pytest.raises(jobs.StopError):
        jobs.fit(first, callbacks=[saved(), jobs.StopAfter(stop)])
    second = jobs.variable(make(), rule="adascale", dropout=0.3)
    resumed = jobs.fit(second, callbacks=[saved()])
    assert second.custom_optimizer.updates == int(second.optimizer.iterations) == UPDATES
    assert jobs.difference(second, jobs.weights(whole)) == 0.0
    assert resumed.epoch[-1] == EPOCHS - 1
    assert resumed.history["loss"] == history["loss"][resumed.epoch[0] :]
    assert resumed.history["accuracy"] == history["accuracy"][resumed.epoch[0] :]


def test_an_adaptive_trace_is_trained_to_the_end_of_each_epoch() -> None:
    model = jobs.variable(jobs.OPTIMIZERS["SGD"][0](), trace=jobs.adaptive_trace(), dropout=0.0)
    history = jobs.fit(model).history
    updates = model.custom_optimizer.updates
    sizes = [model.sampler.trace.batch_size(step) for step in range(updates)]
    assert len({*sizes}) > 3
    assert history["samples"] == [203, 406, 609]
    twin = jobs.Classifier()
    by_hand(twin, jobs.Plain(twin, jobs.OPTIMIZERS["SGD"][0]()), updates=updates, sizes=sizes)
    assert jobs.difference(model, jobs.weights(twin)) < 1e-12


def test_an_adaptive_trace_resumes(tmp_path: Path) -> None:
    def made() -> Any:
        return jobs.variable(jobs.OPTIMIZERS["SGD"][0](), trace=jobs.adaptive_trace(), rule="adascale", dropout=0.2)

    jobs.fit(whole := made())
    with pytest.raises(jobs.StopError):
        jobs.fit(made(), callbacks=[VariableBatchCheckpoint(tmp_path, every=1), jobs.StopAfter(14)])
    jobs.fit(second := made(), callbacks=[VariableBatchCheckpoint(tmp_path)])
    assert jobs.difference(second, jobs.weights(whole)) == 0.0
    assert second.custom_optimizer.updates == whole.custom_optimizer.updates
