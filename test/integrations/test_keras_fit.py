"""What `fit` of a Keras model with a trace accepts and logs."""

from __future__ import annotations

import runpy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from helpers import keras_jobs as jobs
from helpers.keras_backend import keras
from helpers.keras_plain import LOSS, X, Y, dense, fit, functional, made
from helpers.pages import ROOT
from helpers.yardstick import CLASSES, ENDS, FEATURES, MICROBATCH, SAMPLES, SIZES, TRACE, UPDATES, Samples
from variable_batch_size.integrations.keras import VariableBatchCheckpoint, VariableBatchModel

# What it was without. ----------------------------------------------------------------------------------------------


def test_without_a_trace_keras_makes_an_update_of_each_microbatch() -> None:
    with jobs.float64():
        sampler = jobs.vbs.CustomSampler(SAMPLES, TRACE, 1, 0, MICROBATCH, fixed_shape=False)
        model = jobs.Classifier()
        model.compile(jobs.OPTIMIZERS["SGD"][0]())
        model.fit(DataLoader(Samples(), batch_sampler=sampler), epochs=3, verbose=0, shuffle=False)
        assert int(model.optimizer.iterations) == 93
        assert jobs.difference(model, jobs.expected("SGD")) > 1


# The model. --------------------------------------------------------------------------------------------------------


class OwnModel(keras.Model):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.last = keras.layers.Dense(CLASSES)

    def call(self, x: Any) -> Any:
        return self.last(x)


@pytest.mark.parametrize("make", [dense, functional, OwnModel])
def test_a_model_stays_what_it_is(make: Any, tmp_path: Path) -> None:
    plain = make()
    kind = type(plain)
    model = made(plain)
    assert model is plain
    assert isinstance(model, VariableBatchModel)
    assert isinstance(model, kind)
    fit(model, callbacks=[keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}.weights.h5", save_weights_only=True)])
    other = make()
    other(X[:1])
    other.load_weights(tmp_path / "1.weights.h5")
    assert np.array_equal(other.predict(X, verbose=0), model.predict(X, verbose=0))
    with keras.saving.custom_object_scope({"OwnModel": OwnModel}):
        model.save(tmp_path / "model.keras")
        loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert type(loaded) is kind
    assert np.array_equal(loaded.predict(X, verbose=0), model.predict(X, verbose=0))
    assert isinstance(model, VariableBatchModel)
    assert model.evaluate(X, Y, verbose=0) == pytest.approx(loaded.evaluate(X, Y, verbose=0))


def test_a_copy_has_no_trace() -> None:
    model = made(functional())
    assert not isinstance(keras.models.clone_model(model), VariableBatchModel)


# What is counted and logged. ---------------------------------------------------------------------------------------


def test_batches_of_keras_are_updates(capsys: pytest.CaptureFixture[str]) -> None:
    class Batches(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.batches: list[list[int]] = []
            self.sizes: list[int] = []
            self.steps: list[int] = []

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.batches.append([])
            self.steps.append(self.params["steps"])

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.batches[-1].append(batch)
            self.sizes.append(logs["batch_size"])

    model, seen = made(), Batches()
    history = model.fit(X, Y, batch_size=MICROBATCH, epochs=3, verbose=2, callbacks=[seen]).history
    assert seen.steps == [len(epoch) for epoch in seen.batches] == [11, 10, 5]
    assert seen.batches[1] == [*range(10)]
    assert sum(seen.sizes) == 3 * SAMPLES
    assert all(size == SIZES[step] for step, size in enumerate(seen.sizes) if step + 1 not in ENDS)
    assert history["samples"] == [SAMPLES, 2 * SAMPLES, 3 * SAMPLES]
    assert history["effective_learning_rate"][-1] == pytest.approx(0.01 * (seen.sizes[-1] / 16) ** 0.5)
    printed = capsys.readouterr().out
    assert [f"{number}/{number}" in printed for number in (11, 10, 5)] == [True] * 3
    assert "Epoch 3/3" in printed


@pytest.mark.parametrize("fixed_shape", [False, True])
def test_loss_and_metrics_are_those_of_the_samples(fixed_shape: bool) -> None:
    model = made(optimizer=keras.optimizers.SGD(0.0), fixed_shape=fixed_shape)
    history = fit(model, validation_data=(X, Y)).history
    assert history["loss"] == pytest.approx(history["val_loss"], rel=1e-5)
    assert history["accuracy"] == pytest.approx(history["val_accuracy"], rel=1e-5)


def test_a_tracker_with_one_value_a_row_is_a_mean_over_samples() -> None:
    class Own(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.tracker = keras.layers.Dense(CLASSES), keras.metrics.Mean(name="own")

        def call(self, x: Any) -> Any:
            return self.last(x)

        def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, training: bool = True) -> Any:
            values = keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True)  # (rows,)
            self.tracker.update_state(values)
            return keras.ops.mean(values)

    history = fit(made(Own())).history
    assert history["own"] == pytest.approx(history["loss"], rel=1e-5)


@dataclass(frozen=True)
class Recorded(Dataset[Any]):
    rows: list[int]

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        self.rows.append(index)
        return X[index], Y[index]


def test_the_order_of_samples_is_that_of_the_samplers_seed() -> None:
    def order(seed_of_keras: int, **options: Any) -> list[int]:
        keras.utils.set_random_seed(seed_of_keras)
        rows: list[int] = []
        data = DataLoader(Recorded(rows), MICROBATCH, shuffle=True)
        made(**options).fit(data, verbose=0)
        return rows

    assert order(1) == order(2) != order(1, seed=2)


def test_noise_and_norm_are_logged_where_they_are_measured() -> None:
    options = {"rule": "adascale", "ref_batchsize": 16, "optimizer_options": {"grad_norm": True}}
    model = VariableBatchModel(dense(), TRACE, **options)
    model.compile("sgd", LOSS(from_logits=True))
    history = fit(model).history
    assert history["grad_norm"][0] > 0
    assert history["noise_scale"][0] > 0


def test_callbacks_work(tmp_path: Path) -> None:
    class Worse(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            logs["val_loss"] = float(epoch)

    csv = keras.callbacks.CSVLogger(tmp_path / "log.csv")
    plateau = keras.callbacks.ReduceLROnPlateau(patience=1, factor=0.5, min_delta=0)
    stopping = keras.callbacks.EarlyStopping(patience=3, restore_best_weights=True)
    model = made(optimizer=keras.optimizers.SGD(0.1))
    history = fit(model, 9, validation_split=0.2, callbacks=[Worse(), plateau, csv, stopping])
    assert history.epoch == [0, 1, 2, 3]
    assert float(model.optimizer.learning_rate) == pytest.approx(0.1 / 8)
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 5
    assert history.history["samples"] == [162 * epoch for epoch in (1, 2, 3, 4)]


def test_a_callback_may_end_the_training_within_an_epoch() -> None:
    model = made()
    assert fit(model, 3, callbacks=[jobs.StopTrainingAfter(14)]).epoch == [0, 1]
    assert model.custom_optimizer.updates == 14
    fit(model, 3, initial_epoch=1)
    assert model.custom_optimizer.updates == UPDATES


@pytest.mark.parametrize("last", [10, 11, 12, 21])
def test_a_callback_may_end_it_after_any_update(last: int) -> None:
    model = made()
    fit(model, 3, callbacks=[jobs.StopTrainingAfter(last)])
    assert model.custom_optimizer.updates == last


def test_the_last_updates_are_saved(tmp_path: Path) -> None:
    fit(made(), 1, callbacks=[VariableBatchCheckpoint(tmp_path, every=4)])
    assert sorted(path.name[:15] for path in tmp_path.glob("update-*")) == ["update-00000008", "update-00000011"]
    again = fit(made(), 1, callbacks=[VariableBatchCheckpoint(tmp_path, every=4)])
    assert again.epoch == []


def test_metrics_of_a_resumed_epoch_must_be_the_same(tmp_path: Path) -> None:
    with pytest.raises(jobs.StopError):
        fit(made(), 2, callbacks=[VariableBatchCheckpoint(tmp_path, every=1), jobs.StopAfter(14)])
    other = made()
    other.compile("sgd", LOSS(from_logits=True), metrics=["accuracy", "sparse_top_k_categorical_accuracy"])
    with pytest.raises((RuntimeError, ValueError), match="loading state_dict for Metrics"):
        fit(other, 2, callbacks=[VariableBatchCheckpoint(tmp_path)])


def test_a_folder_of_other_data_is_told(tmp_path: Path) -> None:
    with pytest.raises(jobs.StopError):
        fit(made(), 2, callbacks=[VariableBatchCheckpoint(tmp_path), jobs.StopAfter(14)])
    again = made()
    options = {"batch_size": MICROBATCH, "verbose": 0, "callbacks": [VariableBatchCheckpoint(tmp_path)]}
    with pytest.raises((RuntimeError, ValueError), match=r"dataset_size was 203 and is 200"):
        again.fit(X[:200], Y[:200], **options)
    with pytest.raises(ValueError, match=r"must be none of .*, got \['BackupAndRestore'\]; .*VariableBatchChe"):
        fit(again, callbacks=[keras.callbacks.BackupAndRestore(tmp_path)])


STEPS = keras.optimizers.schedules.PiecewiseConstantDecay


@pytest.mark.parametrize(
    ("before", "after", "callbacks", "found"),
    [
        (0.1, 0.3, [], 0.1),
        (0.1, 0.3, [keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.3)], 0.3),
        (STEPS([9], [0.1, 0.2]), STEPS([9], [0.3, 0.4]), [], 0.4),
    ],
)
def test_which_learning_rate_a_restored_training_has(
    before: Any, after: Any, callbacks: list[Any], found: float, tmp_path: Path
) -> None:
    saves = VariableBatchCheckpoint(tmp_path, every=1)
    with pytest.raises(jobs.StopError):
        fit(made(optimizer=keras.optimizers.SGD(before)), 2, callbacks=[saves, jobs.StopAfter(14)])
    fit(model := made(optimizer=keras.optimizers.SGD(after)), 2, callbacks=[saves, *callbacks])
    assert float(model.optimizer.learning_rate) == pytest.approx(found)


def test_an_initial_epoch_is_a_number() -> None:
    model = made()
    assert fit(model, 3, initial_epoch=1).epoch == [1, 2]
    assert model.custom_optimizer.updates == ENDS[1]


def test_a_second_fit_trains_further_epochs() -> None:
    model = made()
    fit(model)
    fit(model, 2)
    assert (model.custom_optimizer.updates, model.custom_optimizer.epoch) == (UPDATES, 3)
    model.compile("sgd", LOSS(from_logits=True))
    fit(model, 3)
    assert model.custom_optimizer.updates == UPDATES


def test_the_training_ends_where_the_options_say() -> None:
    model = made(max_updates=14)
    assert fit(model, 5).epoch == [0, 1]
    assert model.custom_optimizer.updates == 14
    assert fit(model, 5).epoch == []


def test_an_interrupted_fit_can_be_called_again() -> None:
    class Broken(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            raise KeyboardInterrupt

    model = made()
    with pytest.raises(KeyboardInterrupt):
        fit(model, callbacks=[Broken()])
    fit(model, 3)
    assert model.custom_optimizer.updates == UPDATES


# Data. -------------------------------------------------------------------------------------------------------------


def test_sample_weights_are_those_of_keras() -> None:
    """The loss is the mean over samples of their weighted losses."""
    weight = np.where(Y == 0, 2.0, np.where(Y == 3, 0.5, 1.0)).astype("float32")
    keras.utils.set_random_seed(0)
    model = made(optimizer=keras.optimizers.SGD(0.0))
    loss = fit(model, sample_weight=weight).history["loss"][0]
    assert loss == pytest.approx(model.evaluate(X, Y, sample_weight=weight, verbose=0)[0], rel=1e-5)
    with pytest.raises(ValueError, match=r"must be none of .*, got \['class_weight'\]; pass sample_weight"):
        fit(model, class_weight={0: 2.0})


def test_a_loader_that_drops_the_last_batch() -> None:
    model = made()
    model.fit(DataLoader(list(zip(X, Y, strict=True)), MICROBATCH, shuffle=True, drop_last=True), verbose=0)
    assert model.custom_optimizer.samples == sum(SIZES[:10]) < SAMPLES


def test_inputs_by_name_and_several_outputs() -> None:
    a, b = keras.Input((FEATURES,), name="a"), keras.Input((FEATURES,), name="b")
    both = keras.layers.Concatenate()([a, b])
    heads = {"c": keras.layers.Dense(CLASSES, name="c")(both), "d": keras.layers.Dense(1, name="d")(both)}
    model = VariableBatchModel(keras.Model({"a": a, "b": b}, heads), TRACE, "root", 16)
    model.compile("adam", {"c": LOSS(from_logits=True), "d": "mse"}, metrics={"c": ["accuracy"]})
    history = model.fit({"a": X, "b": X}, {"c": Y, "d": X[:, 0]}, batch_size=MICROBATCH, verbose=0).history
    assert {"loss", "c_loss", "d_loss", "c_accuracy"} <= history.keys()
    assert history["loss"][0] == pytest.approx(history["c_loss"][0] + history["d_loss"][0], rel=1e-5)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stateful_loader_of_datasets(workers: int) -> None:
    datasets = pytest.importorskip("datasets")
    from torchdata.stateful_dataloader import StatefulDataLoader

    table = datasets.Dataset.from_dict({"x": X.tolist(), "y": Y.tolist()}).with_format("torch")

    def pairs(rows: Any) -> Any:
        return torch.stack([row["x"] for row in rows]), torch.stack([row["y"] for row in rows])

    model = made()
    model.fit(StatefulDataLoader(table, MICROBATCH, collate_fn=pairs, num_workers=workers), epochs=3, verbose=0)
    assert model.custom_optimizer.updates == UPDATES


# Precision, compilation. -------------------------------------------------------------------------------------------


def test_bfloat16_layers() -> None:
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        model = made(dense(keras.layers.BatchNormalization(), keras.layers.Dropout(0.2)), "adamw")
        fit(model, 3)
    finally:
        keras.mixed_precision.set_global_policy("float32")
    assert model.custom_optimizer.updates == UPDATES
    assert model.trainable_variables[0].dtype == "float32"


def test_the_best_checkpoint_is_one_of_keras(tmp_path: Path) -> None:
    class Values(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            logs["val_loss"] = [1.0, 0.5, np.nan][epoch]

    saves = keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}.weights.h5", "val_loss", 0, True, True)
    fit(made(), 3, callbacks=[Values(), saves])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.weights.h5", "2.weights.h5"]


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "trainers" / "keras_digits.py"), run_name="__main__")
    assert "updates" in capsys.readouterr().out
