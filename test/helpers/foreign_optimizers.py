"""Optimizers of others that no package has, in a few lines: what they keep, and how they are called."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class Sliced(torch.optim.Optimizer):
    """Keeps the momentum of its own rows on each rank, as nanochat's distributed Muon and AdamW do.

    Source: github.com/karpathy/nanochat, nanochat/optim.py, and github.com/KellerJordan/modded-nanogpt.
    """

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "beta": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        rank, world = dist.get_rank(), dist.get_world_size()
        for group in self.param_groups:
            for p in group["params"]:
                own = slice(rank * (p.shape[0] // world), (rank + 1) * (p.shape[0] // world))
                momentum = self.state[p].setdefault("exp_avg", torch.zeros_like(p.grad[own]))
                momentum.mul_(group["beta"]).add_(p.grad[own])
                parts = list(torch.empty_like(p).chunk(world))
                dist.all_gather(parts, p[own] - group["lr"] * momentum)
                p.copy_(torch.cat(parts))


class SAM(torch.optim.Optimizer):
    """Steps by a second backward at weights that are moved along the gradient.

    Source: Foret et al. 2021, arXiv 2010.01412, with the methods of github.com/davda54/sam.
    """

    def __init__(self, params: Any, base: type[torch.optim.Optimizer], **options: Any) -> None:
        super().__init__(params, {"rho": 0.05, **options})
        self.base_optimizer = base(self.param_groups, **options)

    def first_step(self, zero_grad: bool = False) -> None:
        """Move the weights."""

    def second_step(self, zero_grad: bool = False) -> None:
        """Move them back, and step."""
