"""An update of Lightning with `VariableBatchStrategy`, against its own accumulation of the same microbatches."""

from __future__ import annotations

import argparse
import logging
import threading
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from records import spread
from results import TRAINER, record
from step import kept, perceptron, ratios
from variable_batch_size.integrations.lightning import VariableBatchStrategy

ROWS, MICROBATCHES = 32, 4


class Perceptron(pl.LightningModule):
    """A perceptron of a width, trained by AdamW."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.model = perceptron(width, 1)

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
    """Lets a training, which runs in a thread, make so many updates whenever it is called."""

    def __init__(self, updates: int) -> None:
        self.updates = updates
        self.before = -1
        self.begin, self.end = threading.Semaphore(0), threading.Semaphore(0)
        self.last = False

    def __call__(self) -> None:
        """Make the updates."""
        self.begin.release()
        self.end.acquire()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Wait for the first turn."""
        self.begin.acquire()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        """End a turn after so many updates."""
        step = trainer.global_step
        if step == self.before or step % self.updates:
            return
        self.before = step
        self.end.release()
        self.begin.acquire()
        trainer.should_stop = self.last


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


def measured(width: int, updates: int, pairs: int) -> list[float]:
    """Return the ratio of each pair of blocks."""
    sides = Turns(updates), Turns(updates)
    threads = [threading.Thread(target=run, args=(width, side), kwargs={"plain": side is sides[1]}) for side in sides]
    for thread in threads:
        thread.start()
    found = list(ratios(sides, 1, pairs, lambda: None))
    for side, thread in zip(sides, threads, strict=True):
        side.last = True
        side.begin.release()
        thread.join()
    return found


def lightning(pairs: int) -> None:
    """Measure the ratio of the times of an update, for models of two sizes."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    for size, width, updates in ("1M parameters", 512, 16), ("10M parameters", 2800, 4):
        found = spread(measured(width, updates, pairs))
        record(TRAINER, "Lightning / its accumulation", found, on=f"{size}{kept()}", where="CPU, 1 process, 1 thread")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=15, help="pairs of blocks per ratio")
    lightning(parser.parse_args().pairs)
