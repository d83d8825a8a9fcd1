"""What our trainer for Ignite refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ignite.engine import Engine, supervised_training_step
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.utils.data import DataLoader

import variable_batch_size as vbs
from helpers.ignite_jobs import Script
from helpers.trainer_cases import Case
from helpers.yardstick import (
    MICROBATCH,
    SAMPLES,
    TRACE,
    Samples,
    network,
)
from variable_batch_size.integrations.ignite import (
    VariableBatchEngine,
    create_supervised_trainer,
    variable_batch,
)


class Stream(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(100))


WEIGHTED = torch.utils.data.WeightedRandomSampler([1.0] * SAMPLES, SAMPLES)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"deterministic": True}, TypeError, r"deterministic"),
        ({"amp_mode": "amp"}, TypeError, r"amp_mode"),
        ({"loader": DataLoader(Stream())}, TypeError, r"the dataset must have an index"),
        ({"loader": [1, 2]}, TypeError, r"the training's loader must be a DataLoader, got \[1, 2\]"),
        ({"loader": DataLoader(Samples(), batch_size=None)}, ValueError, r"must have a batch_size"),
        ({"rule": "root"}, ValueError, r"ref_batchsize"),
        ({"nonsense": 1}, TypeError, r"nonsense"),
    ],
)
def test_arguments_that_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    model = network()
    given = {"loader": DataLoader(Samples(), MICROBATCH), "trace": TRACE} | options
    with pytest.raises(error, match=message):
        create_supervised_trainer(model, SGD(model.parameters(), lr=0.1), cross_entropy, **given)


def test_runs_that_are_refused() -> None:
    script = Script(Case())
    with pytest.raises(TypeError, match="epoch_length"):
        script.trainer.run(script.loader, max_epochs=3, epoch_length=10)
    with pytest.raises(ValueError, match="a training continues with its 203 samples, got 4; pass the loader"):
        script.trainer.run(DataLoader([1, 2, 3, 4], 8, shuffle=True), max_epochs=3)


def test_states_without_a_position_are_refused() -> None:
    script = Script(Case())
    state = Engine(lambda engine, batch: None).state_dict()
    with pytest.raises(ValueError, match=r'the position in the training under "vbs", but this one has none'):
        script.trainer.load_state_dict(state)


def test_steps_that_are_wrong() -> None:
    """With the plain optimizer, with clipping, and without a step."""
    loader = DataLoader(Samples(), MICROBATCH)
    for name, message in [
        ("inner", r"a wrapped optimizer must be stepped by its wrapper"),
        ("clip", r"only backward\(\) may change gradients between two calls of step\(\).*max_grad_norm="),
        ("none", r"every microbatch of an update must reach optimizer.step\(\)"),
        ("accumulates", r"every microbatch of an update must reach optimizer.step\(\)"),
    ]:
        model = network()
        inner = SGD(model.parameters(), lr=0.1)
        optimizer = variable_batch(inner, loader, trace=TRACE)
        with pytest.raises(RuntimeError, match=message):
            VariableBatchEngine(_wrong(name, model, inner, optimizer), optimizer).run(loader, max_epochs=2)


def _wrong(name: str, model: torch.nn.Module, inner: SGD, optimizer: vbs.CustomOptimizer) -> Any:
    if name == "accumulates":
        return supervised_training_step(model, optimizer, cross_entropy, gradient_accumulation_steps=4)

    def train_step(engine: Engine, batch: Any) -> None:
        x, target = batch
        cross_entropy(model(x), target).backward()
        if name == "clip":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        if name != "none":
            (inner if name == "inner" else optimizer).step()

    return train_step
