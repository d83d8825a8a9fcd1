"""`fit` of Keras against that of a `VariableBatchModel`, in many settings: see differential_common.

    PYTHONPATH=test python benchmarks/differential_keras.py

Keras computes in float32, on the torch backend also where a model is in float64: the settings in float64 have layers
and a loss of their own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import differential_keras_models as jobs
from differential_common import BATCH, Outcome, Setting, compare, files
from helpers.keras_backend import keras
from helpers.keras_jobs import Classifier
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
    dtype: str = "float32", before: Any = int, after: Any = lambda *_: None, **options: Any,
) -> Callable[[bool, Path], Outcome]:  # fmt: skip
    """Return a function that trains a model in a setting; further options are those of `fit`, `fits` those of each."""

    def train(plain: bool, folder: Path) -> Outcome:
        folder.mkdir()
        keras.utils.set_random_seed(1)
        torch.set_num_threads(1)
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
            logs.append([jobs.without(history.history), history.epoch, history.params])
        found = after(model, folder)
        config.set_max_epochs(None)
        return Outcome(
            jobs.tensors(model.variables), [logs, found], recorder.events, files(folder, jobs.OWN, jobs.read)
        )

    return train


def setting(
    reason: str = "", *, differs: str = "", refused: bool = False, tolerance: float = SINGLE, **options: Any
) -> Setting:
    """Return a setting, whose parts named by `differs` differ for a reason."""
    return Setting(fit(**options), dict.fromkeys(differs.split(), reason), refused, tolerance)


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
    "SGD with momentum": setting(),
    "Nesterov": setting(optimizer=partial(opt.SGD, 0.1, 0.9, nesterov=True)),
    "mean reduction": setting(compiled={"loss": losses.SparseCategoricalCrossentropy(True, reduction="mean")}),
    "Adam and metrics": setting(
        optimizer=partial(opt.Adam, 0.01),
        compiled={"metrics": ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2)]},
    ),
    "AdamW with weight_decay": setting(optimizer=partial(opt.AdamW, 0.01, weight_decay=0.1)),
    "RMSprop": setting(optimizer=partial(opt.RMSprop, 0.01, momentum=0.5, centered=True)),
    **{
        name: setting(optimizer=partial(getattr(opt, name), 0.01))
        for name in ("Nadam", "Lion", "Adafactor", "Lamb", "Adagrad", "Ftrl")
    },
    "clipnorm": setting(optimizer=partial(opt.SGD, 0.1, 0.9, clipnorm=0.1)),
    "clipvalue": setting(optimizer=partial(opt.SGD, 0.1, 0.9, clipvalue=0.01)),
    "global_clipnorm": setting(optimizer=partial(opt.Adam, 0.01, global_clipnorm=0.1)),
    "use_ema": setting(optimizer=partial(opt.SGD, 0.1, 0.9, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=7)),
    "SwapEMAWeights": setting(
        optimizer=partial(opt.SGD, 0.1, use_ema=True), callbacks=jobs.one(cb.SwapEMAWeights, True), **valid
    ),
    "CosineDecay": setting(
        optimizer=lambda: opt.SGD(opt.schedules.CosineDecay(0.0, 39, warmup_target=0.2, warmup_steps=5))
    ),
    "ExponentialDecay": setting(optimizer=lambda: opt.Adam(opt.schedules.ExponentialDecay(0.05, 5, 0.8, True))),
    "float64": setting(**double),
    "float64, AdamW": setting(**double, optimizer=partial(opt.AdamW, 0.01)),
    "sample_weight and weighted_metrics": setting(sample_weight=W, compiled={"weighted_metrics": ["accuracy"]}),
    "two inputs, outputs and losses": setting(
        **heads,
        compiled={"loss": two, "loss_weights": {"a": 1.0, "b": 0.3}, "metrics": {"a": ["accuracy"], "b": ["mae"]}},
    ),
    "weights of two outputs": setting(**heads, sample_weight={"a": W, "b": W}, compiled={"loss": two, "metrics": None}),
    "mse": setting(**hot, compiled={"loss": "mse", "metrics": ["mae", keras.metrics.RootMeanSquaredError()]}),
    "label smoothing and AUC": setting(
        **hot, compiled={"loss": losses.BinaryCrossentropy(True, 0.1), "metrics": [keras.metrics.AUC(from_logits=True)]}
    ),
    "validation_data": setting(**valid),
    "validation_data without a batch size": setting(SIZES, differs="events", validation_data=(X[:50], Y[:50])),
    "validation_split": setting(validation_split=0.2, validation_batch_size=9, sample_weight=W),
    "validation_steps": setting(validation_steps=1, **valid),
    "validation_freq": setting(validation_freq=[1, 3], **valid),
    "validation of a DataLoader": setting(validation_data=jobs.loader(True)["x"], data=jobs.loader),
    "validation of a generator": setting(ANEW, differs="logs events", validation_data=jobs.stream, validation_steps=2),
    "initial_epoch": setting(initial_epoch=1, epochs=4),
    "fit twice": setting(fits=({}, {"initial_epoch": 3, "epochs": 5})),
    "fit twice from epoch 0": setting(fits=({"epochs": 2}, {"epochs": 2})),
    "set_max_epochs": setting(LIMIT, differs="weights logs events", before=partial(config.set_max_epochs, 2)),
    "EarlyStopping": setting(
        callbacks=jobs.one(cb.EarlyStopping, "val_loss", 9.0, 1, restore_best_weights=True), **valid
    ),
    "ReduceLROnPlateau": setting(callbacks=jobs.one(cb.ReduceLROnPlateau, "loss", 0.5, 1, min_delta=9.0), epochs=5),
    "LearningRateScheduler": setting(callbacks=jobs.one(cb.LearningRateScheduler, lambda epoch, rate: rate * 0.5)),
    "rates by the batch": setting(callbacks=jobs.one(jobs.Rates)),
    "evaluations in an epoch": setting(callbacks=jobs.one(jobs.Evaluating)),
    "CSVLogger": setting(callbacks=lambda folder: [cb.CSVLogger(folder / "log.csv")], **valid),
    "ModelCheckpoint by epochs": setting(callbacks=jobs.saver("{epoch}-{loss:.2f}.keras")),
    "ModelCheckpoint by batches": setting(callbacks=jobs.saver("{epoch}-{batch}.keras", save_freq=5)),
    "ModelCheckpoint of the best": setting(
        callbacks=jobs.saver("{epoch}.weights.h5", monitor="accuracy", save_best_only=True, save_weights_only=True)
    ),
    "TerminateOnNaN": setting(
        x=np.where(np.arange(len(X))[:, None] == 40, np.nan, X), callbacks=jobs.one(cb.TerminateOnNaN)
    ),
    "run_eagerly": setting(compiled={"run_eagerly": True}),
    "a DataLoader": setting(data=jobs.loader),
    "a DataLoader with weights": setting(data=lambda plain: jobs.loader(plain, X, Y, W)),
    "a DataLoader with drop_last, workers": setting(data=partial(jobs.loader, drop_last=True, num_workers=1)),
    "torch tensors": setting(data=lambda plain: jobs.arrays(plain, torch.as_tensor(X), torch.as_tensor(Y))),
    "losses and metrics of the model": setting(make=jobs.Own),
    "no targets": setting(make=jobs.Own, y=None, compiled={"loss": None, "metrics": None}),
    "regularizers": setting(make=partial(jobs.dense, kernel_regularizer="l2", bias_regularizer="l1")),
    "a frozen layer": setting(make=partial(jobs.dense, trainable=False)),
    "a layer of torch": setting(make=lambda: jobs.dense(layers.TorchModuleWrapper(torch.nn.Linear(16, 7)))),
    "LayerNormalization, no metrics": setting(
        make=lambda: jobs.dense(layers.LayerNormalization()), compiled={"metrics": None}
    ),
    "BatchNormalization": setting(
        NORMALIZES, differs="weights logs events", make=lambda: jobs.dense(layers.BatchNormalization())
    ),
    "Dropout": setting(DRAWS, differs="weights logs events", make=lambda: jobs.dense(layers.Dropout(0.5, seed=1))),
    "masked LSTM": setting(make=lambda: jobs.tokens(layers.LSTM(5), layers.Dense(CLASSES), mask_zero=True), x=TOKENS),
    "sequences": setting(
        make=lambda: jobs.tokens(
            layers.Conv1D(6, 3, padding="same"), layers.GRU(5, return_sequences=True), layers.Dense(7)
        ),
        x=TOKENS,
        y=TOKENS,
        sample_weight=(TOKENS > 2).astype("float32"),
    ),
    "uint8": setting(make=jobs.images, x=TOKENS.astype("uint8")),
    "mixed_bfloat16": setting(dtype="mixed_bfloat16", tolerance=3e-2),
    "evaluate, predict, save": setting(after=jobs.evaluate),
    "class_weight": setting(class_weight=dict.fromkeys(range(CLASSES), 2.0), refused=True),
    "steps_per_epoch": setting(steps_per_epoch=5, refused=True),
    "BackupAndRestore": setting(callbacks=lambda folder: [cb.BackupAndRestore(folder / "backup")], refused=True),
    "a sum of losses": setting(
        compiled={"loss": losses.SparseCategoricalCrossentropy(True, reduction="sum")}, refused=True
    ),
    "accumulation": setting(optimizer=partial(opt.SGD, 0.1, gradient_accumulation_steps=2), refused=True),
    "mixed_float16": setting(dtype="mixed_float16", refused=True),
    "a generator": setting(data=lambda plain: {"x": (jobs.Rows()[index] for index in range(3))}, refused=True),
    "a PyDataset": setting(data=lambda plain: {"x": jobs.Rows()}, refused=True),
    "train_step": setting(make=lambda: jobs.Trained([*jobs.dense().layers]), refused=True),
    "fewer samples than a batch": setting(x=X[:10], y=Y[:10], refused=True),
}

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    compare("Keras", SETTINGS)
