"""A training with dropout, augmentation, clipping and checkpoints, which ends, or is killed after an update."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable, Iterator

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

import variable_batch_size as vbs

SIZES = [13, 7, 1, 29, 11, 64, 33, 5]


class Augmented(Dataset[tuple[Tensor, int]]):
    """Rows with noise that is drawn anew each time."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.x, self.y = torch.randn(500, 20, generator=generator), torch.randint(5, (500,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.x[index] + 0.1 * torch.randn(20) + 0.1 * float(np.random.randn()), int(self.y[index])


def updates_of(
    net: nn.Module, loader: Iterable[tuple[Tensor, Tensor]], optimizer: vbs.CustomOptimizer
) -> Iterator[int]:
    """Train to the end, and yield the number of updates after each."""
    assert isinstance(optimizer.sampler, vbs.CustomSampler)
    for _ in vbs.remaining_epochs(optimizer.sampler, optimizer):
        for update in vbs.updates(loader, optimizer):
            for x, y in update:
                loss = cross_entropy(net(x), y)
                optimizer.backward(loss)
                optimizer.log(loss=loss)
                optimizer.step()
            yield optimizer.updates


def main(folder: str, rule: str, updates: int, killed_after: int, workers: int) -> None:
    """Train until this many updates."""
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 5))
    dataset = vbs.Seeded[tuple[Tensor, int]](Augmented())
    sampler = vbs.CustomSampler(
        dataset, SIZES, minibatch_size=4, on_end="cycle", reproducible=True, max_updates=updates
    )
    persists = {"num_workers": workers, "persistent_workers": True} if workers else {}
    loader: DataLoader[tuple[Tensor, int]] = DataLoader(dataset, batch_sampler=sampler, **persists)  # type: ignore[arg-type]
    inner: torch.optim.Optimizer
    if rule == "adascale":
        inner = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    else:
        inner = torch.optim.AdamW(net.parameters(), lr=1e-3)
    optimizer = vbs.CustomOptimizer(inner, sampler, 16, rule=rule, max_grad_norm=1.0)
    with vbs.Checkpoint(folder, model=net, optimizer=optimizer, every=1) as checkpoint:
        checkpoint.restore()
        for made in updates_of(net, loader, optimizer):
            checkpoint.step()
            if made == killed_after:
                os.kill(os.getpid(), signal.SIGKILL)
        path = checkpoint.save()
    if sampler.rank == 0:
        print(f"hash {vbs.weights_hash(net)} {optimizer.logged['loss'].item().hex()} {path}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
