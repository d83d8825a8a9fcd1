"""Images in the files of MNIST, and of data sets like it, as tensors."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
import torch
from torch.utils.data import TensorDataset


@final
@dataclass(frozen=True)
class IdxFiles:
    """The four files of a data set of images.

    Attributes:
        name: name of the data set.
        md5: MD5 sums of the published files by their names, uncompressed.
        mean: mean of the pixels of the training images, scaled to [0, 1].
        std: their standard deviation.
        subfolders: where in a folder they may lie, too.
        otherwise: what to do instead of passing another folder, as the end of an error.
    """

    name: str
    md5: Mapping[str, str]
    mean: float
    std: float
    subfolders: tuple[str, ...]
    otherwise: str

    def checked(self, content: bytes, name: str) -> bytes:
        """Return the content of the file `name`; ValueError if its MD5 sum is not the published one."""
        found = hashlib.md5(content, usedforsecurity=False).hexdigest()
        if found != self.md5[name]:
            raise ValueError(f"{name} has the MD5 sum {found} instead of {self.md5[name]}")
        return content


def load(folder: Path, files: IdxFiles, *, train: bool) -> TensorDataset:
    """Return the training samples or the test samples.

    Args:
        folder: folder with the idx files, raw or .gz, in itself or in one of their subfolders.
        files: which files they are.
        train: whether to return the training samples.

    Returns:
        A dataset of images, float32 of shape (n, 1, 28, 28), with mean 0 and standard deviation 1 over the training
        set, and labels, int64 of shape (n,).

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: if a file is not the published one.
    """
    part = "train" if train else "t10k"
    pixels = np.frombuffer(read(folder, files, f"{part}-images-idx3-ubyte"), np.uint8, offset=16)
    labels = np.frombuffer(read(folder, files, f"{part}-labels-idx1-ubyte"), np.uint8, offset=8)
    images = torch.from_numpy(pixels.reshape(-1, 1, 28, 28).astype(np.float32)).div_(255)
    return TensorDataset(images.sub_(files.mean).div_(files.std), torch.from_numpy(labels.astype(np.int64)))


def read(folder: Path, files: IdxFiles, name: str) -> bytes:
    """Return the uncompressed content of the idx file `name` in `folder` or a subfolder.

    Raises:
        FileNotFoundError: if no folder has the file.
        ValueError: if its MD5 sum is not the published one.
    """
    folders = (folder, *(folder / subfolder for subfolder in files.subfolders))
    path = next((p for f in folders for p in (f / name, f / f"{name}.gz") if p.is_file()), None)
    if path is None:
        raise FileNotFoundError(
            f"the {files.name} folder must hold {name}, raw or as .gz, but none of "
            f"{', '.join(map(str, folders))} does; correct --data-dir, or {files.otherwise}"
        )
    try:
        content = path.read_bytes()
        return files.checked(gzip.decompress(content) if path.suffix == ".gz" else content, name)
    except (gzip.BadGzipFile, EOFError, zlib.error, ValueError) as error:
        raise ValueError(
            f"{path} must be the published {files.name} file, but {error}; delete it and fetch it again"
        ) from error
