"""Keras with a trace: the laws of all trainers, and what is Keras' own."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from contextlib import nullcontext

import numpy as np
import pytest
from conformance import Conformance
from torch.utils.data import DataLoader, WeightedRandomSampler

from helpers.keras_adapter import ByHand, CaseModel, Keras
from helpers.keras_backend import keras
from helpers.pages import ROOT
from helpers.trainings import TrainerCase
from helpers.yardstick import CLASSES, ENDS, FEATURES, MICROBATCH, SAMPLES, SIZES, TRACE, UPDATES, Samples, samples
from variable_batch_size.integrations.keras import VariableBatchCheckpoint, VariableBatchModel, VariableBatchModelMixin

X, Y = (part.numpy().astype(kind) for part, kind in zip(samples(), ("float32", "int64"), strict=True))
W = np.random.default_rng(0).uniform(0.5, 2.0, SAMPLES).astype("float32")
TEXTS = np.where(
    np.arange(8) < np.where(Y < 3, 2, 8)[:, None], 1 + Y[:, None] + np.arange(8) % 2, 0
)  # of 2 and 8 tokens
layers, callbacks, opt, ce = keras.layers, keras.callbacks, keras.optimizers, keras.losses.SparseCategoricalCrossentropy
schedules = opt.schedules


class TestKeras(Conformance):
    adapter = Keras()
    features = frozenset({"to the last bit", "controller", "tokens", "looks at losses", "evaluation", "processes"})

    def expected(self, case, **options):
        return super().expected(case, inner_of=ByHand, **options)


def dense(*middle, **how):
    first = layers.Dense(16, activation="tanh", **how)
    return keras.Sequential([keras.Input((FEATURES,)), first, *middle, layers.Dense(CLASSES)])


def made(model=None, optimizer="sgd", trace=TRACE, loss=None, **options):
    wrapped = VariableBatchModel(model or dense(), trace=trace, rule="root", ref_batchsize=16, **options)
    wrapped.compile(optimizer, loss or ce(from_logits=True), metrics=["accuracy"])
    return wrapped


def fit(model, epochs=1, **options):
    return model.fit(X, Y, batch_size=MICROBATCH, epochs=epochs, verbose=0, **options)


# A constant trace against Keras itself. --------------------------------------------------------------------------


def two_heads():
    inputs = {"x": keras.Input((FEATURES,), name="x"), "w": keras.Input((1,), name="w")}
    both = layers.Concatenate()([inputs["x"], layers.Dense(3)(inputs["w"])])
    return keras.Model(inputs, {"a": layers.Dense(CLASSES)(both), "b": layers.Dense(1)(both)})


def tagger():
    return keras.Sequential(
        [keras.Input((8,), dtype="int32"), layers.Embedding(7, 4), layers.GRU(7, return_sequences=True)]
    )


def one(kind, *args, **options):
    return {"callbacks": lambda: [kind(*args, **options)]}


sgd, both = opt.SGD, {"a": ce(from_logits=True), "b": "mse"}
valid = {"validation_data": (X[:50], Y[:50]), "validation_batch_size": 25}
HELD = {
    "clipnorm": (dense, lambda: sgd(0.1, 0.9, clipnorm=0.1), {}),
    "global_clipnorm": (dense, lambda: opt.Adam(0.01, global_clipnorm=0.1), {}),
    "clipvalue": (dense, lambda: sgd(0.1, clipvalue=0.01), {}),
    "use_ema": (dense, lambda: sgd(0.1, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=7), {}),
    "SwapEMAWeights": (dense, lambda: sgd(0.1, use_ema=True), {**one(callbacks.SwapEMAWeights, True), **valid}),
    "AdamW": (dense, lambda: opt.AdamW(0.01, weight_decay=0.1), {}),
    "regularizers": (lambda: dense(kernel_regularizer="l2", bias_regularizer="l1"), lambda: sgd(0.1), {}),
    "constraints": (lambda: dense(kernel_constraint="max_norm"), lambda: sgd(0.5), {}),
    "sample_weight": (dense, lambda: sgd(0.1), {"sample_weight": W}),
    "validation_split": (dense, lambda: sgd(0.1), {"validation_split": 0.2, "validation_batch_size": 9}),
    "frozen": (lambda: dense(trainable=False), lambda: sgd(0.1), {}),
    "CosineDecay": (dense, lambda: sgd(schedules.CosineDecay(0.0, 39, warmup_target=0.2, warmup_steps=5)), {}),
    "ReduceLROnPlateau": (dense, lambda: sgd(0.1), one(callbacks.ReduceLROnPlateau, "loss", 0.5, 1, min_delta=9.0)),
    "LearningRateScheduler": (dense, lambda: sgd(0.1), one(callbacks.LearningRateScheduler, lambda _, rate: rate / 2)),
    "EarlyStopping": (
        dense, lambda: sgd(0.1),
        {**one(callbacks.EarlyStopping, "val_loss", 9.0, 1, restore_best_weights=True), **valid},
    ),
    "two heads": (two_heads, opt.Adam, {"x": {"x": X, "w": W[:, None]}, "y": {"a": Y, "b": W}, "loss": both}),
    "sequences": (tagger, lambda: opt.Adam(0.01), {"x": TEXTS, "y": TEXTS, "sample_weight": (TEXTS > 0) * 1.0}),
}  # fmt: skip


@pytest.mark.parametrize("name", HELD)
def test_a_constant_trace_is_keras_with_that_batch_size(name):
    make, optimizer, options = HELD[name]
    weights, logs = [], []
    for plain in True, False:
        keras.utils.set_random_seed(1)
        own = {"x": X, "y": Y, "loss": ce(from_logits=True), "callbacks": list, **options}
        model = make() if plain else VariableBatchModel(make(), trace=16)
        model.compile(optimizer(), own.pop("loss"), metrics=None if make is two_heads else ["accuracy"])
        own["callbacks"] = own["callbacks"]()
        history = model.fit(epochs=3, batch_size=16 if plain else 5, shuffle=False, verbose=0, **own).history
        weights.append(model.get_weights())
        logs.append({key: history[key] for key in history if plain or key in logs[0]})
    for found, wanted in zip(*weights, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=3e-6)
    assert logs[0].keys() == logs[1].keys()
    for key in logs[0]:
        np.testing.assert_allclose(logs[1][key], logs[0][key], rtol=1e-4, err_msg=key)


# Counting, epochs, files. ----------------------------------------------------------------------------------------


class Seen(callbacks.Callback):
    """Notes batches and rates, and ends the training after an update or raises in it."""

    def __init__(self, stop=-1, error=-1):
        super().__init__()
        self.stop, self.error, self.rates = stop, error, list[float]()
        self.steps, self.sizes = list[tuple[int, int]](), list[int]()

    def on_train_batch_begin(self, batch, logs=None):
        if self.model.custom_optimizer.updates == self.error:
            raise KeyboardInterrupt

    def on_train_batch_end(self, batch, logs=None):
        self.steps.append((batch, self.params["steps"]))
        self.sizes.append(logs["batch_size"])
        self.rates.append(logs["effective_learning_rate"])
        self.model.stop_training |= self.model.custom_optimizer.updates == self.stop


def test_batches_of_keras_are_updates(capsys):
    model, seen, rate = made(), Seen(), 0.01
    history = model.fit(X, Y, batch_size=MICROBATCH, epochs=3, verbose=2, callbacks=[seen]).history
    assert seen.steps == [
        (batch, end - begin) for begin, end in zip((0, *ENDS), ENDS, strict=False) for batch in range(end - begin)
    ]
    assert [seen.sizes[i] for i in range(UPDATES) if i + 1 not in ENDS] == [
        SIZES[i] for i in range(UPDATES) if i + 1 not in ENDS
    ]
    assert history["samples"] == [SAMPLES, 2 * SAMPLES, 3 * SAMPLES]
    assert seen.rates == pytest.approx([rate * (size / 16) ** 0.5 for size in seen.sizes])
    printed = capsys.readouterr().out
    assert [f"{number}/{number}" in printed for number in (11, 10, 5)] == [True] * 3


def test_a_training_goes_on_in_a_later_fit():
    model = made(sampler_options={"max_updates": 23})
    with pytest.raises(KeyboardInterrupt):
        fit(model, 3, callbacks=[Seen(error=5)])
    assert fit(model, 3, callbacks=[Seen(stop=11)]).epoch == [0]  # whose end the next one has to leave
    assert fit(model, 7, initial_epoch=5, callbacks=[Seen(stop=14)]).epoch == [5]
    assert model.custom_optimizer.updates == 14
    assert fit(model, 9, initial_epoch=6).epoch == [6, 7]  # where the sampler ends
    assert model.custom_optimizer.updates == int(model.optimizer.iterations) == 23
    assert fit(model, 5).epoch == []
    model.compile("sgd", ce(from_logits=True))
    fit(model, 2)
    assert model.custom_optimizer.updates == ENDS[1]


def test_a_training_goes_on_after_another_compile_with_its_optimizer():
    model, optimizer = made(), opt.SGD(0.1)
    for first, loss in enumerate((ce(from_logits=True), ce(from_logits=True, reduction="sum"))):
        model.compile(optimizer, loss, metrics=["accuracy"])
        with pytest.warns(UserWarning, match="must be a mean over rows") if first else nullcontext():
            fit(model)
        assert model.custom_optimizer.updates == ENDS[first]


@pytest.mark.parametrize(("stop", "every"), [(11, 99), (14, 1)])
def test_a_resume_has_the_epochs_and_the_rate_of_the_script(stop, every, tmp_path):
    options = {"initial_epoch": 2, "epochs": 5}
    with pytest.raises(KeyboardInterrupt):
        fit(made(), callbacks=[VariableBatchCheckpoint(tmp_path, every=every), Seen(error=stop)], **options)
    model = made(optimizer=opt.SGD(0.3))
    assert fit(model, callbacks=[VariableBatchCheckpoint(tmp_path)], **options).epoch == [3, 4]
    assert model.custom_optimizer.updates == UPDATES
    assert float(model.optimizer.learning_rate) == pytest.approx(0.01)  # a number is that of the checkpoint


def functional():
    inputs = keras.Input((FEATURES,))
    return keras.Model(inputs, layers.Dense(CLASSES)(inputs))


@pytest.mark.parametrize("make", [dense, functional])
def test_files_are_those_of_the_model_within(make, tmp_path):
    inner, saver = make(), callbacks.ModelCheckpoint
    model = made(inner, opt.Adam(0.01))
    whole = saver(tmp_path / "{epoch}.keras", "val_loss", save_best_only=True)
    fit(model, 2, callbacks=[whole, saver(tmp_path / "{epoch}.weights.h5", save_weights_only=True)], **valid)
    loaded, other = keras.saving.load_model(tmp_path / "2.keras"), make()
    assert type(loaded) is type(inner)
    other.load_weights(tmp_path / "2.weights.h5")
    for one in loaded, other, inner:
        assert np.array_equal(one.predict(X, verbose=0), model.predict(X, verbose=0))
    assert loaded.evaluate(X, Y, verbose=0) == pytest.approx(model.evaluate(X, Y, verbose=0))
    for own, saved in zip(loaded.optimizer.variables, model.optimizer.variables, strict=True):
        assert np.array_equal(own.numpy(), saved.numpy())
    model.load_weights(tmp_path / "1.weights.h5")
    assert not np.array_equal(other.predict(X, verbose=0), model.predict(X, verbose=0))


def test_bfloat16_layers():
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        fit(model := made(dense(layers.BatchNormalization(), layers.Dropout(0.2)), "adamw"), 3)
        keras.mixed_precision.set_global_policy("mixed_float16")
        with pytest.raises(ValueError, match=r"the optimizer must be .*LossScaleOptimizer.*mixed_bfloat16"):
            fit(made())
    finally:
        keras.mixed_precision.set_global_policy("float32")
    assert model.custom_optimizer.updates == UPDATES


# Losses. ---------------------------------------------------------------------------------------------------------


class Masked(VariableBatchModelMixin, keras.Model):
    """A tagger that masks its padding, over whose other tokens Keras takes means."""

    def __init__(self, **options):
        super().__init__(**options)
        self.logits = layers.Embedding(7, 7, keras.initializers.RandomNormal(stddev=2.0, seed=1), mask_zero=True)

    def call(self, x):
        return self.logits(x)


def ignoring(**options):
    return VariableBatchModel(tagger(), **options)


@pytest.mark.parametrize(("make", "loss"), [(ignoring, ce(from_logits=True, ignore_class=0)), (Masked, None)])
def test_a_mean_over_tokens_needs_their_count(make, loss):
    for options in {}, {"count": lambda y, _: (y != 0).sum()}:
        model = make(trace=16, **options)
        model.compile(opt.SGD(1.0), loss or ce(from_logits=True))
        warned = pytest.warns(UserWarning, match="must be a mean over rows.*pass count=")
        with nullcontext() if options else warned:
            model.fit(TEXTS, TEXTS, batch_size=16, verbose=0)


# Refusals. -------------------------------------------------------------------------------------------------------


def test_what_is_refused(tmp_path):
    choice = DataLoader([*zip(X, Y, strict=True)], 8, sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES))
    compiled, own = dense(), type("Own", (keras.Sequential,), {"train_step": lambda self, data: {}})
    compiled.compile("sgd", "mse")
    calls = [
        (lambda: fit(made(optimizer=opt.SGD(gradient_accumulation_steps=4))), ValueError, "'gradient_accumulation_st"),
        (lambda: fit(made(), steps_per_epoch=5), ValueError, "steps_per_epoch must be None, got 5; pass max_updates"),
        (lambda: fit(made(), callbacks=[callbacks.BackupAndRestore(tmp_path)]), ValueError, "VariableBatchCheckpoint"),
        (lambda: fit(made(), class_weight={0: 2.0}), ValueError, "class_weight must be None, .* as sample_weight"),
        (lambda: made().fit(pair for pair in [(X, Y)]), TypeError, "the data must have an index, .*; pass arrays"),
        (
            lambda: made().fit(DataLoader(Samples(), 8), validation_split=0.25),
            ValueError,
            "validation_split needs arrays, got a DataLoader; split its dataset",
        ),
        (lambda: made().fit(DataLoader(Samples(), 8), Y), TypeError, "a DataLoader with a map-style dataset alone"),
        (lambda: made().fit(X, Y[:200]), ValueError, r"must have the same number of samples, got \[200, 203\]; pass"),
        (lambda: made().fit(choice, verbose=0), TypeError, "must read each sample once an epoch"),
        (lambda: made().train_on_batch(X, Y), RuntimeError, r"microbatches, which only fit\(\) reads"),
        (lambda: fit(made(trace=[24] * 9), 2), ValueError, "the trace must last longer, but its 9 steps|has 9 steps"),
        (lambda: fit(made(rule="x")), TypeError, "multiple values"),
        (lambda: fit(VariableBatchModel(dense(), trace=TRACE)), ValueError, r"You must call `compile\(\)`"),
        (
            lambda: VariableBatchModel(compiled, trace=8),
            TypeError,
            r"not compiled, got .*; load_model\(path, compile=Fal",
        ),
        (lambda: VariableBatchModel(own(), trace=8), TypeError, "must have the train_step of keras.Model, got .*Mixin"),
        (
            lambda: VariableBatchModel(CaseModel(TrainerCase()), trace=8),
            TypeError,
            "must have the compute_loss of keras.Model",
        ),
    ]
    for call, kind, message in calls:
        with pytest.raises(kind, match=message):
            call()
    below = type("Below", (VariableBatchModelMixin, own), {})(dense().layers, trace=8)
    above = type("Above", (VariableBatchModel,), {"train_step": lambda self, data: {"loss": 0.0}})(dense(), trace=8)
    steps = "must have the train_step of Keras, got .* with its own; override compute_loss"
    for model, message in (below, steps), (above, steps), (Masked(), "must get a trace, got Masked without one; pass"):
        model.compile("sgd", "mse")
        with pytest.raises(ValueError, match=message):
            fit(model)


def test_another_backend_is_refused():
    lines = "import variable_batch_size.integrations.keras, keras; print(keras.config.backend())"
    for backend in "jax", "":
        environment = {**os.environ, "KERAS_BACKEND": backend, "PYTHONPATH": str(ROOT)}
        environment = environment if backend else {k: v for k, v in environment.items() if k != "KERAS_BACKEND"}
        ran = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, env=environment)
        refused = "ImportError: this needs Keras on the torch backend, got jax; set os.environ" in ran.stderr
        assert (refused, ran.stdout.strip()) == ((True, "") if backend else (False, "torch"))


def test_the_example_runs(capsys):
    runpy.run_path(str(ROOT / "examples" / "trainers" / "keras_digits.py"), run_name="__main__")
    assert "updates" in capsys.readouterr().out
