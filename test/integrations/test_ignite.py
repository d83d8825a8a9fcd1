"""A script of Ignite around our trainer: the laws of all trainers, and what is Ignite's own."""

from __future__ import annotations

import math
import re
from operator import mul

import ignite
import pytest
import torch
from conformance import Conformance
from ignite.engine import Engine, Events
from ignite.handlers import CosineAnnealingScheduler, LRScheduler, PiecewiseLinear, create_lr_scheduler_with_warmup
from ignite.metrics import Accuracy, Loss, RunningAverage
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.torch_version import TorchVersion
from torch.utils.data import DataLoader

from helpers.ignite_adapter import Ignite, Script
from helpers.trainer_examples import run_script
from helpers.trainings import TrainerCase, expected
from helpers.yardstick import ENDS, MICROBATCH, SAMPLES, SIZES, TRACE, UPDATES, Samples, network, weights
from variable_batch_size.integrations.ignite import VariableBatchEngine, create_supervised_trainer, variable_batch


class TestIgnite(Conformance):
    adapter = Ignite()
    features = frozenset(
        {"to the last bit", "controller", "tokens", "looks at losses", "evaluation", "processes", "ddp"}
    )


def note(script, event, value):
    """Return what a handler of the user finds at each event."""
    found = []
    script.trainer.add_event_handler(event, lambda: found.append(value()))
    return found


# Counting. -------------------------------------------------------------------------------------------------------


def test_epochs_have_unequal_lengths():
    script = Script()
    state = script.trainer.state
    lengths = note(script, Events.ITERATION_STARTED, lambda: state.epoch_length)
    ends = note(script, Events.EPOCH_COMPLETED, lambda: (state.epoch, state.iteration))
    script.run(epochs=1)
    assert script.run().trainer.state.iteration == UPDATES  # a second run continues
    script.run()  # and nothing is left
    assert lengths == [11] * 11 + [10] * 10 + [5] * 5
    assert ends == [*enumerate(ENDS, 1)]


@pytest.mark.parametrize("end", ["terminate", "interrupt", "max_iters"])
def test_a_run_that_ends_early_continues(end):
    script = Script()
    if end == "max_iters":
        if TorchVersion(ignite.__version__) < "0.5.5":
            pytest.skip("older ones have no max_iters")
        script.trainer.run(script.loader, max_iters=14)
        script.trainer.state.max_iters = None  # which Ignite asks for
    else:
        script.trainer.add_event_handler(Events.ITERATION_COMPLETED(once=14), getattr(script.trainer, end))
        script.run()
    assert script.trainer.state.iteration == script.trainer.optimizer.updates == 14
    script.run()
    torch.testing.assert_close(weights(script.model), expected(TrainerCase()).weights, rtol=0, atol=1e-12)


def test_the_end_of_the_sampler_ends_the_run():
    script = Script(sampler_options={"max_updates": 15})
    completed = note(script, Events.COMPLETED, lambda: script.trainer.state.epoch)
    assert script.run().trainer.optimizer.done
    assert script.run().trainer.state.iteration == 15
    assert completed == [2]


# Schedules, outputs, gradients. ----------------------------------------------------------------------------------


SCHEDULES = {
    "cosine": lambda inner: CosineAnnealingScheduler(inner, "lr", 0.1, 0.0, cycle_size=UPDATES),
    "linear": lambda inner: PiecewiseLinear(inner, "lr", [(0, 0.1), (UPDATES, 0.0)]),
    "warm-up": lambda inner: create_lr_scheduler_with_warmup(
        LRScheduler(torch.optim.lr_scheduler.StepLR(inner, 5, 0.5)), 0.01, 4, warmup_end_value=0.1
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_of_ignite_count_updates(name):
    """The rates are those of Ignite itself in as many iterations; that of the page ends at 0."""
    script, rates = Script(TrainerCase("sgd", "constant")), list[float]()
    script.trainer.add_event_handler(Events.ITERATION_STARTED, SCHEDULES[name](script.inner))
    script.run()
    inner = SGD([torch.zeros(1)], lr=0.1)
    plain = Engine(lambda *_: rates.append(inner.param_groups[0]["lr"]))
    plain.add_event_handler(Events.ITERATION_STARTED, SCHEDULES[name](inner))
    plain.run(range(UPDATES))
    assert script.rates == pytest.approx(rates, abs=1e-15)
    if name == "cosine":
        cosine = [0.05 * (1 + math.cos(math.pi * update / UPDATES)) for update in range(UPDATES)]
        assert rates == pytest.approx(cosine, abs=1e-15)


def test_metrics_weigh_by_samples():
    script = Script(TrainerCase("sgd"), output_transform=lambda x, y, y_pred, loss: (y_pred, y, loss.item()))
    trainer = script.trainer
    Loss(cross_entropy, output_transform=lambda output: output[:2]).attach(trainer, "loss")
    Accuracy(output_transform=lambda output: output[:2]).attach(trainer, "accuracy")
    RunningAverage(output_transform=lambda output: output[2], alpha=1e-9).attach(trainer, "last")
    last = note(script, Events.ITERATION_COMPLETED, lambda: trainer.state.metrics["last"])
    means = note(script, Events.EPOCH_COMPLETED, lambda: [trainer.state.metrics[name] for name in ("loss", "accuracy")])
    script.run()
    losses = expected(TrainerCase("sgd")).losses
    assert last == pytest.approx(losses, rel=1e-6)
    for (mean, accuracy), begin, end in zip(means, (0, *ENDS), ENDS, strict=False):
        sizes = [*SIZES[begin:end]]
        sizes[-1] += SAMPLES - sum(sizes)
        assert mean == pytest.approx(sum(map(mul, sizes, losses[begin:end])) / SAMPLES, rel=1e-6)
        assert 0 < accuracy <= 1


def own_engine(step, trace):
    """An engine whose step is `step(model, optimizer, batch)`, its model and its loader."""
    model, loader = network(), DataLoader(Samples(), MICROBATCH)
    optimizer = variable_batch(SGD(model.parameters(), lr=0.1), loader, trace=trace)
    return VariableBatchEngine(lambda _, batch: step(model, optimizer, batch), optimizer), model, loader


def test_outputs_and_batches_of_an_update():
    """Means of numbers, rows put together, and the last one of anything else."""

    def step(model, optimizer, batch):
        optimizer.backward(cross_entropy(model(batch[0]), batch[1]))
        optimizer.step()
        return {"hits": torch.tensor(len(batch[0])), "all": ((float(len(batch[0])), batch[1]), "last")}

    engine, _, loader = own_engine(step, trace=[10] * 30)
    seen = []
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda: seen.append((engine.state.output, engine.state.batch)))
    engine.run(loader, max_epochs=1)
    output, batch = seen[0]
    (mean, rows), last = output["all"]
    assert float(output["hits"]) == mean == pytest.approx(5.0)
    assert (output["hits"].dtype, last) == (torch.float32, "last")
    assert torch.equal(rows, torch.cat([target for _, target in batch]))
    assert len(rows) == 10


# Refusals. -------------------------------------------------------------------------------------------------------


def test_what_is_refused():
    script = Script()
    arguments = script.model, script.inner, cross_entropy
    optimizer = variable_batch(script.inner, script.loader, trace=TRACE)
    with pytest.raises(RuntimeError, match=r"is step\(\) \d+, .* \(in Ignite: VariableBatchEngine"):
        Engine(lambda *_: optimizer.step()).run(script.loader)
    with pytest.raises(TypeError, match=r"the training's loader must be a DataLoader, got \[1, 2\]"):
        create_supervised_trainer(*arguments, loader=[1, 2], trace=TRACE)
    with pytest.raises(TypeError, match="deterministic"):
        create_supervised_trainer(*arguments, loader=script.loader, trace=TRACE, deterministic=True)
    with pytest.raises(TypeError, match="epoch_length"):
        script.trainer.run(script.loader, max_epochs=3, epoch_length=10)
    with pytest.raises(ValueError, match="a run must continue with its 203 samples, got 4; pass the loader"):
        script.trainer.run(DataLoader([1, 2, 3, 4], 8, shuffle=True), max_epochs=3)
    with pytest.raises(ValueError, match=r'the position in the training under "vbs", but this one has none'):
        script.trainer.load_state_dict(Engine(lambda engine, batch: None).state_dict())


@pytest.mark.filterwarnings("ignore:Data iterator can not provide data")
def test_a_run_ends_where_a_handler_hides_the_exceptions_of_every_update():
    """Ignite goes on with the next epoch, which is the rest of this one, and would end in the same exception."""
    errors = []

    def step(model, optimizer, batch):
        if optimizer.updates == 5 or len(errors) > 9:
            raise KeyError("on purpose")
        optimizer.backward(cross_entropy(model(batch[0]), batch[1]))
        optimizer.step()

    engine, _, loader = own_engine(step, trace=16)
    engine.add_event_handler(Events.EXCEPTION_RAISED, errors.append)
    engine.run(loader, max_epochs=3)
    assert [type(error) for error in errors] == [KeyError, RuntimeError]  # the update is not complete


@pytest.mark.parametrize("zeros", [1, 40])
def test_a_term_that_is_0_in_the_first_updates_is_warned_of_in_a_later_one(zeros):
    def loss(y_pred, y):
        return cross_entropy(y_pred, y) + (script.trainer.state.iteration > zeros) * y_pred.mean(0).square().sum()

    script = Script()
    script.trainer = create_supervised_trainer(script.model, script.inner, loss, loader=script.loader, trace=16)
    with pytest.warns(UserWarning, match=r"must be a mean over rows"):
        script.run(epochs=1 if zeros == 1 else 10)


# What else. ------------------------------------------------------------------------------------------------------


def test_the_example_runs_and_resumes(tmp_path, capsys):
    run_script("ignite_classifier.py", "--epochs", "2", "--folder", str(tmp_path))
    whole = capsys.readouterr().out.splitlines()
    run_script("ignite_classifier.py", "--epochs", "2", "--resume", str(tmp_path / "checkpoint_30.pt"))
    after = capsys.readouterr().out.splitlines()
    assert whole[1:] == after
    assert re.match(r"epoch 2: 40 updates, accuracy 0\.[89]", after[0])


def test_a_step_of_ones_own_is_not_checked_which_is_said(caplog):
    caplog.set_level("INFO", "variable_batch_size")
    Script(TrainerCase("sgd", tokens=True)).run(epochs=1)
    assert sum("not checked" in line and "the step is not Ignite's own" in line for line in caplog.messages) == 1
