"""ResNet-18 for images of 32 x 32 pixels."""

from __future__ import annotations

import itertools
from typing import final

from torch import Tensor, nn
from torch.nn import functional as F


@final
class ResNet18(nn.Module):
    """ResNet-18 (He et al. 2016, arXiv 1512.03385) with a first layer for small images: 3 x 3, and no max pooling.

    Args:
        classes: number of classes.
        width: channels of the first stage; 64 gives 11.2 million parameters.
    """

    def __init__(self, classes: int = 10, width: int = 64) -> None:
        super().__init__()
        self.stem = _convolution(3, width)
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        blocks = [
            block
            for before, after in itertools.pairwise(widths)
            for block in (_Block(before, after, 2 if after > before else 1), _Block(after, after))
        ]
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(widths[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits, (n, classes), of images, (n, 3, 32, 32)."""
        features: Tensor = self.blocks(F.relu(self.stem(images)))  # (n, 8 width, 4, 4)
        logits: Tensor = self.head(features.mean((2, 3)))
        return logits


class _Block(nn.Module):
    """Two convolutions beside a path that skips them."""

    def __init__(self, before: int, after: int, stride: int = 1) -> None:
        super().__init__()
        self.first, self.second = _convolution(before, after, stride), _convolution(after, after)
        self.skip = nn.Identity() if before == after else _convolution(before, after, stride, size=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.first(x))) + self.skip(x))


def _convolution(before: int, after: int, stride: int = 1, size: int = 3) -> nn.Module:
    layer = nn.Conv2d(before, after, size, stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return nn.Sequential(layer, nn.BatchNorm2d(after))
