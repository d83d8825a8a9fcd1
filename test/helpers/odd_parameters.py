"""What the processes of test_sharded_models.py run: frozen, never used and tied parameters, and one of no module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import variable_batch_size as vbs

SAMPLES = torch.arange(60) % 7


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.hidden = nn.Embedding(7, 5), nn.Linear(5, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.never = nn.Linear(3, 3)
        for number, parameter in enumerate(self.parameters()):
            values = torch.sin(number + torch.arange(float(parameter.numel())))
            parameter.data = values.view_as(parameter).to(torch.float64)

    def forward(self, rows: Tensor) -> Tensor:
        hidden: Tensor = torch.tanh(self.frozen(self.hidden(self.embedding(rows))))
        return self.head(hidden)  # type: ignore[no-any-return]


def train(backend: vbs.backend.Backend, way: str, until: int, folder: Path | None, outside: bool) -> list[Tensor]:
    """Train until an update, from a checkpoint in the folder if there is one, and save there."""
    model: Any = Odd()
    scale = nn.Parameter(torch.ones((), dtype=torch.float64))  # of no module
    if way == "ddp":
        model = DistributedDataParallel(model, find_unused_parameters=True)
    elif way == "fsdp":
        fully_shard(model)
    sampler = vbs.CustomSampler(SAMPLES, "0:9 2:4 4:7", backend.world.size, backend.world.rank, minibatch_size=3)
    inner = torch.optim.AdamW([*model.parameters(), *([scale] if outside else [])], lr=0.01)
    options: Any = {} if way == "plain" else {"model": model}
    optimizer = vbs.AdamScaleOptimizer(inner, sampler, ref_batchsize=4, **options)
    saves = vbs.Checkpoint(folder, model=model, optimizer=optimizer) if folder else None
    if saves:
        saves.restore()
    for _ in vbs.remaining_epochs(sampler, optimizer, until=9):
        for rows in sampler:
            if optimizer.updates == until:
                break
            logits = model(SAMPLES[rows]) * scale
            optimizer.backward(nn.functional.cross_entropy(logits, SAMPLES[rows]))
            optimizer.step()
        if optimizer.updates == until:
            break
    if saves:
        saves.save()
        saves.close()
    whole = [one.full_tensor() if isinstance(one, DTensor) else one for one in (*model.parameters(), scale)]
    return [one.detach() for one in whole]
