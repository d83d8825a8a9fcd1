"""transformers' Trainer with a variable batch size: the laws of all trainers, and what is its own."""

from __future__ import annotations

import math
import random
from typing import Any

import datasets
import pytest
import torch
import transformers as hf
import trl
from conformance import Conformance
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.nn.functional import cross_entropy
from torch.utils.data import IterableDataset

from helpers import fsdp2_on_cpu
from helpers.trainer_examples import run_script
from helpers.trainings import LENGTH, VOCABULARY, Texts, TrainerCase, expected
from helpers.transformers_adapter import QUIET, CaseTrainer, Model, Rows, Transformers, trained, trainer_of
from helpers.yardstick import (
    ENDS,
    MAX_GRAD_NORM,
    MICROBATCH,
    SAMPLES,
    SIZES,
    UPDATES,
    by_hand,
    difference,
    in_processes,
    weights,
)
from variable_batch_size.integrations.transformers import VariableBatchMixin

TEXTS = TrainerCase("sgd", tokens=True, clip=MAX_GRAD_NORM)
CHECKPOINTING = "activation_checkpointing"  # its name since transformers 5.20
if CHECKPOINTING not in hf.TrainingArguments.__dataclass_fields__:
    CHECKPOINTING = "gradient_checkpointing"


class TestTransformers(Conformance):
    adapter = Transformers()
    features = frozenset({"to the last bit", "controller", "tokens", "looks at losses", "evaluation", "ddp", "fsdp2"})


def test_what_it_logs(tmp_path):
    trainer = trained(tmp_path, TrainerCase("sgd", "adascale"), lr_scheduler_type="linear")
    *steps, end = trainer.state.log_history
    assert [row["batch_size"] for row in steps][:10] == SIZES[:10]
    assert [row["epoch"] for row in steps] == pytest.approx([row["samples"] / SAMPLES for row in steps])
    assert [steps[end - 1]["epoch"] for end in ENDS] == [1.0, 2.0, 3.0]
    assert [row["loss"] for row in steps] == pytest.approx(trainer.losses, rel=1e-6)  # which Trainer adds in float32
    assert 0 < steps[-1]["learning_rate"] < 0.1 / UPDATES  # one step of the schedule is left, and three samples
    assert steps[-1].keys() >= {"noise_scale", "grad_norm"}
    assert end["train_samples_per_second"] == pytest.approx(3 * SAMPLES / end["train_runtime"], rel=0.01)


@pytest.mark.parametrize(("name", "value", "updates"), [("max_steps", 30, 30), ("num_train_epochs", 1.5, 19)])
def test_a_training_has_the_length_that_was_asked_for(tmp_path, name, value, updates):
    trainer = trained(tmp_path, **{name: value}, lr_scheduler_type="linear")
    optimizer = trainer.variable_optimizer
    assert trainer.state.global_step == trainer.state.max_steps == optimizer.updates == updates
    assert trainer.state.epoch == pytest.approx(optimizer.samples / SAMPLES)
    assert trainer.lr_scheduler.get_last_lr() == [0.0]


@pytest.mark.parametrize("by", ["steps", "epoch"])
def test_a_training_that_ends_before_max_steps_is_saved_and_evaluated_once_at_its_end(tmp_path, by):
    """As one does whose max_steps is only a bound, with a controller."""
    case = TrainerCase("sgd", adaptive=True)
    options = {"save_strategy": by, "eval_strategy": by, "save_steps": 8, "eval_steps": 8}
    trainer = trained(tmp_path, case, **options)
    evaluated = [row["step"] for row in trainer.state.log_history if "eval_loss" in row]
    made = trainer.variable_optimizer.updates
    assert made % 8
    assert len(evaluated) == (3 if by == "epoch" else made // 8 + 1) == len({*evaluated})
    assert evaluated[-1] == made == trainer.state.global_step
    assert (tmp_path / f"checkpoint-{made}").is_dir()


def test_a_finished_training_resumes_to_nothing_and_a_longer_one_continues(tmp_path):
    first = trained(tmp_path, save_strategy="steps", save_steps=13)
    again = trained(tmp_path, resume=True)
    assert again.variable_optimizer.updates == UPDATES
    assert difference(again.model, weights(first.model)) == 0
    longer = trained(tmp_path, resume=True, num_train_epochs=4)
    assert (longer.state.epoch, longer.variable_optimizer.samples) == (4, 4 * SAMPLES)
    longer.train()  # a new training
    assert longer.variable_optimizer.samples == 4 * SAMPLES


class Interrupted(CaseTrainer):
    def compute_loss(self, *args, **options):
        if self.variable_optimizer.updates == 2 and self.variable_optimizer.inside_step:
            raise KeyboardInterrupt
        return super().compute_loss(*args, **options)


def test_a_model_is_saved_after_an_interrupt_within_an_update(tmp_path):
    trainer = trainer_of(tmp_path, kind=Interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.save_model(str(tmp_path / "model"))
    assert [path.name for path in (tmp_path / "model").iterdir() if "variable" in path.name] == []


class Leaves(hf.TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        control.should_epoch_stop |= state.global_step == 5


def test_the_rest_of_an_epoch_that_a_callback_leaves_comes_next(tmp_path):
    trainer = trained(tmp_path, TrainerCase(workers=1), callbacks=[Leaves()])
    by_hand = expected(TrainerCase())  # three epochs of the dataset, in four of Trainer
    assert (trainer.state.epoch, trainer.state.num_train_epochs) == (3, 3)
    torch.testing.assert_close(weights(trainer.model), by_hand.weights, rtol=0, atol=1e-12)


# Language models, whose own losses are in float32. ---------------------------------------------------------------


class TakesNoCount(hf.GPT2LMHeadModel):
    accepts_loss_kwargs = False  # as many classes with images


def language_model(name):
    torch.manual_seed(4)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": VOCABULARY}
    none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout_prob"), 0.0)
    kind, config = (hf.BertForMaskedLM, hf.BertConfig) if name == "bert" else (hf.GPT2LMHeadModel, hf.GPT2Config)
    kind = TakesNoCount if name == "no count" else kind
    others = {"attention_probs_dropout_prob": 0.0, "max_position_embeddings": LENGTH, "initializer_range": 0.2}
    model = kind(config(**shape, **none, **others, bos_token_id=0, eos_token_id=1))
    lora = LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=False, fan_in_fan_out=True)
    return (get_peft_model(model, lora) if name == "lora" else model).double()


def train_texts(folder, model, **options):
    return trained(folder, TEXTS, model=model, data=Rows(TEXTS, ("input_ids", "labels")), **options)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft calls it
@pytest.mark.parametrize("name", ["gpt2", "no count", "bert", "lora"])
def test_a_language_model_is_trained_on_means_over_its_labels(tmp_path, name):
    """GPT-2 has no loss_type; the loss of BERT ignores the number of labels."""
    model, twin, data = language_model(name), language_model(name), Texts()

    def loss(own, indices):
        logits, labels = own(input_ids=data.tokens[indices]).logits, data.labels[indices]
        return TEXTS.loss(logits, labels) if name != "bert" else cross_entropy(logits.flatten(0, 1), labels.flatten())

    losses = by_hand(twin, TEXTS.optimizer(twin), loss=loss, max_grad_norm=MAX_GRAD_NORM)
    trainer = train_texts(tmp_path, model, **{CHECKPOINTING: name == "gpt2"})
    assert difference(model, weights(twin)) < 1e-5
    assert [row["loss"] for row in trainer.state.log_history[:-1]] == pytest.approx(losses, rel=1e-5)
    assert trainer.state.total_flos > 0


def train_shards(folder):
    fsdp2_on_cpu.enable()
    blocks = {"fsdp": True, "fsdp_config": {"fsdp_version": 2, "transformer_layer_cls_to_wrap": "GPT2Block"}}
    trainer = train_texts(folder, language_model("gpt2").float(), bf16=True, max_steps=6, **blocks)
    assert trainer.accelerator.state.fsdp_plugin.mixed_precision_policy.reduce_dtype == torch.float32
    return [row["loss"] for row in trainer.state.log_history[:-1]]


def test_bfloat16_in_shards_whose_sums_are_in_float32(tmp_path):
    sharded, _ = in_processes(train_shards, 2, tmp_path)
    for half in False, True:
        exact = train_texts(tmp_path, language_model("gpt2").float(), max_steps=6, bf16=half)
        losses = [row["loss"] for row in exact.state.log_history[:-1]]
        assert sharded == pytest.approx(losses, rel=0.02)


def train_with_trl(folder, name, rows, **columns):
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(VOCABULARY)}, unk_token="w0"))
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1", unk_token="w0")
    options = {**QUIET, "bf16": False, CHECKPOINTING: False, "train_sampling_strategy": "sequential", "max_steps": 4}
    config = getattr(trl, f"{name}Config")(str(folder), per_device_train_batch_size=rows, **options)
    own = {"train_dataset": datasets.Dataset.from_dict(columns), "processing_class": tokenizer, "trace": "0:24 2:10"}
    own |= {"KTO": {"ref_model": language_model("gpt2")}, "GRPO": {"reward_funcs": len}}.get(name, {})
    kind = type(name, (VariableBatchMixin, getattr(trl, f"{name}Trainer")), {})
    trainer = kind(language_model("gpt2"), args=config, **own)
    trainer.train()
    return trainer


def test_the_mixin_comes_first():
    with pytest.raises(TypeError, match=r"must come first; write class Later\(VariableBatchMixin, "):
        type("Later", (hf.Trainer, VariableBatchMixin), {})


def test_trainers_of_trl(tmp_path):
    texts = [row[: 2 + row[0] % (LENGTH - 2)] for row in Texts().tokens.tolist()[:80]]
    one, other = (train_with_trl(tmp_path, "SFT", rows, input_ids=texts) for rows in (4, 13))
    assert difference(one.model, weights(other.model)) < 1e-6
    assert {"num_tokens", "batch_size"} <= one.state.log_history[0].keys()
    words = [f"w{text[0]}" for text in texts]
    with pytest.raises(ValueError, match="loss_type of trl's KTOTrainer must be one without a KL term"):
        train_with_trl(tmp_path, "KTO", 4, prompt=words, completion=words, label=[True, False] * 40)
    with pytest.raises(
        ValueError, match=r"the trainer must be one that reads each sample once .*, got GRPOTrainer; write"
    ):
        train_with_trl(tmp_path, "GRPO", 8, prompt=words)


# Samples, losses, and mistakes. ----------------------------------------------------------------------------------


class Stream(IterableDataset[Any]):
    def __iter__(self):
        return map(Rows(TrainerCase()).__getitem__, range(SAMPLES))


def test_a_stream_is_read_in_order_and_resumes(tmp_path):
    options = {"max_steps": 16, "options": {"trace": [12] * 16}}
    stream = trained(tmp_path, data=Stream(), **options, save_strategy="steps", save_steps=7)
    ordered = trained(tmp_path / "ordered", **options, train_sampling_strategy="sequential")
    assert difference(stream.model, weights(ordered.model)) < 1e-12
    case = TrainerCase(dropout=0.3)
    whole = trained(tmp_path / "whole", case, data=Stream(), **options, save_strategy="steps", save_steps=7)
    again = trained(tmp_path, case, data=Stream(), **options, resume=str(tmp_path / "whole" / "checkpoint-7"))
    assert difference(again.model, weights(whole.model)) == 0


class Shuffling(Stream):
    """Draws its order, and noise for each row, from the generators of the process."""

    def __iter__(self):
        order = list(super().__iter__())
        random.shuffle(order)
        for row in order:
            yield row | {"inputs": row["inputs"] + torch.rand(())}


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_that_draws_resumes_and_draws_by_the_seed(tmp_path, workers):
    options = {"max_steps": 12, "options": {"trace": [12] * 12}, "dataloader_num_workers": workers}
    case = TrainerCase(dropout=0.3)
    whole = trained(tmp_path / "whole", case, data=Shuffling(), **options, save_strategy="steps", save_steps=4)
    again = trained(tmp_path, case, data=Shuffling(), **options, resume=str(tmp_path / "whole" / "checkpoint-8"))
    assert difference(again.model, weights(whole.model)) == 0
    case = TrainerCase()  # which alone does not depend on the seed
    seeds = [trained(tmp_path, case, data=Shuffling(), **options, data_seed=seed).model for seed in (1, 2)]
    assert difference(seeds[0], weights(seeds[1])) > 1e-3


def test_the_loss_of_a_stream_is_not_checked_which_is_said(tmp_path, caplog):
    caplog.set_level("INFO", "variable_batch_size")
    trained(tmp_path, data=Stream(), max_steps=3, options={"trace": [12] * 3})
    assert [line[:90] for line in caplog.messages if "not checked" in line] == [
        "The loss is not checked for a dependence on microbatches: rows of a stream, or of group_by"
    ]


class Weighted(CaseTrainer):
    def compute_loss(self, model, inputs, *_, **__):
        weight = torch.arange(1.0, 6.0, dtype=torch.float64)
        return cross_entropy(model.net(inputs["inputs"]), inputs["labels"], weight)


def test_a_loss_that_is_no_mean_is_found_and_the_check_changes_nothing(tmp_path):
    with pytest.warns(UserWarning, match=r"depend on how they are cut.*or pass check_loss=False"):
        trained(tmp_path, kind=Weighted, max_steps=1)
    found = [trained(tmp_path, TrainerCase(dropout=0.3), options={"check_loss": check}) for check in (True, False)]
    assert difference(found[0].model, weights(found[1].model)) == 0


class Flipped(Rows):
    """Rows sorted by class, which an augmentation changes each time."""

    def __getitem__(self, index):
        order = torch.argsort(torch.tensor([super(Flipped, self).__getitem__(n)["labels"] for n in range(SAMPLES)]))
        row = super().__getitem__(int(order[index]))
        return {**row, "inputs": row["inputs"] + 1e-3 * torch.randn_like(row["inputs"])}


def test_a_wrong_loss_is_found_with_an_augmentation_of_rows_sorted_by_class(tmp_path):
    with pytest.warns(UserWarning, match=r"depend on how they are cut"):
        trained(tmp_path, kind=Weighted, data=Flipped(TrainerCase()), max_steps=2)


def test_a_schedule_that_counts_batches_is_found(tmp_path):
    model = Model(TrainerCase())
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizers = inner, hf.get_cosine_schedule_with_warmup(inner, 5, 3 * math.ceil(SAMPLES / MICROBATCH))
    with pytest.warns(UserWarning, match="is the number of batches of 3 epochs of the loader, which have 26 updates"):
        trained(tmp_path, model=model, options={"optimizers": optimizers})


REFUSED = [
    ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps must be 1, got 4; omit it: the trace says"),
    (
        {"auto_find_batch_size": True},
        "auto_find_batch_size must be False, because its second attempt .* got True; pass",
    ),
    ({"train_sampling_strategy": "group_by_length"}, "max_steps must be > 0 .*, got -1; pass max_steps="),
    ({"optim": "galore_adamw_layerwise", "optim_target_modules": ["net"]}, "optim must be .*, got galore_adamw_lay"),
    ({"options": {"trace": [24] * 5}}, "the trace must last longer, but its 5 steps"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=str)
def test_what_is_refused_at_once(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        trainer_of(tmp_path, **options)


def test_checkpoints_of_something_else(tmp_path):
    trained(tmp_path / "model", save_strategy="steps", save_steps=13, save_only_model=True)
    trained(tmp_path / "own", save_strategy="steps", save_steps=13)
    with pytest.raises(ValueError, match=r"got one without .*variable_batch.pt; load its model, and begin a new"):
        trained(tmp_path / "model", resume=True)
    with pytest.raises(ValueError, match="but seed was 0 and is 3"):
        trained(tmp_path / "own", data_seed=3, resume=True)


def test_the_example_learns(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_script("transformers_classifier.py")
    assert "updates: 1.00" in capsys.readouterr().out
