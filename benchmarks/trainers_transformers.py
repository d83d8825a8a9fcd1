"""What does an update of transformers' Trainer cost with a variable batch size, relative to its own accumulation?

Both train a GPT-2 on random tokens with AdamW, clipping and the same microbatches, in one process on one thread of the
CPU, in float32. Blocks of updates of the two are interleaved: each is one `train()`, of which the first updates are not
counted, and each pair of blocks gives one ratio.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from records import spread
from results import TRAINER, record
from variable_batch_size.integrations.transformers import VariableBatchTrainer

TOKENS, ROWS, WARM_UP = 64, 8, 3
WIDTHS = {  # width, layers
    "GPT-2, 0.2M parameters": (64, 2),
    "GPT-2, 3M parameters": (256, 4),
    "GPT-2, 10M parameters": (384, 6),
}


class Tokens(Dataset[dict[str, Any]]):
    """Random tokens, each text its own labels."""

    def __init__(self) -> None:
        self.ids = torch.randint(256, (4096, TOKENS), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


class Stopwatch(TrainerCallback):
    """Times updates, without the first ones."""

    def __init__(self) -> None:
        self.began = self.seconds = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Note the time."""
        now = time.perf_counter()
        if state.global_step == WARM_UP:
            self.began = now
        self.seconds = now - self.began


def trainer(width: int, layers: int, microbatches: int, updates: int, folder: str, *, variable: bool) -> Any:
    """Return a trainer of so many updates, with a stopwatch."""
    torch.manual_seed(0)
    shape = {"n_embd": width, "n_layer": layers, "n_head": 4, "n_positions": TOKENS, "vocab_size": 256}
    args = TrainingArguments(
        folder,
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=1 if variable else microbatches,
        max_steps=WARM_UP + updates,
        logging_steps=1000,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        dataloader_pin_memory=False,
        disable_tqdm=True,
        log_level="error",
    )
    kind: Any = VariableBatchTrainer if variable else Trainer
    more = {"trace": ROWS * microbatches, "rule": "linear", "ref_batchsize": 32} if variable else {}
    own = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0))
    return kind(own, args, train_dataset=Tokens(), callbacks=[Stopwatch()], **more)


def seconds(one: Any) -> float:
    """Train a block of updates, and return how long they took."""
    one.train()
    return next(each.seconds for each in one.callback_handler.callbacks if isinstance(each, Stopwatch))


def transformers(pairs: int = 21) -> None:
    """Record the ratios."""
    torch.set_num_threads(1)
    for name, (width, layers) in WIDTHS.items():
        for microbatches in 1, 4:
            updates = max(4, 32 // microbatches // layers)
            with tempfile.TemporaryDirectory() as folder:
                sides = [trainer(width, layers, microbatches, updates, folder, variable=own) for own in (True, False)]
                found = []
                for pair in range(-1, pairs):
                    order = (0, 1) if pair % 2 else (1, 0)
                    taken = {side: seconds(sides[side]) for side in order}
                    found += [taken[0] / taken[1]] * (pair >= 0)
            record(
                TRAINER,
                "transformers / its accumulation",
                spread(found),
                on=name,
                where="CPU, 1 process, 1 thread",
                case=f"{microbatches} microbatch{'es' if microbatches > 1 else ''} of {ROWS}",
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=21, help="pairs of blocks per ratio")
    transformers(parser.parse_args().pairs)
