"""The task `cifar10-resnet`."""

from __future__ import annotations

from functools import cached_property
from typing import ClassVar, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer
from torch.utils.data import TensorDataset

from variable_batch_size.lab.evaluation.tasks import cifar_files
from variable_batch_size.lab.evaluation.tasks.resnet import ResNet18

EPOCH = 50_000  # samples
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of the training pixels, scaled to [0, 1]
PADDING = 4
ROWS = 500  # of a batch of the evaluation


@final
class Cifar10ResNet:
    """ResNet-18 on CIFAR-10, on a GPU where there is one: 100 epochs of SGD with momentum 0.9 and weight decay 5e-4.

    The learning rate falls to a tenth after half of the training, and again after three quarters. Images are cropped
    and flipped at random. `loss` draws that for each microbatch from torch's random numbers, which checkpoints save: a
    training that resumes sees the same images, one with another microbatch sees others.

    Batch normalization takes its statistics from one microbatch: 32 to 64 rows for any batch size from 32 on, so that a
    change of the batch size does not change them, but one of `minibatch_size` does. Its running averages are updated
    with each microbatch, and are saved with the model.

    Args:
        data_dir: folder with cifar-10-python.tar.gz or cifar-10-batches-py; by default a cache, to which the archive is
            downloaded once.
        width: channels of the first stage, see `ResNet18`.
    """

    ref_batchsize: ClassVar[int] = 128
    minibatch_size: ClassVar[int] = 64  # two microbatches at the reference, between which the noise is measured
    lr: ClassVar[float] = 0.1
    samples: ClassVar[int] = 100 * EPOCH
    between: ClassVar[int] = 5 * EPOCH
    target: ClassVar[tuple[str, float]] = ("accuracy", 0.93)

    def __init__(self, data_dir: str | None = None, width: int = 64) -> None:
        self.data_dir, self.width = data_dir, width
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def model(self, seed: int) -> nn.Module:
        """Return the model with the weights of a seed."""
        torch.manual_seed(seed)
        return ResNet18(width=self.width).to(self.device)

    def dataset(self) -> TensorDataset:
        """Return the training samples."""
        return self._training

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the mean cross-entropy over the rows of a batch; in training their images are cropped and flipped."""
        images, labels = batch
        return F.cross_entropy(self._logits(model, augmented(images) if model.training else images), self._on(labels))

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return loss and accuracy on the test samples."""
        loss, correct = 0.0, 0
        images, labels = self._test.tensors
        for rows, expected in zip(torch.split(images, ROWS), torch.split(labels, ROWS), strict=True):
            logits = self._logits(model, rows)
            loss += float(F.cross_entropy(logits, self._on(expected), reduction="sum"))
            correct += int((logits.argmax(1) == self._on(expected)).sum())
        return {"loss": loss / len(labels), "accuracy": correct / len(labels)}

    def optimizer(self, model: nn.Module, lr: float) -> Optimizer:
        """Return the optimizer."""
        return SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=5e-4)

    def schedule(self, samples: int, total: int) -> float:
        """Return the factor on the learning rate after so many of `total` samples."""
        return 0.1 ** ((samples >= total / 2) + (samples >= total * 3 / 4))

    def _logits(self, model: nn.Module, images: Tensor) -> Tensor:
        mean, std = (self._on(torch.tensor(values)).view(3, 1, 1) for values in (MEAN, STD))
        logits: Tensor = model((self._on(images).float() / 255 - mean) / std)
        return logits

    def _on(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device)

    @cached_property
    def _training(self) -> TensorDataset:
        return cifar_files.load(self.data_dir, train=True)

    @cached_property
    def _test(self) -> TensorDataset:
        return cifar_files.load(self.data_dir, train=False)


def augmented(images: Tensor) -> Tensor:
    """Return images, (n, 3, height, width), each moved by up to 4 pixels over a black border, and half of them flipped.

    The random numbers are those of torch's default generator.
    """
    n, _, height, width = images.shape
    padded = F.pad(images, (PADDING,) * 4).permute(0, 2, 3, 1)  # (n, height + 8, width + 8, 3)
    top, left = torch.randint(2 * PADDING + 1, (2, n, 1))
    rows, columns = top + torch.arange(height), left + torch.arange(width)  # (n, height), (n, width)
    columns = torch.where(torch.rand(n, 1) < 0.5, columns.flip(1), columns)
    moved = padded[torch.arange(n)[:, None, None], rows[:, :, None], columns[:, None, :]]  # (n, height, width, 3)
    return moved.permute(0, 3, 1, 2).contiguous()
