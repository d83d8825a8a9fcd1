"""What `fit` of a Keras model with a trace refuses, and with which words."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler, WeightedRandomSampler

from helpers.keras_backend import keras
from helpers.keras_plain import LOSS, X, Y, dense, fit, functional, made
from helpers.pages import ROOT
from helpers.yardstick import TRACE, UPDATES, Samples
from variable_batch_size.integrations.keras import VariableBatchModel
from variable_batch_size.integrations.keras.model import COMPILED, FIT
from variable_batch_size.integrations.supported import table


def test_float16_is_refused() -> None:
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        with pytest.raises(ValueError, match=r"the optimizer must be .*LossScaleOptimizer.*mixed_bfloat16"):
            made(dense())
    finally:
        keras.mixed_precision.set_global_policy("float32")


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([])


class Ready(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return X[:8], Y[:8]


@pytest.mark.parametrize("data", [Ready(), DataLoader(Stream(), 8), (pair for pair in [(X, Y)]), Samples()])
def test_data_without_an_index_is_refused(data: Any) -> None:
    with pytest.raises(TypeError, match=r"the data(set)? must have an index, .*; pass "):
        made().fit(data)


def test_arguments_that_contradict_the_trace_are_refused() -> None:
    model = made()
    with pytest.raises(ValueError, match=r"must be none of .*, got \['steps_per_epoch'\]; pass"):
        fit(model, steps_per_epoch=5)
    with pytest.raises(ValueError, match=r"must have a batch_size"):
        model.fit(DataLoader(Samples(), batch_sampler=[[0, 1]]))
    with pytest.raises(ValueError, match=r"a DataLoader must yield \(x, y\).*got others besides it"):
        model.fit(DataLoader(Samples(), 8), Y)
    short = VariableBatchModel(dense(), [24] * 9)
    short.compile("sgd", LOSS(from_logits=True))
    with pytest.raises(ValueError, match=r"the trace must last until the training ends|the trace has 9 steps"):
        fit(short, 2)
    with pytest.raises(RuntimeError, match=r"an update needs its microbatches, which only fit\(\) reads"):
        model.train_on_batch(X, Y)
    fit(model)
    with pytest.raises(ValueError, match=r"a training continues with its 203 samples, got 200; pass the loader"):
        model.fit(X[:200], Y[:200])


def test_a_later_fit_has_the_settings_of_the_first() -> None:
    fit(model := made())
    for others in {"batch_size": 16}, {"shuffle": False}:
        with pytest.raises(ValueError, match=r"a training continues with {'batch_size': 8, .*, or call compile\(\) to"):
            model.fit(X, Y, verbose=0, **others)
    model.fit(X, Y, verbose=0)
    assert model.custom_optimizer.epoch == 2
    changed = r"a training continues with its optimizer and trainable weights, got others; call compile\(\) to begin"
    model.layers[0].trainable = False
    with pytest.raises(ValueError, match=changed):
        fit(model)
    model.layers[0].trainable = True
    fit(model)
    model.optimizer = keras.optimizers.SGD(0.0)
    with pytest.raises(ValueError, match=changed):
        fit(model)
    model.compile(model.optimizer, LOSS(from_logits=True))
    before = model.get_weights()
    model.fit(X, Y, batch_size=16, shuffle=False, verbose=0)
    assert all(np.array_equal(*pair) for pair in zip(before, model.get_weights(), strict=True))


def test_a_fit_that_made_no_update_determines_nothing() -> None:
    model = made(functional())
    with pytest.raises(ValueError, match="incompatible"):
        model.fit(X[:60, :2], Y[:60], batch_size=16, shuffle=False, verbose=0)
    fit(model, 3)
    assert model.custom_optimizer.updates == UPDATES


def test_a_model_that_is_not_compiled_is_refused() -> None:
    with pytest.raises(ValueError, match=r"You must call `compile\(\)`"):
        fit(VariableBatchModel(dense(), TRACE))


@pytest.mark.parametrize("sampler", [SubsetRandomSampler(range(50)), WeightedRandomSampler([1.0] * 203, 203)])
def test_samplers_that_choose_samples_are_refused(sampler: Any) -> None:
    with pytest.raises(TypeError, match=r"the loader must read each sample once an epoch, .*; leave out sampler="):
        made().fit(DataLoader([*zip(X, Y, strict=True)], 8, sampler=sampler), verbose=0)


def test_mistakes_are_told_where_they_are_made(tmp_path: Path) -> None:
    for rule in "sqrt-sde", "linear-momentum":
        with pytest.raises(TypeError, match=r"the inner optimizer must be a torch.optim.*got KerasOptimizer; use the"):
            fit(made_of(TRACE, rule, 16))
    with pytest.raises(ValueError, match="rule must be one of"):
        VariableBatchModel(dense(), TRACE, "square", 16)
    wrong: Any = VariableBatchModel
    for arguments, name in ({}, "trace"), ({"trace": TRACE, "ref": 16}, "ref"):
        with pytest.raises(TypeError, match=f"argument:? '{name}'"):
            wrong(model := dense(), **arguments)
    assert not isinstance(model, VariableBatchModel)
    with pytest.raises(FileNotFoundError):
        fit(made_of(tmp_path / "trace.csv"))
    with pytest.raises(ValueError, match="needs ref_batchsize, but it is None"):
        fit(made_of(TRACE, "root"))


def made_of(*settings: Any) -> Any:
    """A compiled model."""
    model = VariableBatchModel(dense(), *settings)
    model.compile("sgd", LOSS(from_logits=True))
    return model


def test_what_compile_refuses() -> None:
    for optimizer, loss, message in [
        (keras.optimizers.SGD(gradient_accumulation_steps=4), "mse", r"\['SGD', 'gradient_accumulation_steps'\]; lea"),
        (keras.optimizers.SGD(loss_scale_factor=4.0), "mse", r"got \['SGD', 'loss_scale_factor'\]; leave it out"),
        ("sgd", LOSS(reduction="sum"), r"the reduction of a loss must be a mean over samples, got \['sum'\]; pass"),
    ]:
        with pytest.raises(ValueError, match=message):
            VariableBatchModel(dense(), TRACE).compile(optimizer, loss)
        model = dense()
        model.compile(optimizer, loss)
        with pytest.raises(ValueError, match=message):
            VariableBatchModel(model, TRACE)
    optimizers = keras.optimizers
    if hasattr(optimizers, "MultiOptimizer"):
        several = optimizers.MultiOptimizer(optimizers.OptimizerMap(default_optimizer=optimizers.SGD()))
        with pytest.raises(ValueError, match=r"the optimizer must be .*got \['MultiOptimizer'\]"):
            VariableBatchModel(dense(), TRACE).compile(several, "mse")
    with pytest.raises(ValueError, match="jit_compile must be False, got True; compile layers of your own"):
        VariableBatchModel(dense(), TRACE).compile("sgd", "mse", jit_compile=True)
    with pytest.raises(ValueError, match="steps_per_execution must be 1, got 2; leave it out"):
        VariableBatchModel(dense(), TRACE).compile("sgd", "mse", steps_per_execution=2)


def test_the_page_has_the_table_of_settings() -> None:
    page = ROOT / "docs" / "trainers" / "keras.md"
    rows = table((*COMPILED, *FIT))
    assert rows in page.read_text(), f"copy this into {page}:\n{rows}"


def test_what_is_no_model_of_keras_is_refused() -> None:
    with pytest.raises(TypeError, match=r"model must be a keras.Model without a trace, got .*Linear"):
        VariableBatchModel(torch.nn.Linear(2, 3), TRACE)
    with pytest.raises(TypeError, match=r"model must be a keras.Model without a trace"):
        VariableBatchModel(VariableBatchModel(dense(), TRACE), TRACE)
    for name in "fit", "make_train_function", "train_step":
        own = type("Own", (keras.Model,), {name: lambda self, data: {}})()
        setattr(model := dense(), name, lambda data: {})
        for each in own, model:
            with pytest.raises(ValueError, match=rf"the model must have the {name} of Keras.*\w+.{name}; override"):
                VariableBatchModel(each, TRACE)


def test_masks_are_refused() -> None:
    layers = [keras.layers.Embedding(10, 4, mask_zero=True), keras.layers.Dense(3)]
    model = VariableBatchModel(keras.Sequential(layers), 8)
    model.compile("sgd", LOSS(from_logits=True))
    with pytest.raises(ValueError, match=r"the output of the model must have no mask, .*; pass sample_weight"):
        model.fit(np.ones((16, 5), int), np.ones((16, 5), int), verbose=0)


def test_another_backend_is_refused() -> None:
    lines = "import variable_batch_size.integrations.keras"
    for backend, found in ("jax", "jax"), ("tensorflow", "No module named 'tensorflow'"):
        environment = {"KERAS_BACKEND": backend, "PYTHONPATH": str(ROOT)}
        ran = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, env=environment)
        assert f"ImportError: this needs Keras on the torch backend, got {found}; set os.environ" in ran.stderr
