"""An update of Lightning with `VariableBatchStrategy`, against its own accumulation of the same microbatches."""

from __future__ import annotations

import logging
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from records import spread
from results import TRAINER, record
from variable_batch_size.integrations.lightning import VariableBatchStrategy

ROWS, MICROBATCHES = 32, 4


class Perceptron(pl.LightningModule):
    """A perceptron of a width, trained by AdamW."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers = nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
        self.model = nn.Sequential(*layers)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss."""
        data, target = batch
        loss = nn.functional.cross_entropy(self.model(data), target)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        """Return AdamW with a schedule by the step."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-4)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 100), "interval": "step"}]


class Turns(pl.Callback):
    """Lets two trainings, each in a thread, run in turns of so many updates, and notes the seconds of each turn."""

    def __init__(self, own: threading.Semaphore, other: threading.Semaphore, updates: int, blocks: int) -> None:
        self.own, self.other, self.updates, self.blocks = own, other, updates, blocks
        self.seconds: list[float] = []
        self.before = -1
        self.begin = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Wait for the first turn."""
        self.own.acquire()
        self.begin = time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        """End a turn after so many updates."""
        step = trainer.global_step
        if step == self.before or step % self.updates:
            return
        self.before = step
        self.seconds.append(time.perf_counter() - self.begin)
        self.other.release()
        if len(self.seconds) == self.blocks:
            trainer.should_stop = True
            return
        self.own.acquire()
        self.begin = time.perf_counter()


def run(width: int, turns: Turns, *, plain: bool) -> None:
    """Train in turns."""
    size, samples = ROWS * MICROBATCHES, ROWS * MICROBATCHES * 64
    data = TensorDataset(torch.randn(samples, 784), torch.randint(10, (samples,)))
    own: dict[str, Any] = {"strategy": VariableBatchStrategy(size, "root", size)}
    trainer = pl.Trainer(
        max_epochs=-1, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, callbacks=[turns],
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        **({"accumulate_grad_batches": MICROBATCHES} if plain else own),
    )  # fmt: skip
    trainer.fit(Perceptron(width), DataLoader(data, ROWS, shuffle=True))


def pairs(width: int, blocks: int, updates: int) -> Iterator[float]:
    """Yield the ratio of the times of each pair of blocks; the first two pairs warm up."""
    first, second = threading.Semaphore(1), threading.Semaphore(0)
    sides = Turns(first, second, updates, blocks + 2), Turns(second, first, updates, blocks + 2)
    threads = [threading.Thread(target=run, args=(width, side), kwargs={"plain": side is sides[1]}) for side in sides]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for ours, plain in list(zip(sides[0].seconds, sides[1].seconds, strict=True))[2:]:
        yield ours / plain


def lightning(blocks: int = 60, updates: int = 16) -> None:
    """Measure the ratio of the times of an update, for models of two sizes."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    for name, width in ("1M parameters", 512), ("10M parameters", 2800):
        record(
            TRAINER,
            "Lightning / its accumulation",
            spread(list(pairs(width, blocks, updates))),
            on=name,
            where="CPU, 1 process, 1 thread",
        )


if __name__ == "__main__":
    lightning()
