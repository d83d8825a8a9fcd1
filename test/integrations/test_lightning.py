"""A script of Lightning around our strategies: the laws of all trainers, and what is Lightning's own."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from conformance import Conformance
from lightning.pytorch import callbacks
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.trainer.connectors import accelerator_connector
from lightning.pytorch.tuner import Tuner
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, WeightedRandomSampler
from torchmetrics import CatMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassPrecision

from helpers.lightning_adapter import (
    ALLOWED,
    Evaluated,
    Lightning,
    Module,
    Record,
    SaveAt,
    loader,
    strategy_for,
    trainer,
)
from helpers.pages import DOCS
from helpers.trainings import TrainerCase, expected
from helpers.yardstick import ENDS, SAMPLES, UPDATES, Samples, mean_loss, network, samples, weights

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in ALLOWED]
PLAIN = TrainerCase("sgd")


class TestLightning(Conformance):
    adapter = Lightning()
    features = frozenset({"to the last bit", "controller", "tokens", "looks at losses", "evaluation", "ddp", "fsdp2"})


def fit(module=None, data=None, ckpt_path=None, **options):
    run = trainer(**options)
    data = data if isinstance(data, dict) else {"train_dataloaders": loader() if data is None else data}
    run.fit(module or Module(PLAIN), **data, ckpt_path=None if ckpt_path is None else str(ckpt_path))
    return run


def assert_trained(module, updates=UPDATES):
    torch.testing.assert_close(weights(module.net), expected(PLAIN, updates=updates).weights, rtol=0, atol=1e-12)


@pytest.mark.parametrize("every", [1.0, 4])
def test_epochs_have_unequal_lengths(every):
    record, module = Record(), Evaluated(PLAIN)
    data = {"train_dataloaders": loader(), "val_dataloaders": DataLoader(Samples(), 50)}
    run = fit(module, data, callbacks=[record], val_check_interval=every)
    assert record.ends == [*ENDS]
    assert (run.global_step, run.current_epoch, run.strategy.samples) == (UPDATES, 3, 3 * SAMPLES)
    assert len(module.evaluations) == (3 if every == 1 else 2 + 2 + 1)
    assert_trained(module)


@pytest.mark.parametrize("steps", [None, 20])
def test_a_training_that_max_steps_has_ended_resumes_in_its_epoch(steps, tmp_path):
    fit(max_steps=15).save_checkpoint(tmp_path / "part.ckpt")
    module = Module(PLAIN)
    run = fit(module, ckpt_path=tmp_path / "part.ckpt", max_steps=steps or -1)
    assert run.global_step == (steps or UPDATES)
    assert_trained(module, run.global_step)


def test_a_trainer_that_resumes_twice_trains_as_many_epochs_again(tmp_path):
    fit(max_steps=3).save_checkpoint(tmp_path / "part.ckpt")
    run = trainer()
    for _ in range(2):
        module = Module(PLAIN)
        run.fit(module, loader(), ckpt_path=str(tmp_path / "part.ckpt"))
        assert run.global_step == UPDATES
        assert_trained(module)
    run.fit_loop.max_epochs = 5  # which the user asks for
    run.fit(Module(PLAIN), loader(), ckpt_path=str(tmp_path / "part.ckpt"))
    assert run.strategy.samples == 5 * SAMPLES


def test_a_loader_may_have_a_batch_sampler_of_torch():
    module = Module(PLAIN)
    given = loader()
    batches = BatchSampler(given.sampler, given.batch_size, drop_last=False)
    fit(module, DataLoader(given.dataset, batch_sampler=batches, collate_fn=given.collate_fn))
    assert_trained(module)


@pytest.mark.parametrize("hook", ["setup", "configure_optimizers"])
def test_the_number_of_updates_is_that_of_the_plan(hook):
    def ask(**_):
        assert module.trainer.estimated_stepping_batches

    module = Module(PLAIN)
    setattr(module, hook, ask)
    with pytest.raises(RuntimeError, match=r"must come from the plan, .* pass sampler.plan.epoch"):
        fit(module)


def test_the_learning_rate_finder_and_loaders_that_are_made_anew(tmp_path):
    class Tuned(Module):
        lr = 0.1

        def train_dataloader(self):
            return loader()

    module = Tuned(PLAIN)
    run = trainer(default_root_dir=tmp_path)
    found = Tuner(run).lr_find(module, num_training=20, update_attr=False)
    assert found is not None
    assert (len(found.results["lr"]), run.global_step) == (20, 0)
    finder = callbacks.LearningRateFinder(num_training_steps=20, update_attr=False)
    trainer(default_root_dir=tmp_path, callbacks=[finder], reload_dataloaders_every_n_epochs=1).fit(module)
    assert_trained(module)


class Watched(Module):
    """A module that logs a mean over updates, as the page says."""

    gradient: Any = None

    def training_step(self, batch, batch_idx):
        return {"loss": super().training_step(batch, batch_idx), "log": {"x": batch[0].mean()}}

    def on_before_optimizer_step(self, optimizer):
        self.gradient = self.gradient or [p.grad.clone() for p in self.net.parameters() if p.grad is not None]


def test_logs_are_means_over_updates_and_hooks_see_whole_gradients(tmp_path):
    module, monitor = Watched(TrainerCase("sgd", schedule="step")), callbacks.LearningRateMonitor("step")
    run = fit(module, logger=CSVLogger(tmp_path), callbacks=[monitor], log_every_n_steps=2, gradient_clip_val=9.0)
    rows = np.genfromtxt(next(tmp_path.rglob("metrics.csv")), delimiter=",", names=True)
    rows = rows[~np.isnan(rows["vbsglobal_batch_size"])]
    order = run.optimizers[0].sampler.batches.order(0)(np.arange(48))  # of two updates
    assert [*rows["step"]] == [*range(1, UPDATES, 2)]
    facts = [rows[f"vbs{name}"][0] for name in ("global_batch_size", "samples", "lr_effective")]
    assert facts == pytest.approx([24, 48, 0.1 * (24 / 16) ** 0.5])
    assert rows["vbsgrad_norm"].min() > 0
    assert rows["x_step"][0] == pytest.approx(float(samples()[0][order[24:]].mean()), rel=1e-6)
    assert [*monitor.lrs] == ["lr-SGD"]
    twin = network()
    mean_loss(twin, order[:24]).backward()
    torch.testing.assert_close(module.gradient, [p.grad for p in twin.parameters()], rtol=1e-12, atol=1e-15)


@pytest.mark.filterwarnings("ignore:`?.fit")  # which looks for a last checkpoint
def test_an_exception_loses_nothing(tmp_path):
    class Failing(Module):
        calls = 0

        def training_step(self, batch, batch_idx):
            self.calls += 1
            if self.calls == 20:  # within an update
                raise KeyError("on purpose")
            return super().training_step(batch, batch_idx)

    keeper, module = callbacks.OnExceptionCheckpoint(tmp_path), Module(PLAIN)
    with pytest.raises(KeyError, match="on purpose"):
        fit(Failing(PLAIN), callbacks=[keeper], enable_checkpointing=True)
    fit(module, ckpt_path=keeper.ckpt_path)
    assert_trained(module)


def test_float16_skips_updates_and_counts_them():
    scaler, module = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=5), Module(PLAIN)
    module.net.to(torch.float32)[0].register_forward_pre_hook(lambda _, inputs: (inputs[0].float(),))
    run = fit(module, plugins=[MixedPrecision("16-mixed", "cpu", scaler)], gradient_clip_val=0.5)
    assert run.global_step == UPDATES
    assert scaler.get_scale() < 2.0**40
    assert torch.isfinite(weights(module.net)).all()


def test_one_process_is_that_of_a_notebook_and_shuffles_unless_told(monkeypatch):
    monkeypatch.setattr(accelerator_connector, "_IS_INTERACTIVE", True)
    run = fit(max_steps=1, strategy=strategy_for(sampler_options={"shuffle": False}))
    assert not run.optimizers[0].sampler.shuffle
    assert not torch.distributed.is_initialized()
    module = Evaluated(PLAIN)
    run.validate(module, DataLoader(Samples(), 50), verbose=False)
    assert len(module.evaluations) == 1


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_loader_says_whether_samples_are_shuffled(shuffle):
    module = Evaluated(PLAIN)
    run = trainer(max_steps=1)
    run.fit(module, DataLoader(Samples(), 8, shuffle=shuffle), DataLoader(Samples(), 50))
    assert run.optimizers[0].sampler.shuffle == shuffle
    assert run._accelerator_connector.use_distributed_sampler  # of evaluations


class Two(pl.LightningModule):
    """Two networks with an optimizer each: `order` is "backwards first", or one that is refused."""

    def __init__(self, order="backwards first"):
        super().__init__()
        self.first, self.second, self.order = network(), network(), order
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizers = self.optimizers(use_pl_optimizer=self.order == "counted")
        schedulers = self.lr_schedulers()
        losses = [torch.nn.functional.cross_entropy(net(batch[0]), batch[1]) for net in (self.first, self.second)]
        for name, optimizer, loss in zip(("first", "second"), optimizers, losses, strict=True):
            self.manual_backward(loss)
            if self.order == "backwards first":
                optimizer.log(**{name: loss})
            if self.order == "step first":
                optimizer.step()
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            if optimizer.step():
                scheduler.step()

    def configure_optimizers(self):
        optimizers = [SGD(self.first.parameters(), 0.1, 0.9), AdamW(self.second.parameters(), 0.01)]
        return optimizers, [StepLR(optimizer, 4, 0.8) for optimizer in optimizers]


@pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization")
def test_two_optimizers(tmp_path, caplog):
    module, again = Two(), Two()
    caplog.set_level("INFO", "variable_batch_size")
    run = fit(module, callbacks=[SaveAt(tmp_path, [28])], enable_checkpointing=True)
    assert run.global_step == 2 * UPDATES  # Lightning counts the steps of both
    logged = [optimizer.logged[name] for name, optimizer in zip(("first", "second"), run.optimizers, strict=True)]
    assert [run.callback_metrics[f"{name}_step"] for name in ("first", "second")] == pytest.approx(
        [*map(float, logged)], rel=1e-6
    )
    assert sum("not checked" in line and "(manual optimization)" in line for line in caplog.messages) == 1
    for net, inner in (module.first, "sgd"), (module.second, "adamw"):
        by_hand = expected(TrainerCase(inner, schedule="step")).weights
        torch.testing.assert_close(weights(net), by_hand, rtol=0, atol=1e-12)
    fit(again, ckpt_path=tmp_path / "at-28.ckpt")
    assert torch.equal(weights(again), weights(module))


def test_an_argument_that_neither_lightning_nor_torch_has_is_told():
    for wrong in {"rules": "root"}, {"ref_batch_size": 32}, {"minibatch_size": 8}:
        with pytest.raises(
            TypeError, match=rf"VariableBatchStrategy has no {next(iter(wrong))}; .* pass trace, rule, "
        ):
            strategy_for(**wrong)
    strategy_for(find_unused_parameters=True, start_method="fork")


class Sums(Module):
    def training_step(self, batch, batch_idx):
        return self.case.loss(self.net(batch[0]), batch[1], "sum")


def test_the_mean_of_sums_is_logged():
    losses = []
    for kind, options in (Module, {}), (Sums, {"optimizer_options": {"reduction": "sum"}}):
        record = Record()
        trainer(strategy=strategy_for(**options), callbacks=[record], max_epochs=1).fit(kind(), loader())
        losses.append(record.losses)
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_the_look_at_the_loss_leaves_no_traces():
    class Counting(Module):
        def __init__(self):
            super().__init__(PLAIN)
            self.calls, self.rows, self.accuracy = 0, list[int](), MulticlassAccuracy(5)

        def training_step(self, batch, batch_idx):
            self.calls += 1
            self.rows.append(len(batch[1]))
            self.accuracy(self.net(batch[0]), batch[1])
            self.log("rows", float(len(batch[1])), reduce_fx="sum", on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

    module = Counting()
    run = fit(module, max_epochs=1)
    assert sum(module.rows) == run.callback_metrics["rows"] == SAMPLES
    assert (module.calls, module.accuracy.update_count) == (len(module.rows), len(module.rows))


class Images(pl.LightningModule):
    """An autoencoder of images of unequal sizes, in lists, whose loss is a mean over them."""

    def __init__(self):
        super().__init__()
        self.net, self.zeroed = torch.nn.Conv2d(3, 3, 1).double(), list[int]()

    def training_step(self, batch, batch_idx):
        return torch.stack([(self.net(one) - one).square().mean() for one in batch]).mean()

    def on_before_zero_grad(self, optimizer):
        self.zeroed.append(self.trainer.global_step)

    def configure_optimizers(self):
        return SGD(self.parameters(), 0.1)


@pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`")
def test_images_of_unequal_sizes_and_hooks_that_run_once_an_update(caplog):
    images = [torch.randn(3, 4 + index % 3, 4, dtype=torch.float64) for index in range(SAMPLES)]
    module = Images()
    fit(module, DataLoader(images, 4, collate_fn=list), max_epochs=1)
    assert module.zeroed == [*range(ENDS[0])]
    assert not [line for line in caplog.messages if "not checked" in line]


class Measuring(Module):
    """Has a child with metrics that cannot be copied."""

    def __init__(self):
        super().__init__(PLAIN)
        self.child = torch.nn.Module()
        self.child.lock = threading.Lock()
        self.child.accuracy, self.child.losses = MulticlassAccuracy(5), CatMetric()
        self.child.both = MetricCollection([MulticlassAccuracy(5), MulticlassPrecision(5)])

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        guessed, target = torch.arange(10) % 5, torch.arange(10) // 2
        self.child.accuracy.update(guessed, target)
        self.child.both(guessed, target)
        self.child.losses(loss.detach())
        return loss


def test_the_check_adds_nothing_to_metrics(caplog):
    caplog.set_level("INFO", "variable_batch_size")
    modules = []
    for check in True, False:
        modules.append(Measuring())
        fit(modules[-1], max_epochs=1, strategy=strategy_for(PLAIN, check_loss=check))
    checked, unchecked = (module.child for module in modules)
    assert torch.equal(checked.losses.compute(), unchecked.losses.compute())
    assert len(checked.losses.compute()) == checked.accuracy._update_count > ENDS[0]
    assert torch.equal(checked.accuracy.tp, unchecked.accuracy.tp)
    assert checked.both.compute() == unchecked.both.compute()
    assert torch.equal(checked.both.MulticlassAccuracy.tp, unchecked.both.MulticlassAccuracy.tp)
    assert "not checked" not in caplog.text


class Stream(IterableDataset[int]):
    def __iter__(self):
        return iter(range(SAMPLES))


def with_method(name, method):
    return type("Other", (Module,), {name: method})(PLAIN)


class Normalized(Module):
    """It has a batch normalization that the ranks share."""

    def __init__(self, case):
        super().__init__(case)
        self.norm = torch.nn.SyncBatchNorm(2)


REFUSED = [
    ({"accumulate_grad_batches": 4}, "`accumulate_grad_batches` must be 1, got 4; let the trace"),
    ({"val_check_interval": 0.5}, "be 1.0, a number of updates or a time, got 0.5; pass a number"),
    ({"callbacks": [callbacks.GradientAccumulationScheduler({0: 2})]}, "Scheduler; let the"),
    ({"module": with_method("configure_gradient_clipping", lambda *_: None)}, "got that of Other; pass `gradient_clip"),
    ({"module": with_method("training_step", lambda self, batch, i: None)}, "a loss for every microbatch, got None"),
    ({"module": with_method("optimizer_step", lambda *args: args[-1]())}, r"must call optimizer.step\(closure="),
    ({"module": with_method("on_train_batch_start", lambda self, batch, i: -(i == 3))}, "updates of epoch 0 are left"),
    ({"module": Two("counted")}, r"must step by self.optimizers\(use_pl_optimizer=False\)"),
    ({"module": Two("step first")}, r"all backward passes of a training_step must run before its first step\(\)"),
    (
        {"module": Normalized(PLAIN), "callbacks": [callbacks.StochasticWeightAveraging(0.01)]},
        "of a model without batch normalization",
    ),
    ({"data": DataLoader(Stream(), batch_size=8)}, "the dataset must have an index.*pass a map-style dataset"),
    ({"data": [loader(), loader()]}, "must be one DataLoader"),
    ({"data": DataLoader(Samples(), 8, sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES))}, "once an epoch"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_what_is_refused(options, message):
    with pytest.raises((TypeError, ValueError, RuntimeError), match=message):
        fit(**options)


def test_a_second_fit_and_a_checkpoint_without_a_position_are_refused(tmp_path):
    run = fit(max_steps=3)
    run.fit_loop.epoch_loop.max_steps = 6
    with pytest.raises(RuntimeError, match=r"a second fit\(\) must continue with ckpt_path, .* has made 3 updates"):
        run.fit(Module(PLAIN), loader())
    fit(strategy="auto", max_steps=3).save_checkpoint(tmp_path / "plain.ckpt")
    with pytest.raises(ValueError, match=r"must be a checkpoint of this strategy, .*, got version None"):
        fit(ckpt_path=tmp_path / "plain.ckpt")


def test_lightning_starts_the_processes(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from helpers.lightning_adapter import Module, loader, trainer\n"
        "run = trainer(devices=2)\nrun.fit(Module(), loader())\n"
        "print(f'{run.world_size} {run.global_step}\\n', end='')\n"  # in one write
    )
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, script], timeout=120, check=False, **options)
    assert done.stdout.splitlines().count("2 26") == 2, done.stderr


def test_the_example_runs(tmp_path):
    script = DOCS.parent / "examples" / "trainers" / "lightning_classifier.py"
    options = {"cwd": tmp_path, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-W", "ignore", script], timeout=120, check=False, **options)
    (line,) = (line for line in done.stdout.splitlines() if "updates, accuracy" in line)
    assert line.startswith("139 updates")
    assert float(line.split()[-1]) > 0.9
