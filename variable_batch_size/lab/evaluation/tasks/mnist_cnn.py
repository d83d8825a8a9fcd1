"""The task `mnist-cnn`."""

from __future__ import annotations

from typing import ClassVar, final

from torch.utils.data import TensorDataset

from variable_batch_size.lab.evaluation.tasks import mnist_files
from variable_batch_size.lab.evaluation.tasks.images import ImageTask


@final
class MnistCnn(ImageTask):
    """A small CNN on MNIST, see `ImageTask`; the files come from `data_dir`, or from a cache that is filled once."""

    target: ClassVar[tuple[str, float]] = ("loss", 0.06)

    def load(self, *, train: bool) -> TensorDataset:
        """Return the 60,000 training samples or the 10,000 test samples."""
        return mnist_files.load(self.data_dir, train=train)
