"""What else transformers' Trainer does, with a variable batch size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import EarlyStoppingCallback, ProgressCallback, Trainer, TrainerCallback, TrainingArguments

import variable_batch_size as vbs
from helpers.transformers_jobs import EPS, LR, Classifier, Rows, Texts, gpt2, growing, trainer_of
from helpers.yardstick import ENDS, MAX_GRAD_NORM, SAMPLES, TRACE, UPDATES, by_hand, difference, network, weights
from variable_batch_size.integrations.transformers import VariableBatchMixin, VariableBatchTrainer

EXACT = 1e-12
CHECKPOINTING = "activation_checkpointing"  # its name since transformers 5.20
if CHECKPOINTING not in TrainingArguments.__dataclass_fields__:
    CHECKPOINTING = "gradient_checkpointing"


def expected(updates: int = UPDATES, **options: Any) -> Any:
    """The weights of the yardstick after some updates with AdamW and the root rule."""
    twin = network()
    inner = AdamW(twin.parameters(), lr=LR, weight_decay=0.0, eps=EPS)
    by_hand(twin, inner, max_grad_norm=MAX_GRAD_NORM, updates=updates, **options)
    return weights(twin)


@pytest.mark.parametrize(
    ("length", "updates"),
    [
        ({"max_steps": 5}, 5),
        ({"max_steps": 12}, 12),
        ({"max_steps": 30}, 30),
        ({"max_steps": 5, "trace": [2] * 20}, 5),  # within an epoch that the trace does not complete
        ({"max_steps": 20, "trace": [2] * 20}, 20),
        ({"num_train_epochs": 0.5}, 6),
        ({"num_train_epochs": 1.5}, 19),
        ({"num_train_epochs": 2}, 21),
        ({"sampler_options": {"max_samples": 300}}, 18 + 1),
        ({"sampler_options": {"max_updates": 14}}, 14),
        ({"trace": vbs.BatchTrace.parse("0:24 3:10 9:37", on_end="stop", steps=17)}, 17),
    ],
    ids=str,
)
def test_a_training_has_the_length_that_was_asked_for(tmp_path: Path, length: dict[str, Any], updates: int) -> None:
    trainer = trainer_of(tmp_path, lr_scheduler_type="linear", **length)
    trainer.train()
    optimizer = trainer.variable_optimizer
    assert trainer.state.global_step == trainer.state.max_steps == optimizer.updates == updates
    assert trainer.state.epoch == pytest.approx(optimizer.samples / SAMPLES)
    assert trainer.lr_scheduler.get_last_lr() == [0.0, 0.0]
    samples = trainer.state.log_history[-2]["samples"]
    assert samples == optimizer.samples


def test_an_epoch_is_as_long_as_others_if_max_steps_cut_it_short(tmp_path: Path) -> None:
    """Of 90 samples, 10 are dropped in each epoch."""
    short = {"trace": 16, "train_dataset": Rows(90), "dataloader_drop_last": True}
    trainer = trainer_of(tmp_path, **short, max_steps=12)
    trainer.train()
    epochs = [entry["epoch"] for entry in trainer.state.log_history[:-1]]
    assert epochs == pytest.approx([step / 5 for step in range(1, 13)])


class Counting(TrainerCallback):
    """Notes at which updates events came."""

    def __init__(self) -> None:
        self.epochs: list[tuple[int, float]] = []
        self.left: list[bool] = []  # epochs
        self.parts = self.steps = 0

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.epochs.append((state.global_step, state.epoch))
        self.left.append(control.should_epoch_stop)

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.parts += 1

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps += 1
        assert 0 < state.epoch <= 3


def test_events_come_once_an_update(tmp_path: Path) -> None:
    events = Counting()
    trainer = trainer_of(tmp_path, options={"callbacks": [events]})
    assert len(trainer.get_train_dataloader()) == ENDS[0]
    trainer.train()
    assert events.epochs == list(zip(ENDS, (1.0, 2.0, 3.0), strict=True))
    assert events.left == [False] * 3
    assert events.steps == UPDATES
    sizes = [entry["batch_size"] for entry in trainer.state.log_history[:-1]]
    assert events.parts == sum(-(-size // 8) - 1 for size in sizes)


class Lengths(TrainerCallback):
    """Notes how many updates the loader has, at the events of an epoch."""

    def __init__(self) -> None:
        self.found: list[int] = []

    def on_epoch_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any, **_: Any) -> None:
        self.found.append(len(train_dataloader))

    on_step_begin = on_step_end = on_epoch_end = on_train_end = on_epoch_begin


def test_the_loader_has_the_length_of_the_epoch_under_way(tmp_path: Path) -> None:
    lengths = Lengths()
    ends_with_it = vbs.BatchTrace.parse("0:24 3:10 9:37 12:9 18:50", on_end="error", steps=UPDATES)
    saves = {"trace": ends_with_it, "save_strategy": "steps", "save_steps": 14}
    trainer_of(tmp_path, **saves, options={"callbacks": [lengths]}).train()
    expected = [*[number for number in (11, 10, 5) for _ in range(2 * number + 2)], 5]
    assert lengths.found == expected
    again = Lengths()
    trainer = trainer_of(tmp_path, **saves, options={"callbacks": [again]})
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-14"))
    assert again.found == [10, *expected[-(2 * 7 + 1) - 13 :]]


class Bar(ProgressCallback):
    """Notes where its bar ended."""

    ended: Any = None

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self.ended = self.training_bar.n, self.training_bar.total
        super().on_train_end(*args, **kwargs)


def test_a_progress_bar_ends_at_its_end(tmp_path: Path) -> None:
    """Of an adaptive trace, too, whose number of updates is at first an estimate."""
    bar = Bar()
    trainer = trainer_of(tmp_path, trace=growing(), options={"callbacks": [bar]})
    trainer.train()
    assert bar.ended == (trainer.state.global_step, trainer.state.global_step)


class LogsEarly(TrainerCallback):
    """Logs before the first update."""

    trainer: Any = None

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.trainer.log({"learning_rate": 1.0})


def test_a_log_before_the_first_update_is_as_it_was_given(tmp_path: Path) -> None:
    early = LogsEarly()
    trainer = early.trainer = trainer_of(tmp_path, max_steps=2, options={"callbacks": [early]})
    for _ in range(2):
        trainer.train()
        assert trainer.state.log_history[0] == {"learning_rate": 1.0, "epoch": 0.0, "step": 0}


def test_evaluation_saving_and_the_best_model(tmp_path: Path) -> None:
    each = {"eval_strategy": "epoch", "save_strategy": "epoch", "logging_strategy": "epoch"}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    trainer = trainer_of(tmp_path, options={"eval_dataset": Rows(40)}, **each, **best)
    trainer.train()
    evaluated = [(entry["step"], entry["epoch"]) for entry in trainer.state.log_history if "eval_loss" in entry]
    assert evaluated == list(zip(ENDS, (1.0, 2.0, 3.0), strict=True))
    logged = [entry["step"] for entry in trainer.state.log_history if "loss" in entry]
    assert logged == list(ENDS)
    losses = {entry["step"]: entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry}
    assert trainer.state.best_global_step == min(losses, key=losses.__getitem__)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(min(losses.values()))
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [f"checkpoint-{end}" for end in ENDS]
    model = Classifier()
    again = trainer_of(tmp_path / "again", model, options={"eval_dataset": Rows(40)}, **each)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-11"))
    assert difference(model, expected()) < EXACT


def test_early_stopping(tmp_path: Path) -> None:
    stop = EarlyStoppingCallback(early_stopping_patience=1, early_stopping_threshold=1e9)
    each = {"eval_strategy": "steps", "eval_steps": 4, "save_strategy": "steps", "save_steps": 4}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    options = {"eval_dataset": Rows(40), "callbacks": [stop]}
    model = Classifier()
    trainer = trainer_of(tmp_path, model, options=options, **each, **best)
    trainer.train()
    assert trainer.state.global_step == trainer.variable_optimizer.updates == 8
    assert difference(model, expected(trainer.state.best_global_step)) < EXACT
    trainer.train()
    assert trainer.state.global_step == trainer.variable_optimizer.updates < UPDATES


class LeavesAnEpoch(TrainerCallback):
    """Leaves epochs after 5 updates."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        control.should_epoch_stop = state.global_step == 5
        return control


@pytest.mark.filterwarnings("ignore:set_epoch.* skips")
def test_a_callback_may_leave_an_epoch(tmp_path: Path) -> None:
    events = Counting()
    trainer = trainer_of(tmp_path, options={"callbacks": [LeavesAnEpoch(), events]})
    trainer.train()
    assert events.left == [True, False, False]
    assert trainer.state.epoch == 3
    assert trainer.state.global_step == 5 + (ENDS[1] - ENDS[0]) + (ENDS[2] - ENDS[1])
    assert trainer.variable_optimizer.updates == UPDATES  # with those that were left out


@pytest.mark.parametrize(
    ("options", "close"),
    [
        ({"dataloader_num_workers": 2, "dataloader_persistent_workers": True}, EXACT),
        ({"train_sampling_strategy": "sequential"}, None),
        ({"dataloader_drop_last": True}, None),
        ({"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"}, None),
        ({"data_seed": 7}, None),
        ({"max_grad_norm": 0.0}, None),
        ({"ddp_find_unused_parameters": True}, EXACT),
    ],
    ids=str,
)
def test_settings_of_the_trainer(tmp_path: Path, options: dict[str, Any], close: float | None) -> None:
    model = Classifier()
    trainer = trainer_of(tmp_path, model, options={"eval_dataset": Rows(20)}, **options)
    trainer.train()
    dropped = "dataloader_drop_last" in options
    assert trainer.state.global_step == trainer.variable_optimizer.updates == (UPDATES - 3 if dropped else UPDATES)
    assert trainer.state.epoch == 3
    if close is not None:
        assert difference(model, expected()) < close
    assert trainer.variable_optimizer.sampler.seed == options.get("data_seed", 0)


def test_a_compiled_model(tmp_path: Path) -> None:
    model = Classifier()
    compiled = {"torch_compile": True, "torch_compile_backend": "eager", "sampler_options": {"fixed_shape": True}}
    trainer_of(tmp_path, model, max_steps=4, **compiled).train()
    assert difference(model, expected(4)) < EXACT


@pytest.mark.parametrize(
    "options",
    [
        {"bf16": True},
        {CHECKPOINTING: True},
        {"bf16": True, CHECKPOINTING: True, "rule": "adamscale"},
    ],
    ids=str,
)
def test_a_language_model_in_half_precision_and_with_checkpointing(tmp_path: Path, options: dict[str, Any]) -> None:
    trainer = trainer_of(tmp_path, gpt2().float(), train_dataset=Texts(), num_train_epochs=1, **options)
    result = trainer.train()
    assert trainer.state.global_step == trainer.variable_optimizer.updates == ENDS[0]
    assert 3 < result.training_loss < 5


def test_a_dataset_of_datasets_with_other_columns(tmp_path: Path) -> None:
    rows = [Rows()[number] for number in range(SAMPLES)]
    columns = {"x": [row["x"].tolist() for row in rows], "labels": [int(row["labels"]) for row in rows]}
    own = datasets.Dataset.from_dict({**columns, "comment": ["none"] * SAMPLES})
    model = Classifier().float()
    trainer_of(tmp_path, model, train_dataset=own).train()
    assert difference(model.double(), expected()) < 1e-4


class WithALoader(Trainer):
    """A trainer with a loader of its own, and with a loss of its own."""

    losses = 0

    def get_train_dataloader(self) -> Any:
        return StatefulDataLoader(self.train_dataset, batch_size=3, shuffle=True, num_workers=0)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.losses += 1
        return super().compute_loss(model, inputs, *args, **kwargs)


class VariableWithALoader(VariableBatchMixin, WithALoader):
    """The changed line."""


def test_a_subclass_keeps_its_loader_and_its_loss(tmp_path: Path) -> None:
    model = Classifier()
    trainer = trainer_of(tmp_path, model, kind=VariableWithALoader)
    assert isinstance(trainer.get_train_dataloader().loader, StatefulDataLoader)
    trainer.train()
    assert difference(model, expected()) < EXACT
    assert trainer.losses > UPDATES


def test_a_look_at_the_loader_before_the_training_changes_nothing(tmp_path: Path) -> None:
    trainer, twin = trainer_of(tmp_path), trainer_of(tmp_path)
    batch = next(iter(trainer.get_train_dataloader()))
    assert [len(part["x"]) for part in batch] == [8, 8, 8]
    assert trainer.model(**batch[0])["loss"] > 0
    with pytest.raises(TypeError, match=r"is an update, the list of its microbatches, .*; take batch\[0\] to look at"):
        trainer.model(**batch)
    sizes = [sum(len(part["x"]) for part in batch) for batch in trainer.get_train_dataloader()]
    assert (len(sizes), sum(sizes)) == (ENDS[0], SAMPLES)
    trainer.train()
    twin.train()
    assert difference(trainer.model.net, weights(twin.model.net)) == 0.0


def test_optimizers_and_schedules_of_the_user(tmp_path: Path) -> None:
    model, twin = Classifier(), network()
    inner, twin_inner = SGD(model.parameters(), LR), SGD(twin.parameters(), LR)
    trainer = trainer_of(tmp_path, model, options={"optimizers": (inner, StepLR(inner, 10, gamma=0.5))})
    trainer.train()
    by_hand(twin, twin_inner, max_grad_norm=MAX_GRAD_NORM, scheduler=StepLR(twin_inner, 10, gamma=0.5))
    assert difference(model.net, weights(twin)) < EXACT


def test_model_init_and_another_train(tmp_path: Path) -> None:
    def create(folder: Any, _: Any, **options: Any) -> Any:
        return VariableBatchTrainer(None, options.pop("args"), model_init=Classifier, **options)

    from helpers.transformers_jobs import arguments

    own = {"train_dataset": Rows(), "trace": TRACE, "rule": "root", "ref_batchsize": 16}
    trainer = create(None, None, args=arguments(tmp_path), sampler_options={"fixed_shape": False}, **own)
    for _ in range(2):
        trainer.train()
        assert difference(trainer.model, expected()) < EXACT
