"""The task `mnist-cnn`."""

from __future__ import annotations

import math
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer
from torch.utils.data import TensorDataset

from variable_batch_size._validation import check_int
from variable_batch_size.lab.evaluation.tasks import mnist_files

ROWS = 1000  # of a batch of the evaluation


class MnistCnn:
    """A CNN of 22,000 parameters on MNIST: SGD with momentum 0.9, a learning rate that falls to 0 along a cosine.

    The learning rate is the one that benchmarks/rules.py has chosen at batches of 32 samples, for this length.

    Args:
        data_dir: folder of the files; by default a cache, which is filled once.
        images: so many of the training samples, the first ones, with which a training is done sooner; None: all.
    """

    ref_batchsize: ClassVar[int] = 32
    minibatch_size: ClassVar[int] = 16  # two microbatches at the reference, between which the noise is measured
    lr: ClassVar[float] = 2**-5
    samples: ClassVar[int] = 2**17
    between: ClassVar[int] = 2**13

    def __init__(self, data_dir: str | None = None, images: int | None = None) -> None:
        self.data_dir = data_dir
        self.images = None if images is None else check_int(images, "images", 1)

    def load(self, *, train: bool) -> TensorDataset:
        """Return the training samples or the test samples: images, (n, 1, 28, 28), and labels, (n,)."""
        return mnist_files.load(self.data_dir, train=train)

    def model(self, seed: int) -> nn.Module:
        """Return the model with the weights of a seed."""
        torch.manual_seed(seed)
        return cnn()

    def dataset(self) -> TensorDataset:
        """Return the training samples."""
        return TensorDataset(*(tensor[: self.images] for tensor in self.load(train=True).tensors))

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the mean cross-entropy over the rows of a batch."""
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return loss and accuracy on the test samples."""
        loss, correct = 0.0, 0
        images, labels = self._test.tensors
        for rows, expected in zip(torch.split(images, ROWS), torch.split(labels, ROWS), strict=True):
            logits = model(rows)
            loss += float(F.cross_entropy(logits, expected, reduction="sum"))
            correct += int((logits.argmax(1) == expected).sum())
        return {"loss": loss / len(labels), "accuracy": correct / len(labels)}

    def optimizer(self, model: nn.Module, lr: float) -> Optimizer:
        """Return SGD with momentum."""
        return SGD(model.parameters(), lr=lr, momentum=0.9)

    def schedule(self, samples: int, total: int) -> float:
        """Return the factor on the learning rate after `samples` of `total` samples: a cosine from 1 to 0."""
        return 0.5 * (1 + math.cos(math.pi * min(1.0, samples / total)))

    @cached_property
    def _test(self) -> TensorDataset:
        """The test samples, read once."""
        return self.load(train=False)


def cnn() -> nn.Module:
    """Return a CNN for images of 28 x 28: 22,000 parameters, and strides instead of pooling, which is fast on a CPU."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 5, stride=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip
