"""The CNN of `mnist-cnn` on Fashion-MNIST, from a folder or from Debian's package dataset-fashion-mnist."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from variable_batch_size.lab.evaluation.tasks.mnist_cnn import MnistCnn

DEBIAN = "/usr/share/datasets/fashion-mnist"
MEAN, STD = 0.2860, 0.3530  # of the pixels of the training images, scaled to [0, 1]


def load(folder: str | Path, *, train: bool) -> tuple[Tensor, Tensor]:
    """Return images, float32 (n, 1, 28, 28), normalized, and labels, int64 (n,), of a folder of idx files, or .gz."""
    arrays = []
    for kind, header in (("images-idx3", 16), ("labels-idx1", 8)):
        path = Path(folder) / f"{'train' if train else 't10k'}-{kind}-ubyte"
        packed = path.with_name(f"{path.name}.gz")
        content = path.read_bytes() if path.is_file() else gzip.decompress(packed.read_bytes())
        arrays.append(np.frombuffer(content, np.uint8, offset=header))
    images = torch.from_numpy(arrays[0].reshape(-1, 1, 28, 28).astype(np.float32)).div_(255).sub_(MEAN).div_(STD)
    return images, torch.from_numpy(arrays[1].astype(np.int64))


class FashionCnn(MnistCnn):
    """A small CNN on Fashion-MNIST, see `MnistCnn`."""

    def load(self, *, train: bool) -> TensorDataset:
        """Return the 60,000 training samples or the 10,000 test samples."""
        return TensorDataset(*load(self.data_dir or DEBIAN, train=train))
