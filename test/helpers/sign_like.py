"""Optimizers that use the sign of an average of gradients, as their papers give them."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer


class Lion(Optimizer):
    """w -= lr (sign(b1 m + (1 - b1) g) + decay w), then m = b2 m + (1 - b2) g (Chen et al. 2023, arXiv 2302.06675)."""

    def __init__(
        self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for w in (w for w in group["params"] if w.grad is not None):
                m = self.state[w].setdefault("m", torch.zeros_like(w))
                w.sub_(group["lr"] * (m.lerp(w.grad, 1 - beta1).sign() + group["weight_decay"] * w))
                m.lerp_(w.grad, 1 - beta2)


class Signum(Optimizer):
    """m = b m + (1 - b) g, then w -= lr sign(m) (Bernstein et al. 2018, arXiv 1802.04434)."""

    def __init__(self, params: Any, lr: float, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for w in (w for w in group["params"] if w.grad is not None):
                m = self.state[w].setdefault("m", torch.zeros_like(w))
                w.sub_(group["lr"] * m.lerp_(w.grad, 1 - group["momentum"]).sign())
