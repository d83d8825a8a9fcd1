"""Does a training of transformers' Trainer come out the same with ours, setting by setting?

Compared are the weights, the logs and the state, the events of callbacks, the warnings, and the files, with the
weights, schedules and states in checkpoints. What docs/trainers/transformers.md says of all trainings is left out:
`on_substep_end`, the added `batch_size` and `samples` of a log, and `train_batch_size` of a state, the microbatch.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import transformers as hf
from transformers import DataCollatorForTokenClassification, EarlyStoppingCallback

import settings_transformers as own
from differential import EXACT, TRAINED, Reader, Setting, compare
from helpers.transformers_jobs import Rows, gpt2, sum_in_float64, tokenizer
from settings_transformers import Asks, Net


def of(options: dict[str, Any] | None = None, tolerance: float = EXACT, **arguments: Any) -> Setting:
    """Return a setting of options of `settings_transformers.train`, and of training arguments."""
    return Setting(partial(own.train, {**(options or {}), "args": arguments}), tolerance=tolerance)


def texts(model: Any, options: dict[str, Any] | None = None, **arguments: Any) -> Setting:
    """Return a setting of a language model; those of transformers compute losses in float32."""
    test = {"test": lambda: own.texts(100, 20)}
    return of({"data": own.texts, **test, "model": model, **(options or {})}, ROUNDED, **arguments)


def padded(number: str, collator: Any = None, **options: Any) -> Setting:
    """Return a setting with texts that a collator pads."""
    more = {"data_collator": collator or DataCollatorForTokenClassification(tokenizer())}
    data = {"data": own.unpadded, "test": own.unpadded, **options}
    return of({**data, "model": own.bert, "more": more}, 1e-4, include_num_input_tokens_seen=number)


def calls(*callbacks: Any) -> dict[str, Any]:
    """Return an option with callbacks."""
    return {"more": {"callbacks": list(callbacks)}}


ROUNDED = 2e-5  # of sums in float32
STEPS = {"eval_strategy": "steps", "eval_steps": 4, "save_strategy": "steps", "save_steps": 4}
EPOCHS = {"eval_strategy": "epoch", "save_strategy": "epoch", "logging_strategy": "epoch"}
BEST = {"load_best_model_at_end": True, "metric_for_best_model": "accuracy"}
BEST_SAVED = {**STEPS, **BEST, "save_strategy": "best", "eval_delay": 3, "eval_on_start": True, "save_total_limit": 1}
METRICS = {"more": {"compute_metrics": own.accuracy}}
STOPPING = {"more": {"compute_metrics": own.accuracy, "callbacks": [EarlyStoppingCallback(1, 1e9)]}}
PATIENT = {"more": {"compute_metrics": own.accuracy, "callbacks": [EarlyStoppingCallback(3, 1e9)]}}
FLOATS = {"model": lambda: Net().float(), "data": own.columns, "test": own.columns}
DECAY = {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 3}, "warmup_steps": 2}
MIN_LR = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 0.01}}
RESTARTS = {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 2}}
PLATEAU = {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0}}
WORKERS = {"dataloader_num_workers": 2, "dataloader_persistent_workers": True}
IN_FLOAT64 = {"more": {"compute_loss_func": sum_in_float64}}
WITHOUT_FIRST = {"data": lambda: own.texts(first_label=False), "test": lambda: own.texts(100, 20, first_label=False)}
T5 = {"kind": hf.Seq2SeqTrainer, "kind_of_args": hf.Seq2SeqTrainingArguments}
ASKED = Asks(should_log=2, should_evaluate=3, should_save=5, should_training_stop=9)
SAVES_AND_STOPS = Asks(should_save=7, should_training_stop=7)
CUT_SHORT = "the loader of the epoch that max_steps cuts short has the length of what is left"
DRAWS = "random numbers are drawn for each microbatch"
PADDING = "a microbatch is padded to its own longest text, with fewer tokens"
SETTINGS = {
    "the defaults, a log each update": of(),
    "logging_steps 5, logging_first_step, cosine, warmup_steps 4": of(
        logging_steps=5, logging_first_step=True, lr_scheduler_type="cosine", warmup_steps=4
    ),
    "logging_steps 0.25, constant_with_warmup, warmup_steps 0.2": of(
        logging_steps=0.25, warmup_steps=0.2, lr_scheduler_type="constant_with_warmup"
    ),
    "logging_strategy no, save_steps 0.3, prediction_loss_only": of(
        logging_strategy="no", save_strategy="steps", save_steps=0.3, prediction_loss_only=True, eval_strategy="epoch"
    ),
    "an infinite loss, filtered": of({"model": lambda: Net(infinite=True)}),
    "an infinite loss, logged": of({"model": lambda: Net(infinite=True)}, logging_nan_inf_filter=False),
    "save_total_limit 2, polynomial": of(**STEPS, save_total_limit=2, lr_scheduler_type="polynomial"),
    "load_best_model_at_end by epochs, compute_metrics": of(METRICS, **EPOCHS, **BEST),
    "save_strategy best, eval_on_start, eval_delay, save_total_limit 1": of(METRICS, **BEST_SAVED),
    "early stopping": of(STOPPING, **STEPS, **BEST),
    "two datasets of evaluations": of({"test": lambda: {"a": Rows(20), "b": Rows(33)}}, **STEPS),
    "resume within an epoch, cosine_with_restarts": of(
        {"resume": 8}, **STEPS, lr_scheduler_type="cosine_with_restarts"
    ),
    "resume at the end of an epoch, more epochs": of({"resume": 12, "then": {"num_train_epochs": 4}}, **EPOCHS),
    "resume with ignore_data_skip": of({"resume": 8, "then": {"ignore_data_skip": True}}, **STEPS).because(
        "a resumed epoch goes on, where Trainer begins it again"
    ),
    "resume where a callback saved and stopped": of(
        {**calls(Asks(should_save=7, should_training_stop=7)), "resume": 7}
    ),
    "restore_callback_states_from_checkpoint": of(
        {**PATIENT, "resume": 8}, **STEPS, **BEST, restore_callback_states_from_checkpoint=True
    ),
    "save_only_model, a tracker that writes a file": of(
        calls(own.Writes()), save_strategy="steps", save_steps=5, save_only_model=True
    ),
    "max_steps 8, inverse_sqrt": of(max_steps=8, lr_scheduler_type="inverse_sqrt", warmup_steps=2).because(
        CUT_SHORT, "events"
    ),
    "max_steps 12, dataloader_drop_last": of(
        {"data": lambda: Rows(90)}, max_steps=12, dataloader_drop_last=True
    ).because(CUT_SHORT, "events"),
    "max_steps 12, train() twice": of({"twice": True}, max_steps=12),
    "model_init, train() twice, a log that is overridden": of(
        {"model": lambda: None, "more": {"model_init": lambda: Net()}, "twice": True, "kind": own.LogsMore}
    ),
    "num_train_epochs 1.5, warmup_stable_decay": of(num_train_epochs=1.5, **DECAY),
    "reduce_lr_on_plateau": of(**STEPS, **PLATEAU),
    "greedy": of(**STEPS, lr_scheduler_type="greedy"),
    "cosine_with_min_lr, weight_decay, max_grad_norm 0": of(**MIN_LR, weight_decay=0.1, max_grad_norm=0.0),
    "sgd, max_grad_norm 0.1": of(optim="sgd", optim_args="momentum=0.9", max_grad_norm=0.1),
    "adafactor": of(optim="adafactor"),
    "optimizers of the user, SGD and OneCycleLR": of({"optimizers": own.one_cycle}),
    "two groups of parameters": of({"kind": own.TwoGroups}),
    "frozen parameters": of({"model": own.frozen}),
    "compute_loss of a subclass, sequential": of({"kind": own.MarginLoss}, train_sampling_strategy="sequential"),
    "compute_loss with weights of classes": of({"kind": own.ClassWeights}).because(
        "the loss is no mean over rows, as a warning tells", *TRAINED, "warnings"
    ),
    "a last batch of 10 rows": of({"data": lambda: Rows(90)}, **STEPS).because(
        "the epoch counts samples, where Trainer counts batches", "logs", "events", "files"
    ),
    "dataloader_drop_last": of({"data": lambda: Rows(90)}, **EPOCHS, dataloader_drop_last=True),
    "workers, data_seed, remove_unused_columns False": of(**WORKERS, data_seed=3, remove_unused_columns=False),
    "accelerator_config": of(accelerator_config={"split_batches": True, "even_batches": False}, seed=5),
    "a datasets.Dataset with a column that is not used": of(FLOATS, ROUNDED),
    "bf16": of(FLOATS, 0.02, bf16=True),
    "GPT-2, compute_loss_func": texts(gpt2, IN_FLOAT64).because(
        "Trainer counts the first label of each row, which nothing predicts", *TRAINED
    ),
    "GPT-2 without first labels, gradient_checkpointing": of(
        {**WITHOUT_FIRST, **IN_FLOAT64, "model": gpt2}, gradient_checkpointing=True, adam_epsilon=0.01
    ),
    "LoRA of PEFT": of({**WITHOUT_FIRST, **IN_FLOAT64, "model": own.lora}, **STEPS),
    "Llama, texts of unequal length": texts(own.llama, **STEPS),
    "Llama without average_tokens_across_devices": texts(own.llama, average_tokens_across_devices=False),
    "Llama, label smoothing": texts(own.llama, label_smoothing_factor=0.1),
    "T5 with Seq2SeqTrainer": texts(own.t5, T5),
    "a padding collator, tokens seen without padding": padded("non_padding").because(PADDING, "logs"),
    "a padding collator, all tokens seen": padded("all").because(PADDING, "logs"),
    "a collator that masks": padded("no", own.masking(), data=lambda: own.unpadded(labels=False)).because(
        DRAWS, *TRAINED
    ),
    "callbacks that ask for an evaluation, a log, a save and the end": of(calls(ASKED), logging_steps=100),
    "a callback that leaves an epoch": of(calls(Asks(should_epoch_stop=3))).because(
        "a warning tells that steps of the trace are skipped", "warnings"
    ),
    "dropout": of({"model": lambda: Net(torch.nn.Dropout(0.2))}).because(DRAWS, *TRAINED),
    "batch normalization": of({"model": lambda: Net(torch.nn.BatchNorm1d(16))}).because(
        "statistics are those of a microbatch", *TRAINED
    ),
}

if __name__ == "__main__":
    compare("transformers", SETTINGS, Reader(("batch_size", "samples", "train_batch_size")))
