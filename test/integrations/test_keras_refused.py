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
from helpers.keras_plain import LOSS, X, Y, dense, fit, made
from helpers.pages import ROOT
from helpers.yardstick import TRACE, Samples
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
    model.fit(X, Y, batch_size=16, verbose=0)  # the microbatches are those of the first call


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


def test_the_page_has_the_table_of_settings() -> None:
    page = ROOT / "docs" / "trainers" / "keras.md"
    rows = table((*COMPILED, *FIT))
    assert rows in page.read_text(), f"copy this into {page}:\n{rows}"


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
    with pytest.raises(ValueError, match=r"the output of the model must have no mask, .*; pass sample_weight"):
        model.fit(np.ones((16, 5), int), np.ones((16, 5), int), verbose=0)


def test_another_backend_is_refused() -> None:
    lines = "import variable_batch_size.integrations.keras"
    for backend, found in ("jax", "jax"), ("tensorflow", "No module named 'tensorflow'"):
        environment = {"KERAS_BACKEND": backend, "PYTHONPATH": str(ROOT)}
        ran = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, env=environment)
        assert f"ImportError: this needs Keras on the torch backend, got {found}; set os.environ" in ran.stderr
