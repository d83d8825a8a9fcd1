"""A reproducible training on each core of XLA."""

from __future__ import annotations

from pathlib import Path

import torch
import torch_xla
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch_xla.distributed.parallel_loader import MpDeviceLoader

import variable_batch_size as vbs
from helpers.reproducible_training import SIZES, updates_of


def train(folder: Path, rule: str) -> None:
    """Train with dropout and clipping, and write the hash of the weights; ranks are threads that share generators."""
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(200, 20, generator=generator), torch.randint(5, (200,), generator=generator)
    dataset = TensorDataset(*data)
    net = nn.Sequential(nn.Linear(20, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 5))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    net = net.to(torch_xla.device())
    options = {"minibatch_size": 4, "on_end": "cycle", "reproducible": True, "max_updates": 20}
    sampler = vbs.CustomSampler(dataset, SIZES, **options)  # type: ignore[arg-type]
    loader = MpDeviceLoader(DataLoader(dataset, batch_sampler=sampler), torch_xla.device())
    inner = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    optimizer = vbs.CustomOptimizer(inner, sampler, 16, rule=rule, max_grad_norm=1.0)
    for _ in updates_of(net, loader, optimizer):
        pass
    told = vbs.weights_hash(net), optimizer.logged["loss"].item().hex(), float(optimizer.progress).hex()
    backend = vbs.backend.XlaBackend()
    backend.barrier()
    (folder / f"{rule}-{backend.world.size}-{backend.world.rank}").write_text(" ".join(told))
