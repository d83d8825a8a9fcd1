"""Does `fit` of Keras come out the same with a `VariableBatchModel`, setting by setting?

Keras computes in float32, on the torch backend also where a model is in float64: the settings in float64 have layers
and a loss of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import settings_keras as jobs
from differential import TRAINED, Reader, Setting, compare
from helpers.keras_backend import keras
from helpers.keras_jobs import Classifier
from helpers.our_order import BATCH
from helpers.yardstick import CLASSES, samples
from variable_batch_size.integrations.keras import VariableBatchModel

NORMALIZES = "batch normalization takes the statistics of a microbatch"
DRAWS = "dropout draws numbers for each microbatch"
SIZES = "without validation_batch_size, a batch of the validation has as many rows as a microbatch"
ANEW = "each validation reads on in a generator, of which Keras repeats the batches that it has read ahead"
LIMIT = "keras.config.set_max_epochs has no effect"
SINGLE = 3e-5  # the tolerance in float32
layers, cb, opt, losses, config = keras.layers, keras.callbacks, keras.optimizers, keras.losses, keras.config
X, Y, W, TOKENS = jobs.X, jobs.Y, jobs.W, jobs.TOKENS
LOSS = losses.SparseCategoricalCrossentropy(from_logits=True)


def fit(
    make: Callable[[], Any] = jobs.dense, optimizer: Callable[[], Any] = lambda: opt.SGD(0.1, momentum=0.9),
    compiled: Mapping[str, Any] | None = None, data: Callable[[bool], dict[str, Any]] = jobs.arrays,
    callbacks: Callable[[Path], list[Any]] = lambda _: [], fits: Sequence[dict[str, Any]] = ({},),
    dtype: str = "float32", before: Any = int, after: Any = lambda *_: None, tolerance: float = SINGLE, **options: Any,
) -> Setting:  # fmt: skip
    """Return a setting of a model; further options are those of `fit`, and `fits` those of each call."""

    def train(plain: bool, folder: Path) -> tuple[Any, Any, Any]:
        keras.utils.set_random_seed(1)
        config.set_floatx("float64" if dtype == "float64" else "float32")
        config.set_dtype_policy(dtype)
        before()
        model, recorder, own = make(), jobs.Recorder(), callbacks(folder)
        for number, variable in enumerate(model.trainable_variables):
            variable.assign(np.random.default_rng(number).normal(size=variable.shape) / 2)
        if not plain:
            model = VariableBatchModel(model, BATCH)
        model.compile(optimizer(), **{"loss": LOSS, "metrics": ["accuracy"], **(compiled or {})})
        logs = []
        for each in fits:
            given = {"epochs": 3, "verbose": 0, "shuffle": False, "callbacks": [*own, recorder], **data(plain)}
            given |= {name: value() if callable(value) else value for name, value in {**options, **each}.items()}
            history = model.fit(**given)
            logs.append([history.history, history.epoch, history.params])
        found = after(model, folder)
        config.set_max_epochs(None)
        return jobs.tensors(model.variables), [logs, found], recorder.events

    return Setting(train, tolerance=tolerance)


double: dict[str, Any] = {
    "make": Classifier,
    "dtype": "float64",
    "tolerance": 1e-12,
    "data": lambda plain: jobs.arrays(plain, *samples()),
    "compiled": {"loss": None},
}
heads: dict[str, Any] = {
    "make": jobs.outputs,
    "x": {"x": X, "w": W[:, None]},
    "y": {"a": Y, "b": W},
    "optimizer": partial(opt.Adam, 0.01),
}
two = {"a": LOSS, "b": "mse"}
hot: dict[str, Any] = {"y": np.eye(CLASSES)[Y]}
valid: dict[str, Any] = {"validation_data": (X[:50], Y[:50]), "validation_batch_size": 32}
SETTINGS = {
    "SGD with momentum": fit(),
    "Nesterov": fit(optimizer=partial(opt.SGD, 0.1, 0.9, nesterov=True)),
    "mean reduction": fit(compiled={"loss": losses.SparseCategoricalCrossentropy(True, reduction="mean")}),
    "Adam and metrics": fit(
        optimizer=partial(opt.Adam, 0.01),
        compiled={"metrics": ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2)]},
    ),
    "AdamW with weight_decay": fit(optimizer=partial(opt.AdamW, 0.01, weight_decay=0.1)),
    "RMSprop": fit(optimizer=partial(opt.RMSprop, 0.01, momentum=0.5, centered=True)),
    **{
        name: fit(optimizer=partial(getattr(opt, name), 0.01))
        for name in ("Nadam", "Lion", "Adafactor", "Lamb", "Adagrad", "Ftrl")
    },
    "clipnorm": fit(optimizer=partial(opt.SGD, 0.1, 0.9, clipnorm=0.1)),
    "clipvalue": fit(optimizer=partial(opt.SGD, 0.1, 0.9, clipvalue=0.01)),
    "global_clipnorm": fit(optimizer=partial(opt.Adam, 0.01, global_clipnorm=0.1)),
    "use_ema": fit(optimizer=partial(opt.SGD, 0.1, 0.9, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=7)),
    "SwapEMAWeights": fit(
        optimizer=partial(opt.SGD, 0.1, use_ema=True), callbacks=jobs.one(cb.SwapEMAWeights, True), **valid
    ),
    "CosineDecay": fit(
        optimizer=lambda: opt.SGD(opt.schedules.CosineDecay(0.0, 39, warmup_target=0.2, warmup_steps=5))
    ),
    "ExponentialDecay": fit(optimizer=lambda: opt.Adam(opt.schedules.ExponentialDecay(0.05, 5, 0.8, True))),
    "float64": fit(**double),
    "float64, AdamW": fit(**double, optimizer=partial(opt.AdamW, 0.01)),
    "sample_weight and weighted_metrics": fit(sample_weight=W, compiled={"weighted_metrics": ["accuracy"]}),
    "two inputs, outputs and losses": fit(
        **heads,
        compiled={"loss": two, "loss_weights": {"a": 1.0, "b": 0.3}, "metrics": {"a": ["accuracy"], "b": ["mae"]}},
    ),
    "weights of two outputs": fit(**heads, sample_weight={"a": W, "b": W}, compiled={"loss": two, "metrics": None}),
    "mse": fit(**hot, compiled={"loss": "mse", "metrics": ["mae", keras.metrics.RootMeanSquaredError()]}),
    "label smoothing and AUC": fit(
        **hot, compiled={"loss": losses.BinaryCrossentropy(True, 0.1), "metrics": [keras.metrics.AUC(from_logits=True)]}
    ),
    "validation_data": fit(**valid),
    "validation_data without a batch size": fit(validation_data=(X[:50], Y[:50])).because(SIZES, "events"),
    "validation_split": fit(validation_split=0.2, validation_batch_size=9, sample_weight=W),
    "validation_steps": fit(validation_steps=1, **valid),
    "validation_freq": fit(validation_freq=[1, 3], **valid),
    "validation of a DataLoader": fit(validation_data=jobs.loader(True)["x"], data=jobs.loader),
    "validation of a generator": fit(validation_data=jobs.stream, validation_steps=2).because(ANEW, "logs", "events"),
    "initial_epoch": fit(initial_epoch=1, epochs=4),
    "fit twice": fit(fits=({}, {"initial_epoch": 3, "epochs": 5})),
    "fit twice from epoch 0": fit(fits=({"epochs": 2}, {"epochs": 2})),
    "set_max_epochs": fit(before=partial(config.set_max_epochs, 2)).because(LIMIT, *TRAINED, "warnings"),
    "EarlyStopping": fit(callbacks=jobs.one(cb.EarlyStopping, "val_loss", 9.0, 1, restore_best_weights=True), **valid),
    "ReduceLROnPlateau": fit(callbacks=jobs.one(cb.ReduceLROnPlateau, "loss", 0.5, 1, min_delta=9.0), epochs=5),
    "LearningRateScheduler": fit(callbacks=jobs.one(cb.LearningRateScheduler, lambda epoch, rate: rate * 0.5)),
    "rates by the batch": fit(callbacks=jobs.one(jobs.Rates)),
    "evaluations in an epoch": fit(callbacks=jobs.one(jobs.Evaluating)),
    "CSVLogger": fit(callbacks=lambda folder: [cb.CSVLogger(folder / "log.csv")], **valid),
    "ModelCheckpoint by epochs": fit(callbacks=jobs.saver("{epoch}-{loss:.2f}.keras")),
    "ModelCheckpoint by batches": fit(callbacks=jobs.saver("{epoch}-{batch}.keras", save_freq=5)),
    "ModelCheckpoint of the best": fit(
        callbacks=jobs.saver("{epoch}.weights.h5", monitor="accuracy", save_best_only=True, save_weights_only=True)
    ),
    "TerminateOnNaN": fit(
        x=np.where(np.arange(len(X))[:, None] == 40, np.nan, X), callbacks=jobs.one(cb.TerminateOnNaN)
    ),
    "run_eagerly": fit(compiled={"run_eagerly": True}),
    "a DataLoader": fit(data=jobs.loader),
    "a DataLoader with weights": fit(data=lambda plain: jobs.loader(plain, X, Y, W)),
    "a DataLoader with drop_last, workers": fit(data=partial(jobs.loader, drop_last=True, num_workers=1)),
    "torch tensors": fit(data=lambda plain: jobs.arrays(plain, torch.as_tensor(X), torch.as_tensor(Y))),
    "losses and metrics of the model": fit(make=jobs.Own),
    "no targets": fit(make=jobs.Own, y=None, compiled={"loss": None, "metrics": None}),
    "regularizers": fit(make=partial(jobs.dense, kernel_regularizer="l2", bias_regularizer="l1")),
    "a frozen layer": fit(make=partial(jobs.dense, trainable=False)),
    "a layer of torch": fit(make=lambda: jobs.dense(layers.TorchModuleWrapper(torch.nn.Linear(16, 7)))),
    "LayerNormalization, no metrics": fit(
        make=lambda: jobs.dense(layers.LayerNormalization()), compiled={"metrics": None}
    ),
    "BatchNormalization": fit(make=lambda: jobs.dense(layers.BatchNormalization())).because(NORMALIZES, *TRAINED),
    "Dropout": fit(make=lambda: jobs.dense(layers.Dropout(0.5, seed=1))).because(DRAWS, *TRAINED),
    "masked LSTM": fit(make=lambda: jobs.tokens(layers.LSTM(5), layers.Dense(CLASSES), mask_zero=True), x=TOKENS),
    "sequences": fit(
        make=lambda: jobs.tokens(
            layers.Conv1D(6, 3, padding="same"), layers.GRU(5, return_sequences=True), layers.Dense(7)
        ),
        x=TOKENS,
        y=TOKENS,
        sample_weight=(TOKENS > 2).astype("float32"),
    ),
    "uint8": fit(make=jobs.images, x=TOKENS.astype("uint8")),
    "mixed_bfloat16": fit(dtype="mixed_bfloat16", tolerance=3e-2),
    "evaluate, predict, save": fit(after=jobs.evaluate),
    "class_weight": fit(class_weight=dict.fromkeys(range(CLASSES), 2.0)).refuses("['class_weight']"),
    "steps_per_epoch": fit(steps_per_epoch=5).refuses("['steps_per_epoch']"),
    "BackupAndRestore": fit(callbacks=lambda folder: [cb.BackupAndRestore(folder / "backup")]).refuses(
        "['BackupAndRestore']"
    ),
    "a sum of losses": fit(compiled={"loss": losses.SparseCategoricalCrossentropy(True, reduction="sum")}).refuses(
        "the reduction of a loss must be a mean"
    ),
    "accumulation": fit(optimizer=partial(opt.SGD, 0.1, gradient_accumulation_steps=2)).refuses(
        "gradient_accumulation_steps"
    ),
    "mixed_float16": fit(dtype="mixed_float16").refuses("['LossScaleOptimizer']"),
    "a generator": fit(data=lambda plain: {"x": (jobs.Rows()[index] for index in range(3))}).refuses(
        "the data must have an index"
    ),
    "a PyDataset": fit(data=lambda plain: {"x": jobs.Rows()}).refuses("the data must have an index"),
    "train_step": fit(make=lambda: jobs.Trained([*jobs.dense().layers])).refuses(
        "the model must have the train_step of Keras"
    ),
    "fewer samples than a batch": fit(x=X[:10], y=Y[:10]).refuses("at most the dataset's size of 10 samples"),
}

if __name__ == "__main__":
    compare("Keras", SETTINGS, Reader(("batch_size", "effective_learning_rate", "samples"), jobs.read))
