"""Models, data, callbacks and trainers for comparing runs of a plain Trainer with ours."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Subset

from helpers.our_order import BATCH, ROWS, SAMPLES, Shuffled
from helpers.transformers_jobs import QUIET, VOCABULARY, Rows, Texts, gpt2, tokenizer
from helpers.yardstick import network
from variable_batch_size.integrations.transformers import VariableBatchMixin


class Net(nn.Module):
    """A classifier in float64."""

    def __init__(self, *middle: nn.Module, infinite: bool = False) -> None:
        super().__init__()
        self.net, self.infinite = network(), infinite
        self.net.insert(1, nn.Sequential(*middle).double())

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Return logits, and the mean loss; an infinite one if asked for, with a finite gradient."""
        logits = self.net(x)
        if labels is None:
            return {"logits": logits}
        loss = cross_entropy(logits, labels)
        return {"loss": loss + (torch.inf if self.infinite and x[:, 0].max() > 2 else 0), "logits": logits}


def record_events(events: list[Any]) -> hf.TrainerCallback:
    """Return a callback that appends each event: its name, the step, the epoch, and what callbacks have asked for."""

    def event(name: str) -> Callable[..., None]:
        def note(_: Any, args: Any, state: Any, control: Any, **others: Any) -> None:
            asked = sorted(key for key, value in vars(control).items() if value)
            rates = [group["lr"] for group in others["optimizer"].param_groups] if others["optimizer"] else []
            numbers = [state.global_step, state.max_steps, state.epoch, *rates, len(others["train_dataloader"] or ())]
            numbers += [float(value.detach().square().sum()) for value in others["model"].parameters()]
            numbers += [] if others["lr_scheduler"] is None else [others["lr_scheduler"].last_epoch]
            events.append([name, *numbers, asked, sorted(others.get("logs", ()))])

        return note

    names = [name for name in dir(hf.TrainerCallback) if name.startswith("on_") and name != "on_substep_end"]
    return type("Events", (hf.TrainerCallback,), {name: event(name) for name in names})()


class Asks(hf.TrainerCallback):
    """Sets a flag of the control after an update, such as `should_save`."""

    def __init__(self, **at: int) -> None:
        self.at = at

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Set it."""
        for flag, step in self.at.items():
            setattr(control, flag, getattr(control, flag) or state.global_step == step)
        return control


class Writes(hf.TrainerCallback):
    """Writes each log to a file, as a tracker does."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Write it."""
        with (Path(args.output_dir) / "logs.jsonl").open("a") as file:
            file.write(json.dumps([state.global_step, logs]) + "\n")


class InOurOrder:
    """A plain trainer that reads samples in the order of ours."""

    args: Any
    train_dataset: Any

    def _get_train_sampler(self, data: Any = None) -> Any:
        number = len(self.train_dataset if data is None else data)
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        return Shuffled(number, seed, shuffle=self.args.train_sampling_strategy == "random")


class MarginLoss(hf.Trainer):
    """A trainer with a loss of its own, a mean over rows."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        """Return it."""
        outputs = model(inputs["x"])
        loss = nn.functional.multi_margin_loss(outputs["logits"], inputs["labels"])
        return (loss, outputs) if return_outputs else loss


class ClassWeights(hf.Trainer):
    """A trainer whose loss is a mean over weights of classes."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        """Return it."""
        outputs = model(inputs["x"])
        weight = torch.arange(1.0, 6.0, dtype=torch.float64)
        loss = cross_entropy(outputs["logits"], inputs["labels"], weight)
        return (loss, outputs) if return_outputs else loss


class LogsMore(hf.Trainer):
    """A trainer that adds to its logs."""

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log also the number of logs."""
        super().log({**logs, "number": len(self.state.log_history)}, *args, **kwargs)


class TwoGroups(hf.Trainer):
    """A trainer with an optimizer of two groups."""

    def create_optimizer(self, *_: Any) -> Any:
        """Create it."""
        first, second = self.model.net[0], self.model.net[-1]
        groups = [{"params": first.parameters(), "lr": 0.1}, {"params": second.parameters(), "weight_decay": 0.1}]
        self.optimizer = torch.optim.SGD(groups, lr=0.02, momentum=0.9)
        return self.optimizer


def accuracy(found: Any) -> dict[str, float]:
    return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}


def llama() -> Any:
    torch.manual_seed(4)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**shape, vocab_size=VOCABULARY, pad_token_id=0)).double()


def bert() -> Any:
    torch.manual_seed(4)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    drop = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return hf.BertForTokenClassification(hf.BertConfig(**shape, **drop, vocab_size=VOCABULARY, num_labels=VOCABULARY))


def t5() -> Any:
    torch.manual_seed(4)
    shape = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
    return hf.T5ForConditionalGeneration(hf.T5Config(**shape, vocab_size=VOCABULARY, decoder_start_token_id=0))


def frozen() -> nn.Module:
    model = Net()
    model.net[0].requires_grad_(False)
    return model


def lora() -> Any:
    torch.manual_seed(4)
    return get_peft_model(gpt2(), LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.0))


def one_cycle(model: nn.Module) -> Any:
    """An optimizer and its schedule."""
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return inner, torch.optim.lr_scheduler.OneCycleLR(inner, 0.2, total_steps=18)


def masking() -> Any:
    """A collator that draws which tokens are masked."""
    words = tokenizer()
    words.add_special_tokens({"mask_token": "w1"})
    return hf.DataCollatorForLanguageModeling(words, mlm_probability=0.3)


def texts(first: int = 0, number: int = SAMPLES, *, first_label: bool = True) -> Any:
    """Padded texts; the first label of each may be left out."""
    found = Texts()
    if not first_label:
        found.labels[:, 0] = -100
    return Subset(found, range(first, first + number))


def unpadded(labels: bool = True) -> list[dict[str, Any]]:
    """Texts of unequal length."""
    texts = Texts()
    cut = [(texts[number], int(texts.lengths[number])) for number in range(SAMPLES)]
    names = ("input_ids", "labels") if labels else ("input_ids",)
    return [{name: text[name][:end] for name in names} for text, end in cut]


def columns() -> Any:
    rows = [Rows()[number] for number in range(SAMPLES)]
    parts = {"x": [row["x"].tolist() for row in rows], "labels": [int(row["labels"]) for row in rows]}
    return datasets.Dataset.from_dict({**parts, "comment": ["none"] * SAMPLES})


def train(options: Mapping[str, Any], plain: bool, folder: Path) -> tuple[Tensor, Any, Any]:
    """Train, and return weights, the state with its logs, and the events.

    Args:
        options: `model`, `data` and `test` create the model and the datasets; `args` are training arguments, and `more`
            further ones of the class `kind`; `optimizers` is a function of the model. With `resume`, the training is
            resumed from the checkpoint of that step, with `then` as further training arguments.
        plain: whether it is a plain trainer, with batches; otherwise ours, with microbatches.
        folder: where it writes.
    """
    events: list[Any] = []
    trainer = create(folder / "run", options, events, plain)
    result = trainer.train()
    if "twice" in options:
        result = trainer.train()
    if "resume" in options:
        options = {**options, "args": options["args"] | options.get("then", {})}
        trainer = create(folder / "again", options, events, plain)
        result = trainer.train(resume_from_checkpoint=str(folder / "run" / f"checkpoint-{options['resume']}"))
    logs = [dataclasses.asdict(trainer.state), list(result)]
    weights = torch.cat([value.detach().flatten() for value in trainer.model.state_dict().values()])
    return weights, logs, events


def create(folder: Path, options: Mapping[str, Any], events: list[Any], plain: bool) -> Any:
    """Return a trainer with its own model."""
    torch.manual_seed(0)
    model = options.get("model", Net)()
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": BATCH if plain else ROWS,
        "learning_rate": 0.02,
        **QUIET,
    }
    more = dict(options.get("more", {}))
    if "optimizers" in options:
        more["optimizers"] = options["optimizers"](model)
    more["callbacks"] = [record_events(events), *copy.deepcopy(more.get("callbacks", []))]
    first, last = (InOurOrder, {}) if plain else (VariableBatchMixin, {"trace": BATCH})
    kind: Any = type("Compared", (first, options.get("kind", hf.Trainer)), {})
    args = options.get("kind_of_args", hf.TrainingArguments)(str(folder), **arguments | options["args"])
    data = options.get("data", lambda: Rows(SAMPLES))()
    trainer = kind(model, args, train_dataset=data, eval_dataset=options.get("test", Rows)(), **more, **last)
    trainer.remove_callback(hf.PrinterCallback)
    return trainer
