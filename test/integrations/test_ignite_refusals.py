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
from helpers.ignite_jobs import Script, check
from helpers.trainer_cases import Case
from helpers.yardstick import (
    MICROBATCH,
    SAMPLES,
    TRACE,
    Samples,
    network,
)
from variable_batch_size.backend.local import LocalBackend
from variable_batch_size.integrations.ignite import (
    UpdateEpochs,
    VariableBatchEngine,
    create_supervised_trainer,
    per_update,
    variable_batch,
)
from variable_batch_size.integrations.ignite.outputs import combine


class Stream(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(100))


WEIGHTED = torch.utils.data.WeightedRandomSampler([1.0] * SAMPLES, SAMPLES)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"deterministic": True}, ValueError, r"deterministic must be False.*vbs.Checkpoint"),
        ({"gradient_accumulation_steps": 4}, ValueError, r"gradient_accumulation_steps must be 1.*got 4; leave"),
        ({"amp_mode": "apex"}, ValueError, r'amp_mode must be None or "amp", got \'apex\''),
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
    with pytest.raises(ValueError, match=r"epoch_length must be left out, because epochs have unequal numbers"):
        script.trainer.run(script.loader, max_epochs=3, epoch_length=10)
    for loader, error, message in [
        (
            DataLoader([1, 2, 3, 4], 8, shuffle=True),
            ValueError,
            r"with samples=203, got samples=4; pass the loader that",
        ),
        (DataLoader(Samples(), 8, shuffle=True), ValueError, r"must have the very dataset .*got another one; pass the"),
        (
            DataLoader(script.loader.dataset, 64),
            ValueError,
            r"batch_size=8, shuffle=True, got batch_size=64, shuffle=F",
        ),
        (DataLoader(Samples(), 8, sampler=WEIGHTED), TypeError, r"each sample once.*Weighted.*Subset"),
        (DataLoader(Stream()), TypeError, r"the dataset must have an index"),
    ]:
        with pytest.raises(error, match=message):
            script.trainer.run(loader, max_epochs=3)
    for data in None, [1, 2]:
        with pytest.raises(TypeError, match=r"the data must be a DataLoader, got .*; pass the loader of the training"):
            script.trainer.run(data, max_epochs=3)


def test_runs_without_an_update_tell_so() -> None:
    """Ignite itself would train anew, also as its message about a smaller max_epochs says, by max_epochs = None."""
    script = Script(Case()).run(epochs=2)
    with pytest.warns(UserWarning, match=r"but all updates of max_epochs=2 were made before, .*create model"):
        script.run(epochs=2)
    script.trainer.state.max_epochs = None
    with pytest.warns(UserWarning, match=r"run\(\) continues the training, but all updates of max_epochs=1 were made"):
        script.run(epochs=1)
    check(script.run())


def test_outputs_of_unequal_structure_are_refused() -> None:
    for outputs, message in [
        (
            [torch.ones(3, 2), torch.ones(3, 4)],
            r"rows of shape \(2,\) and a tensor with rows of shape \(4,\); pad rows",
        ),
        ([{"loss": 1.0}, {"extra": 1.0, "loss": 1.0}], r"a mapping with loss and a mapping with extra, loss; pad rows"),
        ([(1.0, 2.0), (1.0,)], r"a sequence of 2 and a sequence of 1"),
        ([1.0, None], r"a number and a value of another type"),
    ]:
        with pytest.raises(ValueError, match=r"the step must return the same names.*" + message):
            combine(outputs, [3, 3], 6, LocalBackend())


def test_states_without_a_position_are_refused() -> None:
    script = Script(Case())
    state = Engine(lambda engine, batch: None).state_dict()
    with pytest.raises(ValueError, match=r'the position in the training under "vbs", got one without; load the state'):
        script.trainer.load_state_dict(state)


def test_data_without_updates_are_refused() -> None:
    model = network()
    loader = DataLoader(Samples(), MICROBATCH)
    optimizer = variable_batch(SGD(model.parameters(), lr=0.1), loader, trace=TRACE)
    engine = Engine(per_update(supervised_training_step(model, optimizer, cross_entropy), optimizer))
    UpdateEpochs(optimizer).attach(engine)
    with pytest.raises(TypeError, match=r"the data must be updates of the optimizer.*vbs.updates\(loader, optimizer\)"):
        engine.run(loader, max_epochs=1)


def test_steps_that_are_wrong() -> None:
    """With the plain optimizer, with clipping, and without a step."""
    loader = DataLoader(Samples(), MICROBATCH)
    model = network()
    inner = SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        TypeError, match=r"(?s)must be a vbs.CustomOptimizer.*pass what variable_batch\(optimizer, loader"
    ):
        VariableBatchEngine(supervised_training_step(model, inner, cross_entropy), inner)  # type: ignore[arg-type]
    for name, message in [
        ("inner", r"a wrapped optimizer must be stepped by its wrapper"),
        ("clip", r"only backward\(\) may change gradients between two calls of step\(\).*max_grad_norm="),
        ("none", r"every microbatch of an update must reach optimizer.step\(\)"),
    ]:
        model = network()
        inner = SGD(model.parameters(), lr=0.1)
        optimizer = variable_batch(inner, loader, trace=TRACE)
        with pytest.raises(RuntimeError, match=message):
            VariableBatchEngine(_wrong(name, model, inner, optimizer), optimizer).run(loader, max_epochs=2)


@pytest.mark.parametrize("when", ["first", "middle", "last"])
def test_another_optimizer_within_an_update_is_refused(when: str) -> None:
    """It would step for each microbatch, with the gradients of that microbatch and this rank."""
    loader, model, other = DataLoader(Samples(), MICROBATCH), network(), network()
    optimizer = variable_batch(SGD(model.parameters(), lr=0.1), loader, trace=TRACE)
    plain = SGD(other.parameters(), lr=0.1)

    def train_step(engine: Engine, batch: Any) -> None:
        x, target = batch
        ends = optimizer.microbatch.ends_step
        (cross_entropy(model(x), target) + cross_entropy(other(x), target)).backward()
        optimizer.step()
        if {"first": True, "middle": optimizer.updates == 4, "last": ends}[when]:
            plain.step()

    engine = VariableBatchEngine(train_step, optimizer)
    message = r"every optimizer must step once .*step\(\) of the plain SGD was .*vbs.CustomOptimizer\(other, opt"
    with pytest.raises(RuntimeError, match=message):
        engine.run(loader, max_epochs=2)
    plain.step()  # outside of an update, also after that exception


def _wrong(name: str, model: torch.nn.Module, inner: SGD, optimizer: vbs.CustomOptimizer) -> Any:
    def train_step(engine: Engine, batch: Any) -> None:
        x, target = batch
        cross_entropy(model(x), target).backward()
        if name == "clip":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        if name != "none":
            (inner if name == "inner" else optimizer).step()

    return train_step
