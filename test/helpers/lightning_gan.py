"""A GAN with Lightning's manual optimization, in several orders of its backwards and steps, and its twin by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, one_hot
from torch.optim import SGD

from helpers.lightning_jobs import fit, loader, strategy
from helpers.reference import batches
from helpers.yardstick import CLASSES, REF, SAMPLES, SIZES, UPDATES, difference, network, samples, weights

RATE = 0.05


class Gan(pl.LightningModule):
    """The GAN of Lightning's documentation: `order` is "backwards first", or one that is refused."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.order, self.calls = order, 0
        self.automatic_optimization = False
        self.generator = network()
        self.discriminator = nn.Sequential(nn.Linear(CLASSES, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.discriminator.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2)

    def generator_loss(self, x: Tensor) -> Tensor:
        judged = self.discriminator(self.generator(x))
        return binary_cross_entropy_with_logits(judged, torch.ones_like(judged))

    def discriminator_loss(self, x: Tensor, target: Tensor) -> Tensor:
        real = self.discriminator(one_hot(target, CLASSES).double())
        fake = self.discriminator(self.generator(x).detach())
        losses = [binary_cross_entropy_with_logits(*pair) for pair in ((real, torch.ones_like(real)), (fake, 0 * fake))]
        return sum(losses) / 2  # type: ignore[return-value]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.calls += 1
        x, target = batch
        optimizers: Any = self.optimizers()
        losses = (lambda: self.generator_loss(x)), (lambda: self.discriminator_loss(x, target))
        for optimizer, loss in zip(optimizers, losses, strict=True):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            if self.order == "closures":
                optimizer.step(closure=lambda: self.manual_backward(loss()))  # noqa: B023
            else:
                self.manual_backward(loss())
            if self.order == "as in Lightning's documentation":
                optimizer.step()
            self.untoggle_optimizer(optimizer)
        for optimizer in optimizers if self.order == "backwards first" else ():
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [SGD(part.parameters(), lr=RATE) for part in (self.generator, self.discriminator)], []


def by_hand() -> Tensor:
    """The weights of the GAN, trained with a whole batch an update, by the rule "root"."""
    twin, (x, target) = Gan(""), samples()
    for _, batch in zip(range(UPDATES), batches(SIZES, SAMPLES, 0), strict=False):
        parts = [*twin.generator.parameters()], [*twin.discriminator.parameters()]
        losses = twin.generator_loss(x[batch]), twin.discriminator_loss(x[batch], target[batch])
        gradients = [torch.autograd.grad(loss, part) for loss, part in zip(losses, parts, strict=True)]
        with torch.no_grad():
            for part, found in zip(parts, gradients, strict=True):
                for parameter, gradient in zip(part, found, strict=True):
                    parameter -= RATE * (len(batch) / REF) ** 0.5 * gradient
    return weights(twin)


def gan_job(folder: Path) -> None:
    """Trainings with microbatches of several sizes: the weights are those of whole batches."""
    for rows in 8, 5, 64:
        module = Gan("backwards first")
        run = fit(module, data=loader(batch_size=rows), strategy=strategy())
        assert run.global_step == 2 * UPDATES  # Lightning counts the steps of both
        assert difference(module, by_hand()) < 1e-12
