"""Each private name of transformers and trl is in one file, and a promise breaks without it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from transformers import Trainer
from trl import SFTTrainer

from helpers.private_names import private_names
from helpers.transformers_jobs import Classifier, SavesAt, Texts, arguments, gpt2, sft_trainer, trainer_of
from helpers.yardstick import difference, in_processes, weights
from variable_batch_size.integrations.transformers.internals import TrainerInternals

NAMES = {
    "_init_training_state",
    "_load_optimizer_and_scheduler",
    "_loss_shifts_labels",
    "_metrics",
    "_prepare_inputs",
    "_save_optimizer_and_scheduler",
    "_total_train_tokens",
    "_track_num_input_tokens",
    "_train_batch_size",
}


def test_private_names_are_in_one_file(tmp_path: Path) -> None:
    ours, plain = vars(trainer_of(tmp_path)), vars(Trainer(Classifier(), arguments(tmp_path)))
    of_objects = plain.keys() | (vars(sft_trainer(tmp_path)).keys() - (ours.keys() - plain.keys()))
    found = private_names("transformers", [SFTTrainer, Accelerator, type("Theirs", (), dict.fromkeys(of_objects))])
    assert found == {"internals.py": NAMES}


@contextmanager
def without(name: str) -> Iterator[None]:
    """Leave out a method of the integration within a block."""
    method = vars(TrainerInternals)[name]
    delattr(TrainerInternals, name)
    try:
        yield
    finally:
        setattr(TrainerInternals, name, method)


def test_a_training_resumes_in_the_right_epoch(tmp_path: Path) -> None:
    """By `_init_training_state`."""
    trainer_of(tmp_path, options={"callbacks": [SavesAt()]}).train()
    resumed = trainer_of(tmp_path / "again")
    with without("_init_training_state"), pytest.raises(AttributeError, match="batch_sampler"):  # to skip batches
        resumed.train(str(tmp_path / "checkpoint-14"))


def test_tokens_are_counted_once(tmp_path: Path) -> None:
    """By `_track_num_input_tokens`: Trainer takes the list of microbatches for a batch without tokens."""
    own = {"include_num_input_tokens_seen": "all", "max_steps": 2, "train_dataset": Texts()}
    trainer = trainer_of(tmp_path, gpt2(), **own)
    with without("_track_num_input_tokens"):
        trainer.train()
    assert trainer.state.num_input_tokens_seen == 0
    trainer = trainer_of(tmp_path, gpt2(), **own)
    trainer.train()
    assert trainer.state.num_input_tokens_seen == trainer.variable_optimizer.samples * Texts().ids.shape[1]


def test_a_checkpoint_of_another_training_is_told(tmp_path: Path) -> None:
    """By `_load_optimizer_and_scheduler`."""
    trainer_of(tmp_path, max_steps=5, save_steps=5, save_strategy="steps").train()
    message = "resume from a checkpoint of this training, or begin a new one with the model of"
    for context, told in (nullcontext(), True), (without("_load_optimizer_and_scheduler"), False):
        trainer = trainer_of(tmp_path / "other", seed=3)
        with context, pytest.raises(ValueError, match="seed was 0 and is 3") as caught:
            trainer.train(str(tmp_path / "checkpoint-5"))
        assert (message in str(caught.value)) is told


def sharded(folder: Path) -> None:
    """Save with the method left out: torch steps the optimizer, which is not in a step."""
    from helpers.transformers_sharded_jobs import train_sharded

    saves = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    with without("_save_optimizer_and_scheduler"):
        train_sharded(folder, Classifier(), **saves)
    assert not list(folder.glob("checkpoint-2/variable_batch.pt"))
    train_sharded(folder / "own", Classifier(), **saves)
    assert list(folder.glob("own/checkpoint-2/variable_batch.pt"))


def test_a_sharded_state_has_the_position(tmp_path: Path) -> None:
    """By `_save_optimizer_and_scheduler`."""
    in_processes(sharded, 1, tmp_path)


def test_the_first_label_of_a_row_does_not_count(tmp_path: Path) -> None:
    """By `_loss_shifts_labels`; microbatches are those of `_train_batch_size`, on the device by `_prepare_inputs`."""
    trained = []
    for shifts in True, False:
        model = gpt2()
        trainer = trainer_of(tmp_path, model, train_dataset=Texts(), optim="sgd", max_steps=3, max_grad_norm=0)
        assert trainer._loss_shifts_labels
        trainer._loss_shifts_labels = shifts
        trainer.train()
        trained.append(weights(model))
        assert trainer.variable_optimizer.sampler.plan.minibatch_size == trainer.args.per_device_train_batch_size
        assert trainer.on_device({"x": torch.ones(1)})["x"].device == trainer.args.device
    assert difference(model, trained[0]) > 1e-6


def test_the_logs_of_trl_without_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By `_metrics` and `_total_train_tokens`: the forwards of the check would be among them."""
    from variable_batch_size.integrations.transformers import loss_check

    monkeypatch.setattr(loss_check, "logged_by_loss", lambda _: {})
    trainer = sft_trainer(tmp_path, max_steps=1)
    assert {"_metrics", "_total_train_tokens"} <= vars(trainer).keys()
    trainer.train()
    assert trainer._metrics["eval"] != {}
