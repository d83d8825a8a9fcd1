"""An update in an Engine of ours, against Ignite's own accumulation of the same microbatches."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from ignite.engine import Events, create_supervised_trainer
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from records import spread
from results import TRAINER, record
from step import kept, perceptron, ratios
from variable_batch_size.integrations import ignite as ours

ROWS, MICROBATCHES = 32, 4


def block(width: int, updates: int, *, plain: bool) -> Callable[[], None]:
    """Return a function that makes so many updates."""
    model = perceptron(width, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    size = ROWS * MICROBATCHES
    loader = DataLoader(TensorDataset(torch.randn(64 * size, 784), torch.randint(10, (64 * size,))), ROWS, shuffle=True)
    scheduler = StepLR(optimizer, 100)
    if plain:
        trainer = create_supervised_trainer(model, optimizer, cross_entropy, gradient_accumulation_steps=MICROBATCHES)
    else:
        trainer = ours.create_supervised_trainer(
            model, optimizer, cross_entropy, loader=loader, trace=size, rule="root", ref_batchsize=size
        )
    iterations = MICROBATCHES if plain else 1  # of an update
    trainer.add_event_handler(Events.ITERATION_COMPLETED(every=iterations), lambda: scheduler.step())
    trainer.add_event_handler(Events.ITERATION_COMPLETED(every=iterations * updates), trainer.interrupt)
    return lambda: trainer.run(loader, max_epochs=10**6) and None  # continues in the same iteration of the loader


def ignite(pairs: int) -> None:
    """Measure the ratio of the times of an update, for models of two sizes."""
    for size, width, updates in ("1M parameters", 512, 16), ("10M parameters", 2800, 4):
        sides = block(width, updates, plain=False), block(width, updates, plain=True)
        found = spread(list(ratios(sides, 1, pairs, lambda: None)))
        record(TRAINER, "Ignite / its accumulation", found, on=f"{size}{kept()}", where="CPU, 1 process, 1 thread")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=15, help="pairs of blocks per ratio")
    ignite(parser.parse_args().pairs)
