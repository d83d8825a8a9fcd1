"""The task `fashion-cnn`."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, final

from torch.utils.data import TensorDataset

from variable_batch_size.lab.evaluation.tasks import idx_files
from variable_batch_size.lab.evaluation.tasks.images import ImageTask

DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # of the package dataset-fashion-mnist
MD5 = {  # of the idx files, uncompressed
    "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
    "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
    "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
    "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
}
FILES = idx_files.IdxFiles(
    "Fashion-MNIST",
    MD5,
    0.2860,
    0.3530,
    ("FashionMNIST/raw", "fashion-mnist"),
    "install Debian's package dataset-fashion-mnist and omit it",
)


@final
class FashionCnn(ImageTask):
    """A small CNN on Fashion-MNIST, see `ImageTask`.

    The files come from `data_dir`, or from Debian's package dataset-fashion-mnist.
    """

    target: ClassVar[tuple[str, float]] = ("loss", 0.4)

    def load(self, *, train: bool) -> TensorDataset:
        """Return the 60,000 training samples or the 10,000 test samples."""
        return idx_files.load(self.data_dir or DEBIAN, FILES, train=train)
