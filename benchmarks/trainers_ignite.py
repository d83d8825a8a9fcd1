"""An update in an Engine of ours, against Ignite's own accumulation of the same microbatches."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from ignite.engine import Events, create_supervised_trainer
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from records import spread
from results import TRAINER, record
from variable_batch_size.integrations import ignite as ours

ROWS, MICROBATCHES = 32, 4


def block(width: int, updates: int, *, plain: bool) -> Callable[[], None]:
    """Return a function that makes so many updates."""
    model = nn.Sequential(nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
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


def ignite(blocks: int = 60, updates: int = 16) -> None:
    """Measure the ratio of the times of an update, for models of two sizes."""
    for name, width in ("1M parameters", 512), ("10M parameters", 2800):
        sides = block(width, updates, plain=False), block(width, updates, plain=True)
        ratios = []
        for number in range(blocks + 2):
            seconds = []
            for side in sides:
                begin = time.perf_counter()
                side()
                seconds.append(time.perf_counter() - begin)
            if number >= 2:  # the first ones warm up
                ratios.append(seconds[0] / seconds[1])
        record(
            TRAINER,
            "Ignite / its accumulation",
            spread(ratios),
            on=name,
            where="CPU, 1 process, 1 thread",
        )


if __name__ == "__main__":
    ignite()
