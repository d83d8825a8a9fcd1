"""What transformers' Trainer does with models that are wrapped, launched by its usual commands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.parallel import DistributedDataParallel
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

from helpers import fsdp2_on_cpu
from helpers.transformers_jobs import (
    VOCABULARY,
    Classifier,
    Rows,
    Texts,
    arguments,
    gpt2,
    save,
    sum_in_float64,
    trainer_of,
)
from helpers.transformers_sharded_jobs import BLOCKS, FSDP2
from helpers.yardstick import REF, TRACE, difference, in_processes, weights
from variable_batch_size.integrations.transformers import VariableBatchMixin

EXACT = 1e-12
LOSS = {"compute_loss_func": sum_in_float64}


def adapted() -> Any:
    """The GPT-2 with adapters, which alone are trained."""
    torch.manual_seed(8)
    model = get_peft_model(
        gpt2(), LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=False, fan_in_fan_out=True)
    )
    return model.double()


def train_adapted(folder: Path, **options: Any) -> Any:
    """Train the adapters."""
    # Not AdamW, which amplifies rounding here: microbatches of 3 and of 8 on one process differ by 3e-11.
    trainer = trainer_of(folder, adapted(), train_dataset=Texts(), options=LOSS, optim="sgd", **options)
    trainer.train()
    return trainer


def of_ranks(folder: Path) -> None:
    """Train adapters, and with checkpointing of activations, in DistributedDataParallel and sharded."""
    trainer = train_adapted(folder / "ddp", gradient_checkpointing=True)
    assert isinstance(trainer.model_wrapped, DistributedDataParallel) == (torch.distributed.get_world_size() > 1)
    save(folder, "ddp", weights(trainer.model))
    fsdp2_on_cpu.enable()
    trainer = train_adapted(folder / "fsdp2", **BLOCKS)
    fsdp2_on_cpu.check_sharded(trainer.model)
    save(folder, "fsdp2", weights(trainer.model))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft calls it
@pytest.mark.parametrize("world", [3, pytest.param(2, marks=pytest.mark.nightly("starts processes"))])
def test_adapters(tmp_path: Path, world: int) -> None:
    alone = train_adapted(tmp_path / "alone")
    assert difference(adapted(), weights(alone.model)) > 0
    in_processes(of_ranks, world, tmp_path)
    for name in "ddp", "fsdp2":
        assert difference(alone.model, torch.load(tmp_path / f"{name}-0")) < EXACT


def four_ranks(folder: Path) -> None:
    """Train plainly, and load the best model, in DistributedDataParallel and sharded, and in bfloat16."""
    each = {"eval_strategy": "steps", "eval_steps": 4, "save_strategy": "steps", "save_steps": 4}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "max_steps": 12}
    fsdp2_on_cpu.enable()
    for name, kind in ("ddp", {}), ("fsdp2", FSDP2):
        model = Classifier()
        options = {"eval_dataset": Rows(40)}
        trainer = trainer_of(folder / name, model, options=options, learning_rate=0.3, **each, **best, **kind)
        trainer.train()
        losses = {row["step"]: row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row}
        assert trainer.state.best_global_step == min(losses, key=losses.__getitem__)
        save(folder, name, (trainer.state.best_global_step, losses, weights(trainer.model)))
    half = trainer_of(folder / "half", gpt2().float(), train_dataset=Texts(), **BLOCKS, bf16=True, max_steps=6)
    half.train()
    fsdp2_on_cpu.check_sharded(half.model)
    save(folder, "half", [row["loss"] for row in half.state.log_history[:-1]])


@pytest.mark.nightly("starts processes")
def test_four_ranks_and_the_best_model(tmp_path: Path) -> None:
    in_processes(four_ranks, 4, tmp_path)
    (best, losses, ours), (again, others, sharded) = (torch.load(tmp_path / f"{name}-0") for name in ("ddp", "fsdp2"))
    assert best == again
    assert losses == pytest.approx(others, rel=1e-12)
    assert float((ours - sharded).abs().max()) < EXACT
    exact = trainer_of(tmp_path / "one", gpt2().float(), train_dataset=Texts(), max_steps=6)
    exact.train()
    expected = [row["loss"] for row in exact.state.log_history[:-1]]
    assert torch.load(tmp_path / "half-0") == pytest.approx(expected, rel=5e-3)


class VariableSeq2SeqTrainer(VariableBatchMixin, Seq2SeqTrainer):
    """The changed line."""


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
def test_a_seq2seq_trainer_generates(tmp_path: Path) -> None:
    torch.manual_seed(4)
    shape = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
    model = T5ForConditionalGeneration(T5Config(**shape, vocab_size=VOCABULARY, decoder_start_token_id=0))
    own = {name: value for name, value in arguments(tmp_path).to_dict().items() if name != "generation_config"}
    args = Seq2SeqTrainingArguments(**{**own, "predict_with_generate": True, "eval_strategy": "epoch", "max_steps": 14})
    options = {"train_dataset": Texts(), "eval_dataset": torch.utils.data.Subset(Texts(), range(20))}
    trainer = VariableSeq2SeqTrainer(model, args, trace=TRACE, rule="root", ref_batchsize=REF, **options)
    trainer.train()
    assert trainer.state.global_step == trainer.variable_optimizer.updates == 14
    assert trainer.predict(options["eval_dataset"]).predictions.shape[0] == 20


SCRIPT = """
import sys
from pathlib import Path

from helpers import fsdp2_on_cpu
from helpers.transformers_jobs import Classifier, trainer_of
from helpers.yardstick import weights

if __name__ == "__main__":
    fsdp2_on_cpu.enable()
    trainer = trainer_of(Path(sys.argv[1]), Classifier())
    trainer.train()
    total = float(weights(trainer.model).sum())
    found = f"{trainer.accelerator.is_fsdp2} {trainer.args.world_size} {total:.15e}"
    Path(sys.argv[1], f"{trainer.args.process_index}.found").write_text(found)
"""

SETTINGS = (
    "--num_machines=1",
    "--num_processes=2",
    "--mixed_precision=no",
    "--dynamo_backend=no",
    "--main_process_port=0",
)
ACCELERATE = "accelerate.commands.launch", *SETTINGS
COMMANDS = {
    "torchrun": ("torch.distributed.run", "--standalone", "--nproc-per-node=2"),
    "accelerate launch": (*ACCELERATE, "--multi_gpu"),  # which the script has no need of
    "accelerate launch, FSDP2": (*ACCELERATE, "--use_fsdp", "--fsdp_version=2"),
}


@pytest.mark.nightly("starts commands that import transformers")
@pytest.mark.parametrize("name", COMMANDS)
def test_the_usual_commands_launch_it(tmp_path: Path, name: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    unset = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)  # the script imports this test's helpers
    command = [sys.executable, "-m", *COMMANDS[name], str(script), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    model = Classifier()
    trainer_of(tmp_path / "alone", model).train()
    for rank in range(2):
        sharded, world, found = (tmp_path / f"{rank}.found").read_text().split()
        assert (sharded, world) == (str("FSDP2" in name), "2")
        assert float(found) == pytest.approx(float(weights(model).sum()), rel=1e-12)
