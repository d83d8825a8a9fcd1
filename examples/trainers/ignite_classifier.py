"""Train a classifier with Ignite and a batch size that follows a trace.

python examples/trainers/ignite_classifier.py
"""

from __future__ import annotations

import argparse

import torch
from ignite.engine import Events, create_supervised_evaluator
from ignite.handlers import Checkpoint, DiskSaver
from ignite.metrics import Accuracy, RunningAverage
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset, random_split

from variable_batch_size.integrations.ignite import create_supervised_trainer


def main() -> None:
    """Train, evaluate after each epoch, and save the state."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--trace", default="0:64 20:128 30:256")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--folder", help="where to save the state after each epoch")
    parser.add_argument("--resume", help="a file to resume from")
    flags = parser.parse_args()

    torch.manual_seed(0)
    x = torch.randn(3000, 20)
    data = TensorDataset(x, (x @ torch.randn(20, 4)).argmax(dim=1))
    train_set, test_set = random_split(data, [2500, 500])
    loader = DataLoader(train_set, batch_size=32, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=100)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005)
    scheduler = StepLR(optimizer, 30, gamma=0.5)

    # The changed line; it was: trainer = create_supervised_trainer(model, optimizer, cross_entropy)
    trainer = create_supervised_trainer(
        model, optimizer, cross_entropy, loader=loader, trace=flags.trace, rule="root", ref_batchsize=64
    )

    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: scheduler.step())
    RunningAverage(output_transform=lambda loss: loss).attach(trainer, "loss")
    evaluator = create_supervised_evaluator(model, {"accuracy": Accuracy()})
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "trainer": trainer}
    if flags.folder:
        saver = DiskSaver(flags.folder, create_dir=True, require_empty=False)
        trainer.add_event_handler(Events.EPOCH_COMPLETED, Checkpoint(parts, saver, n_saved=2))
    if flags.resume:
        Checkpoint.load_objects(parts, flags.resume)

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate() -> None:
        accuracy = evaluator.run(test_loader).metrics["accuracy"]
        print(f"epoch {trainer.state.epoch}: {trainer.state.iteration} updates, accuracy {accuracy:.2f}")

    trainer.run(loader, max_epochs=flags.epochs)


if __name__ == "__main__":
    main()
