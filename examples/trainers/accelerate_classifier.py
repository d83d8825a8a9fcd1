"""Train a classifier with Accelerate and a batch size that follows a trace.

python examples/trainers/accelerate_classifier.py
accelerate launch --num_processes=2 examples/trainers/accelerate_classifier.py
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset, random_split

import variable_batch_size as vbs


def main() -> None:
    """Train, evaluate after each epoch, and save the state."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--trace", default="0:64 20:128 30:256")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--folder", help="where to save the state after each epoch, and to resume from")
    parser.add_argument("--resume", action="store_true")
    flags = parser.parse_args()

    accelerator = Accelerator()
    torch.manual_seed(0)
    x = torch.randn(3000, 20)
    data = TensorDataset(x, (x @ torch.randn(20, 4)).argmax(dim=1))
    train_set, test_set = random_split(data, [2500, 500])
    sampler = vbs.CustomSampler(train_set, flags.trace, minibatch_size=32)
    loader = DataLoader(train_set, batch_sampler=sampler, generator=torch.Generator())
    test_loader = accelerator.prepare(DataLoader(test_set, batch_size=100))
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))
    inner = torch.optim.AdamW(model.parameters(), lr=0.005)
    model = accelerator.prepare_model(model)
    optimizer = vbs.CustomOptimizer(inner, sampler, 64, rule="root", model=model)
    scheduler = StepLR(inner, 30, gamma=0.5)
    accelerator.register_for_checkpointing(optimizer, scheduler)

    if flags.resume:
        accelerator.load_state(flags.folder)
    for epoch in vbs.remaining_epochs(sampler, optimizer, until=flags.epochs):
        model.train()
        for update in vbs.updates(loader, optimizer):
            for inputs, targets in update:
                inputs, targets = inputs.to(accelerator.device), targets.to(accelerator.device)
                optimizer.backward(cross_entropy(model(inputs), targets))
                if optimizer.step():
                    scheduler.step()
        model.eval()
        hits = []
        with torch.no_grad():
            for inputs, targets in test_loader:
                hit = model(inputs).argmax(dim=1) == targets
                hits.append(accelerator.gather_for_metrics(hit))
        accuracy = torch.cat(hits).float().mean().item()
        accelerator.print(f"epoch {epoch}: {optimizer.updates} updates, accuracy {accuracy:.2f}")
        if flags.folder:
            accelerator.save_state(flags.folder)
    accelerator.end_training()


if __name__ == "__main__":
    main()
