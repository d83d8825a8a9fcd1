"""What happens within an update of Ignite's engine: steps of one's own, gradients, outputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from ignite.engine import Engine, Events
from ignite.handlers.tensorboard_logger import GradsScalarHandler, TensorboardLogger
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.utils.data import DataLoader

import variable_batch_size as vbs
from helpers.trainer_cases import Case, expected
from helpers.yardstick import (
    EPOCHS,
    MICROBATCH,
    REF,
    TRACE,
    UPDATES,
    Samples,
    by_hand,
    difference,
    network,
    weights,
)
from variable_batch_size.integrations.ignite import (
    VariableBatchEngine,
    create_supervised_trainer,
    variable_batch,
)


def engine_of_ones_own(optimizer: vbs.CustomOptimizer, model: torch.nn.Module) -> Any:
    def train_step(engine: Engine, batch: Any) -> dict[str, Any]:
        x, target = batch
        loss = cross_entropy(model(x), target)
        loss.backward()
        optimizer.step()
        return {"loss": loss.detach(), "y_pred": model(x).detach(), "y": target, "note": "last"}

    return train_step


@pytest.mark.parametrize("plain", [False, True])
def test_a_step_of_ones_own(plain: bool) -> None:
    """In our Engine, and in Ignite's with `per_update`, the handler and `vbs.updates`."""
    case, model = Case(schedule=False), network()
    loader = DataLoader(Samples(), MICROBATCH, shuffle=True)
    optimizer = variable_batch(case.make_inner(model), loader, trace=TRACE, rule="root", ref_batchsize=REF)
    step = engine_of_ones_own(optimizer, model)
    outputs: list[Any] = []
    if plain:
        sampled = DataLoader(Samples(), batch_sampler=optimizer.sampler)
        data: Any = vbs.updates(sampled, optimizer)
    else:
        data = loader
    trainer = VariableBatchEngine(step, optimizer)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: outputs.append(trainer.state.output))
    state = trainer.run(data, max_epochs=EPOCHS)
    wanted, losses = expected(case)
    assert difference(model, wanted) < 1e-12
    assert (state.iteration, state.epoch) == (UPDATES, EPOCHS)
    assert [float(output["loss"]) for output in outputs] == pytest.approx(losses, rel=1e-12)
    assert [len(output["y"]) for output in outputs[:4]] == [24, 24, 24, 10]
    assert outputs[0]["y_pred"].shape == (24, 5)
    assert outputs[0]["note"] == "last"


class Composed(SGD):
    """An optimizer whose step calls that of another one, as those that wrap one do."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters := list(parameters), lr)
        self.base, self.calls = SGD(parameters, lr), 0

    def step(self, closure: Any = None) -> None:
        self.calls += 1
        self.base.step()


def test_optimizers_that_may_step_within_an_update() -> None:
    """What the inner optimizer calls, and another optimizer of vbs; and any plain one in a handler."""
    models = [network() for _ in range(4)]
    loader = DataLoader(Samples(), MICROBATCH, shuffle=True)
    inner = Composed(models[0].parameters(), lr=0.1)
    optimizer = variable_batch(inner, loader, trace=TRACE)
    second = vbs.CustomOptimizer(SGD(models[1].parameters(), lr=0.1), optimizer.sampler)
    plain = SGD(models[2].parameters(), lr=0.1)

    def train_step(engine: Engine, batch: Any) -> None:
        x, target = batch
        for model in models[:2]:
            cross_entropy(model(x), target).backward()
        optimizer.step()
        second.step()

    engine = VariableBatchEngine(train_step, optimizer)
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda: plain.step())
    engine.run(loader, max_epochs=2)
    by_hand(models[3], SGD(models[3].parameters(), lr=0.1), rule="constant", updates=21)
    assert (optimizer.updates, second.updates, inner.calls) == (21, 21, 21)
    for model in models[:2]:
        assert difference(model, weights(models[3])) < 1e-12


def norms_by_hand(parts: bool) -> list[list[float]]:
    """The norm of the gradient of each update, of each parameter or of all."""
    twin, norms = network(), []
    inner = SGD(twin.parameters(), lr=0.1)

    def note(*_: object) -> None:
        gradients = [parameter.grad for parameter in twin.parameters()]
        norms.append([float(torch.linalg.vector_norm(one)) for one in gradients] if parts else [norm(gradients)])

    inner.register_step_pre_hook(note)
    by_hand(twin, inner, rule="constant")
    return norms


def norm(tensors: list[torch.Tensor]) -> float:
    return float(torch.linalg.vector_norm(torch.cat([tensor.flatten() for tensor in tensors])))


@pytest.fixture
def logged(tmp_path: Path) -> Any:
    """A logger of Ignite, and a list of what it writes."""
    found: list[tuple[str, float, int]] = []
    logger = TensorboardLogger(logdir=str(tmp_path))
    logger.writer.add_scalar = lambda tag, value, step: found.append((tag, float(value), step))
    yield logger, found
    logger.close()


def trained(prepare: Callable[[Any, Any, Any], None], **options: Any) -> None:
    model = network()
    inner, loader = SGD(model.parameters(), lr=0.1), DataLoader(Samples(), MICROBATCH, shuffle=True)
    trainer = create_supervised_trainer(
        model, inner, cross_entropy, loader=loader, trace=TRACE, optimizer_options=options
    )
    prepare(model, inner, trainer)
    trainer.run(loader, max_epochs=EPOCHS)


def test_gradients_are_seen_by_a_hook_before_the_step(logged: Any) -> None:
    """At ITERATION_COMPLETED there are none any more: the handlers of loggers find nothing."""
    logger, found = logged

    def attach(model: Any, inner: Any, trainer: Any) -> None:
        logger.attach(trainer, GradsScalarHandler(model), Events.ITERATION_COMPLETED)

    def hook(model: Any, inner: Any, trainer: Any) -> None:
        write = GradsScalarHandler(model)
        inner.register_step_pre_hook(lambda *_: write(trainer, logger, Events.ITERATION_COMPLETED))

    trained(attach)
    assert not found
    trained(hook)
    names = [f"grads_norm/{name.replace('.', '/')}" for name, _ in network().named_parameters()]
    assert [(tag, step) for tag, _, step in found] == [(tag, n + 1) for n in range(UPDATES) for tag in names]
    wanted = [one for update in norms_by_hand(parts=True) for one in update]
    assert [value for _, value, _ in found] == pytest.approx(wanted, rel=1e-9)


def test_the_norm_of_the_gradient_is_logged(logged: Any) -> None:
    logger, found = logged

    def attach(model: Any, inner: Any, trainer: Any) -> None:
        logger.attach_output_handler(
            trainer,
            Events.ITERATION_COMPLETED,
            tag="training",
            output_transform=lambda _: {"grad_norm": float(trainer.optimizer.grad_norm)},
        )

    trained(attach, grad_norm=True)
    assert {tag for tag, _, _ in found} == {"training/grad_norm"}
    wanted = [value for (value,) in norms_by_hand(parts=False)]
    assert [value for _, value, _ in found] == pytest.approx(wanted, rel=1e-9)


def test_the_output_of_an_update() -> None:
    """Means are no integers, also those of integers."""
    loader, model = DataLoader(Samples(), MICROBATCH, shuffle=True), network()
    optimizer = variable_batch(SGD(model.parameters(), lr=0.1), loader, trace=[10] * 30)

    def train_step(engine: Engine, batch: Any) -> Any:
        cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()
        n = len(batch[0])
        return {"hits": torch.tensor(n), "all": ((float(n), torch.ones(n, 2)), "last")}

    engine = VariableBatchEngine(train_step, optimizer)
    outputs: list[Any] = []
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda: outputs.append(engine.state.output))
    engine.run(loader, max_epochs=1)
    output = outputs[0]
    (mean, rows), last = output["all"]
    assert float(output["hits"]) == mean == pytest.approx(5.0)
    assert (output["hits"].dtype, rows.shape, last) == (torch.float32, (10, 2), "last")


def test_the_batch_of_handlers_has_the_microbatches() -> None:
    model = network()
    loader = DataLoader(Samples(), 5)
    trainer = create_supervised_trainer(model, SGD(model.parameters(), lr=0.1), cross_entropy, loader=loader, trace=16)
    events = Events.GET_BATCH_COMPLETED, Events.ITERATION_STARTED, Events.ITERATION_COMPLETED
    seen: list[Any] = []
    for event in events:
        trainer.add_event_handler(event, lambda: seen.append(torch.cat([x for x, _ in trainer.state.batch])))
    trainer.run(loader, max_epochs=1)
    x = Samples().x
    wanted = [x[first : first + 16] for first in range(0, len(x), 16) for _ in events]
    assert [*map(torch.equal, seen, wanted)] == [True] * 13 * len(events)


class Found(NamedTuple):
    """An output with names."""

    loss: np.float32
    y: torch.Tensor


@pytest.mark.parametrize("kind", [Found, lambda *parts: parts, lambda *parts: [*parts]])
def test_the_output_has_the_type_of_that_of_the_step(kind: Any) -> None:
    def output(x: Any, y: Any, y_pred: Any, loss: Any) -> Any:
        return kind(np.float32(loss.item()), y)

    model = network()
    loader = DataLoader(Samples(), 5)
    options = {"loader": loader, "trace": 16, "output_transform": output, "sampler_options": {"max_updates": 1}}
    trainer = create_supervised_trainer(model, SGD(model.parameters(), lr=0.0), cross_entropy, **options)
    trainer.run(loader)
    loss, target = trainer.state.output
    assert type(trainer.state.output) is type(kind(0, 0))
    assert torch.equal(target, Samples().target[:16])
    assert loss == pytest.approx(cross_entropy(model(Samples().x[:16]), target).item(), rel=1e-6)


@pytest.mark.filterwarnings("ignore:Data iterator can not provide data")
def test_a_run_ends_where_a_handler_hides_the_exceptions_of_every_update() -> None:
    """Ignite goes on with the next epoch, which is the rest of this one, and would end in the same exception."""
    loader, model, errors = DataLoader(Samples(), 5), network(), []
    optimizer = variable_batch(SGD(model.parameters(), lr=0.1), loader, trace=16)

    def train_step(engine: Engine, batch: Any) -> float:
        if optimizer.updates == 5 or len(errors) > 9:
            raise KeyError("on purpose")
        cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()
        return 0.0

    engine = VariableBatchEngine(train_step, optimizer)

    @engine.on(Events.EXCEPTION_RAISED)
    def hide(error: BaseException) -> None:
        errors.append(error)
        if len(errors) > 9:
            raise error

    engine.run(loader, max_epochs=3)
    assert optimizer.updates == 5
    assert [type(error) for error in errors] == [KeyError, RuntimeError]  # the update is not complete
