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
from helpers.yardstick import TRACE, Samples
from variable_batch_size.integrations.keras import VariableBatchCheckpoint, VariableBatchModel


def test_float16_is_refused() -> None:
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        with pytest.raises(ValueError, match=r"the loss must not be scaled.*mixed_bfloat16"):
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
    with pytest.raises(TypeError, match=r"the data(set)? must have an index, .*; (pass|put) "):
        made().fit(data)


def test_arguments_that_contradict_the_trace_are_refused() -> None:
    model = made()
    with pytest.raises(ValueError, match=r"an epoch uses each sample once, without steps_per_epoch, got 5; pass"):
        fit(model, steps_per_epoch=5)
    with pytest.raises(ValueError, match=r"shuffle must be True or False, got 'batch'"):
        fit(model, shuffle="batch")
    with pytest.raises(ValueError, match=r"a DataLoader must have a batch_size"):
        model.fit(DataLoader(Samples(), batch_sampler=[[0, 1]]))
    with pytest.raises(ValueError, match=r"a DataLoader must yield \(x, y\).*got y besides it"):
        model.fit(DataLoader(Samples(), 8), Y)
    short = VariableBatchModel(dense(), [24] * 9)
    short.compile("sgd", LOSS(from_logits=True))
    with pytest.raises(ValueError, match=r"the trace must last until the training ends"):
        fit(short, 2)
    with pytest.raises(RuntimeError, match=r"train_on_batch\(\) was called"):
        model.train_on_batch(X, Y)
    fit(model)
    with pytest.raises(ValueError, match=r"a training continues with the same data, .*'batch_size': 8.*, got .*16"):
        model.fit(X, Y, batch_size=16)


@pytest.mark.parametrize("sampler", [SubsetRandomSampler(range(50)), WeightedRandomSampler([1.0] * 203, 203)])
def test_samplers_that_choose_samples_are_refused(sampler: Any) -> None:
    model = made()
    model.fit(DataLoader([*zip(X, Y, strict=True)], 8, shuffle=True), verbose=0)
    for one in made(), model:
        with pytest.raises(TypeError, match=r"the loader must read each sample once an epoch, .*; leave out sampler="):
            one.fit(DataLoader([*zip(X, Y, strict=True)], 8, sampler=sampler), verbose=0)


def test_mistakes_are_told_where_they_are_made(tmp_path: Path) -> None:
    model: Any = dense()
    for arguments, message in [
        ((TRACE, "square", 16), "rule must be one of"),
        ((TRACE, "root"), "needs ref_batchsize, but it is None"),
        ((TRACE, "sqrt-sde", 16), "with Keras the rule must scale the learning rate only, got sqrt-sde; pass"),
        ((TRACE, "linear-momentum", 16), "the rule must scale the learning rate only, got linear-momentum"),
    ]:
        with pytest.raises(ValueError, match=message):
            VariableBatchModel(model, *arguments)
    wrong: Any = VariableBatchModel
    for arguments, name in ({}, "trace"), ({"trace": TRACE, "ref": 16}, "ref"):
        with pytest.raises(TypeError, match=f"argument:? '{name}'"):
            wrong(model, **arguments)
    VariableBatchModel(model, TRACE)
    with pytest.raises(FileNotFoundError):
        VariableBatchModel(dense(), tmp_path / "trace.csv")
    for size in 0, -1:
        with pytest.raises(ValueError, match=f"batch_size must be an integer >= 1, got {size}"):
            made().fit(X, Y, batch_size=size)
    with pytest.raises(TypeError, match=r"data must be arrays, got 0.*; put np.asarray"):
        made().fit(X, [0] * len(X), verbose=0)
    with pytest.raises(
        ValueError, match=r"best=\"min:val_loss\" must name a value .*, got .*loss.*; pass validation_da"
    ):
        fit(made(), callbacks=[VariableBatchCheckpoint(tmp_path, best="min:val_loss")])


def test_what_compile_refuses() -> None:
    for optimizer, loss, message in [
        (keras.optimizers.SGD(gradient_accumulation_steps=4), "mse", "must have no gradient_accumulation_steps, got 4"),
        (keras.optimizers.SGD(loss_scale_factor=4.0), "mse", "must have no loss_scale_factor, got 4.0"),
        ("sgd", LOSS(reduction="sum"), "a loss must be a mean over the samples, got reduction='sum'"),
        ("sgd", LOSS(ignore_class=-1), "a mean over the samples, got ignore_class=-1 of .*; pass sample_weight"),
        (
            "sgd",
            keras.losses.Dice(),
            "a mean over the samples, got axis=None of dice; pass .*Dice or Tversky with the axes of",
        ),
        ("sgd", "tversky", "a mean over the samples, got axis=None of tversky"),
        ("sgd", keras.losses.dice, "a mean over the samples, got axis=None of dice"),
        ("sgd", "Dice", "a mean over the samples, got axis=None of dice"),
        (
            "sgd",
            keras.losses.Circle(),
            "the samples, got pairs of the samples of a microbatch of circle; pass a loss of",
        ),
        ("sgd", "circle", "the samples, got pairs of the samples of a microbatch of circle"),
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
        with pytest.raises(ValueError, match=r"must have one learning rate, .*, got a MultiOptimizer; pass one"):
            VariableBatchModel(dense(), TRACE).compile(several, "mse")
    with pytest.raises(ValueError, match=r"steps_per_execution must be 1"):
        VariableBatchModel(dense(), TRACE).compile("sgd", "mse", steps_per_execution=2)
    with pytest.raises(TypeError, match=r"compile\(\) must get a Keras optimizer"):
        VariableBatchModel(functional(), TRACE).compile(None, "mse")


def test_what_is_no_model_of_keras_is_refused() -> None:
    class Own(keras.Model):
        def train_step(self, data: Any) -> Any:
            return {}

    with pytest.raises(TypeError, match=r"model must be a keras.Model without a trace, got .*Linear"):
        VariableBatchModel(torch.nn.Linear(2, 3), TRACE)
    with pytest.raises(TypeError, match=r"model must be a keras.Model without a trace"):
        VariableBatchModel(VariableBatchModel(dense(), TRACE), TRACE)
    with pytest.raises(ValueError, match=r"the model must have the train_step of Keras.*Own.train_step; override"):
        VariableBatchModel(Own(), TRACE)


def test_masks_are_refused() -> None:
    layers = [keras.layers.Embedding(10, 4, mask_zero=True), keras.layers.Dense(3)]
    model = VariableBatchModel(keras.Sequential(layers), 8)
    model.compile("sgd", LOSS(from_logits=True))
    with pytest.raises(RuntimeError, match=r"the loss must be a mean over samples, but .* has a mask"):
        model.fit(np.ones((16, 5), int), np.ones((16, 5), int), verbose=0)


def test_a_checkpoint_needs_a_trace(tmp_path: Path) -> None:
    model = dense()
    model.compile("sgd", LOSS(from_logits=True))
    with pytest.raises(TypeError, match=r"VariableBatchCheckpoint needs a VariableBatchModel, got Sequential; put"):
        fit(model, callbacks=[VariableBatchCheckpoint(tmp_path)])


def test_another_backend_is_refused() -> None:
    lines = "import variable_batch_size.integrations.keras"
    for backend, found in ("jax", "it runs on jax"), ("tensorflow", "No module named 'tensorflow'"):
        environment = {"KERAS_BACKEND": backend, "PYTHONPATH": str(ROOT)}
        ran = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, env=environment)
        assert f"ImportError: this needs Keras on the torch backend, but {found}; set os.environ" in ran.stderr
